"""Hand-written plans: sequences with their own tables, driven through a `ModelRunner` without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from forkkv.attention.registry import select_backend
from forkkv.executor.cache import PagedCache
from forkkv.executor.runner import ModelRunner
from forkkv.kvcache.spec import CacheSpec
from forkkv.lora.adapter import LoadedAdapter
from forkkv.lora.checkpoint import load_adapter
from forkkv.lora.weights import AdapterWeights
from forkkv.models.config_reader import read_spec
from forkkv.models.llama import LlamaModel, attention_shape
from forkkv.models.loader import load_weights
from forkkv.models.resolve import resolve_model
from forkkv.types import (
    AdapterLoad,
    BlockCopy,
    NewSequence,
    ResidualWrite,
    SamplingParams,
    Segment,
    SharedPrefix,
    StepPlan,
    StepResult,
    TableUpdate,
)

CPU = torch.device("cpu")


def make_runner(
    model_folder: Path,
    adapter_folders: Sequence[Path] = (),
    *,
    block_size: int = 8,
    num_blocks: int = 400,
    num_units: int = 400,
    max_loras: int = 8,
    backend: str = "torch",
    poison: bool = True,
    max_model_len: int = 512,
    dtype: torch.dtype = torch.float32,
) -> ModelRunner:
    """Model and adapters (ids 1, 2, ...) with a poisoned cache: whatever was not written is NaN."""
    resolved = resolve_model(str(model_folder))
    spec = read_spec(resolved)
    model = LlamaModel(spec, load_weights(resolved, spec, dtype, progress=False), CPU, dtype, max_model_len)
    adapters = [
        load_adapter(folder, name=f"a{i}", adapter_id=i, spec=spec, max_lora_rank=64)
        for i, folder in enumerate(adapter_folders, start=1)
    ]
    cache_spec = CacheSpec(
        spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, dtype.itemsize, dtype.itemsize, spec.qk_norm
    )
    cache = PagedCache(cache_spec, num_blocks, num_units, dtype, CPU, poison=poison)
    kind = select_backend(CPU, dtype, attention_shape(spec), backend)
    chosen, pack = model.make_backend(kind), kind.pack_b_k if kind.reads_packed_b_k else None
    rotation = model.offset_rotation(block_size)
    lora = AdapterWeights(spec, adapters, max_loras, CPU, dtype, model.k_gains, rotation, pack)
    return ModelRunner(model, cache, chosen, lora, max_num_seqs=4, max_model_len=max_model_len)


@dataclass
class Seq:
    """One sequence. Tokens below `fork` are base blocks (None: all of them), [fork, weights_from) base weights in
    private blocks, the rest runs with the adapter. `reads`: complete the prefix with the adapter's residual."""

    name: str
    tokens: list[int]
    adapter_id: int = 0
    fork: int | None = None
    weights_from: int | None = None
    reads: bool = True
    kv_blocks: list[int] = field(default_factory=list)
    k_units: list[int] = field(default_factory=list)
    v_units: list[int] = field(default_factory=list)
    computed: int = 0
    stored: int = 0
    """Tokens whose K, V are in the cache already."""
    residual_stored: int = 0


