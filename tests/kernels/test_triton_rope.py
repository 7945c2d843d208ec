"""Rotation with cache write: the Triton kernel, interpreted, against the PyTorch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forkkv_kernels.reference_ops import rope_cache_write_reference
from forkkv_kernels.triton import rope
from tests.kernels.covering import case_id, covering_array

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}
CASES = covering_array(
    {
        "tokens": (1, 3, 16, 35),
        "kv_heads": (1, 2, 3, 8),
        "per_kv_head": (1, 3, 4, 7, 8),
        "dim": (64, 96, 128, 256),
        "block_size": (4, 16),
        "stored": ("all", "none", "some"),
        "rms": (False, True),
        "in_place": (False, True),
        "dtype": (torch.float32, torch.float16),
    }
)


def check(case: dict[str, Any], seed: int) -> None:
    """q, k and v are parts of one projection, as in the model. Slots that no token owns keep their NaN."""
    generator = torch.Generator().manual_seed(seed)
    tokens, kv_heads, dim, size = case["tokens"], case["kv_heads"], case["dim"], case["block_size"]
    heads = kv_heads * case["per_kv_head"]
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(case["dtype"])
    angles = torch.rand(tokens, dim // 2, generator=generator) * 6.0
    cos, sin = angles.cos().to(case["dtype"]), angles.sin().to(case["dtype"])
    blocks = tokens // size + 3
    free = torch.randperm((blocks - 1) * size, generator=generator)[:tokens] + size
    skipped = {"all": 0.0, "none": 1.0, "some": 0.5}[case["stored"]]
    slots = torch.where(torch.rand(tokens, generator=generator) < skipped, -1, free)
    k_rms = torch.rand(tokens, kv_heads, generator=generator) + 0.5 if case["rms"] else None
    results: list[list[Tensor]] = []
    for implementation in (rope_cache_write_reference, rope.rope_cache_write):
        own = fused.clone()
        q, k, v = (part.view(tokens, -1, dim) for part in own.split((heads * dim, kv_heads * dim, kv_heads * dim), 1))
        caches = [torch.full((blocks, size, kv_heads, dim), float("nan"), dtype=case["dtype"]) for _ in range(2)]
        rms_cache = torch.full((blocks, size, kv_heads), float("nan")) if case["rms"] else None
        out = implementation(
            q,
            k,
            v,
            cos,
            sin,
            slots,
            *caches,
            k_rms=k_rms,
            k_rms_cache=rms_cache,
            out=q if case["in_place"] else None,
        )
        assert torch.equal(own[:, heads * dim :], fused[:, heads * dim :])
        assert (out.data_ptr() == q.data_ptr()) == case["in_place"]
        if not case["in_place"]:
            assert torch.equal(own, fused)
        results.append([out, *caches, *([rms_cache] if rms_cache is not None else [])])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE[case["dtype"]])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_rope_cache_write(case: dict[str, Any]) -> None:
    check(case, seed=CASES.index(case))


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.integers(1, 20),
    kv_heads=st.integers(1, 5),
    per_kv_head=st.integers(1, 8),
    dim=st.sampled_from((2, 6, 64, 80, 96, 128)),
    block_size=st.sampled_from((1, 4, 16)),
    stored=st.sampled_from(("all", "none", "some")),
    rms=st.booleans(),
    in_place=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float16)),
    seed=st.integers(0, 1000),
)
def test_rope_cache_write_anywhere(seed: int, **case: Any) -> None:
    check(case, seed)


def test_reference_is_the_complex_rotation() -> None:
    """The oracle against multiplication by exp(i * angle) of the pairs (j, j + D / 2)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 8, generator=generator) for heads in (4, 2, 2))
    angles = torch.rand(5, 4, generator=generator) * 6.0
    caches = torch.zeros(2, 3, 4, 2, 8)
    slots = torch.tensor([4, 11, -1, 6, 9])
    out = rope_cache_write_reference(q, k, v, angles.cos(), angles.sin(), slots, caches[0], caches[1])
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for source, result in ((q, out), (k[slots >= 0], caches[0].view(12, 2, 8)[slots[slots >= 0]])):
        own = turn if source is q else turn[slots >= 0]
        expected = torch.complex(source[..., :4], source[..., 4:]) * own
        torch.testing.assert_close(torch.complex(result[..., :4], result[..., 4:]), expected)
    assert torch.equal(caches[1].view(12, 2, 8)[slots[slots >= 0]], v[slots >= 0])


def test_rejects_heads_that_are_not_contiguous() -> None:
    q = torch.zeros(3, 2, 8).transpose(0, 1)
    k = torch.zeros(2, 1, 8)
    cache, table = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="not contiguous"):
        rope.rope_cache_write(q[:, :, ::2], k, k, table, table, torch.zeros(2, dtype=torch.int64), cache, cache)
