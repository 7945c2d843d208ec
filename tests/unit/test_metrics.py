"""The prefill model, the acceleration factor and the exposition."""

from __future__ import annotations

import random

import pytest

from forkkv.metrics.prefill_model import MIN_SAMPLES, PrefillModel, TtftAcceleration, solve
from forkkv.metrics.prometheus import ServerMetrics
from forkkv.types import AdapterMeta, AdapterProbe, AdapterReport, CacheUsage, EngineInfo, PoolStats, StepStats


def stats(step_id: int, **fields: float) -> StepStats:
    values = {
        "step_seconds": 0.1,
        "prefill_tokens": 0,
        "decode_tokens": 0,
        "attention_pairs": 0,
        "running": 0,
        "waiting": 0,
    }
    pools = {"kv_pool": PoolStats(10, 6, 3, 64), "residual_pool": PoolStats(4, 4, 0, 32)}
    return StepStats(step_id=step_id, timestamp=5.0, active_residual_adapters=2, **{**pools, **values, **fields})


def fitted(a: float, b: float, c: float, noise: float = 0.0) -> PrefillModel:
    generator, model = random.Random(0), PrefillModel()
    for _ in range(200):
        tokens, context = generator.randint(1, 512), generator.randint(0, 4000)
        pairs = tokens * context + tokens * (tokens + 1) // 2
        seconds = a + b * tokens / 1e3 + c * pairs / 1e6
        model.observe(tokens, pairs, seconds * (1 + generator.uniform(-noise, noise)))
    return model


def test_solve() -> None:
    assert solve([[0.0, 2.0], [4.0, 0.0]], [2.0, 8.0]) == [2.0, 1.0]
    assert solve([[1.0, 1.0], [1.0, 1.0]], [1.0, 2.0]) is None


def test_fit_recovers_the_law() -> None:
    assert fitted(0.01, 1.5, 0.2).coefficients() == pytest.approx((0.01, 1.5, 0.2))
    assert fitted(0.01, 1.5, 0.2, noise=0.1).coefficients() == pytest.approx((0.01, 1.5, 0.2), abs=0.1)


def test_coefficients_are_never_negative() -> None:
    fit = fitted(-0.05, 1.0, 0.3).coefficients()
    assert fit is not None and min(fit) >= 0 and fit[0] == 0
    falling = PrefillModel()
    for tokens in range(1, 50):
        falling.observe(tokens, tokens, 1.0 / tokens)
    fit = falling.coefficients()
    assert fit is not None and min(fit) >= 0


def test_equal_samples_do_not_break_the_fit() -> None:
    model = PrefillModel()
    for _ in range(MIN_SAMPLES):
        model.observe(100, 5050, 0.2)
    assert model.predict(1, 100, 5050) == pytest.approx(0.2)


def test_acceleration_is_a_ratio_of_sums() -> None:
    acceleration = TtftAcceleration(fitted(0.0, 1.0, 0.0))
    assert acceleration.factor() is None
    acceleration.observe(4000, 4000, 8_002_000)
    assert acceleration.factor() == pytest.approx(1.0)
    acceleration.observe(4000, 100, 395_050)
    assert acceleration.factor() == pytest.approx(8000 / 4100)
    assert TtftAcceleration(PrefillModel()).factor() is None


def test_acceleration_forgets_old_requests() -> None:
    acceleration = TtftAcceleration(fitted(0.0, 1.0, 0.0))
    acceleration.observe(1000, 1000, 500_500)
    for _ in range(1000):
        acceleration.observe(1000, 100, 95_050)
    assert acceleration.factor() == pytest.approx(10.0)


