"""Which programs the prefill kernel runs for a step: made once on the host, used in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkkv_kernels.triton.configs import PrefillConfig, prefill_config

IntArray = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What the configuration depends on. `group`: query heads per KV head. `itemsize`: bytes of a cache element.
    `arch`: see `configs.device_arch`. `config`: used instead of the default configurations."""

    group: int
    head_dim: int
    itemsize: int
    arch: str
    qk_norm: bool = False
    config: PrefillConfig | None = None

    def configuration(self, k_tiles: int, v_tiles: int) -> PrefillConfig:
        norm = self.qk_norm and k_tiles > 0
        return self.config or prefill_config(self.arch, self.head_dim, k_tiles, v_tiles, self.itemsize, norm)


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Tiles that one launch computes: `work` [items, 2] int32, a row and a tile of it. `k_tiles`, `v_tiles`: residual
    tiles to read, 0 and 0 for rows without residual. `mixed`: the work also names rows of the other kind, or tiles
    behind a row's end, which the kernel has to find out."""

    work: Tensor
    k_tiles: int
    v_tiles: int
    config: PrefillConfig
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Launches of one step and layer; no two of them write the same output."""

    launches: tuple[PrefillLaunch, ...]


def plan_prefill(
    cu_seqlens_q: IntArray,
    seq_lens: IntArray,
    read_slot: IntArray,
    residual_len: IntArray,
    k_tiles: IntArray,
    v_tiles: IntArray,
    *,
    shape: PrefillShape,
    device: torch.device,
    rows: Iterable[int] | None = None,
) -> PrefillPlan:
    """Plan from arrays on the host: cu_seqlens_q [B + 1], the others [B]; `rows`: only these.

    Rows without residual have a launch of their own, so what else is in the step changes neither their speed nor
    their bits; rows with one are launched by the tiles of their halves, so that rank 8 does not pay for rank 64.
    Within a launch the longest tiles come first: the card does not wait for one at the end.
    """
    by_tiles: dict[tuple[int, int], list[int]] = {}
    for row in range(len(seq_lens)) if rows is None else rows:
        has_residual = read_slot[row] >= 0 and residual_len[row] > 0
        own = (int(k_tiles[row]), int(v_tiles[row])) if has_residual else (0, 0)
        by_tiles.setdefault(own, []).append(row)
    parts: list[np.ndarray] = []
    made: list[tuple[int, int, PrefillConfig]] = []
    for own, members in sorted(by_tiles.items()):
        config = shape.configuration(*own)
        work = _tiles(members, cu_seqlens_q, seq_lens, shape.group, config.block_m)
        if len(work):
            parts.append(work)
            made.append((*own, config))
    if not parts:
        return PrefillPlan(())
    joined = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    pieces = joined.split([len(part) for part in parts])
    return PrefillPlan(tuple(PrefillLaunch(w, *m) for w, m in zip(pieces, made, strict=True)))


def plan_prefill_on_device(
    num_rows: int, max_query_len: int, k_tiles: int, v_tiles: int, *, shape: PrefillShape, device: torch.device
) -> PrefillPlan:
    """Plan that asks nothing of the rows but the largest query length, for callers whose row lengths are on the device
    only. Programs of rows that are shorter or of the other kind end at once; all residuals count `k_tiles` and
    `v_tiles` tiles (both 0: no row has one)."""
    launches = []
    for own_k, own_v in dict.fromkeys(((0, 0), (k_tiles, v_tiles))):
        config = shape.configuration(own_k, own_v)
        count = -(-max_query_len * shape.group // config.block_m)
        item = torch.arange(num_rows * count, dtype=torch.int32, device=device)
        work = torch.stack((item % num_rows, count - 1 - item // num_rows), dim=1)
        launches.append(PrefillLaunch(work, own_k, own_v, config, mixed=True))
    return PrefillPlan(tuple(launches))


def _tiles(rows: list[int], cu_seqlens_q: IntArray, seq_lens: IntArray, group: int, block_m: int) -> np.ndarray:
    """[items, 2] int32: tiles of the rows, those with most context first; a row's tiles that see equally far stay
    together, since they read the same K and V."""
    bounds, lengths = np.asarray(cu_seqlens_q), np.asarray(seq_lens)
    parts, context = [], []
    for row in rows:
        queries = int(bounds[row + 1] - bounds[row])
        tiles = np.arange(-(-queries * group // block_m), dtype=np.int32)
        parts.append(np.stack((np.full_like(tiles, row), tiles), axis=1))
        last_query = np.minimum((tiles + 1) * block_m - 1, queries * group - 1) // group
        context.append(int(lengths[row]) - queries + last_query)
    work = np.concatenate(parts)
    return work[np.argsort(-np.concatenate(context), kind="stable")]
