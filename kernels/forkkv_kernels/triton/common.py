"""Pieces of Triton code that several kernels use: pages, columns of residuals, the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""exp(x) = exp2(LOG2_E * x), and the hardware has exp2 only."""


@triton.jit
def token_offsets(table, t, limit, block_stride, token_stride, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """int64 offsets [N] of tokens `t` [N] int32 in a paged cache; `table` points at the row's block ids.

    With MASKED the table is not read for tokens from `limit` on, whose offsets point into block 0."""
    entry = table + t // BLOCK_SIZE
    block = tl.load(entry, mask=t < limit, other=0) if MASKED else tl.load(entry)
    return block.to(tl.int64) * block_stride + (t % BLOCK_SIZE) * token_stride


@triton.jit
def load_tile(cache, offset, column, known, width, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Columns `column` [C] at `offset` [N] of a cache: [N, C].

    With MASKED zeros for tokens that are not `known` [N], with PADDED zeros for columns from `width` on."""
    pointers = cache + offset[:, None] + column[None, :]
    if MASKED and PADDED:
        return tl.load(pointers, mask=known[:, None] & (column < width)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=known[:, None], other=0.0)
    elif PADDED:
        return tl.load(pointers, mask=(column < width)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_residual_tile(
    residual, table, table_tiles, t, limit, unit_stride, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr
):
    """16 columns of a residual [N, 16] of tokens `t` [N] int32, with MASKED zeros for tokens from `limit` on.

    `table` points at the tile's unit for the row's first block; the next block's stands `table_tiles` further."""
    entry = table + (t // BLOCK_SIZE) * table_tiles
    unit = tl.load(entry, mask=t < limit, other=0) if MASKED else tl.load(entry)
    offset = unit.to(tl.int64) * unit_stride + (t % BLOCK_SIZE) * 16
    return load_tile(residual, offset, tl.arange(0, 16), t < limit, 16, MASKED, False)


@triton.jit
def softmax_step(scores, peak, total, scale_log2):
    """One step of the running softmax over `scores` [M, N] (unscaled; -inf: hidden).

    `peak`, `total` [M]: largest score so far times `scale_log2`, and the sum of exp2(score * scale_log2 - peak).
    Returns the tile's weights [M, N], the factor [M] for everything accumulated before, and the new peak and total.
    Every row must have seen one score that is not hidden by the end of its first tile."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    return weights, decay, new_peak, total * decay + tl.sum(weights, 1)
