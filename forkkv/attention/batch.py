"""One step as flat tensors: what the model, the adapters and the attention backend see of a `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from forkkv.types import ResidualWrite, SharedPrefix


@dataclass(frozen=True, slots=True)
class HostRows:
    """The per-row arrays on the CPU, for planning without a device synchronisation. B rows, int32 throughout."""

    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    weights_slot: np.ndarray
    """[B] adapter slot of the row's weights, -1 for base."""
    read_slot: np.ndarray
    residual_len: np.ndarray
    kv_block_table: np.ndarray
    residual_k_table: np.ndarray
    residual_v_table: np.ndarray
    k_tiles: np.ndarray
    """[B] tiles of the row's K residual, at most the tiles of the table; likewise `v_tiles`."""
    v_tiles: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    def query_len(self, row: int) -> int:
        return int(self.cu_seqlens_q[row + 1] - self.cu_seqlens_q[row])


@dataclass(frozen=True, slots=True)
class RowResidualWrites:
    """Residuals that the tokens of one row leave behind."""

    row: int
    start: int
    """Position of the row's first token."""
    writes: tuple[ResidualWrite, ...]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens in B attention rows (segments). All tensors live on the device of the model.

    `input_ids`, `positions` [T] int64; `weights_slot` [T] int64, -1 for base weights; `cu_seqlens_q` [B + 1],
    `seq_lens`, `read_slot`, `residual_len` [B] int32; `kv_block_table` [B, NB] int32; `residual_k_table`,
    `residual_v_table` [B, NB * tiles] int32, block major, 0 where there is nothing to read.

    K and V of the tokens `kv_tokens` (None: of all tokens) go to the flat slots `kv_slots` (block * block_size +
    offset); tokens that are not listed are computed and not stored.
    """

    input_ids: Tensor
    positions: Tensor
    weights_slot: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    read_slot: Tensor
    residual_len: Tensor
    kv_block_table: Tensor
    residual_k_table: Tensor
    residual_v_table: Tensor
    kv_tokens: Tensor | None
    kv_slots: Tensor
    sample_tokens: Tensor
    """[S] indices of the tokens whose logits are wanted."""
    block_size: int
    host: HostRows
    groups: tuple[SharedPrefix, ...] = ()
    residual_writes: tuple[RowResidualWrites, ...] = ()
    """Rows in ascending order."""
    base_kv_tokens: Tensor | None = None
    """Indices of the tokens that run adapter weights and store K, V without the adapter's part; None: no token does."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]
