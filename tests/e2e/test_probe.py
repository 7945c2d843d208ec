"""The probe at load: its figures against the oracle's, what `auto` makes of them, and that it leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig, SchedulerConfig
from forkkv.engine.core import EngineCore
from forkkv.executor.compare import divergence
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import AdapterProbe, KVSharing
from tests.e2e.harness import Ask, run_all
from tests.models.factory import ALL_MODULES, ATTENTION, load_model, make_adapter, make_model
from tests.oracle import oracle_logprobs, read_adapter

BLOCK = 16
TOKENS = tuple(torch.randint(3, 500, (150,), generator=torch.Generator().manual_seed(5)).tolist())
FORK = 112
"""150 tokens, of which a quarter, 37, lie behind the fork point: 113 rounded down to a block."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "zero": {"rank": 8, "b_std": 0.0},
    "faint": {"rank": 40, "targets": ALL_MODULES, "b_std": 0.003},
    "strong": {"rank": 8, "b_std": 0.3},
    "strong-v": {"rank": 20, "targets": ("q_proj", "v_proj"), "b_std": 0.2},
    "strong-o": {"rank": 8, "targets": ("o_proj", "up_proj"), "b_std": 0.2},
    "strong-again": {"rank": 8, "b_std": 0.3},
    "trained": {"rank": 8, "b_std": 0.3, "kind": "fork"},
}
PLAIN = [name for name in ADAPTERS if name != "trained"]


class World:
    """A tiny model and its adapters."""

    def __init__(self, root: Path, arch: str):
        self.model = make_model(root / "model", arch, head_dim=32 if arch == "qwen3" else None)
        self.folders = {
            name: make_adapter(root / name, self.model, **{"targets": ATTENTION, "seed": 3, **options})
            for name, options in ADAPTERS.items()
        }
        self.reference = load_model(self.model)

    def core(
        self,
        mode: KVSharing = "auto",
        *,
        names: Sequence[str] = tuple(ADAPTERS),
        tokens: Sequence[int] | None = TOKENS,
        budget: int = 2048,
        **lora: Any,
    ) -> EngineCore:
        """`tokens` None: the engine must not ask for them."""

        def give() -> Sequence[int]:
            assert tokens is not None, "nothing is to be probed"
            return tokens

        config = EngineConfig(
            model=ModelConfig(str(self.model), dtype="float32", device="cpu"),
            cache=CacheConfig(block_size=BLOCK, memory_bytes=32 << 20),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, kv_sharing=mode, fork_tail=32),
            lora=LoRAConfig(tuple(LoRAModule(name, str(self.folders[name])) for name in names), **lora),
        )
        executor = UniprocExecutor(config, progress=False, poison=True)
        return EngineCore(config, executor, probe_tokens=give, debug_checks=True)

    def expected(self, name: str) -> tuple[float, float]:
        """(mean KL, top-1 agreement) by the oracle."""
        adapter = read_adapter(self.folders[name])
        private = oracle_logprobs(self.reference, TOKENS, adapter, "plain")[FORK:]
        shared = oracle_logprobs(self.reference, TOKENS, adapter, "fork", FORK)[FORK:]
        kl = (private.exp() * (private - shared)).sum(-1).mean()
        return float(kl), float((private.argmax(-1) == shared.argmax(-1)).float().mean())


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(f"probe-{request.param}"), request.param)


def probes(core: EngineCore) -> dict[str, AdapterProbe | None]:
    return {report.name: report.probe for report in core.info.reports}


def passed(core: EngineCore) -> set[str]:
    return {meta.name for meta in core.info.adapters if meta.passed_probe}


def assert_figures(world: World, found: dict[str, AdapterProbe | None]) -> None:
    for name in PLAIN:
        probe, (kl, agreement) = found[name], world.expected(name)
        assert probe is not None and (probe.fork_point, probe.num_tokens) == (FORK, len(TOKENS) - FORK)
        assert probe.kl == pytest.approx(kl, rel=2e-3, abs=2e-6), name
        # One token in 38: two logits that are almost equal may change places.
        assert probe.top1_agreement == pytest.approx(agreement, abs=1 / 38 + 1e-6), name
        assert probe.seconds > 0
    assert found["trained"] is None


