"""Multi-LoRA products, residual writes, rotation, norm and SwiGLU: one signature per operation, the implementation
chosen by the device of the tensors. On a GPU none of them synchronises with the host, so all can be captured in graphs.
"""

from __future__ import annotations

from torch import Tensor

from forkkv_kernels.implementations import has_fast, implementation
from forkkv_kernels.lora_plan import ResidualTable, TokenTiles

_LORA = ("lora_shrink", "lora_expand", "residual_shrink_write")


def has_lora_kernels(device_type: str) -> bool:
    """Whether the operations of adapters have implementations of their own for the device, not just references."""
    return has_fast(device_type, _LORA)


def lora_shrink(x: Tensor, a: Tensor, tokens: TokenTiles, slot_tiles: Tensor) -> Tensor:
    """x·A[slot] for the tokens with an adapter, in parts: [splits, T, n * R] float32, to be summed over the first
    dimension (the splits of the inner dimension; how many depends on the shapes alone).

    x [T, in], rows contiguous; a [in, slots, n * R] of n fused modules with R columns each, any strides (fastest when
    the first dimension is contiguous); slot_tiles [slots, n] int32: tiles of 16 columns that a slot uses of a module.
    Only these columns of these tokens are written; the rest of the result is undefined. Mutates nothing.
    """
    result: Tensor = implementation("lora_shrink", x)(x, a, tokens, slot_tiles)
    return result


def lora_expand(
    y: Tensor, shrunk: Tensor, b: Tensor, tokens: TokenTiles, slot_tiles: Tensor, outputs: tuple[int, ...]
) -> None:
    """y [T, sum of outputs] += shrunk·B[slot] for the tokens with an adapter, in place; other rows stay untouched.

    shrunk: result of `lora_shrink`; b [slots, n * R, sum of outputs], block diagonal over the modules, scaling folded
    in; `outputs`: widths of the n modules (at most 3). y's rows and b's rows are contiguous.
    """
    implementation("lora_expand", y)(y, shrunk, b, tokens, slot_tiles, outputs)


def lora_rows(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, tokens: TokenTiles, slot_tiles: Tensor, outputs: tuple[int, ...]
) -> None:
    """y += x·A[slot]·B[slot] for the tokens with an adapter, in place: `lora_shrink` and `lora_expand` in one, for
    steps of few tokens on CPUs. Arguments as there; x and y [T, ...] do not overlap."""
    implementation("lora_rows", y)(x, y, a, b, tokens, slot_tiles, outputs)


def residual_shrink_write(h: Tensor, a: Tensor, table: ResidualTable, residual_cache: Tensor) -> None:
    """Write h·A of every (token, tile) of the table into `residual_cache` [num_units, block_size, 16], in place.

    h [T, hidden], rows contiguous; a [tiles, 16, hidden]: the stacked A matrices of all adapters. One pass over h
    serves the adapters of a job. Unit 0 is never written.
    """
    implementation("residual_shrink_write", h)(h, a, table, residual_cache)


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
    """Rotate q and k, store k and v (and rms) of the tokens in the paged caches, in place; return the rotated q.

    q [T, H, D], k, v [T, Hkv, D], heads contiguous; cos, sin [T, D / 2] of the tokens' positions (halves, Hugging
    Face's Llama convention); slots [T] int64: block * block_size + offset, or -1: not stored; k_cache, v_cache
    [num_blocks, block_size, Hkv, D]; k_rms [T, Hkv] goes to k_rms_cache [num_blocks, block_size, Hkv]. `out` [T, H, D]
    takes the result and may be q itself. k and v are not changed.
    """
    rotate_and_store = implementation("rope_cache_write", q)
    result: Tensor = rotate_and_store(
        q, k, v, cos, sin, slots, k_cache, v_cache, k_rms=k_rms, k_rms_cache=k_rms_cache, out=out
    )
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight over the last dimension, rms in float32; a new tensor. With `delta`, shaped as x, x += delta
    comes first, in place."""
    result: Tensor = implementation("rms_norm", x)(x, weight, eps, delta)
    return result


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up of both = [gate, up] [T, 2 * n] -> [T, n], a new tensor."""
    result: Tensor = implementation("swiglu", both)(both)
    return result
