"""Tables as text and as Markdown. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table for the terminal: the first column to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same as a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def mega(num_bytes: float) -> str:
    """Bytes in MB (10^6)."""
    return f"{num_bytes / 1e6:,.1f}"


def tokens(count: int) -> str:
    """4096 as "4k"; counts that are no multiple of 1024 as they are."""
    return f"{count // 1024}k" if count and count % 1024 == 0 else str(count)
