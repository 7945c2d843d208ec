"""Attention of one cluster of decode rows: matrix products over the shared prefix, padded products over the tails.

A residual score is q · RoPE_t(r_t B). Position t = t0 + j, with t0 the first token of its block, splits the rotation:
RoPE_t = RoPE_t0 RoPE_j. RoPE_j moves into one rotated copy of B per offset j, RoPE_t0 backwards into one rotated copy
of q per block, so nothing of the size of the expanded K is ever rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forkkv.attention.backend import AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.clusters import DecodeCluster, ResidualRows
from forkkv.attention.paged import read_residual, rotate


def run_cluster(
    q: Tensor,
    cluster: DecodeCluster,
    cache: LayerCache,
    expansion: ResidualExpansion | None,
    shape: AttentionShape,
    offset_cos: Tensor,
    offset_sin: Tensor,
) -> Tensor:
    """q [R, H, D] of the cluster's rows -> out [R, H, D]. `offset_cos`, `offset_sin` [block_size, D / 2]: rotation of
    the positions inside a block."""
    rows, (kv_heads, per_kv, dim) = cluster.num_rows, (shape.num_kv_heads, shape.heads_per_kv_head, shape.head_dim)
    scaled = (q * shape.scale).view(rows, kv_heads, per_kv, dim)
    by_head = scaled.transpose(0, 1).reshape(kv_heads, rows * per_kv, dim)
    tail_shape = (cluster.tail_len, rows * kv_heads, dim)
    tail_k = cache.k.view(-1, kv_heads * dim).index_select(0, cluster.tail_slots).view(tail_shape)
    tail_v = cache.v.view(-1, kv_heads * dim).index_select(0, cluster.tail_slots).view(tail_shape)
    pieces = [torch.bmm(by_head, run.tokens(cache.k).permute(1, 2, 0)) for run in cluster.shared]
    own_k, own_v = _own_tokens(cluster, cache.k), _own_tokens(cluster, cache.v)
    if own_k:
        own = torch.stack([torch.bmm(q_row, k.permute(1, 2, 0)) for q_row, k in zip(scaled, own_k, strict=True)], dim=1)
        pieces.append(own.view(kv_heads, rows * per_kv, cluster.own_len))
    tail = torch.bmm(scaled.view(rows * kv_heads, per_kv, dim), tail_k.permute(1, 2, 0))
    tail = tail.view(rows, kv_heads, per_kv, cluster.tail_len)
    if cluster.tail_padding is not None:
        tail = tail.masked_fill_(cluster.tail_padding[:, None, None, :], float("-inf"))
    pieces.append(tail.transpose(0, 1).reshape(kv_heads, rows * per_kv, cluster.tail_len))
    scores = torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]
    # [Hkv, R, G, N]: column t is context position t of every row, since all tails begin behind the shared prefix.
    by_row = scores.view(kv_heads, rows, per_kv, -1)
    if expansion is not None:
        for part in cluster.residuals:
            if part.k_chunks:
                _add_residual_scores(by_row, scaled, part, cache, expansion, offset_cos, offset_sin)
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    by_row = probs.view(kv_heads, rows, per_kv, -1)
    tail_probs = (
        by_row[..., cluster.num_shared + cluster.own_len :].transpose(0, 1).reshape(rows * kv_heads, per_kv, -1)
    )
    out = torch.bmm(tail_probs, tail_v.transpose(0, 1)).view(rows, kv_heads, per_kv, dim)
    begin = 0
    for run in cluster.shared:
        values = run.tokens(cache.v)
        piece = torch.bmm(probs[..., begin : begin + values.shape[0]], values.transpose(0, 1))
        out += piece.view(kv_heads, rows, per_kv, dim).transpose(0, 1)
        begin += values.shape[0]
    if own_v:
        own_probs = by_row[..., begin : begin + cluster.own_len].unbind(1)
        out += torch.stack([torch.bmm(p, v.transpose(0, 1)) for p, v in zip(own_probs, own_v, strict=True)])
    if expansion is not None:
        for part in cluster.residuals:
            if part.v_units is not None:
                _add_residual_values(out, by_row, part, cache, expansion)
    return out.view(rows, kv_heads * per_kv, dim)


def _own_tokens(cluster: DecodeCluster, cache: Tensor) -> list[Tensor]:
    """Views [own_len, Hkv, D] of the rows' own consecutive tokens."""
    tokens = cache.flatten(0, 1)
    return [tokens[slot : slot + cluster.own_len] for slot in cluster.own_slots]


