"""Which tokens adapters are probed with, and how they reach the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkkv.engine import wire
from forkkv.engine.client import ProcClient
from forkkv.errors import ConfigError
from forkkv.frontend.probe_text import DOCUMENT, PROBE_TOKENS, probe_tokens


def test_the_built_in_document_is_long_enough(tokenizer) -> None:
    assert probe_tokens(tokenizer) == tokenizer.encode(DOCUMENT, add_special_tokens=True)[:PROBE_TOKENS]
    assert len(probe_tokens(tokenizer)) == PROBE_TOKENS


def test_the_first_part_of_a_file(tmp_path: Path, tokenizer) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Ærlig talt, " * 100_000, encoding="utf-8")
    assert probe_tokens(tokenizer, str(file)) == tokenizer.encode("Ærlig talt, " * 300, add_special_tokens=True)[:512]
    file.write_text("short")
    assert probe_tokens(tokenizer, str(file)) == tokenizer.encode("short", add_special_tokens=True)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "binary", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=f"--probe-file {file}"):
            probe_tokens(tokenizer, str(file))


@pytest.mark.parametrize("wanted_first", [False, True])
def test_tokens_are_sent_once_they_are_wanted_and_there(wanted_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    client, sent = ProcClient("ipc:///tmp/never.sock"), []
    monkeypatch.setattr(client, "_send", sent.append)
    steps = [lambda: client._handle(wire.ProbeWanted()), lambda: client.offer_probe([5, 6])]
    first, second = steps if wanted_first else steps[::-1]
    first()
    assert not sent
    second()
    assert sent == [wire.ProbeTokens((5, 6))]
