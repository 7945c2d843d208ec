"""Section "prefill" of `gpu_check.py`: chunks and suffixes against torch SDPA on K and V put together beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lib.gpu_decode import layers_only
from benchmarks.lib.gpu_setup import Clock, Setup
from benchmarks.lib.problem import Problem
from benchmarks.lib.roofline import attention_work, prefill_rows
from benchmarks.lib.steps import Step, prefill_step
from benchmarks.lib.timing import take_turns

RANK = 16
_LAYERS = 4


def cases(setup: Setup) -> tuple[tuple[str, Step, int, int, int], ...]:
    """(name, step, queries, context, adapters)."""
    if setup.tiny:
        return (("base chunk", prefill_step(32, 32), 32, 32, 0), ("suffix", prefill_step(8, 32, suffix=True), 8, 32, 1))
    return (
        ("base chunk at the start", prefill_step(2048, 0), 2048, 0, 0),
        ("base chunk", prefill_step(2048, 14336), 2048, 14336, 0),
        ("suffix", prefill_step(64, 16384, suffix=True), 64, 16384, 1),
        ("long suffix", prefill_step(1024, 16384, suffix=True), 1024, 16384, 1),
    )


def run(setup: Setup, clock: Clock) -> dict[str, Any]:
    """One row per case: seconds a layer of ours and of SDPA, and the floor."""
    rows: list[dict[str, Any]] = []
    for name, step, queries, context, adapters in cases(setup):
        row: dict[str, Any] = {"case": name, "queries": queries, "context": context}
        if clock.over(0.0 if setup.tiny else 5.0):
            rows.append(row | {"skipped": "out of time"})
            continue
        rows.append(row | measure(setup, step, queries, context, adapters))
    return {"ok": not any("skipped" in row for row in rows), "rows": rows, "rank": RANK}


def measure(setup: Setup, step: Step, queries: int, context: int, adapters: int) -> dict[str, Any]:
    """Times of one case."""
    layers = min(_LAYERS, setup.max_layers, setup.spec.num_layers)
    problem = Problem(
        setup.spec,
        step,
        layers=layers,
        backend=setup.backend,
        rank=RANK if adapters else 0,
        num_adapters=adapters,
        dtype=setup.dtype,
        device=setup.device,
    )
    contenders: dict[str, tuple[Callable[[], object], int]] = {
        "forkkv": (layers_only(problem), layers),
        "SDPA": (materialised(setup, queries, context, layers), layers),
    }
    times = take_turns(contenders, setup.rounds, setup.device, warm_up=setup.warm_up)
    work = attention_work(problem.batch, setup.spec, prefill_rows(problem.batch.host), setup.dtype.itemsize)
    floor = work.floor(setup.rates)
    found: dict[str, Any] = {"floor_s": floor, "bytes": work.total_bytes, "flops": work.total_flops}
    for name in contenders:
        seconds = times.median(name)
        found[name] = {"seconds": seconds, "flop_per_s": work.total_flops / seconds}
    return found


def materialised(setup: Setup, queries: int, context: int, layers: int) -> Callable[[], object]:
    """Fused attention over contiguous K and V, one copy for each query head as SDPA's fast path wants them."""
    spec = setup.spec

    def random(length: int) -> torch.Tensor:
        shape = (layers, 1, spec.num_heads, length, spec.head_dim)
        return torch.randn(shape, device=setup.device, dtype=setup.dtype)

    q, k, v = random(queries), random(context + queries), random(context + queries)
    mask = causal_mask(setup, queries, context + queries)

    def step() -> None:
        for layer in range(layers):
            torch.nn.functional.scaled_dot_product_attention(q[layer], k[layer], v[layer], attn_mask=mask)

    return step


def causal_mask(setup: Setup, queries: int, length: int) -> torch.Tensor:
    """The last `queries` of `length` positions see what is not behind them; on GPUs as the bias that SDPA's fast path
    knows, whose import takes seconds, and on CPUs written out."""
    if setup.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        bias: torch.Tensor = causal_lower_right(queries, length)
        return bias
    return torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
