"""Section "decode" of `gpu_check.py`: agents on one prefix, grouped and not, beside torch SDPA on private K, V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lib.gpu_setup import Clock, Setup
from benchmarks.lib.problem import PrivateCaches, Problem
from benchmarks.lib.roofline import attention_work, decode_rows
from benchmarks.lib.steps import decode_step, private_step
from benchmarks.lib.timing import take_turns

RANK = 16
_CACHE_BYTES = 6 << 30
"""Most bytes of one contender's caches: as many layers are in rotation as fit."""
_CELL_SECONDS = 8.0
"""Least time to begin another cell."""


def run(setup: Setup, clock: Clock) -> dict[str, Any]:
    """One row per (prefix, agents), small ones first: seconds a layer, floors, ratios. `ok` if every cell ran."""
    cells: list[dict[str, Any]] = []
    for prefix in setup.prefixes:
        for agents in setup.agents:
            cell: dict[str, Any] = {"agents": agents, "prefix": prefix}
            if clock.over(0.0 if setup.tiny else _CELL_SECONDS):
                cells.append(cell | {"skipped": "out of time"})
                continue
            cells.append(cell | measure(setup, agents, prefix))
            print(f"decode: {describe(cells[-1])}", flush=True)
    return {"ok": not any("skipped" in cell for cell in cells), "cells": cells, "rank": RANK, "private": setup.private}


def measure(setup: Setup, agents: int, prefix: int) -> dict[str, Any]:
    """Times of one cell."""
    spec, itemsize = setup.spec, setup.dtype.itemsize
    token_bytes = 2 * spec.kv_size * itemsize
    per_layer = (prefix + agents * setup.private) * token_bytes + agents * prefix * 2 * RANK * itemsize
    layers = max(1, min(setup.max_layers, spec.num_layers, _CACHE_BYTES // per_layer))
    grouped = Problem(
        spec,
        decode_step(agents, prefix, setup.private, rank=RANK),
        layers=layers,
        backend=setup.backend,
        rank=RANK,
        num_adapters=agents,
        dtype=setup.dtype,
        device=setup.device,
    )
    alone = grouped.with_step(decode_step(agents, prefix, setup.private, rank=RANK, grouped=False))
    length = prefix + setup.private
    few = max(1, min(layers, _CACHE_BYTES // (agents * length * token_bytes)))
    private = PrivateCaches(spec, agents, length, layers=few, dtype=setup.dtype, device=setup.device)
    private.choose_faster()
    contenders: dict[str, tuple[Callable[[], object], int]] = {
        "grouped": (layers_only(grouped), layers),
        "ungrouped": (layers_only(alone), layers),
        "private SDPA": (private.run_step, few),
    }
    times = take_turns(contenders, setup.rounds, setup.device, warm_up=setup.warm_up)
    rows = decode_rows(grouped.batch.host)
    caches = attention_work(private_step(agents, length).batch(), spec, rows, itemsize)
    works = {
        "grouped": attention_work(grouped.batch, spec, rows, itemsize),
        "ungrouped": attention_work(grouped.batch, spec, rows, itemsize, grouped=False),
        "private SDPA": caches,
    }
    cell: dict[str, Any] = {"layers": layers}
    for name, work in works.items():
        seconds, floor = times.median(name), work.floor(setup.rates)
        cell[name] = {
            "seconds": seconds,
            "floor_s": floor,
            "bytes": work.total_bytes,
            "flops": work.total_flops,
            "bytes_per_s": work.total_bytes / seconds,
        }
    cell["error"] = difference(grouped, alone)
    return cell


def layers_only(problem: Problem) -> Callable[[], object]:
    """All layers of a step that is planned already."""
    metadata = problem.plan()

    def step() -> torch.Tensor:
        out = problem.run_layer(0, metadata)
        for layer in range(1, problem.num_layers):
            out = problem.run_layer(layer, metadata)
        return out

    return step


def difference(a: Problem, b: Problem) -> float:
    """Largest difference of two ways to compute the same step, over the largest output."""
    one, other = (problem.run_layer(0, problem.plan()).float() for problem in (a, b))
    return float((one - other).abs().max() / other.abs().max())


def describe(cell: dict[str, Any]) -> str:
    """One line for the terminal."""
    parts = [f"{cell['agents']} agents on {cell['prefix']}"]
    for name in ("grouped", "ungrouped", "private SDPA"):
        parts.append(
            f"{name} {1e6 * cell[name]['seconds']:.1f} us ({cell[name]['seconds'] / cell[name]['floor_s']:.2f}x floor)"
        )
    return ", ".join(parts)
