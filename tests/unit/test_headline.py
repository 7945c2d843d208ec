"""README's numbers are those of the committed results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import headline
from benchmarks.workloads.client import Outcome


def fanout_run(folder: Path, agents: int, factor: float, quick: bool = False) -> None:
    def row(peer: str, part: str, seconds: float) -> dict[str, Any]:
        waits = [seconds, seconds / 10, seconds / 20, seconds / 40]
        outcomes = [asdict(Outcome(0, 8, 1.0, first_s=1.0 + wait, last_s=20.0)) for wait in waits]
        return {
            "peer": peer,
            "part": part,
            "summary": {"seconds": seconds, "ttft_sum_s": seconds},
            "outcomes": outcomes,
            "peak_kv": 2**21 if peer == "forkkv" else None,
        }

    rows = [row(peer, part, factor * 8) for peer in ("forkkv", "vllm") for part in ("one after another", "together")]
    rows.append({"peer": "peft", "part": "all", "summary": None, "outcomes": [], "peak_kv": None})
    folder.mkdir(parents=True)
    sizes = {"agents": agents, "tokens": 4000, "max_tokens": 32}
    (folder / "results.json").write_text(json.dumps({"quick": quick, "sizes": sizes, "rows": rows}))


def test_the_latest_full_run_of_the_largest_sizes_is_shown(tmp_path: Path):
    fanout_run(tmp_path / "2026-01-01-fanout-3", 3, 1.0)
    fanout_run(tmp_path / "2026-01-01-fanout-8", 8, 2.0)
    fanout_run(tmp_path / "2026-01-02-fanout-8", 8, 5.0)
    fanout_run(tmp_path / "2026-01-03-fanout-9-quick", 9, 7.0, quick=True)
    text = headline.headline(tmp_path)
    assert "8 agents ask about one 4,000-token document" in text and "2026-01-02-fanout-8/table.md" in text
    assert "|  | forkkv | vLLM for CPU |" in text, "a server without numbers has no column"
    assert "| one after another: all answered, s | 40.0 | 40.0 |" in text
    assert "| one after another: first token of the later agents, s | 2.00 | 2.00 |" in text, "the median of the later"
    assert "| together: first token of the last agent, s | 40.00 | 40.00 |" in text
    assert "| K and V held, MiB | 2 | ? |" in text


def test_without_results_there_is_no_text(tmp_path: Path):
    assert headline.headline(tmp_path) == ""


def test_text_goes_between_the_marks():
    readme = f"above\n{headline.BEGIN}old{headline.END}\nbelow"
    assert headline.with_headline(readme, "new") == f"above\n{headline.BEGIN}\nnew\n\n{headline.END}\nbelow"
    with pytest.raises(ValueError, match="substring not found"):
        headline.with_headline("no marks", "new")


def test_readme_shows_the_committed_results():
    readme = headline.README.read_text()
    assert headline.with_headline(readme, headline.headline(headline.RESULTS)) == readme, (
        "run python benchmarks/headline.py --write"
    )
