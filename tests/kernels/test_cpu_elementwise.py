"""Norm, SwiGLU and rotation with cache write on the CPU against their references, within 1e-5 of the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forkkv_kernels import implementations, ops, reference_ops
from tests.kernels.covering import case_id, covering_array

pytest.importorskip("numba")
from forkkv_kernels.cpu import elementwise

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ROWS = (1, 3, 17, 300)
ROTATIONS = covering_array(
    {
        "tokens": ROWS,
        "kv_heads": (1, 2, 3, 8),
        "per_kv_head": (1, 3, 4, 7, 8),
        "dim": (32, 64, 96, 128, 256),
        "block_size": (4, 16),
        "stored": ("all", "none", "some"),
        "rms": (False, True),
        "in_place": (False, True),
    }
)


def test_registered() -> None:
    """What the model calls on a CPU are these functions."""
    x = torch.zeros(1)
    for name in ("rms_norm", "swiglu", "rope_cache_write"):
        assert implementations.implementation(name, x) is getattr(elementwise, name)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [16, 576, 1040, 24])
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(rows: int, columns: int, added: bool) -> None:
    """24 columns are no whole vectors: the reference does them."""
    generator = torch.Generator().manual_seed(rows + columns)
    x, delta = torch.randn(2, rows, columns, generator=generator).unbind()
    x[0] = 1e-4
    weight = torch.randn(columns, generator=generator)
    changed, expected_changed = x.clone(), x.clone()
    actual = ops.rms_norm(changed, weight, 1e-5, delta if added else None)
    expected = reference_ops.rms_norm_reference(expected_changed, weight, 1e-5, delta if added else None)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    torch.testing.assert_close(changed, expected_changed, **TOLERANCE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [16, 1536, 24])
def test_swiglu(rows: int, width: int) -> None:
    both = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows)) * 20
    both[0, :3] = torch.tensor((-200.0, 0.0, 200.0))
    torch.testing.assert_close(ops.swiglu(both), reference_ops.swiglu_reference(both), **TOLERANCE)


@pytest.mark.parametrize("case", ROTATIONS, ids=case_id)
def test_rope_cache_write(case: dict[str, Any]) -> None:
    """q, k and v are parts of one projection, as in the model. Slots that no token owns keep their NaN."""
    generator = torch.Generator().manual_seed(ROTATIONS.index(case))
    tokens, kv_heads, dim, size = case["tokens"], case["kv_heads"], case["dim"], case["block_size"]
    heads = kv_heads * case["per_kv_head"]
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator)
    angles = torch.rand(tokens, dim // 2, generator=generator) * 6.0
    blocks = tokens // size + 3
    free = torch.randperm((blocks - 1) * size, generator=generator)[:tokens] + size
    skipped = {"all": 0.0, "none": 1.0, "some": 0.5}[case["stored"]]
    slots = torch.where(torch.rand(tokens, generator=generator) < skipped, -1, free)
    k_rms = torch.rand(tokens, kv_heads, generator=generator) + 0.5 if case["rms"] else None
    results: list[list[Tensor]] = []
    for implementation in (reference_ops.rope_cache_write_reference, elementwise.rope_cache_write):
        own = fused.clone()
        q, k, v = (part.view(tokens, -1, dim) for part in own.split((heads * dim, kv_heads * dim, kv_heads * dim), 1))
        caches = [torch.full((blocks, size, kv_heads, dim), float("nan")) for _ in range(2)]
        rms_cache = torch.full((blocks, size, kv_heads), float("nan")) if case["rms"] else None
        out = q if case["in_place"] else None
        out = implementation(
            q, k, v, angles.cos(), angles.sin(), slots, *caches, k_rms=k_rms, k_rms_cache=rms_cache, out=out
        )
        assert torch.equal(own[:, heads * dim :], fused[:, heads * dim :])
        assert (out.data_ptr() == q.data_ptr()) == case["in_place"]
        results.append([out, *caches, *([rms_cache] if rms_cache is not None else [])])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE)
