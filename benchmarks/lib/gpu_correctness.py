"""Section "correctness" of `gpu_check.py`: every Triton kernel against the PyTorch reference on the same device.

The reference computes in float32 from the same, rounded, inputs. Errors are told relative to the largest output.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.gpu_setup import Clock, Setup
from benchmarks.lib.problem import Problem
from benchmarks.lib.steps import Step, decode_step, prefill_step
from forkkv.attention.backend import AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch, HostRows
from forkkv.attention.registry import select_backend
from forkkv.types import SharedPrefix
from forkkv_kernels.lora_plan import TILE, ResidualTable, TokenTiles, block_rows, plan_token_tiles
from forkkv_kernels.reference_ops import (
    lora_expand_reference,
    lora_shrink_reference,
    residual_shrink_write_reference,
    rope_cache_write_reference,
)

if TYPE_CHECKING:
    from tests.kernels.attention_cases import AttentionCase

TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 3e-2}

ATTENTION_CASES: tuple[dict[str, Any], ...] = (
    {"head_dim": 128, "rank": 16, "group": 4, "mode": "mixed", "length": "300"},
    {"head_dim": 128, "rank": 16, "group": 4, "mode": "decode", "length": "300"},
    {"head_dim": 128, "rank": 64, "group": 4, "mode": "prefill", "length": "300", "coverage": "whole"},
    {"head_dim": 128, "rank": 64, "group": 4, "mode": "decode", "popularity": "zipf"},
    {"head_dim": 128, "rank": 33, "group": 8, "mode": "chunk", "adapters": "k", "coverage": "ragged"},
    {"head_dim": 128, "rank": 33, "group": 8, "mode": "decode", "adapters": "v", "block_size": 32},
    {"head_dim": 128, "rank": 16, "group": 2, "mode": "mixed", "qk_norm": True},
    {"head_dim": 128, "rank": 16, "group": 2, "mode": "decode", "qk_norm": True, "length": "300"},
    {"head_dim": 128, "rank": 16, "group": 4, "mode": "mixed", "adapters": "none", "length": "300"},
    {"head_dim": 128, "rank": 128, "group": 4, "mode": "decode", "popularity": "same"},
    {"head_dim": 64, "rank": 8, "group": 3, "mode": "mixed", "length": "300", "block_size": 8},
    {"head_dim": 64, "rank": 16, "group": 3, "mode": "decode", "length": "bs+1"},
    {"head_dim": 96, "rank": 5, "group": 1, "mode": "mixed"},
    {"head_dim": 96, "rank": 16, "group": 5, "mode": "decode"},
    {"head_dim": 256, "rank": 16, "group": 2, "mode": "mixed"},
    {"head_dim": 256, "rank": 64, "group": 2, "mode": "decode"},
    {"head_dim": 128, "rank": 128, "group": 4, "mode": "prefill", "adapters": "absent"},
)
_TINY_CASES = (0, 1, 6, 10)


@dataclass(frozen=True, slots=True)
class Check:
    """`compare` returns pairs of what was computed and what was expected."""

    name: str
    dtype: torch.dtype
    compare: Callable[[], list[tuple[Tensor, Tensor]]]


def run(setup: Setup, clock: Clock) -> dict[str, Any]:
    """All checks; `ok` if all of them were made and passed."""
    rows: list[dict[str, Any]] = []
    for check in checks(setup):
        if clock.over(2.0):
            rows.append({"name": check.name, "ok": False, "error": "not run: out of time"})
            continue
        rows.append(_outcome(check))
        if not rows[-1]["ok"]:
            print(f"correctness: {rows[-1]}", flush=True)
    return {"ok": all(row["ok"] for row in rows), "checks": rows}


def _outcome(check: Check) -> dict[str, Any]:
    row: dict[str, Any] = {"name": check.name, "tolerance": TOLERANCE[check.dtype]}
    try:
        row["error"] = max(_error(out, expected) for out, expected in check.compare())
        row["ok"] = row["error"] <= row["tolerance"]
    except Exception as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return row


def _error(out: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude; infinite if something is not finite."""
    if out.shape != expected.shape or not bool(torch.isfinite(out).all()):
        return float("inf")
    scale = max(float(expected.float().abs().max()), 1e-3)
    return float((out.float() - expected.float()).abs().max()) / scale


def checks(setup: Setup) -> Iterator[Check]:
    """On GPUs bf16 everywhere and float16 for a part; on CPUs float32 and float16."""
    wide, narrow = (torch.bfloat16, torch.float16) if setup.device.type == "cuda" else (torch.float32, torch.float16)
    chosen = [ATTENTION_CASES[i] for i in _TINY_CASES] if setup.tiny else list(ATTENTION_CASES)
    yield from (_attention_check(setup, case, wide) for case in chosen)
    for dtype in (wide, narrow):
        yield from _operation_checks(setup, dtype)
        yield from _backend_checks(setup, dtype)
    yield from (_attention_check(setup, case, narrow) for case in chosen[: 2 if setup.tiny else 6])


