"""Section "graphs" of `gpu_check.py`: whole decode steps with and without CUDA graphs, and whether they agree.

A model of a few layers of the shape with random weights, on random caches. One set of graphs runs several steps that
differ in their rows, lengths and groups: nothing may be captured anew, and logits have to be those of the model itself.
On CPUs, where there are no graphs, the captured function itself runs in the graphs' memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.gpu_setup import Clock, Setup
from benchmarks.lib.problem import Problem
from benchmarks.lib.steps import Step, decode_step
from forkkv.executor.graphs import CudaCapture, DecodeGraphs, EagerReplay
from forkkv.models.llama import LlamaModel
from forkkv.models.loader import load_weights
from forkkv.models.resolve import ResolvedModel
from forkkv.models.spec import ModelSpec

RANK = 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of logits, over the largest one: a few layers of rounding."""
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def run(setup: Setup, clock: Clock) -> dict[str, Any]:
    """Wall seconds of a step, eager and by graph; `ok` if all agree and each size was captured once."""
    rows_of, prefix, private = ((1, 3), 32, 5) if setup.tiny else ((1, 8, 32), 4096, 200)
    spec = replace(
        setup.spec,
        num_layers=min(setup.max_layers, setup.spec.num_layers),
        vocab_size=min(32000, setup.spec.vocab_size),
    )
    problem = Problem(
        spec,
        decode_step(max(rows_of), prefix, private, rank=RANK),
        layers=spec.num_layers,
        backend=setup.backend,
        rank=RANK,
        num_adapters=max(rows_of),
        modules=_MODULES,
        dtype=setup.dtype,
        device=setup.device,
    )
    model = make_model(spec, setup, positions=prefix + private + 1)
    graphs = make_graphs(problem, model, max(rows_of), prefix + private + 1)
    steps: list[dict[str, Any]] = []
    for rows in rows_of:
        for name, step in variants(rows, prefix, private):
            if clock.over(1.0):
                steps.append({"rows": rows, "note": f"{name}: out of time", "ok": False})
                continue
            steps.append(measure(setup, problem, model, graphs, step, name))
    expected = len({next(size for size in graphs.sizes if size >= rows) for rows in rows_of})
    ok = all(step["ok"] for step in steps) and graphs.captures == expected
    return {"ok": ok, "layers": spec.num_layers, "captures": graphs.captures, "sizes": expected, "steps": steps}


def variants(rows: int, prefix: int, private: int) -> tuple[tuple[str, Step], ...]:
    """(name, step): the same rows with other lengths, and in other groups."""
    found = [("grouped", decode_step(rows, prefix, private, rank=RANK))]
    found.append(("shorter", decode_step(rows, prefix // 2, private - 3, rank=RANK)))
    if rows > 1:
        found.append(("ungrouped", decode_step(rows, prefix, private, rank=RANK, grouped=False)))
    return tuple(found)


def make_model(spec: ModelSpec, setup: Setup, positions: int) -> LlamaModel:
    """Random weights."""
    nowhere = ResolvedModel(Path("."), "safetensors", "random")
    weights = load_weights(nowhere, spec, setup.dtype, "dummy", progress=False)
    return LlamaModel(spec, weights, setup.device, setup.dtype, positions)


def make_graphs(problem: Problem, model: LlamaModel, max_rows: int, max_len: int) -> DecodeGraphs:
    """As the runner makes them; on CPUs without capture."""
    assert problem.lora is not None
    return DecodeGraphs(
        model,
        problem.cache,
        problem.backend,
        problem.lora,
        max_num_seqs=max_rows,
        max_model_len=max_len,
        strategy=CudaCapture() if model.device.type == "cuda" else EagerReplay(),
    )


def measure(
    setup: Setup, problem: Problem, model: LlamaModel, graphs: DecodeGraphs, step: Step, name: str
) -> dict[str, Any]:
    """Both ways to run one step."""
    batch, lora = step.batch(setup.device), problem.lora
    assert lora is not None
    found: dict[str, Any] = {"rows": batch.num_tokens, "note": name}
    logits, found["eager_s"] = timed(setup, lambda: model(batch, problem.cache, problem.backend, lora).float())
    replayed, found["graph_s"] = timed(setup, lambda: graphs.run(batch).float())
    found["error"] = float((replayed - logits).abs().max() / logits.abs().max())
    found["ok"] = found["error"] <= TOLERANCE[setup.dtype]
    return found


def timed(setup: Setup, action: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Result of an action and the median time of it when it begins and ends with an idle device, so that what the host
    adds counts. The first run compiles and captures; it is left out where there are others."""
    times = []
    for _ in range(setup.rounds + setup.warm_up * (not setup.tiny)):
        synchronise(setup)
        began = time.perf_counter()
        result = action()
        synchronise(setup)
        times.append(time.perf_counter() - began)
    return result, statistics.median(times[-setup.rounds :])


def synchronise(setup: Setup) -> None:
    """Wait for the device."""
    if setup.device.type == "cuda":
        torch.cuda.synchronize()
