"""Everything behind `/metrics`; the only module that knows prometheus_client.

Engine figures are read from the latest `StepStats` when scraped: its counters are cumulative, so a lost or repeated
report changes nothing and no counter can go backwards. Request figures are counted here as outputs pass by.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forkkv.metrics.prefill_model import PrefillModel, TtftAcceleration
from forkkv.sharing import is_shared
from forkkv.types import CacheUsage, EngineInfo, PoolStats, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

ENGINE_COUNTERS = (
    ("base_weight_tokens_total", "forkkv_base_weight_tokens", "Prefill tokens that ran with base weights."),
    ("adapter_weight_tokens_total", "forkkv_adapter_weight_tokens", "Prefill tokens that ran with adapter weights."),
    ("decode_tokens_total", "forkkv_decode_tokens", "Tokens that ran in decode rows."),
    ("backfill_tokens_total", "forkkv_backfill_tokens", "Tokens run again only to write a residual."),
    ("fanout_tokens_total", "forkkv_fanout_tokens", "Tokens whose residual was written for another adapter."),
    ("duplicate_blocks_total", "forkkv_duplicate_blocks", "Blocks computed although an equal one was in a tree."),
    ("preemptions_total", "forkkv_num_preemptions", "Sequences preempted and recomputed."),
    ("aborts_total", "forkkv_aborts", "Requests aborted in the engine."),
    ("failed_steps_total", "forkkv_failed_steps", "Engine steps that failed and were withdrawn."),
    ("adapter_loads_total", "forkkv_adapter_loads", "Adapter weights copied into a slot."),
)


class ServerMetrics:
    """One registry of its own. All methods are called from the event loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.stats: StepStats | None = None
        self.info: EngineInfo | None = None
        self.prefill_model = PrefillModel()
        self.acceleration = TtftAcceleration(self.prefill_model)
        self.bcache_query_tokens = 0
        self.bcache_hit_tokens = 0
        self._step_id: int | None = None
        self._register_requests()
        self.registry.register(_EngineCollector(self))

    def _register_requests(self) -> None:
        registry = self.registry
        self._prompt = Counter(
            "forkkv_prompt_tokens", "Prompt tokens by where their K/V came from.", ["source"], registry=registry
        )
        self._generated = Counter("forkkv_generation_tokens", "Generated tokens.", registry=registry)
        self._finished = Counter(
            "forkkv_request_success", "Sequences that ended, by reason.", ["finished_reason"], registry=registry
        )
        self._ttft = Histogram(
            "forkkv_time_to_first_token_seconds", "Arrival to first token.", buckets=TTFT_BUCKETS, registry=registry
        )
        self._inter_token = Histogram(
            "forkkv_inter_token_latency_seconds",
            "Time between tokens of one sequence.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self._e2e = Histogram(
            "forkkv_e2e_request_latency_seconds", "Arrival to last token.", buckets=E2E_BUCKETS, registry=registry
        )
        for source in ("base", "private", "computed"):
            self._prompt.labels(source)
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(reason)

    def on_stats(self, stats: StepStats) -> None:
        """Take a report of the engine; a prefill-only step is also a sample of the prefill model."""
        self.stats = stats
        if stats.step_id == self._step_id:
            return
        self._step_id = stats.step_id
        if stats.prefill_tokens > 0 and stats.decode_tokens == 0:
            self.prefill_model.observe(stats.prefill_tokens, stats.attention_pairs, stats.step_seconds)

    def on_prompt(self, num_prompt_tokens: int, usage: CacheUsage) -> None:
        """Count one prompt, once the engine has said where its tokens came from."""
        cached = usage.cached_tokens(num_prompt_tokens)
        private = min(usage.private, cached)
        self._prompt.labels("private").inc(private)
        self._prompt.labels("base").inc(cached - private)
        self._prompt.labels("computed").inc(num_prompt_tokens - cached)
        self.bcache_query_tokens += usage.base_queries
        self.bcache_hit_tokens += usage.base
        self.acceleration.observe(num_prompt_tokens, usage.computed, usage.computed_pairs)

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_tokens(self, count: int, seconds: float | None) -> None:
        """Count `count` new tokens of a sequence that came `seconds` after its last ones; None for its first."""
        self._generated.inc(count)
        if seconds is not None:
            for _ in range(count):
                self._inter_token.observe(seconds / count)

    def on_finish(self, reason: str, seconds: float) -> None:
        """Count the end of a sequence `seconds` after its request arrived; "abort" for a client that left."""
        self._finished.labels(reason).inc()
        if reason in ("stop", "length"):
            self._e2e.observe(seconds)

    def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Turns the latest `StepStats` into metric families at scrape time."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._cache_figures()
        if (stats := self._metrics.stats) is not None:
            yield from _gauges(stats)
            yield from _counters(stats)
            yield from _pools(stats)
        if (info := self._metrics.info) is not None:
            yield _info(info)
            yield from _adapters(info)

    def _cache_figures(self) -> Iterator[Metric]:
        metrics = self._metrics
        queries, hits = metrics.bcache_query_tokens, metrics.bcache_hit_tokens
        yield CounterMetricFamily(
            "forkkv_bcache_query_tokens", "Prompt tokens below the fork point, looked up in the bCache.", value=queries
        )
        yield CounterMetricFamily(
            "forkkv_bcache_hit_tokens", "Prompt tokens whose base K/V was found in the bCache.", value=hits
        )
        if queries:
            yield GaugeMetricFamily(
                "forkkv_bcache_hit_ratio", "bCache hit tokens over query tokens since start.", value=hits / queries
            )
        if (factor := metrics.acceleration.factor()) is not None:
            yield GaugeMetricFamily(
                "forkkv_ttft_acceleration_factor",
                "Modelled prefill time of whole prompts over that of what was computed, last 1000 requests.",
                value=factor,
            )


