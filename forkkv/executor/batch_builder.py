"""From the segments of a plan to flat tensors, with NumPy: no loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.batch import ForwardBatch, HostRows, RowResidualWrites
from forkkv.attention.paged import to_device
from forkkv.executor.table import RequestTable, SequenceState
from forkkv.types import Segment, SharedPrefix


def build_batch(
    segments: Sequence[Segment],
    groups: tuple[SharedPrefix, ...],
    table: RequestTable,
    block_size: int,
    device: torch.device,
) -> ForwardBatch:
    """Flatten `segments`, one attention row each, in their order. Mutates nothing.

    Raises `ValueError` if a segment stores or reads where its tables hold nothing.
    """
    states = [table[segment.request_id] for segment in segments]
    starts = np.array([segment.start for segment in segments], dtype=np.int32)
    lens = np.array([segment.num_tokens for segment in segments], dtype=np.int32)
    seq_lens = starts + lens
    cu_seqlens = np.zeros(len(segments) + 1, dtype=np.int32)
    np.cumsum(lens, out=cu_seqlens[1:])
    num_blocks = -(-int(seq_lens.max()) // block_size)
    kv_table = table.block_tables[[state.row for state in states], :num_blocks]
    token_row = np.repeat(np.arange(len(segments)), lens)
    positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[token_row]
    kv_tokens, kv_slots = _kv_slots(segments, kv_table, token_row, positions, block_size)
    weights_slot = np.array([segment.weights_slot for segment in segments], dtype=np.int32)
    base_kv = np.array([segment.weights_slot >= 0 and segment.write == "base" for segment in segments])
    host = _host_rows(segments, states, cu_seqlens, seq_lens, weights_slot, kv_table, block_size)

    def ints(array: np.ndarray) -> Tensor:
        return to_device(array, device, torch.int32)

    return ForwardBatch(
        input_ids=to_device(_input_ids(segments, states, cu_seqlens), device),
        positions=to_device(positions, device),
        weights_slot=to_device(weights_slot[token_row], device),
        cu_seqlens_q=ints(cu_seqlens),
        seq_lens=ints(seq_lens),
        read_slot=ints(host.read_slot),
        residual_len=ints(host.residual_len),
        kv_block_table=ints(kv_table),
        residual_k_table=ints(host.residual_k_table),
        residual_v_table=ints(host.residual_v_table),
        kv_tokens=None if len(kv_tokens) == len(positions) else to_device(kv_tokens, device),
        kv_slots=to_device(kv_slots, device),
        sample_tokens=to_device(
            np.array([cu_seqlens[i + 1] - 1 for i, segment in enumerate(segments) if segment.sample], dtype=np.int64),
            device,
        ),
        block_size=block_size,
        host=host,
        groups=groups,
        residual_writes=tuple(
            RowResidualWrites(row, segment.start, segment.residual_writes)
            for row, segment in enumerate(segments)
            if segment.residual_writes
        ),
        base_kv_tokens=to_device(np.flatnonzero(base_kv[token_row]), device) if base_kv.any() else None,
    )


def _input_ids(segments: Sequence[Segment], states: Sequence[SequenceState], cu_seqlens: np.ndarray) -> np.ndarray:
    """Token ids [T]; raises `ValueError` if a segment reaches beyond the tokens of its sequence."""
    out = np.empty(int(cu_seqlens[-1]), dtype=np.int64)
    for segment, state, begin in zip(segments, states, cu_seqlens.tolist(), strict=False):
        if segment.end > state.num_tokens:
            raise ValueError(f"{segment.request_id}: token {segment.end - 1} of {state.num_tokens} is not known")
        out[begin : begin + segment.num_tokens] = state.tokens[segment.start : segment.end]
    return out


def _kv_slots(
    segments: Sequence[Segment], kv_table: np.ndarray, token_row: np.ndarray, positions: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(indices of the tokens whose K, V are stored, their flat slots)."""
    write_from = np.array([segment.kv_write_from for segment in segments], dtype=np.int64)
    stored = np.flatnonzero(positions >= write_from[token_row])
    rows, where = token_row[stored], positions[stored]
    blocks = kv_table[rows, where // block_size].astype(np.int64)
    if not blocks.all():
        row = int(rows[blocks == 0][0])
        raise ValueError(f"{segments[row].request_id}: the plan stores tokens for which it gave no block")
    return stored, blocks * block_size + where % block_size


def _host_rows(
    segments: Sequence[Segment],
    states: Sequence[SequenceState],
    cu_seqlens: np.ndarray,
    seq_lens: np.ndarray,
    weights_slot: np.ndarray,
    kv_table: np.ndarray,
    block_size: int,
) -> HostRows:
    num_rows, num_blocks = kv_table.shape
    read_slot = np.full(num_rows, -1, dtype=np.int32)
    residual_len = np.zeros(num_rows, dtype=np.int32)
    k_tiles = np.zeros(num_rows, dtype=np.int32)
    v_tiles = np.zeros(num_rows, dtype=np.int32)
    for row, (segment, state) in enumerate(zip(segments, states, strict=True)):
        if segment.read_slot >= 0 and segment.residual_len > 0:
            read_slot[row], residual_len[row] = segment.read_slot, segment.residual_len
            k_tiles[row], v_tiles[row] = state.k_tiles, state.v_tiles
    k_table = np.zeros((num_rows, num_blocks, int(k_tiles.max())), dtype=np.int32)
    v_table = np.zeros((num_rows, num_blocks, int(v_tiles.max())), dtype=np.int32)
    for row in np.flatnonzero(residual_len).tolist():
        own, name = -(-int(residual_len[row]) // block_size), segments[row].request_id
        for out, tiles, units in (
            (k_table, states[row].k_tiles, states[row].k_units),
            (v_table, states[row].v_tiles, states[row].v_units),
        ):
            if own * tiles > len(units):
                raise ValueError(f"{name}: the plan reads {own} residual blocks but gave {len(units)} units")
            out[row, :own, :tiles] = units[: own * tiles].reshape(own, tiles)
    return HostRows(
        cu_seqlens_q=cu_seqlens,
        seq_lens=seq_lens,
        weights_slot=weights_slot,
        read_slot=read_slot,
        residual_len=residual_len,
        kv_block_table=kv_table,
        residual_k_table=k_table.reshape(num_rows, -1),
        residual_v_table=v_table.reshape(num_rows, -1),
        k_tiles=k_tiles,
        v_tiles=v_tiles,
    )
