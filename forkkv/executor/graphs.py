"""Decode steps as CUDA graphs, or as programs of the CPU's kernels: one capture per padded number of rows, replayed
with new content in the same memory.

Everything that differs between two decode steps of one size is data in buffers that stay where they are: token ids,
positions, cache slots, block and unit tables, which token runs which adapter, and the work list of attention with its
groups. So neither a group, nor an adapter in another slot, nor a longer context captures anything anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.backend import AttentionBackend
from forkkv.attention.batch import ForwardBatch, HostRows
from forkkv.attention.cpu_backend import CpuBackend
from forkkv.executor.cache import PagedCache
from forkkv.lora.tensors import LoRATensors, static_lora_step
from forkkv.lora.weights import AdapterWeights
from forkkv.models.llama import LlamaModel, StepContext
from forkkv.types import RESIDUAL_TILE, SharedPrefix
from forkkv_kernels.lora_plan import ROWS_TOGETHER

_MOST_ROWS_ON_CPU = 8
"""With more rows the products take so much longer than Python that a program gains little, and keeps more memory."""

Step = Callable[[], Tensor]


class CaptureStrategy(Protocol):
    """How a function on fixed memory is made repeatable. `rows_together`: most tokens of a tile of the adapters'
    tables, None for what the kernels of GPUs want."""

    rows_together: int | None

    def sizes(self, max_rows: int) -> tuple[int, ...]:
        """Numbers of rows, ascending, that steps are padded to; larger steps are not captured."""
        ...

    def capture(self, step: Step) -> Step:
        """A function that does what `step` does, as often as it is called, with what is then in the memory. `step` may
        be run meanwhile; running it twice with the same content must do no harm."""
        ...


def padded_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two below `max_rows`, and `max_rows`."""
    return (*(1 << i for i in range((max_rows - 1).bit_length())), max_rows)


class EagerReplay:
    """Runs the function itself: what a graph would compute, where there are no graphs. For tests."""

    rows_together: int | None = None

    def sizes(self, max_rows: int) -> tuple[int, ...]:
        return padded_sizes(max_rows)

    def capture(self, step: Step) -> Step:
        return step


class CudaCapture:
    """Records a CUDA graph. All graphs share one memory pool, since only one of them runs at a time."""

    rows_together: int | None = None
    _WARM_UPS = 2
    """Runs before the recording, in which kernels are compiled and libraries allocate their workspaces."""

    def __init__(self) -> None:
        self._pool: Any = None

    def sizes(self, max_rows: int) -> tuple[int, ...]:
        return padded_sizes(max_rows)

    def capture(self, step: Step) -> Step:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self._WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class CpuCapture:
    """Records a program of the CPU's kernels."""

    rows_together: int | None = ROWS_TOGETHER

    def sizes(self, max_rows: int) -> tuple[int, ...]:
        """A row of padding costs a CPU as much as any other, and every size keeps memory of its own."""
        return tuple(range(1, min(max_rows, _MOST_ROWS_ON_CPU) + 1))

    def capture(self, step: Step) -> Step:
        from forkkv_kernels.cpu.program import record

        return record(step)


class GraphBackend(Protocol):
    """What graphs need of an attention backend besides `AttentionBackend`; see `TritonBackend`, `CpuBackend`."""

    def static_metadata(self, batch: ForwardBatch, residual: bool) -> Any:
        """Metadata in fixed memory for decode steps in the buffers of `batch`."""
        ...

    def refill(self, metadata: Any, host: HostRows, groups: tuple[SharedPrefix, ...]) -> None:
        """Put the work of a step into it. Mutates the metadata's memory."""
        ...


def choose_strategy(backend: AttentionBackend, device: torch.device) -> CaptureStrategy | None:
    """How decode steps are captured on this device with this backend; None if they are not."""
    if isinstance(backend, CpuBackend):
        return CpuCapture()
    return CudaCapture() if device.type == "cuda" and hasattr(backend, "static_metadata") else None


