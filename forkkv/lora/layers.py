"""Applying adapters inside a step: planned once, then a few matrix products per projection, no loop over sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.backend import LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch, RowResidualWrites
from forkkv.attention.paged import to_device
from forkkv.lora.tensors import KernelLoRAStep, group_outputs, plan_kernel_lora, slot_tiles, unit_slots
from forkkv.lora.weights import AdapterWeights
from forkkv.types import RESIDUAL_TILE, AdapterId
from forkkv_kernels.lora_plan import ROWS_TOGETHER, TokenTiles, plan_token_tiles
from forkkv_kernels.ops import has_lora_kernels, lora_rows

_LONG_RANGE = 16
"""Tokens from which a range with one adapter gets its own matrix products; shorter ones are computed together."""


@dataclass(frozen=True, slots=True)
class ShortRanges:
    """Tokens of short ranges (decode rows), which one operation computes together.

    `slot_tiles[group]` [max_loras, n] int32: rank tiles of a slot per module; `outputs[group]`: the modules' widths.
    """

    tokens: TokenTiles
    slot_tiles: dict[str, Tensor]
    outputs: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RmsWrite:
    """QK-norm: tokens [begin, end) of the batch, the adapter's columns [first, last) of the residual job and the
    flat slots of the rms side tensor."""

    begin: int
    end: int
    first: int
    last: int
    adapter_id: AdapterId
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ResidualJob:
    """h·A of one row, tokens [begin, end): `tiles` of the stacked A matrices; element `src` of the result, as
    rows of 16 columns token major, goes to flat slot `dst` (unit * block_size + offset)."""

    begin: int
    end: int
    tiles: Tensor
    src: Tensor
    dst: Tensor
    rms: tuple[RmsWrite, ...]


@dataclass(frozen=True, slots=True)
class LoRAStep:
    """The adapters' share of one forward pass."""

    weights: AdapterWeights
    ranges: tuple[tuple[int, int, int], ...]
    """(begin, end, slot): tokens that run with the adapter in `slot`."""
    short: ShortRanges | None
    groups: frozenset[str]
    jobs: tuple[ResidualJob, ...]
    reads: bool
    """Whether some row reads residuals."""

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> None:
        """y [T, out] += s·(x·A)·B for the tokens with adapter weights, in place; x [T, in]. `group` of `GROUPS`."""
        if group not in self.groups:
            return
        a, b = self.weights.a[group][layer], self.weights.b[group][layer]
        for begin, end, slot in self.ranges:
            y[begin:end].addmm_(torch.mm(x[begin:end], a[:, slot]), b[slot])
        if (rows := self.short) is not None:
            lora_rows(x, y, a, b, rows.tokens, rows.slot_tiles[group], rows.outputs[group])

    def write_residuals(self, layer: int, h: Tensor, k: Tensor, cache: LayerCache, eps: float) -> None:
        """Write h·A of the step's residual jobs into `cache.residual`, in place.

        h [T, hidden]: input of the projections; k [T, Hkv * D]: base K before norm and rotation, used with QK-norm
        for the rms of the adapted K (`eps` as in the norm).
        """
        for job in self.jobs:
            a = self.weights.residual_a[layer].index_select(0, job.tiles).flatten(0, 1)
            result = torch.mm(h[job.begin : job.end], a.t())
            rows = result.view(-1, RESIDUAL_TILE).index_select(0, job.src)
            cache.residual.view(-1, RESIDUAL_TILE).index_copy_(0, job.dst, rows.to(cache.residual.dtype))
            for write in job.rms:
                assert cache.residual_rms is not None
                own = result[write.begin - job.begin : write.end - job.begin, write.first : write.last]
                adapted = torch.addmm(k[write.begin : write.end], own, self.weights.raw_b_k[write.adapter_id][layer])
                kv_heads = cache.residual_rms.shape[-1]
                rms = rms_of_heads(adapted.view(len(adapted), kv_heads, -1), eps)
                cache.residual_rms.view(-1, kv_heads).index_copy_(0, write.slots, rms)

    def expansion(self, layer: int) -> ResidualExpansion | None:
        """B matrices that complete what this step reads; None if no row reads residuals."""
        return self.weights.expansions[layer] if self.reads else None


