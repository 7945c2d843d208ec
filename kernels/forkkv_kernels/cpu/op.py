"""`residual_attention` by the CPU kernel, for tests and measurements; the server plans once per step instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkkv_kernels.cpu.plan import Rows
from forkkv_kernels.cpu.runtime import CpuAttention, Heads, LayerTensors, pack_b_k


def residual_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    groups: Sequence[tuple[int, Sequence[int]]] | None = None,
    threads: int | None = None,
    return_lse: bool = False,
    **residual: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `forkkv_kernels.residual_attention`. `groups`: (tokens shared, rows), by default every row by itself.
    Raises `TypeError` for tensors that are not float32."""
    if q.dtype != torch.float32 or k_cache.dtype != torch.float32:
        raise TypeError("the CPU kernel computes in float32")
    kv_heads, dim = k_cache.shape[2:]
    heads = Heads(kv_heads, q.shape[1] // kv_heads, dim)
    cos, sin = residual.get("cos"), residual.get("sin")
    longest = int(seq_lens.max())
    nothing = torch.zeros(longest, dim // 2)
    kernel = CpuAttention(heads, nothing if cos is None else cos, nothing if sin is None else sin, threads)
    rows = _rows(cu_seqlens_q, seq_lens, kv_block_table, residual)
    alone = [(0, [row]) for row in range(len(seq_lens))]
    work = kernel.plan(rows, alone if groups is None else groups, kv_block_table.numpy())
    b_k, b_v = residual.get("b_k"), residual.get("b_v")
    # A half that is not given has no tiles either: what stands in for it is not read.
    given = b_k if b_k is not None else b_v
    if given is not None:
        b_k, b_v = pack_b_k(given, kv_heads), given if b_v is None else b_v
    units = residual.get("residual_cache")
    units = torch.zeros(1, k_cache.shape[1], 16) if units is None else units
    layer = LayerTensors(k_cache, v_cache, units, residual.get("k_rms"), residual.get("residual_rms"), b_k, b_v)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    kernel.begin(work)
    kernel.run(q.contiguous(), scale, layer, out, lse)
    return (out, lse) if return_lse else out


def _rows(cu_seqlens_q: Tensor, seq_lens: Tensor, kv_block_table: Tensor, residual: dict[str, Any]) -> Rows:
    """Host arrays; a row's tiles are those of its tables that are not null throughout."""
    count, blocks = kv_block_table.shape
    slot, length = residual.get("read_slot"), residual.get("residual_len")
    reads = slot is not None and length is not None and residual.get("residual_cache") is not None
    halves = [
        _half(residual.get(name) if reads and residual.get(b) is not None else None, count, blocks)
        for name, b in (("residual_k_table", "b_k"), ("residual_v_table", "b_v"))
    ]
    return Rows(
        cu_seqlens_q.numpy(),
        seq_lens.numpy(),
        slot.numpy() if reads and slot is not None else np.full(count, -1, dtype=np.int32),
        length.numpy() if reads and length is not None else np.zeros(count, dtype=np.int32),
        halves[0][1],
        halves[1][1],
        halves[0][0],
        halves[1][0],
    )


def _half(table: Tensor | None, count: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(table [B, NB * tiles], tiles [B] of each row up to its last one that is not null throughout)."""
    units = np.zeros((count, 0), dtype=np.int32) if table is None else table.numpy()
    used = np.any(units.reshape(count, blocks, units.shape[1] // blocks), axis=1)
    return units, (used * np.arange(1, used.shape[1] + 1)).max(axis=1, initial=0)
