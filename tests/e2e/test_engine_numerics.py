"""The whole engine on tiny random models against the oracle: every kind of request under every way of running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig, SchedulerConfig
from forkkv.engine.core import EngineCore
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import KVSharing, StepPlan, StepResult
from tests.e2e.harness import Ask, Completions, KnownAdapter, Reference, run_all
from tests.models.factory import ALL_MODULES, ATTENTION, MLP, load_model, make_adapter, make_model

ARCHS = ("llama", "qwen2", "qwen3")
INVOCATION = (501, 502)
FORK_TAIL = 32
BLOCK = 16
TOLERANCE = 1e-3

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain8": {"rank": 8, "targets": ATTENTION},
    "plain40": {"rank": 40, "targets": ALL_MODULES},
    "fork8": {"rank": 8, "targets": ATTENTION, "kind": "fork"},
    "fork-qv20": {"rank": 20, "targets": ("q_proj", "v_proj"), "kind": "fork", "rslora": True, "alpha": 4},
    "fork-mlp": {"rank": 4, "targets": MLP, "kind": "fork"},
    "fork40": {"rank": 40, "targets": ALL_MODULES, "kind": "fork", "rank_pattern": {"k_proj": 3}, "layers": [1]},
    "alora16": {"rank": 16, "targets": ALL_MODULES, "kind": "alora", "invocation_tokens": INVOCATION},
}


def _random(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(token) for token in torch.randint(3, 500, (count,), generator=generator))


DOCUMENT = _random(103, 1)


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return (*DOCUMENT, *_random(length, seed))


ASKS = (
    Ask("base", _prompt(2, 21)),
    Ask("base, whole blocks", DOCUMENT[:96]),
    Ask("plain8", _prompt(3, 18), "plain8", fork_at=48),
    Ask("plain40", _prompt(4, 25), "plain40"),
    Ask("plain40 none", _prompt(4, 25), "plain40", kv_sharing="none"),
    Ask("fork8", _prompt(5, 20), "fork8"),
    Ask("fork8 at 37", _prompt(5, 20), "fork8", fork_at=37),
    Ask("fork8 at 0", _prompt(5, 20), "fork8", fork_at=0),
    Ask("fork8 none", _prompt(5, 20), "fork8", kv_sharing="none"),
    Ask("fork8, whole blocks", DOCUMENT[:96], "fork8", fork_at=1000),
    Ask("fork-qv20", _prompt(6, 30), "fork-qv20", fork_at=96),
    Ask("fork-mlp", _prompt(7, 12), "fork-mlp", fork_at=80),
    Ask("fork40", _prompt(8, 23), "fork40", fork_at=10_000),
    Ask("alora16", (*INVOCATION, *DOCUMENT, *INVOCATION, *_random(15, 9)), "alora16", fork_at=16),
    Ask("alora16 without invocation", _prompt(10, 14), "alora16"),
    Ask("alora16 none", (*_prompt(11, 6), *INVOCATION, 7), "alora16", kv_sharing="none"),
)


@dataclass(frozen=True)
class World:
    """A tiny model, its adapters, and the oracle's view of both."""

    model_folder: Path
    adapter_folders: dict[str, Path]
    reference_model: Any
    known: dict[str, KnownAdapter]

    def reference(self, mode: str) -> Reference:
        return Reference(self.reference_model, self.known, mode=mode, block_size=BLOCK, fork_tail=FORK_TAIL)

    def core(
        self,
        mode: KVSharing,
        *,
        budget: int = 512,
        max_loras: int = 8,
        seqs: int = 16,
        reuse: bool = True,
        **pools: int,
    ) -> EngineCore:
        """A checked engine whose cache is NaN until written. `pools`: num_kv_blocks, num_residual_units."""
        modules = tuple(LoRAModule(name, str(folder)) for name, folder in self.adapter_folders.items())
        config = EngineConfig(
            model=ModelConfig(str(self.model_folder), dtype="float32", device="cpu"),
            cache=CacheConfig(block_size=BLOCK, memory_bytes=64 << 20, enable_dual_radix_tree=reuse, **(pools or {})),
            scheduler=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=budget,
                kv_sharing=mode,
                fork_tail=FORK_TAIL,  # type: ignore[arg-type]
            ),
            lora=LoRAConfig(modules=modules, max_loras=max_loras),
        )
        return EngineCore(config, UniprocExecutor(config, progress=False, poison=True), debug_checks=True)