class Driver:
    """Allocates ids upwards and turns (sequence, tokens up to) pairs into plans. Every row samples."""

    def __init__(self, runner: ModelRunner, sampling: SamplingParams | None = None) -> None:
        self.runner, self.block_size = runner, runner.block_size
        vocab = runner.model.spec.vocab_size
        self.sampling = sampling or SamplingParams(max_tokens=64, temperature=0.0, logprobs=vocab)
        self.next_block = self.next_unit = 1
        self.step_id = 0
        self.known: set[str] = set()
        self.new: list[NewSequence] = []
        self.tables: list[TableUpdate] = []
        self.loads: list[AdapterLoad] = []

    def blocks(self, count: int) -> list[int]:
        # Every second id, so that no table is one run of consecutive blocks by accident of the allocator.
        ids = list(range(self.next_block, self.next_block + 2 * count, 2))
        self.next_block += 2 * count
        return ids

    def units(self, count: int) -> list[int]:
        self.next_unit += count
        return list(range(self.next_unit - count, self.next_unit))

    def load(self, slot: int, adapter_id: int) -> None:
        self.loads.append(AdapterLoad(slot, adapter_id))

    def adapter(self, adapter_id: int) -> LoadedAdapter:
        return self.runner.lora.adapters[adapter_id]

    def slot_of(self, adapter_id: int) -> int:
        for load in self.loads:
            if load.adapter_id == adapter_id:
                return load.slot
        return next(slot for slot, there in self.runner.lora.slots.items() if there == adapter_id)

    def write_for(self, adapter_id: int, start: int, end: int) -> ResidualWrite:
        """Fresh units for the whole blocks in [start, end) of an adapter."""
        meta = self.adapter(adapter_id).meta
        count = end // self.block_size - start // self.block_size
        return ResidualWrite(
            adapter_id, start, tuple(self.units(count * meta.k_tiles)), tuple(self.units(count * meta.v_tiles))
        )

    def segments(self, seq: Seq, end: int, fanout: Sequence[ResidualWrite] = ()) -> list[Segment]:
        """Segments of tokens [computed, end), allocating what they write."""
        self._enter(seq)
        fork = len(seq.tokens) + 999 if seq.fork is None else seq.fork
        weights_from = max(fork, seq.weights_from or 0)
        missing = -(-end // self.block_size) - len(seq.kv_blocks)
        added = self.blocks(max(0, missing))
        seq.kv_blocks += added
        self.tables.append(TableUpdate(seq.name, kv_blocks=tuple(added)))
        out = []
        bounds = [b for b in (fork, weights_from) if seq.computed < b < end]
        for start, stop in zip([seq.computed, *bounds], [*bounds, end], strict=True):
            if start < stop:
                out.append(self._segment(seq, start, stop, fork, weights_from, fanout))
        seq.computed, seq.stored = end, max(seq.stored, end)
        return out

    def _segment(
        self, seq: Seq, start: int, stop: int, fork: int, weights_from: int, fanout: Sequence[ResidualWrite]
    ) -> Segment:
        base = start < weights_from
        writes = list(fanout) if start < fork else []
        if start < fork and seq.adapter_id and seq.reads and stop > seq.residual_stored:
            own = self.write_for(seq.adapter_id, seq.residual_stored, stop)
            seq.residual_stored = stop
            seq.k_units += own.k_units
            seq.v_units += own.v_units
            self.tables.append(TableUpdate(seq.name, k_units=own.k_units, v_units=own.v_units))
            writes.insert(0, own)
        slot = -1 if base else self.slot_of(seq.adapter_id)
        reading = not base and seq.reads and fork > 0
        return Segment(
            request_id=seq.name,
            start=start,
            num_tokens=stop - start,
            weights_slot=slot,
            write="base" if base else "merged",
            kv_write_from=max(start, seq.stored),
            residual_writes=tuple(writes),
            read_slot=slot if reading else -1,
            residual_len=fork if reading else 0,
            sample=True,
        )

    def _enter(self, seq: Seq) -> None:
        if seq.name in self.known:
            return
        self.known.add(seq.name)
        meta = self.adapter(seq.adapter_id).meta if seq.adapter_id and seq.reads else None
        self.new.append(
            NewSequence(
                seq.name,
                tuple(seq.tokens),
                len(seq.tokens),
                self.sampling,
                seed=7,
                k_tiles=meta.k_tiles if meta else 0,
                v_tiles=meta.v_tiles if meta else 0,
            )
        )
        tables = TableUpdate(seq.name, tuple(seq.kv_blocks), tuple(seq.k_units), tuple(seq.v_units))
        self.tables.append(tables)

    def execute(
        self,
        segments: Sequence[Segment],
        groups: Sequence[SharedPrefix] = (),
        copies: Sequence[BlockCopy] = (),
        dropped: Sequence[str] = (),
    ) -> StepResult:
        self.step_id += 1
        plan = StepPlan(
            self.step_id,
            tuple(self.new),
            tuple(self.tables),
            tuple(segments),
            tuple(groups),
            tuple(copies),
            tuple(self.loads),
            tuple(dropped),
        )
        self.new, self.tables, self.loads = [], [], []
        self.known -= set(dropped)
        result = self.runner.execute(plan)
        assert result.step_id == self.step_id and result.error is None
        return result

    def run(self, seq: Seq, ends: Sequence[int], groups: Sequence[SharedPrefix] = ()) -> dict[int, Tensor]:
        """Steps of one sequence alone: {position: log-probs [vocab] after it} for the last token of every step."""
        return {end - 1: self.logprobs(self.execute(self.segments(seq, end), groups), seq) for end in ends}

    def together(self, parts: Sequence[tuple[Seq, int]], groups: Sequence[SharedPrefix] = ()) -> dict[str, Tensor]:
        """One step of several sequences: {name: log-probs [vocab] after the last token}."""
        result = self.execute([segment for seq, end in parts for segment in self.segments(seq, end)], groups)
        return {seq.name: self.logprobs(result, seq) for seq, _ in parts}

    def logprobs(self, result: StepResult, seq: Seq) -> Tensor:
        out = torch.empty(self.runner.model.spec.vocab_size)
        for token, value in result.logprobs[seq.name].top:
            out[token] = value
        return out
