"""Section "layer" of `gpu_check.py`: every kernel of a decoder layer, through the functions that the model calls."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.gpu_setup import Clock, Setup
from benchmarks.lib.layer_ops import LayerOps
from benchmarks.lib.steps import Step, decode_step, prefill_step

RANK = 16
_LAYERS = 4


def cases(setup: Setup) -> tuple[tuple[str, Step, int], ...]:
    """(name, step, adapters)."""
    if setup.tiny:
        return (("decode of 3", decode_step(3, 32, 5), 3), ("base chunk of 32", prefill_step(32, 32, fanout=2), 2))
    return (
        ("decode of 1 agent on 4k", decode_step(1, 4096, setup.private), 1),
        ("decode of 8 agents on 16k", decode_step(8, 16384, setup.private), 8),
        ("decode of 32 agents on 16k", decode_step(32, 16384, setup.private), 32),
        ("base chunk of 2048, 8 residuals", prefill_step(2048, 2048, fanout=8), 8),
        ("an agent's own 64 tokens behind 16k", prefill_step(64, 16384, suffix=True), 1),
    )


def run(setup: Setup, clock: Clock) -> dict[str, Any]:
    """Seconds a layer and floor of every kernel of every case."""
    rows: list[dict[str, Any]] = []
    for name, step, adapters in cases(setup):
        if clock.over(0.0 if setup.tiny else 5.0):
            rows.append({"case": name, "skipped": "out of time"})
            continue
        ops = LayerOps(
            setup.spec,
            step,
            layers=min(_LAYERS, setup.max_layers, setup.spec.num_layers),
            rank=RANK,
            num_adapters=adapters,
            dtype=setup.dtype,
            device=setup.device,
            backend=setup.backend,
        )
        times = ops.measure(setup.rounds, warm_up=setup.warm_up)
        for kernel, work in ops.works().items():
            seconds, floor = times.median(kernel), work.floor(setup.rates)
            row = {"case": name, "kernel": kernel, "seconds": seconds, "floor_s": floor}
            rows.append(row | {"bytes": work.total_bytes, "flops": work.total_flops})
    return {"ok": not any("skipped" in row for row in rows), "rows": rows, "rank": RANK}
