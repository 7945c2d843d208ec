"""Applying adapters through kernels: all decisions of a step are in small tensors of fixed shapes.

Same interface as `forkkv.lora.layers.LoRAStep`. Which token runs which adapter is data, never a shape, so a graph that
was captured with `LoRATensors` of T tokens runs any step of T tokens after `LoRATensors.fill`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.backend import LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch, RowResidualWrites
from forkkv.attention.paged import to_device
from forkkv.lora.weights import GROUPS, AdapterWeights
from forkkv.models.spec import ModelSpec
from forkkv.types import RESIDUAL_TILE, AdapterId
from forkkv_kernels import ops
from forkkv_kernels.lora_plan import (
    ROWS_TOGETHER,
    ResidualTable,
    TokenTiles,
    block_rows,
    plan_token_tiles,
    tile_capacity,
)

_ALIGNMENT = 4
"""int32 numbers to whose multiples parts of the packed tensor begin: kernels are compiled for aligned pointers."""
_WRITE_ROWS = 64
"""Tokens of a tile of the residual write, which only base prefills do."""

_MODULE_TILES: WeakKeyDictionary[AdapterWeights, dict[AdapterId, dict[str, tuple[int, ...]]]] = WeakKeyDictionary()


class LoRATensors:
    """Index tables of one step of `num_tokens` tokens, views of the one tensor `packed` [N] int32.

    `tokens`: tokens by adapter slot; `slot_tiles[group]` [max_loras, n]: rank tiles of a slot per module;
    `outputs[group]`: output widths of the modules.
    """

    def __init__(self, weights: AdapterWeights, num_tokens: int, device: torch.device, rows: int | None = None) -> None:
        """Tables without content; `fill` before use. The shapes depend on the arguments alone, never on content.
        `rows`: most tokens of a tile, by default what the kernels of GPUs want."""
        self.weights, self.num_tokens, self.rows = weights, num_tokens, rows or block_rows(num_tokens)
        shapes: dict[str, tuple[int, ...]] = {
            "order": (num_tokens,),
            "tiles": (tile_capacity(num_tokens, weights.max_loras, self.rows), 3),
            **{group: (weights.max_loras, len(GROUPS[group])) for group in weights.groups},
        }
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self._starts: dict[str, int] = {}
        total = 0
        for name, size in sizes.items():
            self._starts[name] = total
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.packed = torch.zeros(total, dtype=torch.int32, device=device)
        views = {
            name: self.packed[start : start + sizes[name]].view(shapes[name]) for name, start in self._starts.items()
        }
        self.tokens = TokenTiles(views["order"], views["tiles"], self.rows)
        self.slot_tiles = {group: views[group] for group in weights.groups}
        self.outputs = {group: group_outputs(weights.spec, group) for group in weights.groups}

    def fill(self, slots: np.ndarray) -> None:
        """Overwrite the tables for the adapter slots of the tokens [T] (-1: base weights, or padding), by one copy to
        the device. Raises `KeyError` for an empty slot, `ValueError` for another number of tokens."""
        if len(slots) != self.num_tokens:
            raise ValueError(f"{len(slots)} tokens for tables of {self.num_tokens}")
        used = set(np.unique(slots).tolist()) - {-1}
        if empty := sorted(used - self.weights.slots.keys()):
            raise KeyError(f"no adapter in slot {empty[0]}")
        host = np.zeros(self.packed.shape[0], dtype=np.int32)
        order, tiles = plan_token_tiles(slots, self.weights.max_loras, self.rows)
        self._put(host, "order", order)
        self._put(host, "tiles", tiles)
        tiles_of_slots = slot_tiles(self.weights, used)
        for group in self.weights.groups:
            self._put(host, group, tiles_of_slots[group])
        self.packed.copy_(torch.from_numpy(host))

    def _put(self, host: np.ndarray, name: str, values: np.ndarray) -> None:
        start = self._starts[name]
        host[start : start + values.size] = values.ravel()


@dataclass(frozen=True, slots=True)
class RmsWrite:
    """QK-norm: tokens [begin, end) of the batch; where the K columns of the residual were written, [tokens * tiles]
    row major; the flat slots [tokens] of the rms side tensor."""

    begin: int
    end: int
    adapter_id: AdapterId
    columns: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ResidualWrites:
    """All residual writes of a step."""

    table: ResidualTable
    rms: tuple[RmsWrite, ...]


@dataclass(frozen=True, slots=True)
class KernelLoRAStep:
    """The adapters' share of one forward pass, by kernels. See `forkkv.lora.layers.LoRAStep`."""

    weights: AdapterWeights
    tensors: LoRATensors
    groups: frozenset[str]
    reads: bool
    writes: ResidualWrites | None = field(default=None)

    @property
    def jobs(self) -> bool:
        """Whether the step writes residuals."""
        return self.writes is not None

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> None:
        """y [T, out] += s·(x·A)·B for the tokens with adapter weights, in place; x [T, in]. `group` of `GROUPS`."""
        if group not in self.groups:
            return
        tokens, slot_tiles, outputs = self.tensors.tokens, self.tensors.slot_tiles[group], self.tensors.outputs[group]
        a, b = self.weights.a[group][layer], self.weights.b[group][layer]
        if tokens.block_rows <= ROWS_TOGETHER:
            ops.lora_rows(x, y, a, b, tokens, slot_tiles, outputs)
        else:
            ops.lora_expand(y, ops.lora_shrink(x, a, tokens, slot_tiles), b, tokens, slot_tiles, outputs)

    def write_residuals(self, layer: int, h: Tensor, k: Tensor, cache: LayerCache, eps: float) -> None:
        """Write h·A of the step's residual writes into `cache`, in place; arguments as in `LoRAStep`."""
        if self.writes is None:
            return
        ops.residual_shrink_write(h, self.weights.residual_a[layer], self.writes.table, cache.residual)
        for write in self.writes.rms:
            assert cache.residual_rms is not None
            rows = cache.residual.view(-1, RESIDUAL_TILE).index_select(0, write.columns)
            own = rows.view(write.end - write.begin, -1).to(k.dtype)
            adapted = torch.addmm(k[write.begin : write.end], own, self.weights.raw_b_k[write.adapter_id][layer])
            kv_heads = cache.residual_rms.shape[-1]
            rms = adapted.view(len(adapted), kv_heads, -1).float().pow(2).mean(-1).add_(eps).sqrt_()
            cache.residual_rms.view(-1, kv_heads).index_copy_(0, write.slots, rms)

    def expansion(self, layer: int) -> ResidualExpansion | None:
        """B matrices that complete what this step reads; None if no row reads residuals."""
        return self.weights.expansions[layer] if self.reads else None