class DecodeGraphs:
    """Runs decode steps of a model by captured graphs."""

    def __init__(
        self,
        model: LlamaModel,
        cache: PagedCache,
        backend: AttentionBackend,
        lora: AdapterWeights,
        *,
        max_num_seqs: int,
        max_model_len: int,
        strategy: CaptureStrategy,
    ) -> None:
        """`backend` also has the methods of `GraphBackend`."""
        self.model, self.cache, self.backend, self.lora = model, cache, backend, lora
        self.strategy = strategy
        self.sizes = strategy.sizes(max_num_seqs)
        self.captures = 0
        """Captures so far."""
        self._max_blocks = -(-max_model_len // cache.spec.block_size) + 1
        self._rank = -1
        self._graphs: dict[int, _Graph] = {}
        self._rows: _StaticRows | None = None

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether the step is one of single tokens, not too many, that write no residual and store K, V with the
        contribution of the weights that run."""
        plain = not batch.residual_writes and batch.base_kv_tokens is None
        return plain and batch.num_tokens == batch.host.num_rows <= self.sizes[-1]

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size now, the largest first, so that the others find their memory in its pool. The steps that
        run meanwhile consist of padding and write nothing."""
        for size in reversed(self.sizes):
            graph = self._graph(size)
            graph.clear()
            graph.replay()

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits [S, vocab] of the batch's `sample_tokens`, as `LlamaModel` computes them; valid until the next call.
        Writes K and V of the step. Captures if the size is new or larger ranks have replaced the adapters' tensors.

        Raises `KeyError` if a row names an empty adapter slot.
        """
        graph = self._graph(next(size for size in self.sizes if size >= batch.num_tokens))
        graph.fill(batch)
        return graph.replay().index_select(0, batch.sample_tokens)

    def _graph(self, size: int) -> _Graph:
        if self._rank != self.lora.rank or self._rows is None:
            # The weights of all slots were allocated anew, and residuals may be wider than the tables.
            self._rank = self.lora.rank
            self._graphs.clear()
            self._rows = _StaticRows(self.sizes[-1], self._max_blocks, self._rank // RESIDUAL_TILE, self)
        if size not in self._graphs:
            self._graphs[size] = _Graph(self, self._rows.view(size))
        return self._graphs[size]

    def capture(self, step: Step) -> Step:
        """`step` made repeatable; counted."""
        self.captures += 1
        return self.strategy.capture(step)


class _StaticRows:
    """Buffers of a decode batch of up to `max_rows` rows; smaller batches are its first rows."""

    def __init__(self, max_rows: int, max_blocks: int, tiles: int, owner: DecodeGraphs) -> None:
        device, self._block_size = owner.model.device, owner.cache.spec.block_size

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids, self.positions, self.weights_slot, self.kv_slots = (buffer(max_rows) for _ in range(4))
        self.bounds = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.tokens = torch.arange(max_rows, device=device)
        self.row_numbers = buffer(max_rows, dtype=torch.int32)
        self.kv_table = buffer(max_rows, max_blocks, dtype=torch.int32)
        self.k_table, self.v_table = (buffer(max_rows, max_blocks * tiles, dtype=torch.int32) for _ in range(2))

    def view(self, rows: int) -> ForwardBatch:
        """The first rows as a batch. What the layers of a decode step do not read, because it is planned into the
        work lists, stays zero: lengths and slots of the rows, and the host's side."""
        return ForwardBatch(
            input_ids=self.ids[:rows],
            positions=self.positions[:rows],
            weights_slot=self.weights_slot[:rows],
            cu_seqlens_q=self.bounds[: rows + 1],
            seq_lens=self.row_numbers[:rows],
            read_slot=self.row_numbers[:rows],
            residual_len=self.row_numbers[:rows],
            kv_block_table=self.kv_table[:rows],
            residual_k_table=self.k_table[:rows],
            residual_v_table=self.v_table[:rows],
            kv_tokens=None,
            kv_slots=self.kv_slots[:rows],
            sample_tokens=self.tokens[:rows],
            block_size=self._block_size,
            host=_no_rows(rows),
        )


class _Graph:
    """Steps of one padded size, in the buffers of `batch`."""

    def __init__(self, owner: DecodeGraphs, batch: ForwardBatch) -> None:
        self.owner, self.batch = owner, batch
        self._backend = cast(GraphBackend, owner.backend)
        self._metadata = self._backend.static_metadata(batch, residual=bool(owner.lora.expansions))
        self._lora = LoRATensors(owner.lora, batch.num_tokens, owner.model.device, owner.strategy.rows_together)
        self._replay: Step | None = None

    def clear(self) -> None:
        """Fill with padding alone."""
        target = self.batch
        for tensor in (target.input_ids, target.positions):
            tensor.zero_()
        for tensor in (target.weights_slot, target.kv_slots):
            tensor.fill_(-1)
        self._lora.fill(np.full(target.num_tokens, -1, dtype=np.int64))
        self._backend.refill(self._metadata, _no_rows(0), ())

    def fill(self, batch: ForwardBatch) -> None:
        """Copy a step into the buffers. Rows of padding run token 0 at position 0 with base weights, attend to nothing
        and store nothing (slot -1)."""
        target, rows, host = self.batch, batch.num_tokens, batch.host
        padding = (
            (target.input_ids, batch.input_ids, 0),
            (target.positions, batch.positions, 0),
            (target.weights_slot, batch.weights_slot, -1),
        )
        for buffer, values, filler in padding:
            buffer[:rows].copy_(values)
            buffer[rows:].fill_(filler)
        target.kv_slots.fill_(-1)
        stored = target.sample_tokens[:rows] if batch.kv_tokens is None else batch.kv_tokens
        target.kv_slots.index_copy_(0, stored, batch.kv_slots)
        blocks = batch.kv_block_table.shape[1]
        target.kv_block_table[:rows, :blocks].copy_(batch.kv_block_table)
        _copy_units(target.residual_k_table, batch.residual_k_table, target.kv_block_table.shape[1], blocks)
        _copy_units(target.residual_v_table, batch.residual_v_table, target.kv_block_table.shape[1], blocks)
        slots = np.full(target.num_tokens, -1, dtype=np.int64)
        slots[:rows] = host.weights_slot
        self._lora.fill(slots)
        self._backend.refill(self._metadata, host, batch.groups)

    def replay(self) -> Tensor:
        """Logits [size, vocab] of what the buffers hold."""
        if self._replay is None:
            self._replay = self.owner.capture(self._forward)
        return self._replay()

    def _forward(self) -> Tensor:
        owner, batch = self.owner, self.batch
        model = owner.model
        cos, sin = model.rotary(batch.positions, model.dtype)
        lora = static_lora_step(owner.lora, self._lora)
        step = StepContext(batch, owner.backend, self._metadata, lora, cos, sin, batch.kv_slots)
        return model.logits(step, owner.cache)


def _copy_units(target: Tensor, source: Tensor, max_blocks: int, blocks: int) -> None:
    """Copy a residual table [rows, blocks * tiles] into a wider one [size, max_blocks * tiles]. Units that stay behind
    from an earlier step are never read, since every row's tiles and tokens are counted."""
    tiles = source.shape[1] // blocks
    if tiles:
        rows = source.shape[0]
        target.view(target.shape[0], max_blocks, -1)[:rows, :blocks, :tiles].copy_(source.view(rows, blocks, tiles))


def _no_rows(rows: int) -> HostRows:
    """The host's side of `rows` rows that hold nothing."""
    numbers, table = np.zeros(rows, dtype=np.int32), np.zeros((rows, 0), dtype=np.int32)
    bounds = np.arange(rows + 1, dtype=np.int32)
    return HostRows(bounds, numbers, numbers - 1, numbers - 1, numbers, table, table, table, numbers, numbers)
