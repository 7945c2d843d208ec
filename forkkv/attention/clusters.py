"""Which decode rows are computed together: one cluster per shared prefix, its blocks read once for all rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.batch import ForwardBatch, HostRows
from forkkv.attention.groups import LONG_CONTEXT, shared_groups
from forkkv.attention.paged import BlockRun, block_runs, to_device
from forkkv.attention.prefill import row_units
from forkkv.types import RESIDUAL_TILE

_MIN_OWN_BLOCKS = 4
"""Consecutive blocks from which a row is read in place, by products of its own, instead of being gathered."""
_EXPANSION_ELEMENTS = 1 << 18
"""Expanded residual elements (rows * tokens * Hkv * D) at a time: 1 MiB in float32, so that what one matrix product
writes is still in the core's own cache when the next one reads it."""


@dataclass(frozen=True, slots=True)
class KeyChunk:
    """K residual of blocks [begin, end) of some rows: `units` [rows * (end - begin) * tiles]."""

    begin: int
    end: int
    units: Tensor


@dataclass(frozen=True, slots=True)
class ResidualRows:
    """Rows [lo, hi) of a cluster whose residuals are expanded together, padded with null units to `num_blocks`.

    `k_chunks` cover the blocks (empty: no row has a K residual) and `k_rank` counts its columns; `v_units`
    [rows * num_blocks * tiles] (None: no row has a V residual); `slots` [rows]; `cos`, `sin` [num_blocks, D / 2]:
    rotation of the first token of each block. `kv_blocks`, `rms_units` [rows * num_blocks] for QK-norm, null where a
    row has no K residual.
    """

    lo: int
    hi: int
    num_blocks: int
    slots: Tensor
    k_rank: int
    k_chunks: tuple[KeyChunk, ...]
    v_units: Tensor | None
    cos: Tensor
    sin: Tensor
    kv_blocks: Tensor | None
    rms_units: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeCluster:
    """R rows with one query each. Context position t < num_shared lies in `shared`, for all rows alike; the next
    `own_len` of row i lie in consecutive slots from `own_slots[i]` on, and are read in place; the rest at the flat
    slots `tail_slots[:, i]`, padded with the null block's slot 0 (zeros)."""

    tokens: Tensor
    num_shared: int
    shared: tuple[BlockRun, ...]
    own_slots: tuple[int, ...]
    own_len: int
    tail_slots: Tensor
    """[tail * R], position major."""
    tail_len: int
    tail_padding: Tensor | None
    """[R, tail] True where a row has no token; None when all tails are equally long."""
    residuals: tuple[ResidualRows, ...]

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


