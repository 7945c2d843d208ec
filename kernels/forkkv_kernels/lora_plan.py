"""Who works on which tokens: fixed-capacity index tables for the multi-LoRA operations, filled once per step.

The tables are small integer tensors whose shapes depend on the number of tokens alone, so a CUDA graph that was
captured with one filling runs with any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

TILE = 16
"""Columns of a rank tile: the smallest matrix instruction, and what a residual unit holds."""
SMALL_BATCH = 256
"""Tokens up to which tiles of 16 rows are used: adapters have few rows each there, and a matrix instruction has 16."""

ROWS_TOGETHER = 4
"""Tokens of a tile in `lora_rows`."""


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """Tokens of a step that run adapter weights, ordered by slot and cut into tiles of one slot each.

    `order` [T] int32: token indices by slot, those without adapter left out (the rest is unused). `tiles` [W, 3]
    int32: slot, first and last + 1 position in `order`; slot -1: nothing to do. `block_rows`: most tokens of a tile.
    """

    order: Tensor
    tiles: Tensor
    block_rows: int


@dataclass(frozen=True, slots=True)
class ResidualTable:
    """Which residual tiles a step writes, and where.

    `tiles` [W, 3] int32: job, first and last + 1 token of at most `block_rows` tokens; job -1: nothing to do.
    `tile_ids` [jobs, N] int32: tiles of the stacked A matrices, -1: unused. `targets` [T, N] int64: flat slots
    (unit * block_size + offset) of the rows of 16 numbers; below `block_size` (unit 0 or -1): not written.
    """

    tiles: Tensor
    tile_ids: Tensor
    targets: Tensor
    block_rows: int


def block_rows(num_tokens: int) -> int:
    """Rows of a tile for a step of so many tokens."""
    return 16 if num_tokens <= SMALL_BATCH else 64


def tile_capacity(num_tokens: int, num_slots: int, rows: int) -> int:
    """Most tiles that any distribution of `num_tokens` over `num_slots` needs."""
    return max(1, min(num_tokens, num_tokens // rows + num_slots))


def plan_token_tiles(slots: np.ndarray, num_slots: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`order` [T] and `tiles` [W, 3] of `TokenTiles` for the slot of every token [T] (-1: base weights).

    The order within a slot is that of the tokens. Raises `ValueError` for a slot outside [-1, num_slots).
    """
    if len(slots) and (slots.min() < -1 or slots.max() >= num_slots):
        raise ValueError(f"slots outside -1..{num_slots - 1}")
    order = np.argsort(slots, kind="stable").astype(np.int32)
    counts = np.bincount(slots + 1, minlength=num_slots + 1)
    base = int(counts[0])
    order = np.concatenate((order[base:], order[:base]))
    ends = np.cumsum(counts[1:])
    tiles = np.full((tile_capacity(len(slots), num_slots, rows), 3), (-1, 0, 0), dtype=np.int32)
    row = 0
    for slot in np.flatnonzero(counts[1:]):
        end = int(ends[slot])
        for first in range(end - int(counts[slot + 1]), end, rows):
            tiles[row] = slot, first, min(first + rows, end)
            row += 1
    return order, tiles
