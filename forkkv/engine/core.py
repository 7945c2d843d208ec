"""EngineCore: the loop body that joins scheduler and executor. They meet only here, through plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from forkkv.config import EngineConfig
from forkkv.engine.probe import probe_at_load
from forkkv.executor.executor import Executor
from forkkv.kvcache.manager import KVCacheManager
from forkkv.log import get_logger
from forkkv.lora.registry import AdapterRegistry, AdapterSlots
from forkkv.scheduler.scheduler import Scheduler
from forkkv.sharing import residual_digest
from forkkv.types import RESIDUAL_TILE, EngineInfo, EngineOutput, EngineRequest, StepPlan, StepResult, StepStats

logger = get_logger(__name__)


class EngineCore:
    """Add requests, call `step` while `has_work`, give the outputs to clients. Not thread-safe.

    `executor` None builds the single-process executor for `config`, which loads the model and the adapters.
    `probe_tokens` gives the tokens of the probe's text; called at most once, if an adapter is to be probed. None: no
    adapter is. With `debug_checks` the ownership invariants are asserted after every step (slow; for tests).
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        *,
        probe_tokens: Callable[[], Sequence[int]] | None = None,
        debug_checks: bool = False,
    ):
        if executor is None:
            from forkkv.executor.uniproc import UniprocExecutor

            executor = UniprocExecutor(config)
        self.config = config
        self.executor = executor
        self._debug_checks = debug_checks
        # Before the pools are sized: who shares decides how much of the memory is for residuals.
        self.adapters, self.reports = probe_at_load(executor, config, probe_tokens)
        num_kv_blocks, num_residual_units = self._size_pools()
        executor.allocate_cache(num_kv_blocks, num_residual_units)
        self.kv = KVCacheManager(config.cache.block_size, num_kv_blocks, num_residual_units)
        self.scheduler = Scheduler(
            config.scheduler,
            self.kv,
            AdapterRegistry(self.adapters),
            AdapterSlots(config.lora.max_loras),
            max_model_len=executor.max_model_len,
            eos_token_ids=executor.eos_token_ids,
            enable_reuse=config.cache.enable_dual_radix_tree,
            seed=config.model.seed,
        )
        self.info = self._describe(num_kv_blocks, num_residual_units)
        self._last_step_id = -1
        self._last_step_seconds = 0.0
        self._last_step_time = time.time()

    def _size_pools(self) -> tuple[int, int]:
        cache, spec = self.config.cache, self.executor.cache_spec
        share = cache.residual_share
        if share is None:
            sharing = self.config.scheduler.kv_sharing
            readers = {digest: meta for meta in self.adapters if (digest := residual_digest(meta, sharing))}
            ranks = [max(meta.rank_k, meta.rank_v) for meta in readers.values()]
            # The requester's own residual is mandatory, also where nothing fans out.
            fanout = min(max(1, self.config.scheduler.residual_fanout), len(readers))
            share = spec.residual_share(fanout, max(ranks, default=0))
        memory = cache.memory_bytes or self.executor.cache_memory_bytes()
        kv_blocks, residual_units = spec.split(memory, share)
        return cache.num_kv_blocks or kv_blocks, cache.num_residual_units or residual_units

    def _describe(self, num_kv_blocks: int, num_residual_units: int) -> EngineInfo:
        executor, block_size = self.executor, self.config.cache.block_size
        ranks = [(meta.k_tiles + meta.v_tiles) for meta in self.adapters]
        units_per_block = max(ranks, default=2) or 2
        info = EngineInfo(
            model=executor.model_name,
            max_model_len=executor.max_model_len,
            vocab_size=executor.vocab_size,
            eos_token_ids=tuple(executor.eos_token_ids),
            kv_sharing=self.config.scheduler.kv_sharing,
            block_size=block_size,
            kv_capacity_tokens=(num_kv_blocks - 1) * block_size,
            residual_capacity_tokens=(num_residual_units - 1) // units_per_block * block_size,
            adapters=self.adapters,
            reports=self.reports,
            device=executor.device,
            dtype=executor.dtype,
            quantization=executor.quantization,
        )
        logger.info(
            "bCache holds %d tokens; rCache holds %d tokens of one adapter's residual (%d units of %d columns a block)",
            info.kv_capacity_tokens,
            info.residual_capacity_tokens,
            units_per_block,
            RESIDUAL_TILE,
        )
        return info

    # ---- requests

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError`, and changes nothing, if it can never be served."""
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored. No output follows."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        return self.scheduler.has_work

    def flush_cache(self) -> bool:
        """Drop every unleased block. True if both pools are entirely free afterwards. Mutates."""
        return self.kv.flush()

    # ---- the loop body

    def step(self) -> tuple[list[EngineOutput], StepStats]:
        """Schedule, execute, apply. A step that fails is withdrawn and its requests run once more; never raises for
        it. Mutates everything."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return self.scheduler.take_outputs(), self.stats()
        outputs = self.scheduler.apply(self._execute(plan))
        self._last_step_id = plan.step_id
        self._last_step_seconds = time.perf_counter() - started
        self._last_step_time = time.time()
        if self._debug_checks:
            self.check()
        return outputs, self.stats()

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return self.executor.execute(plan)
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            return StepResult(plan.step_id, error=f"{type(error).__name__}: {error}")

    def check(self) -> None:
        """Assert the invariants of block ownership and adapter slots. Pure."""
        self.kv.check(self.scheduler.caches())
        self.scheduler.slots.check()

    def stats(self) -> StepStats:
        """State of the engine now; counters are cumulative."""
        scheduler, kv, spec = self.scheduler, self.kv, self.executor.cache_spec
        counters, last = scheduler.counters, scheduler.last_step
        return StepStats(
            step_id=self._last_step_id,
            timestamp=self._last_step_time,
            step_seconds=self._last_step_seconds,
            prefill_tokens=last.prefill_tokens,
            decode_tokens=last.decode_tokens,
            attention_pairs=last.attention_pairs,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_pool=kv.kv_stats(spec.kv_block_bytes),
            residual_pool=kv.residual_stats(spec.residual_unit_bytes),
            active_residual_adapters=kv.tree.num_residual_digests,
            base_weight_tokens_total=counters.base_weight_tokens,
            adapter_weight_tokens_total=counters.adapter_weight_tokens,
            decode_tokens_total=counters.decode_tokens,
            backfill_tokens_total=counters.backfill_tokens,
            fanout_tokens_total=counters.fanout_tokens,
            duplicate_blocks_total=counters.duplicate_blocks,
            preemptions_total=counters.preemptions,
            aborts_total=counters.aborts,
            failed_steps_total=counters.failed_steps,
            evicted_kv_blocks_total=kv.evicted_kv_blocks,
            evicted_residual_units_total=kv.evicted_residual_units,
            adapter_loads_total=counters.adapter_loads,
            leases=kv.tree.num_leases,
        )