def plan_clusters(
    batch: ForwardBatch, rows: list[int], kv_size: int, cos: Tensor, sin: Tensor, qk_norm: bool
) -> tuple[DecodeCluster, ...]:
    """Partition the single-query rows `rows` of a batch. `kv_size` = Hkv * D; `cos`, `sin` [positions, D / 2]."""
    host, block_size = batch.host, batch.block_size
    parts, left = shared_groups(batch.host, batch.groups, batch.block_size, rows)
    short = [row for row in left if host.seq_lens[row] <= LONG_CONTEXT]
    parts += [(0, members) for members in _by_own_run(host, short, block_size)]
    parts += [(int(host.seq_lens[row] - 1) // block_size, [row]) for row in left if host.seq_lens[row] > LONG_CONTEXT]
    assert sorted(row for _, members in parts for row in members) == rows, "every row is in one cluster"
    return tuple(_plan_cluster(batch, shared, members, kv_size, cos, sin, qk_norm) for shared, members in parts)


def _own_runs(host: HostRows, rows: list[int], first: int, block_size: int) -> np.ndarray:
    """[rows]: how many blocks from table column `first` on are consecutive in memory and full, before the last."""
    table = host.kv_block_table[rows, first:]
    broken = np.ones((len(rows), table.shape[1]), dtype=bool)
    broken[:, :-1] = np.diff(table, axis=1) != 1
    full = (host.seq_lens[rows] - 1) // block_size - first
    return np.minimum(broken.argmax(axis=1) + 1, full)


def _by_own_run(host: HostRows, rows: list[int], block_size: int) -> list[list[int]]:
    """Rows without a shared prefix, together with those whose consecutive beginning is about as long."""
    if not rows:
        return []
    buckets: dict[int, list[int]] = {}
    for row, run in zip(rows, _own_runs(host, rows, 0, block_size).tolist(), strict=True):
        buckets.setdefault(run.bit_length() if run >= _MIN_OWN_BLOCKS else 0, []).append(row)
    return list(buckets.values())


def _plan_cluster(
    batch: ForwardBatch, shared: int, members: list[int], kv_size: int, cos: Tensor, sin: Tensor, qk_norm: bool
) -> DecodeCluster:
    host, block_size, device = batch.host, batch.block_size, batch.input_ids.device
    reads = {row: int(host.residual_len[row]) if host.read_slot[row] >= 0 else 0 for row in members}
    members = sorted(members, key=lambda row: reads[row])
    rows = np.asarray(members)
    num_shared = shared * block_size
    lengths = host.seq_lens[rows]
    own = int(_own_runs(host, members, shared, block_size).min())
    own = own if own >= _MIN_OWN_BLOCKS else 0
    positions = np.arange(num_shared + own * block_size, int(lengths.max()))[:, None]
    slots = host.kv_block_table[rows[None, :], positions // block_size] * np.int64(block_size) + positions % block_size
    padding = positions >= lengths[None, :]
    slots[padding] = 0
    return DecodeCluster(
        tokens=to_device(host.cu_seqlens_q[rows], device),
        num_shared=num_shared,
        shared=block_runs(host.kv_block_table[members[0], :shared], device),
        own_slots=tuple((host.kv_block_table[rows, shared] * block_size).tolist()) if own else (),
        own_len=own * block_size,
        tail_slots=to_device(slots.ravel(), device),
        tail_len=len(positions),
        tail_padding=to_device(padding.T, device, torch.bool) if padding.any() else None,
        residuals=_plan_residuals(host, members, reads, block_size, kv_size, cos, sin, qk_norm),
    )


def _plan_residuals(
    host: HostRows,
    members: list[int],
    reads: dict[int, int],
    block_size: int,
    kv_size: int,
    cos: Tensor,
    sin: Tensor,
    qk_norm: bool,
) -> tuple[ResidualRows, ...]:
    """Batches of the rows with a residual, which stand at the end of `members` in ascending order of length."""
    out: list[ResidualRows] = []
    hi = len(members)
    while hi > 0 and reads[members[hi - 1]] > 0:
        longest = reads[members[hi - 1]]
        lo = max(0, hi - max(1, _EXPANSION_ELEMENTS // (longest * kv_size)))
        while reads[members[lo]] == 0:
            lo += 1
        num_blocks, chunk = longest // block_size, max(1, _EXPANSION_ELEMENTS // ((hi - lo) * block_size * kv_size))
        out.append(_residual_rows(host, members[lo:hi], lo, reads, num_blocks, chunk, block_size, cos, sin, qk_norm))
        hi = lo
    return tuple(out)


def _residual_rows(
    host: HostRows,
    rows: list[int],
    lo: int,
    reads: dict[int, int],
    num_blocks: int,
    chunk: int,
    block_size: int,
    cos: Tensor,
    sin: Tensor,
    qk_norm: bool,
) -> ResidualRows:
    """`chunk`: blocks whose K is expanded at a time."""
    device = cos.device
    k_chunks: list[KeyChunk] = []
    k_units = _padded_units(host.residual_k_table, host.k_tiles, host, rows, reads, num_blocks, block_size)
    v_units = _padded_units(host.residual_v_table, host.v_tiles, host, rows, reads, num_blocks, block_size)
    kv_blocks = rms_units = None
    if k_units is not None:
        for begin in range(0, num_blocks, chunk):
            units = k_units[:, begin : begin + chunk]
            k_chunks.append(KeyChunk(begin, begin + units.shape[1], to_device(units.ravel(), device)))
    if qk_norm and k_units is not None:
        first_tile = k_units[:, :, 0]
        kv_blocks = to_device(np.where(first_tile > 0, host.kv_block_table[rows, :num_blocks], 0).ravel(), device)
        rms_units = to_device(first_tile.ravel(), device)
    return ResidualRows(
        lo=lo,
        hi=lo + len(rows),
        num_blocks=num_blocks,
        slots=to_device(host.read_slot[rows], device),
        k_rank=0 if k_units is None else k_units.shape[2] * RESIDUAL_TILE,
        k_chunks=tuple(k_chunks),
        v_units=None if v_units is None else to_device(v_units.ravel(), device),
        cos=cos[: num_blocks * block_size : block_size],
        sin=sin[: num_blocks * block_size : block_size],
        kv_blocks=kv_blocks,
        rms_units=rms_units,
    )


def _padded_units(
    table: np.ndarray,
    tiles: np.ndarray,
    host: HostRows,
    rows: list[int],
    reads: dict[int, int],
    num_blocks: int,
    block_size: int,
) -> np.ndarray | None:
    """Units [rows, num_blocks, tiles] with the null unit beyond a row's residual and rank; None without any."""
    widest = int(tiles[rows].max())
    if widest == 0:
        return None
    out = np.zeros((len(rows), num_blocks, widest), dtype=np.int64)
    for i, row in enumerate(rows):
        own, count = reads[row] // block_size, int(tiles[row])
        units = row_units(table, host, row, own, count)
        if units is not None:
            out[i, :own, :count] = units
    return out