def test_figures_are_the_oracles_and_auto_follows_them(world: World) -> None:
    core = world.core()
    found = probes(core)
    assert_figures(world, found)
    assert found["zero"] is not None and found["zero"].kl < 1e-6 and found["zero"].top1_agreement == 1.0
    assert all(probe.kl > 0.1 for name, probe in found.items() if probe and name.startswith("strong"))
    assert found["strong"] == found["strong-again"], "equal weights are measured once"
    assert passed(core) == {"zero", "faint"}

    prompt = (*TOKENS, *TOKENS[:40])
    asks = [Ask(name, prompt, name, max_tokens=4) for name in ADAPTERS]
    usages = {name: completion.usage for (name, _), completion in run_all(core, asks).items()}
    forks = {name: usage.fork_point if usage else None for name, usage in usages.items()}
    assert forks == {name: 144 if name in ("zero", "faint", "trained") else 0 for name in ADAPTERS}


def test_nothing_is_left_behind(world: World) -> None:
    core = world.core()
    core.check()
    stats = core.stats()
    for pool in (stats.kv_pool, stats.residual_pool):
        assert pool.free == pool.total
    fresh = replace(stats, kv_pool=None, residual_pool=None, timestamp=0)  # type: ignore[arg-type]
    assert fresh == replace(fresh, **{name: 0 for name in fresh.__slots__ if name.endswith("_total")}, leases=0)
    assert stats.running == stats.waiting == stats.active_residual_adapters == 0 and stats.step_id == -1
    executor: Any = core.executor
    assert len(executor.runner.table) == 0
    assert executor.runner.cache.k[:, 1:].isnan().all(), "the server's own cache was not touched"


@pytest.mark.parametrize("limits", [{"max_loras": 1}, {"budget": 128}, {"max_loras": 2}])
def test_batches_do_not_change_the_figures(world: World, limits: dict[str, int]) -> None:
    assert_figures(world, probes(world.core(**limits)))  # type: ignore[arg-type]


def test_the_limit_decides(world: World) -> None:
    assert passed(world.core(max_probe_kl=1e6)) == set(PLAIN)
    assert passed(world.core(max_probe_kl=0.0)) <= {"zero"}


def test_only_what_needs_a_figure_is_probed(world: World) -> None:
    for core in (
        world.core("none", tokens=None),
        world.core("auto", tokens=None, names=["trained"]),
        world.core("auto", tokens=None, probe=False),
    ):
        assert not passed(core) and not any(probes(core).values())


def test_a_text_that_is_too_short_leaves_plain_adapters_private(world: World, caplog: pytest.LogCaptureFixture) -> None:
    core = world.core(tokens=TOKENS[:20])
    assert not passed(core) and not any(probes(core).values())
    assert "too few" in caplog.text


def test_fork_warns_with_the_figure(world: World, caplog: pytest.LogCaptureFixture) -> None:
    core = world.core("fork", names=["strong", "trained"])
    probe = probes(core)["strong"]
    assert probe is not None
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "strong" in record.getMessage() and f"KL {probe.kl:.4f}" in record.getMessage()
    caplog.clear()
    world.core("fork", names=["strong"], tokens=None, probe=False)
    assert "was not measured" in caplog.text


def test_divergence_by_hand() -> None:
    half, skewed = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([[math.log(3), 0.0], [0.0, 1.0]])
    found = divergence(half, skewed)
    assert found.kl == pytest.approx((0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) / 2)
    assert found.top1_agreement == 1.0
    assert divergence(skewed, -skewed).top1_agreement == 0.0
    assert divergence(half, half * math.nan).kl == math.inf