@pytest.fixture(scope="module", params=ARCHS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp(f"e2e-{request.param}")
    model = make_model(root / "model", request.param, head_dim=32 if request.param == "qwen3" else None)
    folders = {
        name: make_adapter(root / name, model, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items(), start=1)
    }
    known = {
        name: KnownAdapter.read(
            folder, ADAPTERS[name].get("kind", "plain"), ADAPTERS[name].get("invocation_tokens", ())
        )
        for name, folder in folders.items()
    }
    yield World(model, folders, load_model(model), known)


def assert_equal(reference: Reference, asks: tuple[Ask, ...], completions: Completions) -> None:
    difference, name = reference.worst(asks, completions)
    assert difference < TOLERANCE, f"{name}: log-probs differ by {difference}: {completions}"


def assert_clean(core: EngineCore) -> None:
    """After a flush nothing is leased or lost."""
    assert core.flush_cache()
    stats = core.stats()
    assert stats.leases == 0 and stats.failed_steps_total == 0
    assert stats.kv_pool.free == stats.kv_pool.total and stats.residual_pool.free == stats.residual_pool.total


@pytest.mark.parametrize("budget", [512, 33], ids=["unchunked", "chunked"])
@pytest.mark.parametrize("mode", ["none", "auto", "fork"])
def test_mixed_batch_uncached_and_cached(world: World, mode: KVSharing, budget: int) -> None:
    core, reference = world.core(mode, budget=budget), world.reference(mode)
    first = run_all(core, ASKS)
    assert_equal(reference, ASKS, first)
    again = run_all(core, ASKS)
    assert_equal(reference, ASKS, again)
    assert core.stats().preemptions_total == 0
    for ask in ASKS:
        usage = again[ask.name, 0].usage
        # Whole blocks of the prompt are there already; a base request's and an aLoRA's whole prompt, too.
        assert usage is not None and usage.computed <= BLOCK, (ask.name, usage)
    assert_clean(core)


@pytest.mark.parametrize("mode", ["none", "fork"])
def test_alone(world: World, mode: KVSharing) -> None:
    core, reference = world.core(mode, max_loras=1), world.reference(mode)
    for ask in ASKS:
        assert_equal(reference, (ask,), run_all(core, [ask]))
        assert core.flush_cache()
    assert_clean(core)


@pytest.mark.parametrize("mode", ["none", "fork"])
def test_preempted(world: World, mode: KVSharing) -> None:
    core = world.core(mode, budget=64, num_kv_blocks=40, num_residual_units=120)
    asks = tuple(replace(ask, max_tokens=48) for ask in ASKS)
    completions = run_all(core, asks)
    assert core.stats().preemptions_total > 0
    assert_equal(world.reference(mode), asks, completions)
    assert_clean(core)


def test_few_adapter_slots_and_no_reuse(world: World) -> None:
    core = world.core("fork", budget=64, max_loras=2, reuse=False)
    assert_equal(world.reference("fork"), ASKS, run_all(core, ASKS))
    assert core.stats().adapter_loads_total >= len(ADAPTERS)
    assert_clean(core)


@pytest.mark.parametrize("budget", [512, 33], ids=["unchunked", "chunked"])
def test_several_completions(world: World, budget: int) -> None:
    core, reference = world.core("fork", budget=budget, seqs=16), world.reference("fork")
    chosen = ("base", "base, whole blocks", "plain40", "fork8", "fork8, whole blocks", "fork40", "alora16")
    asks = tuple(replace(ask, n=3, temperature=1.0) for ask in ASKS if ask.name in chosen)
    completions = run_all(core, asks)
    assert_equal(reference, asks, completions)
    for ask in asks:
        texts = {tuple(completions[ask.name, index].token_ids) for index in range(ask.n)}
        assert len(texts) > 1, f"{ask.name}: completions with different seeds are the same"
    assert_clean(core)


def test_several_completions_preempted(world: World) -> None:
    core = world.core("fork", budget=64, num_kv_blocks=30, num_residual_units=120)
    chosen = ("base", "fork8", "fork40", "alora16")
    asks = tuple(replace(ask, n=3, temperature=1.0, max_tokens=40) for ask in ASKS if ask.name in chosen)
    completions = run_all(core, asks)
    assert core.stats().preemptions_total > 0
    assert_equal(world.reference("fork"), asks, completions)
    assert_clean(core)


def test_an_answer_that_comes_back_in_a_longer_prompt(world: World) -> None:
    """Private blocks and base blocks of earlier turns are read by later ones, at the definition's fork point."""
    core, reference = world.core("fork", budget=48), world.reference("fork")
    for name in ("fork8", "plain8", "alora16", None):
        ask = Ask(f"{name} turn 1", (*DOCUMENT, *INVOCATION, *_random(9, 20)), name, fork_at=80)
        completions = run_all(core, [ask])
        assert_equal(reference, (ask,), completions)
        for turn in (2, 3):
            history = (*ask.prompt, *completions[ask.name, 0].token_ids, *_random(11, 20 + turn))
            ask = replace(ask, name=f"{name} turn {turn}", prompt=history)
            completions = run_all(core, [ask])
            assert_equal(reference, (ask,), completions)
            usage = completions[ask.name, 0].usage
            assert usage is not None and usage.computed < 32, usage
    assert_clean(core)


def test_a_failed_step_changes_no_answer(world: World) -> None:
    core, reference = world.core("fork", budget=96), world.reference("fork")
    execute, calls = core.executor.execute, [0]

    def sometimes(plan: StepPlan) -> StepResult:
        calls[0] += 1
        result = execute(plan)
        if calls[0] in (3, 20):
            return StepResult(plan.step_id, error="injected after the forward pass")
        return result

    core.executor.execute = sometimes  # type: ignore[method-assign]
    completions = run_all(core, ASKS)
    assert core.stats().failed_steps_total == 2
    assert_equal(reference, ASKS, completions)
    assert core.flush_cache() and core.stats().leases == 0