def _add_residual_scores(
    scores: Tensor,
    q: Tensor,
    part: ResidualRows,
    cache: LayerCache,
    expansion: ResidualExpansion,
    offset_cos: Tensor,
    offset_sin: Tensor,
) -> None:
    """Complete the scores [Hkv, R, G, N] of the part's rows in place; q [R, Hkv, G, D] is already scaled."""
    count, (_, kv_heads, per_kv, dim) = part.hi - part.lo, q.shape
    block_size = cache.residual.shape[1]
    target = scores[:, part.lo : part.hi, :, : part.num_blocks * block_size]
    adapted = None
    if part.rms_units is not None and part.kv_blocks is not None:
        assert cache.k_rms is not None and cache.residual_rms is not None
        adapted = _rms(cache.residual_rms, part.rms_units, count)
        target *= (_rms(cache.k_rms, part.kv_blocks, count) / adapted).to(target.dtype)
    b_k = _rotated_b_k(expansion, part.slots, part.k_rank, dim, offset_cos, offset_sin)
    b_k = b_k.view(block_size * count, part.k_rank, kv_heads * dim)
    queries = rotate(q[part.lo : part.hi, None], part.cos[:, None, None], -part.sin[:, None, None])
    for chunk in part.k_chunks:
        blocks = chunk.end - chunk.begin
        columns = read_residual(cache.residual, chunk.units, count, blocks).permute(2, 0, 1, 3)
        keys = torch.bmm(columns.reshape(block_size * count, blocks, part.k_rank), b_k)
        keys = keys.view(block_size, count * blocks * kv_heads, dim).transpose(0, 1)
        own = queries[:, chunk.begin : chunk.end].reshape(-1, per_kv, dim)
        extra = torch.bmm(keys, own.transpose(1, 2)).view(count, blocks, kv_heads, block_size, per_kv)
        extra = extra.permute(2, 0, 4, 1, 3).reshape(kv_heads, count, per_kv, blocks * block_size)
        begin, end = chunk.begin * block_size, chunk.end * block_size
        if adapted is not None:
            extra = extra / adapted[..., begin:end].to(extra.dtype)
        target[..., begin:end] += extra


def _rotated_b_k(expansion: ResidualExpansion, slots: Tensor, rank: int, dim: int, cos: Tensor, sin: Tensor) -> Tensor:
    """B_k of `slots` [count] rotated to every offset inside a block, [block_size, count, rank, Hkv * D]."""
    if expansion.b_k_rotated is not None:
        return expansion.b_k_rotated[:, :, :rank].index_select(1, slots)
    b_k = expansion.b_k[:, :rank].index_select(0, slots)
    by_head = b_k.view(1, len(slots), rank, -1, dim)
    return rotate(by_head, cos[:, None, None, None], sin[:, None, None, None]).flatten(3)


def _rms(cache: Tensor, blocks: Tensor, rows: int) -> Tensor:
    """Side tensor [num_blocks, block_size, Hkv] at `blocks` [rows * n] -> [Hkv, rows, 1, n * block_size]."""
    picked = cache.index_select(0, blocks)
    return picked.view(rows, 1, -1, picked.shape[-1]).permute(3, 0, 1, 2)


def _add_residual_values(
    out: Tensor, probs: Tensor, part: ResidualRows, cache: LayerCache, expansion: ResidualExpansion
) -> None:
    """out [R, Hkv, G, D] += (P rV) B_v of the part's rows, in place; probs [Hkv, R, G, N]."""
    assert part.v_units is not None
    count, (_, kv_heads, per_kv, dim) = part.hi - part.lo, out.shape
    columns = read_residual(cache.residual, part.v_units, count, part.num_blocks).flatten(1, 2)
    rank = columns.shape[2]
    weights = probs[:, part.lo : part.hi, :, : columns.shape[1]].transpose(0, 1)
    mixed = torch.bmm(weights.reshape(count, kv_heads * per_kv, -1), columns)
    b_v = expansion.b_v.index_select(0, part.slots)[:, :rank].view(count, rank, kv_heads, dim).transpose(1, 2)
    extra = torch.bmm(mixed.view(count * kv_heads, per_kv, rank), b_v.reshape(count * kv_heads, rank, dim))
    out[part.lo : part.hi] += extra.view(count, kv_heads, per_kv, dim)
