"""Horizontal bar charts as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABELS, _NUMBERS = 860, 300, 120
_BAR, _STEP, _HEAD, _MARGIN = 14, 20, 34, 16
_COLOURS = ("#2b6cb0", "#a0aec0")


@dataclass(frozen=True, slots=True)
class Bar:
    """`value` None: not measured, `text` then says why. `strong` chooses the colour, `interval` bounds the value."""

    label: str
    value: float | None
    text: str
    strong: bool
    interval: tuple[float, float] | None = None


def bar_charts(title: str, charts: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """One picture with a chart for each (name, bars), below one another, each on a scale of its own from 0 on."""
    parts: list[str] = [_text(_MARGIN, 24, title, size=15, bold=True)]
    y = 34
    for name, bars in charts:
        parts.append(_text(_MARGIN, y + 20, name, bold=True))
        y += _HEAD
        room = _WIDTH - _LABELS - _NUMBERS - 2 * _MARGIN
        ends = [bar.interval[1] if bar.interval else bar.value for bar in bars]
        largest = max((end for end in ends if end is not None), default=0.0) or 1.0
        for bar in bars:
            length = room * (bar.value or 0.0) / largest
            left = _MARGIN + _LABELS
            parts.append(_text(left - 8, y + 11, bar.label, anchor="end"))
            if bar.value is not None:
                colour = _COLOURS[0 if bar.strong else 1]
                parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>')
            if bar.interval is not None:
                low, length = (room * bound / largest for bound in bar.interval)
                middle = y + _BAR / 2
                place = f'x1="{left + low:.1f}" x2="{left + length:.1f}" y1="{middle}" y2="{middle}"'
                parts.append(f'<line {place} stroke="#222"/>')
            parts.append(_text(left + length + 6, y + 11, bar.text))
            y += _STEP
    height = y + _MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