# ---- attention --------------------------------------------------------------------------------------------------


def _attention_check(setup: Setup, case: dict[str, Any], dtype: torch.dtype) -> Check:
    """The operation with its log-sum-exp, and the backend, whose plan sends rows of one query to the decode kernel."""

    def compare() -> list[tuple[Tensor, Tensor]]:
        from forkkv_kernels.triton.prefill import residual_attention_prefill
        from tests.kernels.attention_cases import make_case

        problem = make_case(**case, dtype=dtype, device=setup.device.type)
        expected = problem.expected()
        pairs = [(_run_backend(setup, problem), expected[0])]
        if case["mode"] != "decode":
            found = residual_attention_prefill(**problem.arguments, return_lse=True)
            pairs += zip(found, expected, strict=True)
        return pairs

    text = ", ".join(f"{key} {value}" for key, value in case.items())
    return Check(f"residual_attention, {text}, {_short(dtype)}", dtype, compare)


def _run_backend(setup: Setup, case: AttentionCase) -> Tensor:
    """Output of the case by the attention backend; no groups, since its rows share nothing."""
    x = case.arguments
    q, k_cache = x["q"], x["k_cache"]
    shape = AttentionShape(q.shape[1], k_cache.shape[2], q.shape[2], x["scale"], "k_rms" in x)
    backend = select_backend(setup.device, q.dtype, shape, setup.backend)(shape, x["cos"], x["sin"])
    names = ("cu_seqlens_q", "seq_lens", "read_slot", "residual_len", "kv_block_table")
    host = {name: x[name].cpu().numpy() for name in (*names, "residual_k_table", "residual_v_table")}
    tiles = (np.asarray(own, dtype=np.int32) for own in (case.k_tiles, case.v_tiles))
    empty = torch.zeros(0, dtype=torch.int64, device=setup.device)
    batch = ForwardBatch(
        input_ids=torch.zeros(len(q), dtype=torch.int64, device=setup.device),
        positions=empty,
        weights_slot=empty,
        **{name: x[name] for name in host},
        kv_tokens=None,
        kv_slots=empty,
        sample_tokens=empty,
        block_size=k_cache.shape[1],
        host=HostRows(**host, weights_slot=host["read_slot"], **dict(zip(("k_tiles", "v_tiles"), tiles, strict=True))),
    )
    cache = LayerCache(k_cache, x["v_cache"], x["residual_cache"], x.get("k_rms"), x.get("residual_rms"))
    return backend.run(q, cache, ResidualExpansion(x["b_k"], x["b_v"]), backend.plan(batch))


def _backend_checks(setup: Setup, dtype: torch.dtype) -> Iterator[Check]:
    """The backend's own plan (groups, work lists) against the reference backend on the same caches."""
    prefix = 4 * 16 if setup.tiny else 1024
    steps: tuple[tuple[str, Step, int], ...] = (
        ("3 agents on one prefix", decode_step(3, prefix, 5), 3),
        ("the same, ungrouped", decode_step(3, prefix, 5, grouped=False), 3),
        ("9 agents, blocks in random order", decode_step(9, prefix, 17, rank=8, shuffled=True), 9),
        ("base rows and agents on one prefix", _mixed_step(prefix), 2),
        ("an agent's own prefill", prefill_step(20, prefix, suffix=True), 1),
        ("base chunk", prefill_step(37, prefix), 0),
    )
    for name, step, adapters in steps[: 4 if setup.tiny else None]:
        yield Check(
            f"backend {setup.backend}: {name}, {_short(dtype)}", dtype, _backend_compare(setup, step, adapters, dtype)
        )


