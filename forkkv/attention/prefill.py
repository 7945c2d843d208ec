"""Attention of one row with several queries: the row's K and V are put together once, then a fused kernel runs.

The context before the row's first query is visible to all of its queries and needs no mask; only the row's own
tokens are causal. Two fused calls merged by log-sum-exp therefore do a chunk without a materialised mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.backend import AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.batch import HostRows
from forkkv.attention.paged import BlockRun, block_runs, read_residual, read_tokens, rotate, to_device

_MATH_CHUNK = 256
"""Queries per score tile where no fused kernel exists."""


@dataclass(frozen=True, slots=True)
class PrefillResidual:
    """Residual of a row over [0, length): unit ids block major (None: no such half)."""

    slot: int
    length: int
    num_blocks: int
    k_units: Tensor | None
    v_units: Tensor | None
    k_rms_units: Tensor | None
    """Unit of tile 0 of each block."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Queries [begin, end) of the batch; the last sits at position seq_len - 1."""

    begin: int
    end: int
    seq_len: int
    runs: tuple[BlockRun, ...]
    residual: PrefillResidual | None


def plan_prefill_row(host: HostRows, row: int, block_size: int, device: torch.device) -> PrefillRow:
    """Where row `row` finds its context."""
    seq_len = int(host.seq_lens[row])
    blocks = host.kv_block_table[row, : -(-seq_len // block_size)]
    residual = None
    length = int(host.residual_len[row])
    if host.read_slot[row] >= 0 and length > 0:
        num_blocks = -(-length // block_size)
        k_units = row_units(host.residual_k_table, host, row, num_blocks, int(host.k_tiles[row]))
        v_units = row_units(host.residual_v_table, host, row, num_blocks, int(host.v_tiles[row]))
        residual = PrefillResidual(
            slot=int(host.read_slot[row]),
            length=length,
            num_blocks=num_blocks,
            k_units=None if k_units is None else to_device(k_units.ravel(), device),
            v_units=None if v_units is None else to_device(v_units.ravel(), device),
            k_rms_units=None if k_units is None else to_device(k_units[:, 0], device),
        )
    begin, end = int(host.cu_seqlens_q[row]), int(host.cu_seqlens_q[row + 1])
    return PrefillRow(begin, end, seq_len, block_runs(blocks, device), residual)


def row_units(table: np.ndarray, host: HostRows, row: int, num_blocks: int, tiles: int) -> np.ndarray | None:
    """Units [num_blocks, tiles] of a row from a block-major table; None without tiles."""
    if tiles == 0:
        return None
    return table[row].reshape(host.kv_block_table.shape[1], -1)[:num_blocks, :tiles]


def run_prefill_row(
    q: Tensor,
    row: PrefillRow,
    cache: LayerCache,
    expansion: ResidualExpansion | None,
    shape: AttentionShape,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """q [q_len, H, D] of one row -> out [q_len, H, D]."""
    q_len, num_heads, head_dim = q.shape
    keys = read_tokens(cache.k, row.runs, row.seq_len)
    values = read_tokens(cache.v, row.runs, row.seq_len)
    if row.residual is not None and expansion is not None:
        keys, values = _complete(keys, values, row, row.residual, cache, expansion, cos, sin)
    heads = q.view(q_len, shape.num_kv_heads, shape.heads_per_kv_head, head_dim).permute(1, 2, 0, 3)
    start = row.seq_len - q_len
    out, lse = _attend(heads, keys[start:], values[start:], True, shape.scale)
    if start:
        prefix, prefix_lse = _attend(heads, keys[:start], values[:start], False, shape.scale)
        weight = torch.sigmoid(prefix_lse - lse)[..., None].to(out.dtype)
        out = torch.lerp(out, prefix, weight)
    return out.permute(2, 0, 1, 3).reshape(q_len, num_heads, head_dim)


def _complete(
    keys: Tensor,
    values: Tensor,
    row: PrefillRow,
    residual: PrefillResidual,
    cache: LayerCache,
    expansion: ResidualExpansion,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Copies of keys and values [n, Hkv, D] with the expanded residual added below its length."""
    n, num_kv_heads, head_dim = residual.length, *keys.shape[1:]
    if residual.k_units is not None:
        columns = read_residual(cache.residual, residual.k_units, 1, residual.num_blocks).flatten(0, 2)[:n]
        extra = torch.mm(columns, expansion.b_k[residual.slot, : columns.shape[1]]).view(n, num_kv_heads, head_dim)
        extra = rotate(extra, cos[:n, None], sin[:n, None])
        keys = keys.clone()
        if cache.k_rms is not None and cache.residual_rms is not None and residual.k_rms_units is not None:
            adapted = cache.residual_rms.index_select(0, residual.k_rms_units).flatten(0, 1)[:n]
            base = read_tokens(cache.k_rms, row.runs, n)
            keys[:n] *= (base / adapted)[..., None].to(keys.dtype)
            extra = extra / adapted[..., None].to(keys.dtype)
        keys[:n] += extra
    if residual.v_units is not None:
        columns = read_residual(cache.residual, residual.v_units, 1, residual.num_blocks).flatten(0, 2)[:n]
        values = values.clone()
        values[:n].view(n, -1).addmm_(columns, expansion.b_v[residual.slot, : columns.shape[1]])
    return keys, values


def _attend(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [Hkv, G, S, D], keys and values [n, Hkv, D] -> out [Hkv, G, S, D], log-sum-exp [Hkv, G, S] float32.

    `causal` needs S == n. KV heads are the fused kernel's batch, so grouped heads share K and V by a zero stride.
    """
    size = (q.shape[0], q.shape[1], keys.shape[0], q.shape[3])
    keys = keys.transpose(0, 1).unsqueeze(1).expand(size)
    values = values.transpose(0, 1).unsqueeze(1).expand(size)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, causal, scale=scale)
        return out, lse
    return attend_math(q, keys, values, causal, scale)


def attend_math(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The same with matrix products, `_MATH_CHUNK` queries at a time; keys and values [Hkv, G, n, D]."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for begin in range(0, q.shape[2], _MATH_CHUNK):
        end = min(begin + _MATH_CHUNK, q.shape[2])
        visible = end if causal else keys.shape[2]
        scores = torch.matmul(q[:, :, begin:end], keys[:, :, :visible].transpose(2, 3)).float() * scale
        if causal:
            hidden = torch.ones(end - begin, visible, dtype=torch.bool, device=q.device).triu_(begin + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        lse[:, :, begin:end] = scores.logsumexp(-1)
        probs = scores.softmax(-1).to(q.dtype)
        out[:, :, begin:end] = torch.matmul(probs, values[:, :, :visible])
    return out, lse
