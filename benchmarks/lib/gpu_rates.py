"""Section "rates" of `gpu_check.py`: the ceilings of this run."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.gpu_setup import Clock, Setup


def run(setup: Setup, clock: Clock) -> dict[str, Any]:
    """Copy bandwidth in bytes/s, matrix products in flop/s."""
    rates = setup.rates
    return {"name": rates.name, "bytes_per_s": rates.bytes_per_s, "flop_per_s": rates.flop_per_s}
