"""Attention by the Triton kernels: tiles of queries for prefill rows, a grouped and split work list for decode rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.backend import AttentionBackend, AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch, HostRows
from forkkv.types import SharedPrefix

if TYPE_CHECKING:
    from forkkv_kernels.triton.decode_work import DecodeWork
    from forkkv_kernels.triton.prefill_plan import PrefillPlan
    from forkkv_kernels.triton.worklist import Capacity, RowTables, WorkList

_NARROW_PROGRAMS = 2
"""Programs of the decode kernel with tiles of 16 query heads that fit on a streaming multiprocessor by registers: about
226 of them x 128 threads. Of wider tiles, with twice the threads, one fits; cutting finer would only write more partial
results, which for 32 rows and 33 splits are half as many bytes as 16k tokens of the base."""
_INTERPRETED_CORES = 4
"""Cores of the machine that Triton's interpreter pretends to be: enough that contexts are split in tests."""
_MAX_HEADS_PER_KV_HEAD = 16


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """Work of one step. `batch` holds the tables; `prefill`, `decode` None: no such rows."""

    batch: ForwardBatch
    prefill: PrefillPlan | None
    decode: DecodeWork | None


class TritonBackend(AttentionBackend):
    """The server's backend on GPUs. On the CPU it runs in Triton's interpreter, for tests."""

    name: ClassVar[str] = "triton"

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
            return "Triton needs a GPU, or TRITON_INTERPRET=1"
        if device.type == "cpu" and dtype == torch.bfloat16:
            return "Triton's interpreter computes wrongly in bfloat16"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"{dtype} is not a type that the kernels take"
        if shape.head_dim % 2 or shape.head_dim > 256:
            return f"head_dim {shape.head_dim} is odd or above 256"
        if shape.heads_per_kv_head > _MAX_HEADS_PER_KV_HEAD:
            return f"{shape.heads_per_kv_head} query heads per KV head are more than {_MAX_HEADS_PER_KV_HEAD}"
        return None

    def __init__(self, shape: AttentionShape, cos: Tensor, sin: Tensor) -> None:
        super().__init__(shape, cos, sin)
        self.device = cos.device
        self.cores = _INTERPRETED_CORES
        if self.device.type == "cuda":
            self.cores = torch.cuda.get_device_properties(self.device).multi_processor_count

    # ---- one step

    def plan(self, batch: ForwardBatch) -> TritonMetadata:
        query_lens = np.diff(batch.host.cu_seqlens_q)
        decode, prefill = np.flatnonzero(query_lens == 1).tolist(), np.flatnonzero(query_lens > 1).tolist()
        return TritonMetadata(
            batch,
            self._plan_prefill(batch.host, prefill) if prefill else None,
            self._plan_decode(batch, decode) if decode else None,
        )

    def run(
        self, q: Tensor, cache: LayerCache, expansion: ResidualExpansion | None, metadata: TritonMetadata
    ) -> Tensor:
        from forkkv_kernels.triton.decode import decode_attention
        from forkkv_kernels.triton.prefill import residual_attention_prefill

        batch = metadata.batch
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        residual: dict[str, Any] = {
            "residual_cache": cache.residual,
            "residual_k_table": batch.residual_k_table,
            "residual_v_table": batch.residual_v_table,
            "b_k": None if expansion is None else expansion.b_k,
            "b_v": None if expansion is None else expansion.b_v,
            "cos": self.cos,
            "sin": self.sin,
            "k_rms": cache.k_rms,
            "residual_rms": cache.residual_rms,
        }
        if metadata.prefill is not None:
            residual_attention_prefill(
                q,
                cache.k,
                cache.v,
                batch.kv_block_table,
                batch.cu_seqlens_q,
                batch.seq_lens,
                scale=self.shape.scale,
                residual_len=batch.residual_len,
                read_slot=batch.read_slot,
                plan=metadata.prefill,
                out=out,
                **residual,
            )
        if metadata.decode is not None:
            decode_attention(
                q, cache.k, cache.v, batch.kv_block_table, metadata.decode, out, scale=self.shape.scale, **residual
            )
        return out

    # ---- decode steps in fixed memory, for CUDA graphs

    def static_metadata(self, batch: ForwardBatch, residual: bool) -> TritonMetadata:
        """Metadata of decode steps whose rows, one token each, lie in the buffers of `batch`: launches and memory do
        for any work that `refill` puts there. `residual`: whether rows may read residuals."""
        from forkkv_kernels.triton.decode_work import DecodeWork, capacity_launches, make_partials

        rows = batch.num_tokens
        capacity = self._capacity(rows, rows)
        words = torch.zeros(capacity.words, dtype=torch.int32, device=self.device)
        launches = capacity_launches(capacity, rows, residual)
        partials = make_partials(capacity.partials, self.shape.num_heads, self.shape.head_dim, self.device)
        return TritonMetadata(batch, None, DecodeWork(words, capacity, launches, rows, *partials))

    def refill(self, metadata: TritonMetadata, host: HostRows, groups: tuple[SharedPrefix, ...]) -> None:
        """Plan the step of `host`, whose rows are the first of the static batch, into the metadata's work list.
        Mutates the list; rows behind those of the step get zeros as output."""
        assert metadata.decode is not None
        rows = range(host.num_rows)
        work = self._plan_work(host, rows, groups, metadata.batch.block_size, metadata.decode.capacity)
        metadata.decode.words.copy_(_to_words(work, metadata.decode.rows, self.device), non_blocking=True)

    # ---- planning

    def _plan_prefill(self, host: HostRows, rows: list[int]) -> PrefillPlan:
        from forkkv_kernels.triton.configs import device_arch
        from forkkv_kernels.triton.prefill_plan import PrefillShape, plan_prefill

        shape = self.shape
        return plan_prefill(
            host.cu_seqlens_q,
            host.seq_lens,
            host.read_slot,
            host.residual_len,
            host.k_tiles,
            host.v_tiles,
            shape=PrefillShape(
                shape.heads_per_kv_head, shape.head_dim, self.cos.element_size(), device_arch(self.device)
            ),
            device=self.device,
            rows=rows,
        )

    def _plan_decode(self, batch: ForwardBatch, rows: list[int]) -> DecodeWork:
        from forkkv_kernels.triton.decode_work import DecodeWork, exact_launches, make_partials

        known = set(rows)
        largest = max((len(known.intersection(group.rows)) for group in batch.groups), default=1)
        capacity = self._capacity(len(rows), largest)
        work = self._plan_work(batch.host, rows, batch.groups, batch.block_size, capacity)
        partials = make_partials(work.num_partials, self.shape.num_heads, self.shape.head_dim, self.device)
        words = _to_words(work, None, self.device)
        return DecodeWork(words, capacity, exact_launches(work), len(rows), *partials)

    def _capacity(self, rows: int, largest_group: int) -> Capacity:
        """Room for `rows` decode rows, tiles for groups of `largest_group`."""
        from forkkv_kernels.triton.worklist import Capacity, tile_heads

        heads = self.shape.heads_per_kv_head
        wide = tile_heads(largest_group, heads, self.shape.head_dim)
        return Capacity.for_limits(rows, heads, self.shape.num_kv_heads, wide, self._programs(wide))

    def _programs(self, wide: int) -> int:
        """Programs that run at once when the widest tiles are `wide`."""
        return self.cores * (_NARROW_PROGRAMS if wide == 16 else 1)

    def _plan_work(
        self,
        host: HostRows,
        rows: list[int] | range,
        groups: tuple[SharedPrefix, ...],
        block_size: int,
        capacity: Capacity,
    ) -> WorkList:
        from forkkv_kernels.triton.worklist import plan_work

        members = [group.rows for group in groups]
        programs = self._programs(capacity.wide)
        return plan_work(_row_tables(host), rows, members, capacity, block_size=block_size, programs=programs)


def _row_tables(host: HostRows) -> RowTables:
    from forkkv_kernels.triton.worklist import RowTables

    return RowTables(
        tokens=host.cu_seqlens_q[:-1],
        seq_lens=host.seq_lens,
        read_slot=host.read_slot,
        residual_len=host.residual_len,
        k_tiles=host.k_tiles,
        v_tiles=host.v_tiles,
        kv_block_table=host.kv_block_table,
        residual_k_table=host.residual_k_table,
        residual_v_table=host.residual_v_table,
    )


def _to_words(work: WorkList, num_rows: int | None, device: torch.device) -> Tensor:
    """The list as one int32 tensor on the device, copied without waiting."""
    words = torch.empty(work.capacity.words, dtype=torch.int32, pin_memory=device.type == "cuda")
    work.write(words.numpy(), num_rows)
    return words.to(device, non_blocking=True) if device.type == "cuda" else words
