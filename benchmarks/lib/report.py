"""The table on the terminal and the JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.common import Line
from benchmarks.lib.machine import MachineRates


def table(lines: Sequence[Line]) -> str:
    """Columns: line, measured, required, pass or FAIL."""
    rows = [("line", "measured", "required", "")]
    rows += [(f"{x.section}: {x.name}", x.measured, x.required, "pass" if x.passed else "FAIL") for x in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def describe(rates: MachineRates) -> str:
    """One line on the machine."""
    return (
        f"{rates.processor}, {rates.threads} threads: copies {rates.copy_gb_per_s:.1f} GB/s (read and write), "
        f"multiplies {rates.matmul_gflop_per_s:.0f} GFLOP/s in fp32; torch {rates.torch_version}"
    )


def write_json(path: Path, rates: MachineRates, lines: Sequence[Line], notes: dict[str, Any]) -> None:
    """Everything as one object; `notes` are added at its top."""
    content = {**notes, "machine": rates.as_dict(), "lines": [asdict(line) for line in lines]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