def _mixed_step(prefix: int) -> Step:
    """Two agents in slots 0 and 1 and a base row on one prefix, and a row that shares nothing."""
    step = decode_step(3, prefix, 9)
    base = step.segments[2]
    step.segments[2] = replace(base, weights_slot=-1, read_slot=-1, residual_len=0)
    step.add(replace(step.segments[2], request_id="other"), step.blocks(prefix + 9))
    step.groups[0] = SharedPrefix(prefix // step.block_size, (0, 1, 2))
    return step


def _backend_compare(
    setup: Setup, step: Step, adapters: int, dtype: torch.dtype
) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    def compare() -> list[tuple[Tensor, Tensor]]:
        problem = Problem(
            setup.spec,
            step,
            layers=1,
            backend=setup.backend,
            rank=16 if adapters else 0,
            num_adapters=adapters,
            dtype=dtype,
            device=setup.device,
        )
        return [(problem.run_step(), problem.with_backend("reference").run_step())]

    return compare


# ---- adapters, rotation -----------------------------------------------------------------------------------------


def _operation_checks(setup: Setup, dtype: torch.dtype) -> Iterator[Check]:
    for tokens in (8,) if setup.tiny else (1, 8, 300):
        yield Check(f"lora_shrink, lora_expand, {tokens} tokens, {_short(dtype)}", dtype, _lora(setup, tokens, dtype))
        yield Check(f"residual_shrink_write, {tokens} tokens, {_short(dtype)}", dtype, _residual(setup, tokens, dtype))
        yield Check(f"rope_cache_write, {tokens} tokens, {_short(dtype)}", dtype, _rope(setup, tokens, dtype))


def _lora(setup: Setup, num_tokens: int, dtype: torch.dtype) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    """q, k, v of four slots with ranks 16, 8, none and 64; every fifth token runs base weights."""

    def compare() -> list[tuple[Tensor, Tensor]]:
        from forkkv_kernels.triton import lora

        spec, device = setup.spec, setup.device
        generator = torch.Generator().manual_seed(5)
        ranks, outputs = (16, 8, 0, 64), (spec.q_size, spec.kv_size, spec.kv_size)
        slots = np.where(np.arange(num_tokens) % 5 == 4, -1, np.arange(num_tokens) % len(ranks))
        rows = block_rows(num_tokens)
        order, tiles = plan_token_tiles(slots, len(ranks), rows)
        tokens = TokenTiles(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device), rows)
        slot_tiles = torch.tensor([[-(-rank // TILE)] * 3 for rank in ranks], dtype=torch.int32, device=device)
        a = torch.zeros(len(ranks), 3 * 64, spec.hidden_size)
        b = torch.zeros(len(ranks), 3 * 64, sum(outputs))
        for slot, rank in enumerate(ranks):
            for module in range(3):
                first, column = 64 * module, sum(outputs[:module])
                a[slot, first : first + rank] = _normal(generator, rank, spec.hidden_size) / spec.hidden_size**0.5
                span = slice(column, column + outputs[module])
                b[slot, first : first + rank, span] = _normal(generator, rank, outputs[module]) / max(rank, 1) ** 0.5
        a_device, b_device = a.permute(2, 0, 1).to(device, dtype), b.to(device, dtype)
        x = _normal(generator, num_tokens, spec.hidden_size).to(device, dtype)
        y = _normal(generator, num_tokens, sum(outputs)).to(device, dtype)
        results = []
        for shrink, expand in (
            (lora.lora_shrink, lora.lora_expand),
            (lora_shrink_reference, lora_expand_reference),
        ):
            out = y.clone()
            expand(out, shrink(x, a_device, tokens, slot_tiles), b_device, tokens, slot_tiles, outputs)
            results.append(out)
        return [(results[0], results[1])]

    return compare


def _residual(setup: Setup, num_tokens: int, dtype: torch.dtype) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    """One job of eight tiles over all tokens; cells that nobody writes keep a mark."""

    def compare() -> list[tuple[Tensor, Tensor]]:
        from forkkv_kernels.triton import lora

        hidden, tiles, block_size, device = setup.spec.hidden_size, 8, 16, setup.device
        generator = torch.Generator().manual_seed(6)
        a = (_normal(generator, tiles + 2, TILE, hidden) / hidden**0.5).to(device, dtype)
        h = _normal(generator, num_tokens, hidden).to(device, dtype)
        units = 1 + tiles * (-(-num_tokens // block_size) + 1)
        free = torch.randperm((units - 1) * block_size, generator=generator)[: num_tokens * tiles] + block_size
        rows = block_rows(num_tokens)
        spans = [(0, first, min(first + rows, num_tokens)) for first in range(0, num_tokens, rows)]
        table = ResidualTable(
            torch.tensor([*spans, (-1, 0, 0)], dtype=torch.int32, device=device),
            torch.arange(1, tiles + 1, dtype=torch.int32, device=device)[None],
            free.view(num_tokens, tiles).to(device),
            rows,
        )
        caches = [torch.full((units, block_size, TILE), 0.25, dtype=dtype, device=device) for _ in range(2)]
        lora.residual_shrink_write(h, a, table, caches[0])
        residual_shrink_write_reference(h, a, table, caches[1])
        return [(caches[0], caches[1])]

    return compare


def _rope(setup: Setup, num_tokens: int, dtype: torch.dtype) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    """q, k, v of one fused projection; every third token is not stored."""

    def compare() -> list[tuple[Tensor, Tensor]]:
        from forkkv_kernels.triton import rope

        spec, device, block_size = setup.spec, setup.device, 16
        generator = torch.Generator().manual_seed(7)
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        fused = _normal(generator, num_tokens, heads + 2 * kv_heads, dim).to(device, dtype)
        q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        angles = torch.rand(num_tokens, dim // 2, generator=generator) * 6
        cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        blocks = num_tokens // block_size + 3
        slots = torch.randperm((blocks - 1) * block_size, generator=generator)[:num_tokens] + block_size
        slots[2::3] = -1
        results = []
        for function in (rope.rope_cache_write, rope_cache_write_reference):
            caches = [torch.full((blocks, block_size, kv_heads, dim), 0.5, dtype=dtype, device=device) for _ in "kv"]
            results.append((function(q, k, v, cos, sin, slots.to(device), *caches), *caches))
        return list(zip(*results, strict=True))

    return compare


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