def plan_kernel_lora(weights: AdapterWeights, batch: ForwardBatch) -> KernelLoRAStep:
    """The step of a batch. Raises `KeyError` if a row names an empty slot."""
    host = batch.host
    read = set(host.read_slot[host.read_slot >= 0].tolist())
    if empty := sorted(read - weights.slots.keys()):
        raise KeyError(f"no adapter in slot {empty[0]}")
    tensors = LoRATensors(weights, batch.num_tokens, batch.input_ids.device)
    tensors.fill(np.repeat(host.weights_slot, np.diff(host.cu_seqlens_q)).astype(np.int64))
    used = set(host.weights_slot[host.weights_slot >= 0].tolist())
    return KernelLoRAStep(
        weights=weights,
        tensors=tensors,
        groups=frozenset().union(*(weights.slot_groups(slot) for slot in used)),
        reads=bool(((host.read_slot >= 0) & (host.residual_len > 0)).any()),
        writes=_residual_writes(weights, batch),
    )


def static_lora_step(weights: AdapterWeights, tensors: LoRATensors) -> KernelLoRAStep:
    """A step for capture in a graph: every group that any adapter touches is applied, every row may read residuals.
    It stays valid until `AdapterWeights.rank` grows, which replaces the weights' tensors."""
    return KernelLoRAStep(weights, tensors, frozenset(weights.a), reads=bool(weights.expansions))


