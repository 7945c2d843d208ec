"""What was measured of a workload, as rows, as a table, as a plot, as JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import report as lines_report
from benchmarks.lib.common import Line
from benchmarks.lib.machine import BUSY_PERCENT, MachineRates
from benchmarks.lib.svg import Bar, bar_charts
from benchmarks.lib.text import columns, markdown
from benchmarks.lib.workload_options import WorkloadOptions
from benchmarks.workloads.client import Outcome
from benchmarks.workloads.summary import Summary
from benchmarks.workloads.trace import Trace, prefill_tokens

_HEAD = (
    "server",
    "part",
    "TTFT p50 s",
    "p95",
    "sum",
    "ITL p50 ms",
    "p95",
    "output tok/s",
    "seconds",
    "cached/prompt tokens",
    "peak RSS MiB",
    "KV MiB",
    "same tokens",
    "note",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One trace on one server. `note` says why there is no `summary`, or what went wrong. `gate`: leading greedy tokens
    that agree with the first server's, base model and first adapter. `client_load` and `other_load`: CPU that the load
    client and that others used meanwhile, percent of a core. `peak_rss` and `peak_kv` in bytes. None: not known."""

    peer: str
    part: str
    summary: Summary | None = None
    outcomes: tuple[Outcome, ...] = ()
    peak_rss: int | None = None
    peak_kv: float | None = None
    client_load: float | None = None
    other_load: float | None = None
    gate: tuple[int, ...] = ()
    note: str = ""

    @property
    def disturbed(self) -> bool:
        return self.other_load is not None and self.other_load > BUSY_PERCENT


