"""README's table of numbers, made from the committed results.

    python benchmarks/headline.py            # print it
    python benchmarks/headline.py --write    # put it into README.md, between its two marks

Takes `results/*-fanout*/results.json`, `results/*-lragent*/results.json` and `results/fidelity.json`; of two runs of
the same sizes, the later one. A test compares README.md with what this prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.lib.text import markdown  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
README = ROOT / "README.md"
BEGIN, END = "<!-- headline: made by benchmarks/headline.py -->\n", "<!-- end of headline -->"
SERVERS = {
    "forkkv": "forkkv",
    "forkkv-none": "forkkv, private caches",
    "peft": "transformers + PEFT",
    "llama-server": "llama-server",
    "vllm": "vLLM for CPU",
}
Run = dict[str, Any]


def runs(results: Path, workload: str) -> list[tuple[str, Run]]:
    """(folder's name, results) of full-size runs of `workload`, the latest for each of its sizes, small ones first."""
    found: dict[tuple[int, int], tuple[str, Run]] = {}
    for file in sorted(results.glob(f"*-{workload}*/results.json")):
        run = json.loads(file.read_text())
        if not run["quick"]:
            found[run["sizes"]["agents"], run["sizes"]["tokens"]] = (file.parent.name, run)
    return [found[sizes] for sizes in sorted(found)]


def fanout_table(run: Run) -> str:
    """One column a server: seconds of all requests, time to first token of the later ones, bytes of K and V."""
    rows = {(row["peer"], row["part"]): row for row in run["rows"] if row["summary"] is not None}
    peers = [peer for peer in SERVERS if any(known == peer for known, _ in rows)]

    def cells(part: str, measure: Any) -> list[str]:
        return [measure(rows[peer, part]) if (peer, part) in rows else "-" for peer in peers]

    apart, together = "one after another", "together"
    table = [
        [f"{apart}: all answered, s", *cells(apart, _seconds)],
        [f"{apart}: first token of the later agents, s", *cells(apart, _later)],
        [f"{together}: all answered, s", *cells(together, _seconds)],
        [f"{together}: first token of the last agent, s", *cells(together, _last)],
        ["K and V held, MiB", *cells(together, _kv)],
    ]
    return markdown(["", *(SERVERS[peer] for peer in peers)], table)


def _seconds(row: Run) -> str:
    return f"{row['summary']['seconds']:.1f}"


def _later(row: Run) -> str:
    return f"{statistics.median(map(_ttft, row['outcomes'][1:])):.2f}"


def _last(row: Run) -> str:
    return f"{max(map(_ttft, row['outcomes'])):.2f}"


def _ttft(outcome: Run) -> float:
    return float(outcome["first_s"] - outcome["sent_s"])


def _kv(row: Run) -> str:
    return "?" if row["peak_kv"] is None else f"{row['peak_kv'] / 2**20:,.0f}"


def lragent_line(found: list[tuple[str, Run]]) -> str | None:
    """Ratios of the LRAgent trace, a clause a length."""
    clauses = []
    for _, run in found:
        sums = {row["peer"]: row["summary"]["ttft_sum_s"] for row in run["rows"] if row["summary"] is not None}
        if {"forkkv", "forkkv-none"} <= set(sums):
            clauses.append(f"{sums['forkkv-none'] / sums['forkkv']:.2f}x on {run['rows'][0]['part']} tokens")
    text = "LRAgent's trace, sum of times to first token, private over shared: "
    return f"{text}{', '.join(clauses)}." if clauses else None


def fidelity_lines(summary: Run) -> Iterator[str]:
    """What sharing costs in right answers, a line a length."""
    for verdict in summary["pass_line"]:
        difference = verdict["difference"]
        interval = f"{difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
        yield (
            f"Right answers on {int(verdict['length']):,} tokens: fork-LoRA shared {verdict['fork']:.2f}, plain LoRA "
            f"private {verdict['plain']:.2f}; paired difference {interval}: {verdict['outcome']}."
        )


def headline(results: Path) -> str:
    """Markdown; empty without results."""
    parts = []
    if fanout := runs(results, "fanout"):
        name, run = fanout[-1]
        sizes = run["sizes"]
        parts.append(
            f"{sizes['agents']} agents ask about one {sizes['tokens']:,}-token document, {sizes['max_tokens']} tokens "
            "an answer; SmolLM2-135M in fp32 on a CPU, all servers in one run "
            f"([table and plot](benchmarks/results/{name}/table.md)):"
        )
        parts.append(fanout_table(run))
    notes = []
    if line := lragent_line(runs(results, "lragent")):
        notes.append(line)
    if (file := results / "fidelity.json").exists():
        notes += fidelity_lines(json.loads(file.read_text()))
    if notes:
        parts.append("\n".join(f"* {note}" for note in notes))
    return "\n\n".join(parts)


def with_headline(readme: str, text: str) -> str:
    """`readme` with `text` between the marks. Raises `ValueError` if they are not there."""
    begin, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:begin] + (f"\n{text}\n\n" if text else "") + readme[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into README.md")
    text = headline(RESULTS)
    if parser.parse_args().write:
        README.write_text(with_headline(README.read_text(), text))
    else:
        print(text)


if __name__ == "__main__":
    main()
