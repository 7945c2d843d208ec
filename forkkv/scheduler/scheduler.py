"""The scheduler: `schedule() -> StepPlan`, `apply(StepResult) -> [EngineOutput]`.

A function of its state: no clock, no I/O, no torch. First come, first served; prompts run in chunks beside decode;
when memory is short the sequence that arrived last is preempted and recomputed later at the same fork point.

What one sequence runs within its share of a step is `forkkv.scheduler.segments`' business.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from forkkv.config import SchedulerConfig
from forkkv.errors import RequestError
from forkkv.kvcache.manager import KVCacheManager
from forkkv.kvcache.sequence_cache import UNBOUNDED, SequenceCache
from forkkv.lora.registry import AdapterRegistry, AdapterSlots
from forkkv.scheduler.fork import fork_point
from forkkv.scheduler.plan import PlanBuilder
from forkkv.scheduler.segments import SegmentPlanner
from forkkv.scheduler.sequence import Counters, LastStep, Sequence, SequenceStatus
from forkkv.sharing import is_shared, residual_digest, writer_class
from forkkv.types import (
    AdapterLoad,
    AdapterMeta,
    EngineOutput,
    EngineRequest,
    FinishReason,
    StepPlan,
    StepResult,
)

SLOT_WAIT_LIMIT = 64
"""Steps that a request may wait for an adapter slot before later requests stop taking slots in front of it."""
MAX_FAILURES = 2
"""A sequence whose step failed runs once more, alone; if that fails too it is answered with an error."""


class Budget:
    """Tokens left in one step. Prefill gets a smaller share while others decode, so that their streams keep flowing;
    alone it may fill the step, since larger matrix products are faster ones."""

    def __init__(self, config: SchedulerConfig, *, decoding: bool):
        self._tokens = config.max_num_batched_tokens
        self._prefill = min(config.chunked_prefill_size, self._tokens) if decoding else self._tokens

    def share(self, in_prefill: bool) -> int:
        """Tokens that one sequence may take now."""
        return min(self._tokens, self._prefill) if in_prefill else self._tokens

    def take(self, used: int, in_prefill: bool) -> None:
        self._tokens -= used
        if in_prefill:
            self._prefill -= used


class Scheduler:
    """See the module docstring. Owns every sequence; `kv` owns every block."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        adapters: AdapterRegistry,
        slots: AdapterSlots,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        enable_reuse: bool = True,
        seed: int = 0,
    ):
        self.config = config
        self.kv = kv
        self.adapters = adapters
        self.slots = slots
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.enable_reuse = enable_reuse
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = Counters()
        self.last_step = LastStep()
        self._requests: dict[str, list[Sequence]] = {}
        self._segments = SegmentPlanner(config, kv, adapters, self.counters, enable_reuse=enable_reuse)
        self._seed = seed
        self._num_seeded = 0
        self._draft = PlanBuilder(0)
        self._launched: PlanBuilder | None = None
        self._outputs: list[EngineOutput] = []

    # ---- requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError`, and changes nothing, if it can never be served."""
        adapter = self.adapters.by_id(request.adapter_id) if request.adapter_id else None
        kind = adapter.kind if adapter else None
        sharing = self.config.kv_sharing, request.kv_sharing
        writer = writer_class(kind, *sharing)
        fork = fork_point(
            request.prompt_token_ids,
            self.kv.block_size,
            kind=kind,
            shared=adapter is not None and is_shared(adapter, *sharing),
            fork_tail=self.config.fork_tail,
            invocation_tokens=adapter.invocation_tokens if adapter else (),
            everything=writer == "mixed",
            fork_at=request.fork_at,
            mark=request.fork_mark,
        )
        private_from = UNBOUNDED if fork.private_from is None else fork.private_from
        residual = residual_digest(adapter, *sharing) if adapter and private_from else None
        self._refuse_impossible(request, adapter if residual else None, private_from)
        scope = request.cache_salt if self.enable_reuse else ("request", request.request_id)
        sequences: list[Sequence] = []
        seed = self._resolve_seed(request.sampling.seed)
        for index in range(request.n):
            name = request.request_id if request.n == 1 else f"{request.request_id}#{index}"
            weights_from = UNBOUNDED if fork.weights_from is None else fork.weights_from
            cache = SequenceCache(self.kv.block_size, scope, adapter, private_from, weights_from, residual, writer)
            tokens = array("i", request.prompt_token_ids)
            sequences.append(
                Sequence(
                    sequence_id=name,
                    request_id=request.request_id,
                    index=index,
                    parent=sequences[0] if sequences else None,
                    adapter=adapter,
                    token_ids=tokens,
                    num_prompt_tokens=len(tokens),
                    sampling=request.sampling,
                    seed=seed + index,
                    fork=fork,
                    cache=cache,
                )
            )
        self._requests[request.request_id] = sequences
        self.waiting.extend(sequences)
        if adapter is not None:
            self._segments.mark_used(adapter)

    def _refuse_impossible(self, request: EngineRequest, residual: AdapterMeta | None, private_from: int) -> None:
        n, pool = len(request.prompt_token_ids), self.kv.kv_pool
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", code="duplicate_request_id", status=409)
        if n == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if n >= self.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, and the prompt has {n}; "
                "at least one token must be left for the answer.",
                code="context_length_exceeded",
                param="messages",
            )
        if -(-n // self.kv.block_size) > pool.total:
            raise RequestError(
                f"The prompt has {n} tokens; this server's KV cache holds {pool.total * self.kv.block_size}.",
                code="context_length_exceeded",
                param="messages",
            )
        if residual is not None:
            tokens = min(private_from, n)
            units = -(-tokens // self.kv.block_size) * (residual.k_tiles + residual.v_tiles)
            if units > self.kv.residual_pool.total:
                raise RequestError(
                    f"The residual of {residual.name!r} for {tokens} tokens needs {units} units of the rCache, "
                    f"which has {self.kv.residual_pool.total}.",
                    code="context_length_exceeded",
                    param="messages",
                )

    def _resolve_seed(self, seed: int | None) -> int:
        if seed is not None:
            return seed
        self._num_seeded += 1
        return (self._seed * 0x9E3779B97F4A7C15 + self._num_seeded * 0xD1B54A32D192ED03) % (1 << 62)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; blocks of a sequence in the launched plan are given back when it was applied."""
        for request_id in request_ids:
            sequences = self._requests.get(request_id)
            if sequences is None or all(s.aborted for s in sequences):
                continue
            self.counters.aborts += 1
            for sequence in list(sequences):
                sequence.aborted = True
                if not sequence.in_flight:
                    self._finish(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def caches(self) -> list[SequenceCache]:
        """Cache state of every unfinished sequence, for `KVCacheManager.check`."""
        return [sequence.cache for sequences in self._requests.values() for sequence in sequences]

    # ---- one step

    def schedule(self) -> StepPlan | None:
        """The next step, None if nothing can run. Publishes the blocks that the step will write. Mutates."""
        assert self._launched is None, "the previous plan was not applied"
        if not self._schedule_suspect():
            self._schedule_all()
        plan = self._draft
        if not plan.segments:
            return None
        self._launched, self._draft = plan, PlanBuilder(plan.step_id + 1)
        self.kv.on_launched(plan.step_id)
        self.last_step = self._measure(plan)
        return plan.build()

    def _schedule_all(self) -> None:
        budget = Budget(self.config, decoding=any(not sequence.in_prefill for sequence in self.running))
        short = False
        for sequence in list(self.running):
            has_room = False
            while not has_room and sequence.status is SequenceStatus.RUNNING:
                in_prefill = sequence.in_prefill
                used, has_room = self._segments.advance(sequence, budget.share(in_prefill), self._draft)
                budget.take(used, in_prefill)
                if not has_room:
                    short = True
                    if not self._preempt_after(sequence):
                        self._give_up_if_alone(sequence)
                        break
        if not short:
            self._admit_waiting(budget.share(in_prefill=True))

    def _admit_waiting(self, budget: int) -> None:
        slots_reserved = False
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                break
            if sequence.failures or self._waits_for_parent(sequence) or (slots_reserved and sequence.adapter):
                continue
            if not self._take_slot(sequence):
                sequence.slot_waits += 1
                slots_reserved = slots_reserved or sequence.slot_waits > SLOT_WAIT_LIMIT
                continue
            used = self._admit(sequence, budget)
            if used == 0:
                break
            budget -= used

    def _schedule_suspect(self) -> bool:
        """Run one sequence of a failed step alone, so that a poisoned request cannot take its neighbours with it."""
        ready = (s for s in self.waiting if s.failures and not self._waits_for_parent(s))
        sequence = next(ready, None)
        if sequence is None or not self._take_slot(sequence):
            return False
        while len(self.running) >= self.config.max_num_seqs:
            self._preempt_after(None)
        budget = self.config.max_num_batched_tokens
        while not (used := self._admit(sequence, budget)):
            if not self._preempt_after(None):
                break
            if not self._take_slot(sequence):
                break
        return used > 0

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        if parent is None or parent.status is SequenceStatus.FINISHED:
            return False
        return parent.num_applied_tokens < parent.num_prompt_tokens

    def _take_slot(self, sequence: Sequence) -> bool:
        if sequence.adapter is None:
            return True
        taken = self.slots.acquire(sequence.adapter.adapter_id)
        if taken is None:
            return False
        sequence.slot, needs_load = taken
        if needs_load:
            self._draft.loads.append(AdapterLoad(sequence.slot, sequence.adapter.adapter_id))
            self.counters.adapter_loads += 1
        return True

    def _drop_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0 and sequence.adapter is not None:
            self.slots.release(sequence.adapter.adapter_id)
            sequence.slot = -1

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Start a waiting sequence; tokens scheduled. 0: there is no room, and nothing changed."""
        self._draft.enter(sequence)
        growth = self.kv.admit(sequence.cache, sequence.key())
        self._draft.append(sequence, growth)
        sequence.count_hits(growth)
        sequence.status = SequenceStatus.RUNNING
        used, _ = self._segments.advance(sequence, budget, self._draft)
        if used == 0:
            self._draft.forget(sequence)
            self.kv.release(sequence.cache)
            self._drop_slot(sequence)
            sequence.reset()
            return 0
        sequence.slot_waits = 0
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return used

    def _measure(self, builder: PlanBuilder) -> LastStep:
        measured = LastStep()
        for segment in builder.segments:
            if segment.num_tokens == 1 and segment.sample:
                measured.decode_tokens += 1
            else:
                start, end = segment.start, segment.end
                measured.prefill_tokens += segment.num_tokens
                measured.attention_pairs += (end * (end + 1) - start * (start + 1)) // 2
        return measured

    # ---- running out of room

    def _preempt_after(self, sequence: Sequence | None) -> bool:
        """Preempt the sequence that arrived last, among those without tokens in the plan and behind `sequence`."""
        for victim in reversed(self.running):
            if victim is sequence:
                return False
            if not victim.in_flight:
                self._requeue(victim)
                self.counters.preemptions += 1
                return True
        return False

    def _requeue(self, sequence: Sequence) -> None:
        """Release everything and wait in front, to be recomputed with the same tokens at the same fork point."""
        self._draft.forget(sequence)
        self.kv.release(sequence.cache)
        self._drop_slot(sequence)
        self.running.remove(sequence)
        self._draft.dropped.append(sequence.sequence_id)
        sequence.in_flight = False
        sequence.reset()
        self.waiting.appendleft(sequence)

    def _give_up_if_alone(self, sequence: Sequence) -> None:
        """A sequence that has the pools for itself and still finds no room has outgrown them: it ends here."""
        if self._draft.segments or self.running[0] is not sequence:
            return
        if sequence.cache.fanout_leases:
            self.kv.end_base_part(sequence.cache)
            return
        reason: FinishReason = "length" if sequence.num_generated else "error"
        error = None if sequence.num_generated else "The KV cache cannot hold this prompt."
        self._output(sequence, (), reason, error=error)
        self._finish(sequence)

    # ---- results

    def apply(self, result: StepResult) -> list[EngineOutput]:
        """Take the step's tokens, finish and free what ended. Returns everything to tell clients. Mutates."""
        builder = self._launched
        assert builder is not None and builder.step_id == result.step_id, "results come in order, once"
        self._launched = None
        missing = [s.request_id for s in builder.segments if s.sample and s.request_id not in result.tokens]
        if result.error is not None or missing:
            self._fail(builder, result.error or f"no token for {', '.join(missing)}")
            return self.take_outputs()
        self.kv.on_applied(builder.step_id)
        for sequence in builder.sequences.values():
            sequence.in_flight = False
            sequence.failures = 0
            sequence.num_applied_tokens = sequence.num_computed_tokens
            if sequence.aborted:
                self._finish(sequence)
            elif sequence.num_computed_tokens >= min(sequence.base_limit, sequence.num_prompt_tokens):
                self.kv.end_base_part(sequence.cache)
        for segment in builder.segments:
            sequence = builder.sequences[segment.request_id]
            if segment.sample and sequence.status is SequenceStatus.RUNNING:
                self._take_token(sequence, result)
        return self.take_outputs()

    def _take_token(self, sequence: Sequence, result: StepResult) -> None:
        token = result.tokens[sequence.sequence_id]
        sampling = sequence.sampling
        sequence.token_ids.append(token)
        stops = token in sampling.stop_token_ids or (token in self.eos_token_ids and not sampling.ignore_eos)
        reason: FinishReason | None = None
        if stops:
            reason = "stop"
        elif sequence.num_generated >= sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            reason = "length"
        logprob = result.logprobs.get(sequence.sequence_id)
        self._output(
            sequence, (token,), reason, stop_token_id=token if stops else None, logprobs=(logprob,) if logprob else ()
        )
        if reason:
            self._finish(sequence)

    def _output(self, sequence: Sequence, tokens: tuple[int, ...], reason: FinishReason | None, **fields) -> None:  # type: ignore[no-untyped-def]
        usage = None if sequence.started else sequence.usage()
        sequence.started = sequence.started or bool(tokens)
        self._outputs.append(
            EngineOutput(sequence.request_id, sequence.index, tokens, finish_reason=reason, usage=usage, **fields)
        )

    def take_outputs(self) -> list[EngineOutput]:
        """Outputs since the last call. Mutates."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _finish(self, sequence: Sequence) -> None:
        self._draft.forget(sequence)
        self.kv.release(sequence.cache)
        self._drop_slot(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._draft.dropped.append(sequence.sequence_id)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]
            if not self.enable_reuse:
                self.kv.drop_scope(sequence.cache.scope)

    def _fail(self, builder: PlanBuilder, error: str) -> None:
        """Nothing of the step may be trusted: withdraw what it published and requeue all who depend on it, once."""
        self.counters.failed_steps += 1
        # The executor may have seen any part of the plan; all of it that is idempotent is said again.
        self._draft.loads[:0] = builder.loads
        self._draft.dropped[:0] = builder.dropped
        affected = [
            s
            for s in self.running
            if s.in_flight or s.sequence_id in builder.touched or self.kv.depends_on(s.cache, builder.step_id)
        ]
        for sequence in reversed(affected):
            was_in_plan = sequence.in_flight
            self._requeue(sequence)
            if sequence.aborted:
                self._finish(sequence)
            elif was_in_plan:
                sequence.failures += 1
                if sequence.failures >= MAX_FAILURES:
                    self._output(sequence, (), "error", error=f"The engine failed on this request: {error}")
                    self._finish(sequence)
        self.kv.withdraw(builder.step_id)
        self.kv.on_applied(builder.step_id)
