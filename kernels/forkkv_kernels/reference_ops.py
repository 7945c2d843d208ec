"""The operations of `forkkv_kernels.ops` in plain PyTorch: oracles, clear rather than fast.

Those of the adapters read index tables on the host, so on a GPU they synchronise with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forkkv_kernels.lora_plan import TILE, ResidualTable, TokenTiles


def lora_shrink_reference(x: Tensor, a: Tensor, tokens: TokenTiles, slot_tiles: Tensor) -> Tensor:
    """See `forkkv_kernels.ops.lora_shrink`; one split."""
    modules = slot_tiles.shape[1]
    out = torch.zeros(1, x.shape[0], a.shape[2], dtype=torch.float32, device=x.device)
    used = slot_tiles.tolist()
    for slot, rows in _ranges(tokens):
        shrunk = x[rows].float() @ a[:, slot].float()
        for module, count in enumerate(used[slot]):
            first = module * (a.shape[2] // modules)
            out[0, rows, first : first + count * TILE] = shrunk[:, first : first + count * TILE]
    return out


def lora_expand_reference(
    y: Tensor, shrunk: Tensor, b: Tensor, tokens: TokenTiles, slot_tiles: Tensor, outputs: tuple[int, ...]
) -> None:
    """See `forkkv_kernels.ops.lora_expand`."""
    rank = b.shape[1] // len(outputs)
    used = slot_tiles.tolist()
    for slot, rows in _ranges(tokens):
        column = 0
        for module, (count, width) in enumerate(zip(used[slot], outputs, strict=True)):
            own = slice(module * rank, module * rank + count * TILE)
            span = slice(column, column + width)
            if count:
                added = shrunk[:, rows, own].sum(0).to(b.dtype).float() @ b[slot, own, span].float()
                y[rows, span] = (y[rows, span].float() + added).to(y.dtype)
            column += width


def lora_rows_reference(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, tokens: TokenTiles, slot_tiles: Tensor, outputs: tuple[int, ...]
) -> None:
    """See `forkkv_kernels.ops.lora_rows`."""
    lora_expand_reference(y, lora_shrink_reference(x, a, tokens, slot_tiles), b, tokens, slot_tiles, outputs)


def residual_shrink_write_reference(h: Tensor, a: Tensor, table: ResidualTable, residual_cache: Tensor) -> None:
    """See `forkkv_kernels.ops.residual_shrink_write`."""
    block_size = residual_cache.shape[1]
    flat = residual_cache.view(-1, TILE)
    for job, begin, end in table.tiles.tolist():
        for column, tile in enumerate(table.tile_ids[job].tolist() if job >= 0 else ()):
            if tile < 0:
                continue
            targets = table.targets[begin:end, column]
            kept = targets >= block_size
            rows = h[begin:end].float() @ a[tile].float().t()
            flat[targets[kept]] = rows[kept].to(flat.dtype)


def rope_cache_write_reference(
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
    """See `forkkv_kernels.ops.rope_cache_write`."""
    rotated = _rotate(q, cos, sin)
    kept = slots >= 0
    targets = slots[kept].long()
    pairs = [(k_cache, _rotate(k, cos, sin)), (v_cache, v)]
    if k_rms is not None and k_rms_cache is not None:
        pairs.append((k_rms_cache, k_rms))
    for cache, source in pairs:
        cache.view(-1, *cache.shape[2:])[targets] = source[kept].to(cache.dtype)
    return rotated if out is None else out.copy_(rotated)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """See `forkkv_kernels.ops.rms_norm`."""
    if delta is not None:
        x.add_(delta)
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu_reference(both: Tensor) -> Tensor:
    """See `forkkv_kernels.ops.swiglu`."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _ranges(tokens: TokenTiles) -> list[tuple[int, Tensor]]:
    """(slot, token indices) of every tile in use."""
    order = tokens.order.long()
    return [(slot, order[first:end]) for slot, first, end in tokens.tiles.tolist() if slot >= 0]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves in float32: x [T, heads, D], cos and sin [T, D / 2]; result in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos[:, None].float(), sin[:, None].float()
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
