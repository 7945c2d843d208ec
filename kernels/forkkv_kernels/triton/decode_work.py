"""Decode work on the device: the list, room for partial results, and which launches the list needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forkkv_kernels.triton.worklist import Capacity, WorkList


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `decode_items`: items of the classes [first, last], at most `items` of them."""

    first: int
    last: int
    items: int

    @property
    def wide(self) -> bool:
        return self.last >= 2

    @property
    def residual(self) -> bool:
        return self.last % 2 == 1


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A work list on the device and what to launch for it. `words` int32 [capacity.words]; `partial` [P, H, D] and
    `partial_lse` [P, H] float32 with P >= the partials of the list; `rows`: rows to merge."""

    words: Tensor
    capacity: Capacity
    launches: tuple[Launch, ...]
    rows: int
    partial: Tensor
    partial_lse: Tensor


def exact_launches(work: WorkList) -> tuple[Launch, ...]:
    """One launch per class that has items."""
    counts = (work.bounds[1:] - work.bounds[:-1]).tolist()
    return tuple(Launch(i, i, count) for i, count in enumerate(counts) if count)


def capacity_launches(capacity: Capacity, max_rows: int, residual: bool) -> tuple[Launch, ...]:
    """Launches that do for any list of up to `max_rows` rows, with residuals only if `residual`; for CUDA graphs.
    Programs without an item end at once, which is why base items are left to the residual's kernel there."""
    narrow = Launch(0, int(residual), capacity.items)
    return (narrow, Launch(2, 2 + residual, capacity.items)) if max_rows > capacity.members else (narrow,)


def make_partials(count: int, num_heads: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for `count` partial results: [count, H, D] and [count, H] float32, uninitialised."""
    return (
        torch.empty((count, num_heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((count, num_heads), dtype=torch.float32, device=device),
    )
