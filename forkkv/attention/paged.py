"""Reading paged tensors: runs of consecutive blocks as views, everything else by one gather."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks [begin, end) of the pool, consecutive in memory, or the blocks listed in `ids`."""

    begin: int
    end: int
    ids: Tensor | None = None

    def tokens(self, cache: Tensor) -> Tensor:
        """cache [num_blocks, block_size, ...] -> [blocks * block_size, ...]: a view for a run (do not write to it), a
        copy for listed blocks."""
        blocks = cache[self.begin : self.end] if self.ids is None else cache.index_select(0, self.ids)
        return blocks.flatten(0, 1)

    @property
    def num_blocks(self) -> int:
        return self.end - self.begin if self.ids is None else self.ids.shape[0]


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A NumPy array as a tensor on `device`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)


def block_runs(blocks: np.ndarray, device: torch.device, blocks_per_run: int = 32) -> tuple[BlockRun, ...]:
    """Split `blocks` into runs of consecutive ids when these are long (on average `blocks_per_run`, or at most two in
    all), so that reading them copies nothing; else one gather."""
    if len(blocks) == 0:
        return ()
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    if len(breaks) + 1 > max(2, len(blocks) // blocks_per_run):
        return (BlockRun(0, 0, to_device(blocks, device)),)
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(blocks)]))
    return tuple(BlockRun(int(blocks[a]), int(blocks[b - 1]) + 1) for a, b in zip(starts, ends, strict=True))


def read_tokens(cache: Tensor, runs: tuple[BlockRun, ...], length: int) -> Tensor:
    """First `length` tokens of a row, [length, ...]; a view when the row is one run (do not write to it)."""
    if len(runs) == 1:
        return runs[0].tokens(cache)[:length]
    return torch.cat([run.tokens(cache) for run in runs])[:length]


def read_residual(cache: Tensor, units: Tensor, rows: int, num_blocks: int) -> Tensor:
    """Residual units [rows * num_blocks * tiles] of a cache [num_units, block_size, 16] as columns of their tokens,
    [rows, num_blocks, block_size, tiles * 16]."""
    block_size, columns = cache.shape[1:]
    picked = cache.index_select(0, units).view(rows, num_blocks, -1, block_size, columns)
    return picked.transpose(2, 3).reshape(rows, num_blocks, block_size, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves of the last dimension: x [..., D], cos and sin broadcastable to [..., D / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(torch.broadcast_shapes(x.shape, (*cos.shape[:-1], x.shape[-1])), dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half])
    torch.mul(second, cos, out=out[..., half:])
    out[..., :half].addcmul_(second, sin, value=-1)
    out[..., half:].addcmul_(first, sin)
    return out
