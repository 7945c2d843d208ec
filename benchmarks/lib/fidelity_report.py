"""The table, the pass line and the plot of a run: functions of its records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.lib import text
from benchmarks.lib.fidelity_stats import (
    LEARNT,
    MARGIN,
    PLAIN_PRIVATE,
    Cell,
    CellFigures,
    Interval,
    Record,
    by_cell,
    figures,
    verdicts,
)

HEAD = ("length", "adapters", "mode", "answers", "right", "KL per token", "top-1", "prompt shared")
COLORS = ("#4063a6", "#d98032", "#5a9e5a", "#b04a5a", "#7d62a8", "#8a8a8a")
_BAR, _GAP, _PANEL, _LEFT, _TOP = 24, 26, 180, 44, 34


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
    """SVG: right answers with their intervals, a panel a length, a group a team, a bar a mode."""
    cells = {cell: figures(group).exact for cell, group in by_cell(records).items()}
    modes = list(dict.fromkeys(cell.mode for cell in cells))
    panels = list(dict.fromkeys(cell.length for cell in cells))
    widths = [_panel_width([cell for cell in cells if cell.length == length]) for length in panels]
    width, height = _LEFT + sum(widths) + 120, _TOP + _PANEL + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#444">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        y = _y(tick)
        out.append(f'<line x1="{_LEFT}" x2="{width - 110}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    left = _LEFT
    for length, panel_width in zip(panels, widths, strict=True):
        out += _panel(left, length, {cell: found for cell, found in cells.items() if cell.length == length}, modes)
        left += panel_width
    for index, mode in enumerate(modes):
        y = _TOP + 18 * index
        out.append(f'<rect x="{width - 100}" y="{y}" width="11" height="11" fill="{_color(index)}"/>')
        out.append(f'<text x="{width - 84}" y="{y + 10}">{escape(mode)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel_width(cells: Sequence[Cell]) -> int:
    return _BAR * len(cells) + _GAP * (len({cell.team for cell in cells}) + 1)


def _panel(left: int, length: str, cells: Mapping[Cell, Interval], modes: Sequence[str]) -> list[str]:
    title = f"{int(length):,} tokens" if length.isdigit() else length
    out = [f'<text x="{left + _GAP}" y="{_TOP - 14}" font-weight="bold">{escape(title)}</text>']
    x = left
    for team in dict.fromkeys(cell.team for cell in cells):
        x += _GAP
        begin = x
        for cell, found in cells.items():
            if cell.team == team:
                out += _bar(x, found, _color(modes.index(cell.mode)))
                x += _BAR
        middle, y = (begin + x) / 2, _TOP + _PANEL + 18
        out.append(f'<text x="{middle:.1f}" y="{y}" text-anchor="middle">{escape(team)}</text>')
    return out


def _bar(x: int, found: Interval, color: str) -> list[str]:
    top, low, high, middle = _y(found.value), _y(found.low), _y(found.high), x + (_BAR - 4) / 2
    height = _TOP + _PANEL - top
    return [
        f'<rect x="{x}" y="{top:.1f}" width="{_BAR - 4}" height="{height:.1f}" fill="{color}"/>',
        f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="#222"/>',
    ]


def _y(share: float) -> float:
    return _TOP + _PANEL * (1 - share)


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]