def typical(rows: Sequence[Row]) -> list[Row]:
    """Of several rounds of one server, for each part the row with the median of the seconds, the lower one of two; of
    those that nobody disturbed, if there are any. A round that failed is taken before all others."""
    chosen = []
    for part in dict.fromkeys(row.part for row in rows):
        of_part = [row for row in rows if row.part == part]
        failed = [row for row in of_part if row.summary is None or row.summary.failed]
        quiet = [row for row in of_part if not row.disturbed] or of_part
        by_time = sorted(quiet, key=lambda row: row.summary.seconds if row.summary else 0.0)
        chosen.append(failed[0] if failed else by_time[(len(by_time) - 1) // 2])
    return chosen


@dataclass
class Report:
    """`descriptions` of the servers by name. `tail_forward_s`: seconds of transformers' own forward of an agent's tail
    behind the cached document (fan-out with peft only)."""

    options: WorkloadOptions
    traces: tuple[Trace, ...]
    rates: MachineRates
    gate_tokens: int
    descriptions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    tail_forward_s: float | None = None

    def usable(self, row: Row) -> bool:
        """Whether the row may be compared with others: everything answered, nobody else at work."""
        complete = row.summary is not None and not row.summary.failed
        return complete and (self.options.anyway or not row.disturbed)

    def find(self, peer: str, part: str) -> Row | None:
        """The usable row of that peer and part."""
        return next((row for row in self.rows if (row.peer, row.part) == (peer, part) and self.usable(row)), None)


def _cells(row: Row, gate_tokens: int) -> tuple[str, ...]:
    s = row.summary
    if s is None:
        return (row.peer, row.part, *["-"] * (len(_HEAD) - 4), _gate(row, gate_tokens), row.note)
    notes = [f"{s.failed} of {s.requests} not answered: {row.note}"] if s.failed else []
    if row.disturbed:
        notes.append(f"disturbed: others used {row.other_load:.0f} % of a core")
    return (
        row.peer,
        row.part,
        f"{s.ttft_p50_s:.2f}",
        f"{s.ttft_p95_s:.2f}",
        f"{s.ttft_sum_s:.2f}",
        f"{1000 * s.itl_p50_s:.1f}",
        f"{1000 * s.itl_p95_s:.1f}",
        f"{s.output_per_s:.1f}",
        f"{s.seconds:.1f}",
        f"{'?' if s.cached_tokens is None else s.cached_tokens}/{s.prompt_tokens}",
        _mebi(row.peak_rss),
        _mebi(row.peak_kv),
        _gate(row, gate_tokens),
        "; ".join(notes),
    )


def _mebi(num_bytes: float | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**20:.0f}"


def _gate(row: Row, gate_tokens: int) -> str:
    return "+".join(map(str, row.gate)) + f" of {gate_tokens}" if row.gate else "-"


def _counted(report: Report) -> list[str]:
    """Tokens that each trace must prefill under both rules."""
    found = []
    for trace in report.traces if report.options.sizes.agents else ():
        private, shared = (prefill_tokens(trace, shared=shared) for shared in (False, True))
        found.append(
            f"{trace.part}: prompt tokens to compute, counted: {private:,} with a cache for each adapter, {shared:,} "
            f"shared; ratio {private / shared:.2f}"
        )
    return found


def text(report: Report, lines: list[Line], as_markdown: bool = False) -> str:
    """The table, the counted tokens, and `lines` (what is required)."""
    rows = [_cells(row, report.gate_tokens) for row in report.rows]
    parts = [markdown(_HEAD, rows) if as_markdown else columns(_HEAD, rows), "\n".join(_counted(report))]
    if lines:
        table = lines_report.table(lines)
        parts.append(f"```\n{table}\n```" if as_markdown else table)
    if report.options.rounds > 1:
        parts.append(f"Servers ran {report.options.rounds} times in turns; a row is the run with the median seconds.")
    if report.options.quick:
        parts.append("Quick sizes: these numbers claim nothing.")
    return "\n\n".join(part for part in parts if part)


def write(report: Report, folder: Path, lines: list[Line]) -> None:
    """`table.md`, `plot.svg` and `results.json` (every request included) in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"* {name}: {description}" for name, description in report.descriptions.items()]
    head = [
        f"# Workload {report.options.workload}, {time.strftime('%Y-%m-%d')}",
        lines_report.describe(report.rates),
        "\n".join(names),
    ]
    (folder / "table.md").write_text("\n\n".join([*head, text(report, lines, as_markdown=True)]) + "\n")
    (folder / "plot.svg").write_text(_plot(report))
    (folder / "results.json").write_text(_as_json(report, lines))


def _plot(report: Report) -> str:
    def bar(row: Row, value: float | None, text: str) -> Bar:
        return Bar(f"{row.peer}, {row.part}", value, text, row.peer.startswith("forkkv"))

    totals, waits, caches = [], [], []
    for row in report.rows:
        if row.summary is None or row.summary.failed == row.summary.requests:
            totals.append(bar(row, None, row.note.split(":")[0]))
            continue
        missing = f" ({row.summary.failed} not answered)" if row.summary.failed else ""
        totals.append(bar(row, row.summary.seconds, f"{row.summary.seconds:.1f}{missing}"))
        waits.append(bar(row, row.summary.ttft_p95_s, f"{row.summary.ttft_p95_s:.2f}"))
        if row.peak_kv is not None:
            caches.append(bar(row, row.peak_kv / 2**20, _mebi(row.peak_kv)))
    charts = [("Seconds for all requests", totals), ("Time to first token, p95, s", waits), ("KV cache, MiB", caches)]
    return bar_charts(f"{report.options.workload}: shorter is better", charts)


def _as_json(report: Report, lines: list[Line]) -> str:
    content: dict[str, Any] = {
        "workload": report.options.workload,
        "quick": report.options.quick,
        "sizes": asdict(report.options.sizes),
        "rounds": report.options.rounds,
        "machine": report.rates.as_dict(),
        "descriptions": report.descriptions,
        "tail_forward_s": report.tail_forward_s,
        "lines": [asdict(line) for line in lines],
        "rows": [asdict(row) for row in report.rows],
    }
    return _numbers_in_a_line(json.dumps(content, indent=1)) + "\n"


def _numbers_in_a_line(text: str) -> str:
    """JSON whose lists of nothing but numbers are not spread over as many lines."""
    return re.sub(r"\[[-\d.eE+,\s]+\]", lambda found: " ".join(found[0].split()), text)