def _gauges(stats: StepStats) -> Iterator[Metric]:
    rows = (
        ("forkkv_num_requests_running", "Sequences in the running batch.", stats.running),
        ("forkkv_num_requests_waiting", "Sequences that wait for admission.", stats.waiting),
        (
            "forkkv_active_adapter_rcache_count",
            "Adapters with at least one live block in the rCache.",
            stats.active_residual_adapters,
        ),
        ("forkkv_leases", "Leases held on tree paths.", stats.leases),
        ("forkkv_engine_last_step_timestamp_seconds", "Unix time of the engine's last report.", stats.timestamp),
    )
    for name, text, value in rows:
        yield GaugeMetricFamily(name, text, value=value)


def _counters(stats: StepStats) -> Iterator[Metric]:
    for field, name, text in ENGINE_COUNTERS:
        yield CounterMetricFamily(name, text, value=getattr(stats, field))
    evicted = CounterMetricFamily("forkkv_evicted_blocks", "Blocks evicted from a tree.", labels=["pool"])
    evicted.add_metric(["base"], stats.evicted_kv_blocks_total)
    evicted.add_metric(["residual"], stats.evicted_residual_units_total)
    yield evicted


def _pools(stats: StepStats) -> Iterator[Metric]:
    pools: tuple[tuple[str, PoolStats], ...] = (("base", stats.kv_pool), ("residual", stats.residual_pool))
    usage = GaugeMetricFamily(
        "forkkv_kv_cache_usage_perc",
        "Share of a pool held by live sequences, 0 to 1 (cached blocks can be reused).",
        labels=["pool"],
    )
    blocks = GaugeMetricFamily("forkkv_pool_blocks", "Blocks of a pool by state.", labels=["pool", "state"])
    size = GaugeMetricFamily("forkkv_pool_block_bytes", "Bytes of one block of a pool.", labels=["pool"])
    for name, pool in pools:
        usage.add_metric([name], pool.in_use / pool.total if pool.total else 0.0)
        for state in ("total", "free", "cached", "in_use"):
            blocks.add_metric([name, state], getattr(pool, state))
        size.add_metric([name], pool.block_bytes)
    yield from (usage, blocks, size)


def _info(info: EngineInfo) -> Metric:
    labels = {
        "model": info.model,
        "kv_sharing": info.kv_sharing,
        "block_size": str(info.block_size),
        "device": info.device,
        "dtype": info.dtype,
        "quantization": info.quantization,
    }
    family = GaugeMetricFamily("forkkv_engine_info", "Settings of the engine; always 1.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _adapters(info: EngineInfo) -> Iterator[Metric]:
    """What the probe found, and what follows from it."""
    kl = GaugeMetricFamily(
        "forkkv_adapter_probe_kl",
        "Mean KL per token, in nats, of a plain adapter under sharing to its own distributions.",
        labels=["lora_name"],
    )
    agreement = GaugeMetricFamily(
        "forkkv_adapter_probe_top1_agreement",
        "Share of tokens at which sharing leaves a plain adapter its most likely token.",
        labels=["lora_name"],
    )
    shares = GaugeMetricFamily(
        "forkkv_adapter_shares_base_kv",
        "1 if requests for the adapter read the shared bCache, 0 if they are private.",
        labels=["lora_name"],
    )
    for report in info.reports:
        if report.probe is not None:
            kl.add_metric([report.name], report.probe.kl)
            agreement.add_metric([report.name], report.probe.top1_agreement)
    for adapter in info.adapters:
        shares.add_metric([adapter.name], is_shared(adapter, info.kv_sharing))
    yield from (kl, agreement, shares)
