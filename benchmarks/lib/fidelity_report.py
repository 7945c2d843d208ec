"""The table, the pass line and the plot of a run: functions of its records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib import text
from benchmarks.lib.fidelity_stats import (
    LEARNT,
    MARGIN,
    PLAIN_PRIVATE,
    Cell,
    CellFigures,
    Record,
    by_cell,
    figures,
    verdicts,
)
from benchmarks.lib.svg import Bar, bar_charts

HEAD = ("length", "adapters", "mode", "answers", "right", "KL per token", "top-1", "prompt shared")


def rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The table's rows under `HEAD`."""
    return [_row(figures(group)) for group in by_cell(records).values()]


def _row(found: CellFigures) -> tuple[str, ...]:
    compared = ("reference", "") if found.is_reference else (found.kl.text(4), found.top1.text(3))
    return (*found.cell, str(found.answers), found.exact.text(), *compared, f"{found.shared:.0%}")


def agent_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Share of right answers of each agent, a row a cell."""
    agents = list(dict.fromkeys(record.agent for record in records))
    return [
        (*cell, *(_share([record.exact for record in group if record.agent == agent]) for agent in agents))
        for cell, group in by_cell(records).items()
    ]


def _share(right: Sequence[bool]) -> str:
    return f"{sum(right) / len(right):.2f}" if right else "-"


def pass_lines(records: Sequence[Record]) -> list[str]:
    """The pass line in words, a line a length."""
    return [
        f"{verdict.length}: fork-LoRA under fork {verdict.fork:.2f}, plain under none {verdict.plain:.2f}, "
        f"paired difference {verdict.difference.text(3)}: {verdict.outcome}"
        for verdict in verdicts(records)
    ]


def page(records: Sequence[Record], notes: Sequence[str], plot: str) -> str:
    """The Markdown page; `notes` say how it was made, `plot` is the name of the image beside it."""
    agents = list(dict.fromkeys(record.agent for record in records))
    parts = [
        "# Fidelity under sharing",
        "\n".join(f"* {note}" for note in notes),
        text.markdown(HEAD, rows(records)),
        f"![right answers]({plot})",
    ]
    if lines := pass_lines(records):
        rule = f"Pass line (lower bound above {MARGIN}, where {' under '.join(PLAIN_PRIVATE)} reaches {LEARNT}):"
        parts += [rule, "\n".join(f"* {line}" for line in lines)]
    parts += ["Right answers by agent:", text.markdown(("length", "adapters", "mode", *agents), agent_rows(records))]
    return "\n\n".join(parts) + "\n"


def summary(records: Sequence[Record], notes: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as one object."""
    cells = []
    for group in by_cell(records).values():
        found = asdict(figures(group))
        cells.append({**dict(zip(Cell._fields, found.pop("cell"), strict=True)), **found})
    return {**notes, "cells": cells, "pass_line": [asdict(verdict) for verdict in verdicts(records)]}


def write(stem: Path, records: Sequence[Record], notes: Mapping[str, Any]) -> None:
    """`stem`.json, .md and .svg."""
    plot = stem.with_name(stem.name + ".svg")
    plot.write_text(bars(records))
    lines = [f"{key}: {value}" for key, value in notes.items()]
    stem.with_name(stem.name + ".md").write_text(page(records, lines, plot.name))
    stem.with_name(stem.name + ".json").write_text(json.dumps(summary(records, notes), indent=2) + "\n")


def bars(records: Sequence[Record]) -> str:
    """SVG: right answers with their intervals, a chart a length, a bar a cell; references are the strong ones."""
    charts: dict[str, list[Bar]] = {}
    for cell, group in by_cell(records).items():
        found = figures(group)
        right, label = found.exact, f"{cell.team} under {cell.mode}"
        name = f"{int(cell.length):,} tokens" if cell.length.isdigit() else cell.length
        bar = Bar(label, right.value, right.text(), found.is_reference, (right.low, right.high))
        charts.setdefault(name, []).append(bar)
    return bar_charts("Right answers", list(charts.items()))
