"""What one sequence runs within its share of a step.

The tokens of a sequence fall into three stretches, and one step may run a segment of each:

    [0, f)      base tier      base weights, shared blocks; writes residuals for its own and its fan-out's adapters
    [f, f_w)    private tier   base weights (aLoRA only: the invocation starts inside a block)
    [f_w, ...)  private tier   adapter weights, reading base K, V and its residual below f

In a mixed tree (`--kv-sharing first-writer`, `shared-a`, `full`) an agent's tokens are all of the first kind, run with
adapter weights: each segment reads the residual of all tokens up to its own last one, and writes what is missing.
"""

from __future__ import annotations

from forkkv.config import SchedulerConfig
from forkkv.kvcache.manager import KVCacheManager
from forkkv.kvcache.sequence_cache import UNBOUNDED, Growth
from forkkv.lora.registry import AdapterRegistry
from forkkv.scheduler.plan import PlanBuilder
from forkkv.scheduler.sequence import Counters, Sequence, SequenceStatus
from forkkv.sharing import takes_fanout
from forkkv.types import AdapterMeta, BlockCopy, ResidualWrite, Segment

_LOOKED_AT = 8
"""Adapters that are looked up for each that a fan-out may write for: most of the recent ones may have it all."""


class SegmentPlanner:
    """Turns room and hits into segments. Holds no sequence; `kv` owns every block."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        adapters: AdapterRegistry,
        counters: Counters,
        *,
        enable_reuse: bool,
    ):
        self.config = config
        self.kv = kv
        self.adapters = adapters
        self.counters = counters
        self.enable_reuse = enable_reuse
        self._recent: list[AdapterMeta] = [meta for meta in adapters.list() if takes_fanout(meta, config.kv_sharing)]

    def mark_used(self, adapter: AdapterMeta) -> None:
        """Remember `adapter` as the most recently used one, for the fan-out of requests without a team. Mutates."""
        if adapter in self._recent:
            self._recent.remove(adapter)
            self._recent.insert(0, adapter)

    def advance(self, sequence: Sequence, budget: int, plan: PlanBuilder) -> tuple[int, bool]:
        """Put segments of `sequence` into `plan`: (tokens used, False if the pools had no room). Mutates both."""
        used = 0
        while used < budget and sequence.num_computed_tokens < sequence.num_tokens:
            if sequence.num_computed_tokens < sequence.base_limit:
                tokens = self._base_segment(sequence, budget - used, plan)
            else:
                tokens = self._private_segment(sequence, budget - used, plan)
            if tokens is None:
                return used, False
            if tokens == 0 and sequence.num_computed_tokens < sequence.base_limit:
                break
            used += tokens
        return used, True

    def _base_segment(self, sequence: Sequence, budget: int, plan: PlanBuilder) -> int | None:
        """The next segment of the base tier: tokens used, 0 if the budget is below a block or hits cover the rest,
        None without room."""
        cache, limit, key = sequence.cache, sequence.base_limit, sequence.key()
        if sequence.in_prefill:
            found = self.kv.adopt(cache, key)
            plan.append(sequence, found)
            sequence.count_hits(found)
            # Where a residual belongs to it, a partial block is not copied: its few tokens are computed again.
            if cache.private_from == UNBOUNDED and not cache.uses_residual:
                self._copy_partial_block(sequence, plan)
        reached = min(max(cache.base_depth, cache.stored), cache.residual_depth, limit, sequence.num_tokens - 1)
        start = sequence.num_computed_tokens = max(sequence.num_computed_tokens, reached)
        if start >= limit:
            return 0
        end = min(limit, start + budget)
        if end < limit:
            end = end // self.kv.block_size * self.kv.block_size
            if end <= start:
                return 0
        stored, residual_from = cache.stored, cache.residual_depth
        growth = self.kv.grow_base(cache, key, end, plan.step_id)
        if growth is None:
            return None
        plan.append(sequence, growth)
        self.counters.duplicate_blocks += growth.duplicates
        writes = self._fan_out(sequence, key, start, end, plan.step_id)
        if cache.uses_residual and cache.residual_depth > residual_from:
            assert sequence.adapter is not None
            units = cache.units_from(residual_from // self.kv.block_size)
            writes.insert(0, ResidualWrite(sequence.adapter.adapter_id, residual_from, *units))
            self.counters.backfill_tokens += max(0, min(end, stored) - residual_from)
        mixed = cache.writer == "mixed"
        reads_residual = mixed and cache.uses_residual
        segment = Segment(
            request_id=sequence.sequence_id,
            start=start,
            num_tokens=end - start,
            weights_slot=sequence.slot if mixed else -1,
            write="merged" if mixed and not reads_residual else "base",
            kv_write_from=max(start, stored),
            residual_writes=tuple(writes),
            read_slot=sequence.slot if reads_residual else -1,
            residual_len=end if reads_residual else 0,
            sample=end == sequence.num_tokens,
        )
        self._emit(sequence, segment, plan)
        return end - start

    def _fan_out(self, sequence: Sequence, key: bytes, start: int, end: int, step_id: int) -> list[ResidualWrite]:
        end = min(end, sequence.num_prompt_tokens)
        if not self.enable_reuse or end - start < self.kv.block_size or sequence.cache.writer == "mixed":
            return []
        limit = self.config.residual_fanout
        likely = self._likely_readers(sequence.adapter)[: limit * _LOOKED_AT]
        writes = self.kv.fan_out(sequence.cache, key, start, end, likely, limit, step_id)
        aligned = end // self.kv.block_size * self.kv.block_size
        self.counters.fanout_tokens += sum(aligned - write.write_from for write in writes)
        return writes

    def _likely_readers(self, requester: AdapterMeta | None) -> list[AdapterMeta]:
        """The requester's team if it has one, else all adapters, the most recently used first; one per digest."""
        team = self.adapters.team_of(requester.adapter_id) if requester and requester.team else self._recent
        seen = {requester.digest} if requester else set()
        chosen: list[AdapterMeta] = []
        for adapter in team:
            if adapter.digest not in seen and takes_fanout(adapter, self.config.kv_sharing):
                seen.add(adapter.digest)
                chosen.append(adapter)
        return chosen

    def _private_segment(self, sequence: Sequence, budget: int, plan: PlanBuilder) -> int | None:
        """The next segment behind f; tokens used, None without room."""
        cache, key = sequence.cache, sequence.key()
        if cache.private_lease is None or sequence.in_prefill:
            found = self.kv.enter_private(cache, key)
            plan.append(sequence, found)
            sequence.count_hits(found, private=True)
            self._copy_partial_block(sequence, plan)
        reached = min(max(cache.private_depth, cache.stored), sequence.num_tokens - 1)
        start = sequence.num_computed_tokens = max(sequence.num_computed_tokens, reached)
        weights_from = cache.weights_from
        in_gap = start < weights_from
        end = min(sequence.num_tokens, start + budget)
        if in_gap:
            end = min(end, weights_from)
        stored = cache.stored
        growth = self.kv.grow_private(cache, key, end, plan.step_id)
        if growth is None:
            return None
        plan.append(sequence, growth)
        self.counters.duplicate_blocks += growth.duplicates
        reads_residual = cache.uses_residual and not in_gap
        segment = Segment(
            request_id=sequence.sequence_id,
            start=start,
            num_tokens=end - start,
            weights_slot=-1 if in_gap else sequence.slot,
            write="base" if in_gap else "merged",
            kv_write_from=max(start, stored),
            read_slot=sequence.slot if reads_residual else -1,
            residual_len=cache.private_from if reads_residual else 0,
            sample=end == sequence.num_tokens,
        )
        self._emit(sequence, segment, plan)
        return end - start

    def _copy_partial_block(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """n > 1: a child takes an eager copy of the prompt's partial block, since it will write behind it."""
        parent, n, block_size = sequence.parent, sequence.num_prompt_tokens, self.kv.block_size
        full = n // block_size
        if parent is None or n % block_size == 0 or sequence.num_generated:
            return
        done = max(sequence.num_computed_tokens, sequence.cache.stored)
        if len(sequence.cache.kv_blocks) != full or done < full * block_size:
            return
        if parent.status is not SequenceStatus.RUNNING or parent.num_applied_tokens < n:
            return
        target = self.kv.take_copy_target(sequence.cache, n)
        if target is not None:
            plan.copies.append(BlockCopy(parent.cache.kv_blocks[full], target))
            plan.append(sequence, Growth((target,)))

    def _emit(self, sequence: Sequence, segment: Segment, plan: PlanBuilder) -> None:
        plan.add(sequence, segment)
        sequence.num_computed_tokens = segment.end
        sequence.count_computed(segment.start, segment.end)
        if segment.start >= sequence.num_prompt_tokens and segment.num_tokens == 1:
            self.counters.decode_tokens += 1
        elif segment.weights_slot < 0:
            self.counters.base_weight_tokens += segment.num_tokens
        else:
            self.counters.adapter_weight_tokens += segment.num_tokens