def rms_of_heads(k: Tensor, eps: float) -> Tensor:
    """Root mean square over the last dimension, k [n, Hkv, D] -> [n, Hkv] float32."""
    return k.float().pow(2).mean(-1).add_(eps).sqrt_()


def plan_lora(weights: AdapterWeights, batch: ForwardBatch) -> LoRAStep | KernelLoRAStep:
    """Decide for every token how its adapter is applied: by kernels where the device has them, else by matrix products
    per range of tokens. Raises `KeyError` if a row names an empty slot."""
    if has_lora_kernels(batch.input_ids.device.type):
        return plan_kernel_lora(weights, batch)
    host = batch.host
    runs: list[tuple[int, int, int]] = []
    for row in range(host.num_rows):
        slot = int(host.weights_slot[row])
        if slot < 0:
            continue
        begin, end = int(host.cu_seqlens_q[row]), int(host.cu_seqlens_q[row + 1])
        if runs and runs[-1][1:] == (begin, slot):
            begin = runs.pop()[0]
        runs.append((begin, end, slot))
    used = {slot for _, _, slot in runs} | {int(slot) for slot in host.read_slot if slot >= 0}
    if empty := sorted(used - weights.slots.keys()):
        raise KeyError(f"no adapter in slot {empty[0]}")
    short = [run for run in runs if run[1] - run[0] < _LONG_RANGE]
    return LoRAStep(
        weights=weights,
        ranges=tuple(run for run in runs if run not in short),
        short=_short_ranges(weights, short) if short else None,
        groups=frozenset().union(*(weights.slot_groups(slot) for _, _, slot in runs)),
        jobs=tuple(
            _residual_job(weights, batch, row)
            for row in batch.residual_writes
            if any(write.k_units or write.v_units for write in row.writes)
        ),
        reads=bool(((host.read_slot >= 0) & (host.residual_len > 0)).any()),
    )


def _short_ranges(weights: AdapterWeights, runs: list[tuple[int, int, int]]) -> ShortRanges:
    tokens = np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end, _ in runs])
    slots = np.repeat([slot for _, _, slot in runs], [end - begin for begin, end, _ in runs])
    order, tiles = plan_token_tiles(slots, weights.max_loras, ROWS_TOGETHER)
    return ShortRanges(
        TokenTiles(torch.from_numpy(tokens[order]), torch.from_numpy(tiles), ROWS_TOGETHER),
        {group: torch.from_numpy(tiles) for group, tiles in slot_tiles(weights, set(slots.tolist())).items()},
        {group: group_outputs(weights.spec, group) for group in weights.groups},
    )


def _residual_job(weights: AdapterWeights, batch: ForwardBatch, row: RowResidualWrites) -> ResidualJob:
    """Index arrays of all residual writes of one row."""
    device, block_size = batch.input_ids.device, batch.block_size
    begin, end = int(batch.host.cu_seqlens_q[row.row]), int(batch.host.cu_seqlens_q[row.row + 1])
    tiles: list[int] = []
    tokens: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    rms: list[RmsWrite] = []
    for write in row.writes:
        where, first = weights.tiles[write.adapter_id], write.write_from - row.start
        halves = ((write.k_units, where.k_tiles, where.k_first), (write.v_units, where.v_tiles, where.v_first))
        for is_v, (units, count, tile) in enumerate(halves):
            if not units:
                continue
            targets = unit_slots(units, count, write.write_from, end - begin - first, block_size)
            tokens.append(np.repeat(np.arange(first, first + len(targets)), count))
            columns.append(np.tile(np.arange(len(tiles), len(tiles) + count), len(targets)))
            slots.append(targets.ravel())
            if not is_v and weights.raw_b_k:
                span = (begin + first, begin + first + len(targets))
                used = (len(tiles) * RESIDUAL_TILE, (len(tiles) + count) * RESIDUAL_TILE)
                rms.append(RmsWrite(*span, *used, write.adapter_id, to_device(targets[:, 0], device)))
            tiles.extend(range(tile, tile + count))
    src = np.concatenate([t * len(tiles) + c for t, c in zip(tokens, columns, strict=True)])
    return ResidualJob(
        begin,
        end,
        to_device(np.asarray(tiles), device),
        to_device(src, device),
        to_device(np.concatenate(slots), device),
        tuple(rms),
    )
