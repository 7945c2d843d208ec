"""Runs plans: keeps the running sequences, builds batches, drives the model, samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forkkv.attention.backend import AttentionBackend
from forkkv.attention.batch import ForwardBatch
from forkkv.attention.paged import to_device
from forkkv.executor.batch_builder import build_batch
from forkkv.executor.cache import PagedCache
from forkkv.executor.graphs import DecodeGraphs
from forkkv.executor.table import RequestTable
from forkkv.log import get_logger
from forkkv.lora.weights import AdapterWeights
from forkkv.models.llama import LlamaModel
from forkkv.sampling.sampler import SampleRow, sample
from forkkv.types import Segment, StepPlan, StepResult

logger = get_logger(__name__)


class ModelRunner:
    """Owner of one device's cache and of the executor's view of running sequences."""

    def __init__(
        self,
        model: LlamaModel,
        cache: PagedCache,
        backend: AttentionBackend,
        lora: AdapterWeights,
        *,
        max_num_seqs: int,
        max_model_len: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`graphs`: runs the decode steps that it accepts."""
        self.model, self.cache, self.backend, self.lora = model, cache, backend, lora
        self.graphs = graphs
        self.block_size = cache.spec.block_size
        self.table = RequestTable(max_num_seqs, -(-max_model_len // self.block_size) + 1)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, see `Executor.execute`. Mutates cache, adapter slots and the table of sequences.

        Raises `ValueError` for a plan that contradicts itself, `KeyError` for unknown sequences or adapters,
        `FloatingPointError` for logits that are not finite.
        """
        self._prepare(plan)
        if not plan.segments:
            return StepResult(plan.step_id)
        logits = self._forward(plan)
        sampled = [segment for segment in plan.segments if segment.sample]
        tokens, logprobs = sample(logits, [self._sample_row(segment) for segment in sampled])
        for segment, token in zip(sampled, tokens, strict=True):
            self.table[segment.request_id].append_token(segment.end, token)
        names = [segment.request_id for segment in sampled]
        wanted = {name: entry for name, entry in zip(names, logprobs, strict=True) if entry is not None}
        return StepResult(plan.step_id, dict(zip(names, tokens, strict=True)), wanted)

    @torch.inference_mode()
    def score(self, plan: StepPlan) -> dict[str, Tensor]:
        """Run one step as `execute` does, and give the logits [num_tokens, vocab] after every token of the segments
        that sample, by request. Nothing is sampled: the tokens that follow are known. Mutates and raises alike."""
        self._prepare(plan)
        batch = self._batch(plan)
        ends = batch.host.cu_seqlens_q.tolist()
        rows = {s.request_id: np.arange(ends[i], ends[i + 1]) for i, s in enumerate(plan.segments) if s.sample}
        wanted = to_device(np.concatenate(list(rows.values())), self.model.device)
        logits = self.model(replace(batch, sample_tokens=wanted), self.cache, self.backend, self.lora)
        parts = logits.split([len(tokens) for tokens in rows.values()])
        return dict(zip(rows, parts, strict=True))

    def _prepare(self, plan: StepPlan) -> None:
        """Everything that precedes the forward pass."""
        for request_id in plan.dropped:
            self.table.drop(request_id)
        for new in plan.new:
            self.table.add(new)
        for update in plan.tables:
            self.table.extend(update)
        self.cache.copy_blocks(plan.copies)
        for load in plan.adapter_loads:
            self.lora.load(load.slot, load.adapter_id)

    def _forward(self, plan: StepPlan) -> Tensor:
        """Logits [S, vocab] of the sampled rows."""
        batch = self._batch(plan)
        if self.graphs is not None and self.graphs.accepts(batch):
            try:
                return self.graphs.run(batch)
            except NotImplementedError as error:
                logger.warning("decode steps of this model run uncaptured: %s", error)
                self.graphs = None
        return self.model(batch, self.cache, self.backend, self.lora)

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        return build_batch(plan.segments, plan.groups, self.table, self.block_size, self.model.device)

    def _sample_row(self, segment: Segment) -> SampleRow:
        state = self.table[segment.request_id]
        return SampleRow(state.sampling, state.seed, segment.end - state.num_prompt_tokens)
