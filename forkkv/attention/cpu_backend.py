"""Attention on CPUs: every row by a compiled kernel that reads paged blocks in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forkkv.attention.backend import AttentionBackend, AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch, HostRows
from forkkv.attention.groups import shared_groups
from forkkv.types import SharedPrefix

if TYPE_CHECKING:
    from forkkv_kernels.cpu.runtime import LayerTensors, StepWork
    from forkkv_kernels.cpu.team import LiveBlock


@dataclass(slots=True)
class RepeatedMetadata:
    """Work of decode steps that are run again in the same memory: that of the step which `refill` put there last.
    `blocks`: one for each layer that ran."""

    block_size: int
    work: StepWork | None = None
    blocks: list[LiveBlock] = field(default_factory=list)


class CpuBackend(AttentionBackend):
    """The server's backend on CPUs. One instance serves one engine: its buffers are reused by every layer."""

    name: ClassVar[str] = "cpu"
    reads_packed_b_k: ClassVar[bool] = True

    def __init__(self, shape: AttentionShape, cos: Tensor, sin: Tensor) -> None:
        """Compiles the kernels for `shape`, or loads them from disk."""
        super().__init__(shape, cos, sin)
        from forkkv_kernels.cpu.runtime import CpuAttention, Heads, LayerTensors

        self._layer_tensors = LayerTensors
        self._layers: WeakKeyDictionary[LayerCache, dict[bool, tuple[ResidualExpansion | None, LayerTensors]]] = (
            WeakKeyDictionary()
        )
        self._kernel = CpuAttention(Heads(shape.num_kv_heads, shape.heads_per_kv_head, shape.head_dim), cos, sin)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> str | None:
        if device.type != "cpu":
            return f"computes on CPUs, not on {device.type}"
        try:
            from forkkv_kernels.cpu.runtime import unsupported
        except ImportError as error:
            return f"needs Numba ({error})"
        return unsupported(shape.head_dim, dtype)

    @staticmethod
    def pack_b_k(b_k: Tensor, num_kv_heads: int) -> Tensor:
        from forkkv_kernels.cpu.runtime import pack_b_k

        return pack_b_k(b_k, num_kv_heads)

    def plan(self, batch: ForwardBatch) -> StepWork:
        return self._begin(batch.host, batch.groups, batch.block_size)

    def _begin(self, host: HostRows, groups: Sequence[SharedPrefix], block_size: int) -> StepWork:
        """Plan all rows for the kernel, and make that what it does next."""
        from forkkv_kernels.cpu.plan import Rows

        rows = Rows(
            host.cu_seqlens_q,
            host.seq_lens,
            host.read_slot,
            host.residual_len,
            host.k_tiles,
            host.v_tiles,
            host.residual_k_table,
            host.residual_v_table,
        )
        shared, alone = shared_groups(host, groups, block_size, range(host.num_rows))
        together = [(blocks * block_size, part) for blocks, part in shared] + [(0, [row]) for row in alone]
        work = self._kernel.plan(rows, together, host.kv_block_table)
        self._kernel.begin(work)
        return work

    # ---- decode steps in fixed memory, see `forkkv.executor.graphs`

    def static_metadata(self, batch: ForwardBatch, residual: bool) -> RepeatedMetadata:
        """Metadata of decode steps whose rows, one token each, lie in the buffers of `batch`."""
        return RepeatedMetadata(batch.block_size)

    def refill(self, metadata: RepeatedMetadata, host: HostRows, groups: tuple[SharedPrefix, ...]) -> None:
        """Plan the step of `host` for the calls that were made with the metadata, and for new ones. Mutates it."""
        metadata.work = self._begin(host, groups, metadata.block_size)
        self._kernel.refresh(metadata.blocks)

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        expansion: ResidualExpansion | None,
        metadata: StepWork | RepeatedMetadata,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        if isinstance(metadata, RepeatedMetadata):
            metadata.blocks.append(self._kernel.own_block())
            self._kernel.run(q, self.shape.scale, self._tensors(cache, expansion), out, own=metadata.blocks[-1])
            return out
        self._kernel.run(q, self.shape.scale, self._tensors(cache, expansion), out)
        return out

    def _tensors(self, cache: LayerCache, expansion: ResidualExpansion | None) -> LayerTensors:
        """The layer as the kernel takes it, remembered as long as the cache lives."""
        known = self._layers.setdefault(cache, {})
        seen, layer = known.get(expansion is None, (None, None))
        if layer is None or seen is not expansion:
            layer = self._layer_tensors(
                cache.k,
                cache.v,
                cache.residual,
                cache.k_rms,
                cache.residual_rms,
                None if expansion is None else expansion.b_k_packed,
                None if expansion is None else expansion.b_v,
            )
            known[expansion is None] = (expansion, layer)
        return layer
