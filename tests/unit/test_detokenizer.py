"""Incremental decoding, stop strings, and the state of a completion."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

from forkkv.frontend.chat import common_prefix, encode_chat
from forkkv.frontend.detokenizer import IncrementalDecoder, StopChecker
from forkkv.frontend.output import Completion, finite
from forkkv.types import EngineOutput

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def backend() -> BackendTokenizer:
    """One token per byte."""
    tokenizer = BackendTokenizer(models.BPE(vocab={char: index for index, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def decode(backend: BackendTokenizer, token_ids: Sequence[int]) -> list[str]:
    decoder = IncrementalDecoder(backend)
    return [decoder.step(token_id) for token_id in token_ids] + [decoder.flush()]


def ids_of(backend: BackendTokenizer, data: bytes) -> list[int]:
    """Byte tokens, also for bytes that are no text."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    chars = (chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in data)
    return [token_id for char in chars if (token_id := backend.token_to_id(char)) is not None]


def test_pieces_end_on_character_borders(backend: BackendTokenizer) -> None:
    text = "é 你好 👩‍👩‍👧‍👦 🏳️‍🌈."
    pieces = decode(backend, ids_of(backend, text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_is_shown_at_the_end_only(backend: BackendTokenizer) -> None:
    pieces = decode(backend, ids_of(backend, b"ab" + "👩".encode()[:3]))
    assert pieces[:-1] == ["a", "b", "", "", ""] and set(pieces[-1]) == {"\ufffd"}


def test_invalid_bytes_do_not_block_what_follows(backend: BackendTokenizer) -> None:
    pieces = decode(backend, ids_of(backend, b"ok" + b"\xff" * 40 + b" and on"))
    text = "".join(pieces)
    assert text.startswith("ok\ufffd") and text.endswith(" and on") and pieces[-1] == ""


def test_random_bytes_never_raise_and_keep_ascii(backend: BackendTokenizer) -> None:
    generator = random.Random(1)
    for _ in range(50):
        data = bytes(generator.randrange(256) for _ in range(60)) + b"END."
        assert "".join(decode(backend, ids_of(backend, data))).endswith("END.")


def test_stop_checker() -> None:
    checker = StopChecker(["STOP", "STOPPED", "x"])
    assert checker.find("a STO", 4) is None
    assert checker.find("a STOP", 5) == (2, "STOP")
    assert checker.find("a STOPPED", 2) == (2, "STOPPED")
    assert checker.find("ab x STOP", 0) == (3, "x")
    assert checker.held_back("a STO") == 3 and checker.held_back("STOST") == 2
    assert checker.held_back("none") == 0
    assert StopChecker([]).find("abc", 0) is None and StopChecker([]).held_back("abc") == 0


def run(backend: BackendTokenizer, text: str, stop: Sequence[str], batch: int) -> tuple[str, list[int], Completion]:
    completion = Completion(0, IncrementalDecoder(backend), stop)
    token_ids = ids_of(backend, text.encode())
    shown, tokens = "", []
    for start in range(0, len(token_ids), batch):
        part = tuple(token_ids[start : start + batch])
        last = start + batch >= len(token_ids)
        delta = completion.feed(EngineOutput("r", 0, part, "length" if last else None))
        shown += delta.text
        tokens += [token.token_id for token in delta.tokens]
        assert completion.text.startswith(shown)
        if completion.is_finished:
            break
    return shown, tokens, completion


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_stop_strings_do_not_depend_on_batching(backend: BackendTokenizer, batch: int) -> None:
    shown, tokens, completion = run(backend, "one § two §§ END three", ["§ END"], batch)
    # Had a stop string's beginning been shown, the shortened text could not start with what was shown.
    assert shown == completion.text == "one § two §"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "§ END")
    assert len(tokens) == completion.num_tokens == len("one § two §§ END".encode())


def test_text_held_back_comes_out_at_the_end(backend: BackendTokenizer) -> None:
    shown, tokens, completion = run(backend, "one § tw", ["§ two"], 1)
    assert shown == "one § tw" and completion.finish_reason == "length"
    assert len(tokens) == len("one § tw".encode())


def test_stop_token_is_counted_and_not_shown(backend: BackendTokenizer) -> None:
    completion = Completion(0, IncrementalDecoder(backend), ())
    a, b = ids_of(backend, b"ab")
    delta = completion.feed(EngineOutput("r", 0, (a, b), "stop", stop_token_id=b))
    assert (delta.text, completion.num_tokens, delta.stop_reason) == ("a", 2, b)
    assert [token.token_id for token in delta.tokens] == [a, b]


def test_tokens_come_with_their_text(backend: BackendTokenizer) -> None:
    completion = Completion(0, IncrementalDecoder(backend), ())
    released = [
        (delta.text, len(delta.tokens))
        for token_id in ids_of(backend, "a好b".encode())
        if (delta := completion.feed(EngineOutput("r", 0, (token_id,))))
    ]
    assert released == [("a", 1), ("", 0), ("", 0), ("好", 3), ("b", 1)]


def test_finite() -> None:
    assert finite(-1.5) == -1.5
    assert finite(float("-inf")) == finite(float("nan")) == -9999.0


class TemplateTokenizer:
    """Renders `<role>content` and encodes characters."""

    chat_template = "role content"

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        text = "".join(f"<{message['role']}>{message['content']}|" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in text]


def mark_text(messages: list[dict[str, Any]]) -> str | None:
    tokens, mark = encode_chat(messages, TemplateTokenizer())  # type: ignore[arg-type]
    return None if mark is None else "".join(map(chr, tokens[:mark]))


def test_the_last_mark_counts() -> None:
    cache: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    system = {"role": "system", "content": "S", **cache}
    parts = [{"type": "text", "text": "doc", **cache}, {"type": "text", "text": "ask"}]
    assert mark_text([{"role": "user", "content": "x"}]) is None
    assert mark_text([system, {"role": "user", "content": "x"}]) == "<system>S|<"[:10]
    assert mark_text([system, {"role": "user", "content": parts}]) == "<system>S|<user>doc"
    assert mark_text([{"role": "user", "content": [parts[1], parts[0]]}]) == "<user>ask\ndoc|"


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