def module_tiles(weights: AdapterWeights, adapter_id: AdapterId) -> dict[str, tuple[int, ...]]:
    """Rank tiles of an adapter per group and module, the most that any layer needs; computed once per adapter."""
    known = _MODULE_TILES.setdefault(weights, {})
    if adapter_id not in known:
        ranks: dict[str, int] = {}
        for (_, module), (a, _) in weights.adapters[adapter_id].weights.items():
            ranks[module] = max(ranks.get(module, 0), a.shape[0])
        known[adapter_id] = {
            group: tuple(-(-ranks.get(module, 0) // RESIDUAL_TILE) for module in modules)
            for group, modules in GROUPS.items()
        }
    return known[adapter_id]


def slot_tiles(weights: AdapterWeights, slots: Collection[int]) -> dict[str, np.ndarray]:
    """Per group [max_loras, n] int32: rank tiles per module of the adapters in `slots`, 0 elsewhere."""
    counts = {group: np.zeros((weights.max_loras, len(GROUPS[group])), dtype=np.int32) for group in weights.groups}
    for slot in slots:
        for group, tiles in module_tiles(weights, weights.slots[slot]).items():
            if group in counts:
                counts[group][slot] = tiles
    return counts


def group_outputs(spec: ModelSpec, group: str) -> tuple[int, ...]:
    """Output widths of the modules of a group."""
    return {
        "qkv": (spec.q_size, spec.kv_size, spec.kv_size),
        "o": (spec.hidden_size,),
        "gate_up": (spec.intermediate_size, spec.intermediate_size),
        "down": (spec.hidden_size,),
    }[group]


def _residual_writes(weights: AdapterWeights, batch: ForwardBatch) -> ResidualWrites | None:
    """Tables of all residual writes of a batch; None if there are none."""
    jobs = [row for row in batch.residual_writes if any(write.k_units or write.v_units for write in row.writes)]
    if not jobs:
        return None
    device, bounds = batch.input_ids.device, batch.host.cu_seqlens_q
    tile_ids: list[list[int]] = []
    parts: list[tuple[int, int, np.ndarray]] = []
    tiles: list[tuple[int, int, int]] = []
    rms: list[RmsWrite] = []
    for job, row in enumerate(jobs):
        begin, end = int(bounds[row.row]), int(bounds[row.row + 1])
        tile_ids.append(_row_writes(weights, row, begin, end, batch, parts, rms))
        tiles += [(job, first, min(first + _WRITE_ROWS, end)) for first in range(begin, end, _WRITE_ROWS)]
    width = max(len(ids) for ids in tile_ids)
    targets = np.full((batch.num_tokens, width), -1, dtype=np.int64)
    for first, column, slots in parts:
        targets[first : first + slots.shape[0], column : column + slots.shape[1]] = slots
    ids = np.array([[*own, *[-1] * (width - len(own))] for own in tile_ids], dtype=np.int32)
    table = ResidualTable(
        to_device(np.array(tiles, dtype=np.int32), device, torch.int32),
        to_device(ids, device, torch.int32),
        to_device(targets, device),
        _WRITE_ROWS,
    )
    return ResidualWrites(table, tuple(rms))


def _row_writes(
    weights: AdapterWeights,
    row: RowResidualWrites,
    begin: int,
    end: int,
    batch: ForwardBatch,
    parts: list[tuple[int, int, np.ndarray]],
    rms: list[RmsWrite],
) -> list[int]:
    """Tile ids of one row, tokens [begin, end); appends (first token, first column, slots [tokens, tiles]) of
    every adapter's halves to `parts`, and what QK-norm needs to `rms`."""
    device = batch.input_ids.device
    ids: list[int] = []
    for write in row.writes:
        where, first = weights.tiles[write.adapter_id], begin + write.write_from - row.start
        halves = ((write.k_units, where.k_tiles, where.k_first), (write.v_units, where.v_tiles, where.v_first))
        for is_v, (units, count, tile) in enumerate(halves):
            if not units:
                continue
            slots = unit_slots(units, count, write.write_from, end - first, batch.block_size)
            parts.append((first, len(ids), slots))
            if not is_v and weights.raw_b_k:
                columns, lead = to_device(slots.ravel(), device), to_device(slots[:, 0], device)
                rms.append(RmsWrite(first, first + len(slots), write.adapter_id, columns, lead))
            ids.extend(range(tile, tile + count))
    return ids


def unit_slots(units: Sequence[int], tiles: int, first: int, num_tokens: int, block_size: int) -> np.ndarray:
    """Flat slots [tokens, tiles] of the `num_tokens` tokens from position `first` on, as far as `units` reach; these
    begin with the block of `first`."""
    table = np.asarray(units, dtype=np.int64).reshape(-1, 1, tiles)
    slots = (table * block_size + np.arange(block_size)[None, :, None]).reshape(-1, tiles)
    return slots[first % block_size :][:num_tokens]
