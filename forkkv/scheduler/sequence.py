"""One sequence inside the scheduler: tokens, progress, and where its prompt came from."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, auto

from forkkv.kvcache.sequence_cache import Growth, SequenceCache
from forkkv.scheduler.fork import ForkPoint
from forkkv.types import AdapterMeta, CacheUsage, SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    """Not started, or preempted, or requeued after a failed step: holds no block."""
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one of the `n` completions of a request. `token_ids` holds prompt and generated tokens.

    There are no phases: `num_computed_tokens` catches up with `num_tokens`, which covers chunks, cache hits,
    preemption and decode alike. It advances when a step is *scheduled*.
    """

    sequence_id: str
    request_id: str
    index: int
    parent: Sequence | None
    """The first completion of the request, whose prompt this one waits for; None for that one itself."""
    adapter: AdapterMeta | None
    token_ids: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    fork: ForkPoint
    cache: SequenceCache
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_applied_tokens: int = 0
    """`num_computed_tokens` as of the last applied plan: K, V of these tokens are really there."""
    slot: int = -1
    """Adapter slot while running, -1 for a base request."""
    in_flight: bool = False
    """The launched plan has tokens of this sequence: it is no victim, and an abort waits for `apply`."""
    aborted: bool = False
    failures: int = 0
    """Failed steps since the last one that succeeded; a suspect runs alone until one does."""
    slot_waits: int = 0
    started: bool = False
    """The first token was given out; the usage counters below are final."""
    base_hit: int = 0
    residual_hit: int = 0
    private_hit: int = 0
    computed: int = 0
    computed_pairs: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def base_limit(self) -> int:
        """Tokens that belong to the base tier."""
        return min(self.cache.private_from, self.num_tokens)

    @property
    def in_prefill(self) -> bool:
        """More than the one token of a decode step is missing."""
        return self.num_tokens - self.num_computed_tokens > 1

    def key(self) -> bytes:
        """All tokens as int32 bytes, the key of the radix trees."""
        return self.token_ids.tobytes()

    def reset(self) -> None:
        """Back to the start after its blocks were released; tokens, seed and fork point stay."""
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = self.num_applied_tokens = 0
        self.slot = -1
        if not self.started:
            self.base_hit = self.residual_hit = self.private_hit = self.computed = self.computed_pairs = 0

    def count_hits(self, growth: Growth, *, private: bool = False) -> None:
        """Account blocks and units that were found, not computed. Mutates the usage counters."""
        if self.started:
            return
        block_size = self.cache.block_size
        if private:
            self.private_hit += len(growth.kv_blocks) * block_size
            return
        self.base_hit += len(growth.kv_blocks) * block_size
        for units, tiles in (
            (growth.k_units, self.adapter.k_tiles if self.adapter else 0),
            (growth.v_units, self.adapter.v_tiles if self.adapter else 0),
        ):
            if tiles:
                self.residual_hit += len(units) // tiles * block_size
                break

    def count_computed(self, start: int, end: int) -> None:
        """Account tokens [start, end) that run through the model. Mutates the usage counters."""
        if not self.started:
            self.computed += end - start
            self.computed_pairs += (end * (end + 1) - start * (start + 1)) // 2

    def usage(self) -> CacheUsage:
        below = min(self.cache.private_from, self.num_prompt_tokens)
        weights_from = self.fork.weights_from
        return CacheUsage(
            kind=self.adapter.kind if self.adapter else "base",
            fork_point=self.num_prompt_tokens if weights_from is None else weights_from,
            base=min(self.base_hit, below),
            residual=min(self.residual_hit, below),
            private=min(self.private_hit, self.num_prompt_tokens - below),
            computed=self.computed,
            computed_pairs=self.computed_pairs,
            base_queries=below,
        )


@dataclass(slots=True)
class Counters:
    """Cumulative counts of what the scheduler did; see `StepStats` for their meaning."""

    base_weight_tokens: int = 0
    adapter_weight_tokens: int = 0
    decode_tokens: int = 0
    backfill_tokens: int = 0
    fanout_tokens: int = 0
    duplicate_blocks: int = 0
    preemptions: int = 0
    aborts: int = 0
    failed_steps: int = 0
    adapter_loads: int = 0


@dataclass(slots=True)
class LastStep:
    """What the most recent plan contained, for `StepStats`."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    attention_pairs: int = 0
