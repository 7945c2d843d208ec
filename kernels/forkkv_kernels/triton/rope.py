"""Rotation of q and k and the write of k, v into the paged cache, as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkkv_kernels.triton.aot import HEAD_DIMS, CompileSpec, Target

_Q_HEADS = 16
"""Query heads of one program: 16 x 128 numbers are 16 bytes a thread and load for q, and a step of eight tokens still
spreads over two dozen programs on a model with 32 heads."""
_WARPS = 4


@triton.jit
def rope_cache_kernel(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    out,
    k_cache,
    v_cache,
    k_rms,
    k_rms_cache,
    stride_q,
    stride_k,
    stride_v,
    stride_out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    RMS: tl.constexpr,
):
    """Program (token, part): Q_BLOCK query heads, or in the last part all heads of k and v. The arithmetic is float32
    whatever the dtype: loads are upcast, and the rotation is rounded once."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = column < HALF
    c = tl.load(cos + token * HALF + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + column, mask=inside, other=0.0).to(tl.float32)
    if part < tl.cdiv(HEADS, Q_BLOCK):
        head = part * Q_BLOCK + tl.arange(0, Q_BLOCK)[:, None]
        mask = inside & (head < HEADS)
        source = q + token * stride_q + head * (2 * HALF) + column
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        target = out + token * stride_out + head * (2 * HALF) + column
        tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            kv_head = tl.arange(0, KV_BLOCK)
            head = kv_head[:, None]
            mask = inside & (head < KV_HEADS)
            offset = head * (2 * HALF) + column
            first = tl.load(k + token * stride_k + offset, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(k + token * stride_k + offset + HALF, mask=mask, other=0.0).to(tl.float32)
            v_first = tl.load(v + token * stride_v + offset, mask=mask, other=0.0).to(tl.float32)
            v_second = tl.load(v + token * stride_v + offset + HALF, mask=mask, other=0.0).to(tl.float32)
            row = slot * (KV_HEADS * 2 * HALF) + offset
            tl.store(k_cache + row, (first * c - second * s).to(k_cache.dtype.element_ty), mask=mask)
            tl.store(k_cache + row + HALF, (second * c + first * s).to(k_cache.dtype.element_ty), mask=mask)
            tl.store(v_cache + row, v_first.to(v_cache.dtype.element_ty), mask=mask)
            tl.store(v_cache + row + HALF, v_second.to(v_cache.dtype.element_ty), mask=mask)
            if RMS:
                own = kv_head < KV_HEADS
                rms = tl.load(k_rms + token * KV_HEADS + kv_head, mask=own, other=0.0)
                tl.store(k_rms_cache + slot * KV_HEADS + kv_head, rms, mask=own)


def rope_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_rms: Tensor | None = None,
    k_rms_cache: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `forkkv_kernels.ops.rope_cache_write`. Raises `ValueError` for layouts that the kernel does not read."""
    num_tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if tensor.stride()[1:] != (dim, 1):
            raise ValueError(f"{name}: heads are not contiguous, strides {tensor.stride()}")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("cos", cos), ("sin", sin), ("slots", slots)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
    if num_tokens == 0:
        return out
    rms = k_rms is not None and k_rms_cache is not None
    shape = rope_constants(heads, k.shape[1], dim, rms)
    rope_cache_kernel[(num_tokens, triton.cdiv(heads, _Q_HEADS) + 1)](
        q,
        k,
        v,
        cos,
        sin,
        slots,
        out,
        k_cache,
        v_cache,
        k_rms.contiguous() if rms and k_rms is not None else None,
        k_rms_cache if rms else None,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        **shape,
        num_warps=_WARPS,
    )
    return out


def rope_constants(heads: int, kv_heads: int, dim: int, rms: bool) -> dict[str, object]:
    """Compile-time constants of the kernel."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": dim // 2,
        "HALF_BLOCK": triton.next_power_of_2(dim // 2),
        "Q_BLOCK": min(_Q_HEADS, triton.next_power_of_2(heads)),
        "KV_BLOCK": triton.next_power_of_2(kv_heads),
        "RMS": rms,
    }


def compile_specs(target: Target) -> list[CompileSpec]:
    """Default configurations: 32 query and 8 KV heads, with and without rms."""
    specs = []
    for dim in HEAD_DIMS:
        for dtype, rms in (("bf16", False), ("fp16", True), ("fp32", False)):
            data = dict.fromkeys(("q", "k", "v", "cos", "sin", "out", "k_cache", "v_cache"), f"*{dtype}")
            strides = dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_out"), "i32:16")
            side = dict.fromkeys(("k_rms", "k_rms_cache"), "*fp32") if rms else {}
            constants = {**rope_constants(32, 8, dim, rms), **({} if rms else {"k_rms": None, "k_rms_cache": None})}
            name = f"rope D{dim} {dtype}{' rms' if rms else ''}"
            signature = {**data, "slots": "*i64", **side, **strides}
            quick = (target.name, dim, dtype) == ("gfx942", 128, "bf16")
            specs.append(CompileSpec(name, rope_cache_kernel, signature, constants, {"num_warps": _WARPS}, quick=quick))
    return specs
