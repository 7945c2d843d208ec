"""Adapter weights on the device: full weights of the adapters in slots, A_k and A_v of all adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forkkv.attention.backend import ResidualExpansion
from forkkv.attention.paged import rotate
from forkkv.lora.adapter import LoadedAdapter
from forkkv.models.spec import ModelSpec
from forkkv.types import RESIDUAL_TILE, AdapterId

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Fused projections of the model and the modules they stand for, in the order of their output columns."""


@dataclass(frozen=True, slots=True)
class TileRange:
    """Tiles of one adapter in `AdapterWeights.residual_a`: K tiles from `k_first`, V tiles from `v_first`."""

    k_first: int
    k_tiles: int
    v_first: int
    v_tiles: int


class AdapterWeights:
    """A and B of the adapters that may run, stacked by slot, and what base prefills need to write residuals.

    With R the largest rank ever resident, rounded up to 16, and n the modules of a group: `a[group][layer]`
    [in, slots, n * R]; `b[group][layer]` [slots, n * R, out], block diagonal over the modules, scaling folded in.
    Columns beyond an adapter's rank, modules and layers without weights are zeros, so mixed ranks need no branch.
    A group that no adapter touches has no tensors.
    """

    def __init__(
        self,
        spec: ModelSpec,
        adapters: Sequence[LoadedAdapter],
        max_loras: int,
        device: torch.device,
        dtype: torch.dtype,
        k_gains: Sequence[Tensor] | None = None,
        offset_rotation: tuple[Tensor, Tensor] | None = None,
        pack_b_k: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        """`k_gains`: the K norm's gain [D] of each layer, for models with QK-norm; it is folded into `B_k`.
        `offset_rotation`: cos and sin [block_size, D / 2] of the offsets inside a block; with it B_k is also kept
        rotated to each of them, which spares PyTorch's decode on CPUs doing so in every step. `pack_b_k`: takes B_k
        [slots, R, Hkv * D] and the number of KV heads, and gives `ResidualExpansion.b_k_packed`."""
        self.spec, self.max_loras, self.device, self.dtype = spec, max_loras, device, dtype
        self.adapters = {adapter.meta.adapter_id: adapter for adapter in adapters}
        self.slots: dict[int, AdapterId] = {}
        self.rank = 0
        self.groups = tuple(group for group in GROUPS if any(_has_group(a, group) for a in adapters))
        self.a: dict[str, list[Tensor]] = {}
        self.b: dict[str, list[Tensor]] = {}
        self.expansions: list[ResidualExpansion] = []
        self._k_gains, self._offset_rotation, self._pack_b_k = k_gains, offset_rotation, pack_b_k
        self._outputs = {
            "q_proj": spec.q_size,
            "k_proj": spec.kv_size,
            "v_proj": spec.kv_size,
            "o_proj": spec.hidden_size,
            "gate_proj": spec.intermediate_size,
            "up_proj": spec.intermediate_size,
            "down_proj": spec.hidden_size,
        }
        self.tiles, self.residual_a = self._stack_residual_a()
        self.raw_b_k = self._stack_raw_b_k() if k_gains is not None else {}

    def slot_groups(self, slot: int) -> frozenset[str]:
        """Groups that the adapter in `slot` touches; empty for an empty slot."""
        adapter = self.adapters.get(self.slots.get(slot, -1))
        return frozenset(group for group in self.groups if adapter is not None and _has_group(adapter, group))

    def reserve(self) -> None:
        """Make room for the largest rank of all adapters now, so that no later `load` allocates anything."""
        self._grow(max((_rank(adapter) for adapter in self.adapters.values()), default=0))

    def load(self, slot: int, adapter_id: AdapterId) -> None:
        """Put an adapter into a slot, replacing what was there. Grows all slots if its rank is the largest so far.

        Raises `KeyError` for an unknown adapter, `IndexError` for a slot outside `max_loras`.
        """
        adapter = self.adapters[adapter_id]
        if not 0 <= slot < self.max_loras:
            raise IndexError(f"adapter slot {slot} outside 0..{self.max_loras - 1}")
        self.slots[slot] = adapter_id
        if not self._grow(_rank(adapter)):
            self._fill(slot, adapter)

    def _grow(self, rank: int) -> bool:
        """Make room for `rank`. Returns whether there was none, so that all slots were allocated and filled anew."""
        if rank <= self.rank:
            return False
        self.rank = _round_up(rank)
        self._allocate()
        for slot, resident in self.slots.items():
            self._fill(slot, self.adapters[resident])
        return True

    def _allocate(self) -> None:
        spec, layers = self.spec, range(self.spec.num_layers)
        inputs = {
            "qkv": spec.hidden_size,
            "o": spec.q_size,
            "gate_up": spec.hidden_size,
            "down": spec.intermediate_size,
        }
        for group in self.groups:
            rows = len(GROUPS[group]) * self.rank
            out = sum(self._outputs[module] for module in GROUPS[group])
            self.a[group] = [self._stacked_a(inputs[group], rows) for _ in layers]
            self.b[group] = [self._zeros(self.max_loras, rows, out) for _ in layers]
        shape = (self.max_loras, self.rank, spec.kv_size)
        offsets = 0 if self._offset_rotation is None else len(self._offset_rotation[0])
        self.expansions = [
            ResidualExpansion(
                self._zeros(*shape),
                self._zeros(*shape),
                self._zeros(offsets, *shape) if offsets else None,
                None if self._pack_b_k is None else self._pack_b_k(self._zeros(*shape), spec.num_kv_heads),
            )
            for _ in layers
        ]

    def _fill(self, slot: int, adapter: LoadedAdapter) -> None:
        """Overwrite everything of a slot."""
        for layer in range(self.spec.num_layers):
            for group in self.groups:
                slot_a, slot_b = self.a[group][layer][:, slot].zero_(), self.b[group][layer][slot].zero_()
                column = 0
                for i, module in enumerate(GROUPS[group]):
                    out = self._outputs[module]
                    if (layer, module) in adapter.weights:
                        a, b = self._scaled(adapter, layer, module)
                        rows = slice(i * self.rank, i * self.rank + a.shape[0])
                        slot_a[:, rows] = a.t()
                        slot_b[rows, column : column + out] = b
                    column += out
            self._fill_expansion(slot, adapter, layer)

    def _fill_expansion(self, slot: int, adapter: LoadedAdapter, layer: int) -> None:
        """Overwrite a slot of what readers of residuals need."""
        expansion, dim = self.expansions[layer], self.spec.head_dim
        for module, target in (("k_proj", expansion.b_k), ("v_proj", expansion.b_v)):
            target[slot].zero_()
            if (layer, module) in adapter.weights:
                _, b = self._scaled(adapter, layer, module)
                if module == "k_proj" and self._k_gains is not None:
                    b = (b.reshape(len(b), -1, dim) * self._k_gains[layer].float().cpu()).view_as(b)
                target[slot, : len(b)] = b
        if expansion.b_k_rotated is not None and self._offset_rotation is not None:
            cos, sin = (table[:, None, None].float() for table in self._offset_rotation)
            rotated = rotate(expansion.b_k[slot].float().view(self.rank, -1, dim), cos, sin)
            expansion.b_k_rotated[:, slot] = rotated.flatten(2)
        if expansion.b_k_packed is not None and self._pack_b_k is not None:
            expansion.b_k_packed[slot] = self._pack_b_k(expansion.b_k[slot : slot + 1], self.spec.num_kv_heads)[0]

    def _scaled(self, adapter: LoadedAdapter, layer: int, module: str) -> tuple[Tensor, Tensor]:
        """(A [r, in], scaling * B transposed [r, out]) in float32 on the CPU."""
        a, b = adapter.weights[layer, module]
        return a.float(), b.float().t() * adapter.scaling[layer, module]

    def _stack_residual_a(self) -> tuple[dict[AdapterId, TileRange], list[Tensor]]:
        """A_k and A_v of every adapter cut into tiles, one tensor [tiles, 16, hidden] per layer."""
        tiles: dict[AdapterId, TileRange] = {}
        total = 0
        for adapter_id, adapter in self.adapters.items():
            k_tiles, v_tiles = adapter.meta.k_tiles, adapter.meta.v_tiles
            tiles[adapter_id] = TileRange(total, k_tiles, total + k_tiles, v_tiles)
            total += k_tiles + v_tiles
        stacked = [self._zeros(total, RESIDUAL_TILE, self.spec.hidden_size) for _ in range(self.spec.num_layers)]
        for adapter_id, adapter in self.adapters.items():
            where = tiles[adapter_id]
            for layer, target in enumerate(stacked):
                for module, first in (("k_proj", where.k_first), ("v_proj", where.v_first)):
                    if (layer, module) in adapter.weights:
                        a, _ = adapter.weights[layer, module]
                        target[first:].view(-1, self.spec.hidden_size)[: a.shape[0]] = a
        return tiles, stacked

    def _stack_raw_b_k(self) -> dict[AdapterId, list[Tensor]]:
        """B_k [k_tiles * 16, Hkv * D] of every adapter and layer without the norm's gain: QK-norm needs the rms of
        the adapted K when the residual is written, also for adapters that are in no slot."""
        out: dict[AdapterId, list[Tensor]] = {}
        for adapter_id, adapter in self.adapters.items():
            layers = []
            for layer in range(self.spec.num_layers):
                target = self._zeros(adapter.meta.k_tiles * RESIDUAL_TILE, self.spec.kv_size)
                if (layer, "k_proj") in adapter.weights:
                    _, b = self._scaled(adapter, layer, "k_proj")
                    target[: b.shape[0]] = b
                layers.append(target)
            out[adapter_id] = layers
        return out

    def _stacked_a(self, width: int, rows: int) -> Tensor:
        """[in, slots, rows] of zeros, each slot's matrix in one piece. Kernels on a GPU read along the input."""
        if self.device.type == "cpu":
            return self._zeros(self.max_loras, width, rows).transpose(0, 1)
        return self._zeros(self.max_loras, rows, width).permute(2, 0, 1)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _has_group(adapter: LoadedAdapter, group: str) -> bool:
    return any(module in GROUPS[group] for _, module in adapter.weights)


def _rank(adapter: LoadedAdapter) -> int:
    return max((a.shape[0] for a, _ in adapter.weights.values()), default=0)


def _round_up(rank: int) -> int:
    return -(-rank // RESIDUAL_TILE) * RESIDUAL_TILE