def sample(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_hit_ratio_appears_with_the_first_query() -> None:
    metrics = ServerMetrics()
    metrics.on_prompt(10, CacheUsage("plain", 0, 0, 0, 4, 6, 50, 0))
    assert sample(metrics, "forkkv_bcache_hit_ratio") is None
    assert sample(metrics, "forkkv_bcache_query_tokens_total") == 0
    metrics.on_prompt(100, CacheUsage("fork", 64, 48, 64, 0, 52, 5000, 64))
    assert sample(metrics, "forkkv_bcache_hit_ratio") == 0.75
    assert sample(metrics, "forkkv_bcache_hit_tokens_total") == 48
    sources = {source: sample(metrics, "forkkv_prompt_tokens_total", source=source) for source in ("base", "private")}
    assert sources == {"base": 48, "private": 4}
    assert sample(metrics, "forkkv_prompt_tokens_total", source="computed") == 58


def test_factor_needs_twenty_prefill_steps_of_this_process() -> None:
    metrics = ServerMetrics()
    metrics.on_prompt(100, CacheUsage("fork", 64, 64, 64, 0, 36, 2970, 64))
    for step in range(MIN_SAMPLES - 1):
        metrics.on_stats(stats(step, prefill_tokens=10 + step, attention_pairs=100 * step, step_seconds=0.01 * step))
        metrics.on_stats(stats(step, prefill_tokens=10 + step, attention_pairs=100 * step, step_seconds=0.01 * step))
        metrics.on_stats(stats(1000 + step, prefill_tokens=10, decode_tokens=1))
    assert sample(metrics, "forkkv_ttft_acceleration_factor") is None
    metrics.on_stats(stats(500, prefill_tokens=64, attention_pairs=3000, step_seconds=0.5))
    factor = sample(metrics, "forkkv_ttft_acceleration_factor")
    assert factor is not None and factor > 1


def test_engine_figures_follow_the_latest_report() -> None:
    metrics = ServerMetrics()
    assert b"forkkv_num_requests_running" not in metrics.render()
    metrics.on_stats(stats(1, running=3, waiting=2, aborts_total=1, evicted_residual_units_total=4))
    assert sample(metrics, "forkkv_num_requests_running") == 3
    metrics.on_stats(stats(1, aborts_total=6))
    assert sample(metrics, "forkkv_num_requests_running") == 0
    assert sample(metrics, "forkkv_aborts_total") == 6
    assert sample(metrics, "forkkv_active_adapter_rcache_count") == 2
    assert sample(metrics, "forkkv_kv_cache_usage_perc", pool="base") == pytest.approx(0.1)
    assert sample(metrics, "forkkv_pool_blocks", pool="base", state="cached") == 3
    assert sample(metrics, "forkkv_engine_last_step_timestamp_seconds") == 5.0


def test_adapters_and_their_probes() -> None:
    metrics = ServerMetrics()
    adapters = (AdapterMeta(1, "a", "d1", "plain", 8, 8), AdapterMeta(2, "b", "d2", "fork", 8, 8))
    reports = (
        AdapterReport("a", "/a", 1, "d1", "plain", 4, (), 9, probe=AdapterProbe(0.5, 0.75, 128, 384, 1.5)),
        AdapterReport("b", "/b", 2, "d2", "fork", 4, (), 9),
    )
    metrics.info = EngineInfo("m", 100, 512, (2,), "auto", 16, 1000, 500, adapters, reports)
    assert sample(metrics, "forkkv_adapter_probe_kl", lora_name="a") == 0.5
    assert sample(metrics, "forkkv_adapter_probe_top1_agreement", lora_name="a") == 0.75
    assert sample(metrics, "forkkv_adapter_probe_kl", lora_name="b") is None
    assert [sample(metrics, "forkkv_adapter_shares_base_kv", lora_name=name) for name in ("a", "b")] == [0, 1]


def test_every_metric_carries_the_prefix() -> None:
    metrics = ServerMetrics()
    metrics.on_stats(stats(1))
    names = [line.split()[2] for line in metrics.render().decode().splitlines() if line.startswith("# TYPE")]
    assert names and all(name.startswith("forkkv_") for name in names)
