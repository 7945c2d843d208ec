"""`residual_attention` in plain PyTorch: row by row, in float32, in the order of the formulas. The oracle for every
other implementation; clear rather than fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _RowResidual:
    """Residual of one row: rK, rV [n, tiles * 16] (None: no such half), B_k, B_v [tiles * 16, Hkv, D], cos and sin
    [n, 1, D / 2], rms ratios [n, Hkv] for models with QK-norm."""

    length: int
    r_k: Tensor | None
    r_v: Tensor | None
    b_k: Tensor | None
    b_v: Tensor | None
    cos: Tensor
    sin: Tensor
    base_factor: Tensor | None
    residual_factor: Tensor | None


def residual_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    residual_cache: Tensor | None = None,
    residual_k_table: Tensor | None = None,
    residual_v_table: Tensor | None = None,
    residual_len: Tensor | None = None,
    read_slot: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_rms: Tensor | None = None,
    residual_rms: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `forkkv_kernels.residual_attention`."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lengths):
        begin, end = bounds[row], bounds[row + 1]
        blocks = kv_block_table[row].long()
        residual = None
        if read_slot is not None and residual_len is not None and residual_cache is not None:
            slot, length = int(read_slot[row]), int(residual_len[row])
            if slot >= 0 and length > 0:
                assert cos is not None and sin is not None
                assert residual_k_table is not None and residual_v_table is not None
                k_units, v_units = (_units(t[row], len(blocks)) for t in (residual_k_table, residual_v_table))
                residual = _RowResidual(
                    length,
                    _columns(residual_cache, k_units, length),
                    _columns(residual_cache, v_units, length),
                    _expansion(b_k, slot, k_units, k_cache),
                    _expansion(b_v, slot, v_units, v_cache),
                    cos[:length, None].float(),
                    sin[:length, None].float(),
                    *_rms_factors(k_rms, residual_rms, blocks, k_units, length),
                )
        keys = _tokens(k_cache, blocks, seq_len)
        values = _tokens(v_cache, blocks, seq_len)
        out[begin:end], lse[begin:end] = _attend_row(q[begin:end].float(), keys, values, residual, scale)
    return (out, lse) if return_lse else out


def _attend_row(
    q: Tensor, keys: Tensor, values: Tensor, residual: _RowResidual | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out [q_len, H, D] and lse [q_len, H] of one row: q [q_len, H, D], keys and values [seq_len, Hkv, D]."""
    q_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    grouped = q.view(q_len, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,tkd->kgqt", grouped, keys)
    if residual is not None and residual.r_k is not None and residual.b_k is not None:
        n = residual.length
        expanded = _rotate(torch.einsum("tr,rkd->tkd", residual.r_k, residual.b_k), residual.cos, residual.sin)
        extra = torch.einsum("qkgd,tkd->kgqt", grouped, expanded)
        if residual.base_factor is not None and residual.residual_factor is not None:
            scores[..., :n] *= residual.base_factor.T[:, None, None, :]
            extra *= residual.residual_factor.T[:, None, None, :]
        scores[..., :n] += extra
    positions = torch.arange(seq_len, device=q.device)
    hidden = positions[None, :] > positions[seq_len - q_len :, None]
    scores = (scores * scale).masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    probs = (scores - lse[..., None]).exp()
    out = torch.einsum("kgqt,tkd->qkgd", probs, values)
    if residual is not None and residual.r_v is not None and residual.b_v is not None:
        mixed = torch.einsum("kgqt,tr->qkgr", probs[..., : residual.length], residual.r_v)
        out = out + torch.einsum("qkgr,rkd->qkgd", mixed, residual.b_v)
    return out.reshape(q_len, num_heads, head_dim), lse.permute(2, 0, 1).reshape(q_len, num_heads)


def _tokens(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """cache [num_blocks, block_size, ...] -> the first `length` tokens of a row [length, ...] in float32."""
    used = blocks[: -(-length // cache.shape[1])]
    return cache[used].flatten(0, 1)[:length].float()


def _units(table_row: Tensor, num_blocks: int) -> Tensor:
    """[NB * tiles] -> [NB, tiles]."""
    return table_row.long().view(num_blocks, table_row.numel() // num_blocks)


def _columns(cache: Tensor, units: Tensor, length: int) -> Tensor | None:
    """Residual of a row [length, tiles * 16] in float32 from units [NB, tiles]; None without tiles."""
    tiles = units.shape[1]
    if tiles == 0:
        return None
    used = units[: -(-length // cache.shape[1])]
    return cache[used].transpose(1, 2).reshape(-1, tiles * cache.shape[2])[:length].float()


def _expansion(b: Tensor | None, slot: int, units: Tensor, kv_cache: Tensor) -> Tensor | None:
    """B of a slot cut to the columns of the tiles, [tiles * 16, Hkv, D] in float32."""
    if b is None or units.shape[1] == 0:
        return None
    num_kv_heads, head_dim = kv_cache.shape[2:]
    return b[slot, : units.shape[1] * 16].reshape(-1, num_kv_heads, head_dim).float()


def _rms_factors(
    k_rms: Tensor | None, residual_rms: Tensor | None, blocks: Tensor, k_units: Tensor, length: int
) -> tuple[Tensor | None, Tensor | None]:
    """(rms_b / rms_a, 1 / rms_a), each [length, Hkv]; (None, None) without QK-norm or without a K residual."""
    if k_rms is None or residual_rms is None or k_units.shape[1] == 0 or not bool(k_units[0, 0]):
        return None, None
    adapted = _tokens(residual_rms, k_units[:, 0], length)
    return _tokens(k_rms, blocks, length) / adapted, 1.0 / adapted


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves: x [n, heads, D], cos and sin [n, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
