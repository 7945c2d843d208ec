"""The whole engine on tiny random models against the oracle: every kind of request under every way of running it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forkkv.types import KVSharing, StepPlan, StepResult
from tests.e2e.harness import Ask, Completions, Reference, run_all
from tests.e2e.tiny import ARCHS, BLOCK, INVOCATION, TOLERANCE, TinyWorld, assert_clean, random_tokens
from tests.models.factory import ALL_MODULES, ATTENTION, MLP

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain8": {"rank": 8, "targets": ATTENTION},
    "plain40": {"rank": 40, "targets": ALL_MODULES},
    "fork8": {"rank": 8, "targets": ATTENTION, "kind": "fork"},
    "fork-qv20": {"rank": 20, "targets": ("q_proj", "v_proj"), "kind": "fork", "rslora": True, "alpha": 4},
    "fork-mlp": {"rank": 4, "targets": MLP, "kind": "fork"},
    "fork40": {"rank": 40, "targets": ALL_MODULES, "kind": "fork", "rank_pattern": {"k_proj": 3}, "layers": [1]},
    "alora16": {"rank": 16, "targets": ALL_MODULES, "kind": "alora", "invocation_tokens": INVOCATION},
}


DOCUMENT = random_tokens(103, 1)


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return (*DOCUMENT, *random_tokens(length, seed))


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
    Ask("alora16", (*INVOCATION, *DOCUMENT, *INVOCATION, *random_tokens(15, 9)), "alora16", fork_at=16),
    Ask("alora16 without invocation", _prompt(10, 14), "alora16"),
    Ask("alora16 none", (*_prompt(11, 6), *INVOCATION, 7), "alora16", kv_sharing="none"),
)


@pytest.fixture(scope="module", params=ARCHS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld.make(tmp_path_factory.mktemp(f"e2e-{request.param}"), request.param, ADAPTERS)


def assert_equal(reference: Reference, asks: tuple[Ask, ...], completions: Completions) -> None:
    difference, name = reference.worst(asks, completions)
    assert difference < TOLERANCE, f"{name}: log-probs differ by {difference}: {completions}"


@pytest.mark.parametrize("budget", [512, 33], ids=["unchunked", "chunked"])
@pytest.mark.parametrize("mode", ["none", "auto", "fork"])
def test_mixed_batch_uncached_and_cached(world: TinyWorld, mode: KVSharing, budget: int) -> None:
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
def test_alone(world: TinyWorld, mode: KVSharing) -> None:
    core, reference = world.core(mode, max_loras=1), world.reference(mode)
    for ask in ASKS:
        assert_equal(reference, (ask,), run_all(core, [ask]))
        assert core.flush_cache()
    assert_clean(core)


@pytest.mark.parametrize("mode", ["none", "fork"])
def test_preempted(world: TinyWorld, mode: KVSharing) -> None:
    core = world.core(mode, budget=64, num_kv_blocks=40, num_residual_units=120)
    asks = tuple(replace(ask, max_tokens=48) for ask in ASKS)
    completions = run_all(core, asks)
    assert core.stats().preemptions_total > 0
    assert_equal(world.reference(mode), asks, completions)
    assert_clean(core)


def test_few_adapter_slots_and_no_reuse(world: TinyWorld) -> None:
    core = world.core("fork", budget=64, max_loras=2, reuse=False)
    assert_equal(world.reference("fork"), ASKS, run_all(core, ASKS))
    assert core.stats().adapter_loads_total >= len(ADAPTERS)
    assert_clean(core)


@pytest.mark.parametrize("budget", [512, 33], ids=["unchunked", "chunked"])
def test_several_completions(world: TinyWorld, budget: int) -> None:
    core, reference = world.core("fork", budget=budget, seqs=16), world.reference("fork")
    chosen = ("base", "base, whole blocks", "plain40", "fork8", "fork8, whole blocks", "fork40", "alora16")
    asks = tuple(replace(ask, n=3, temperature=1.0) for ask in ASKS if ask.name in chosen)
    completions = run_all(core, asks)
    assert_equal(reference, asks, completions)
    for ask in asks:
        texts = {tuple(completions[ask.name, index].token_ids) for index in range(ask.n)}
        assert len(texts) > 1, f"{ask.name}: completions with different seeds are the same"
    assert_clean(core)


def test_several_completions_preempted(world: TinyWorld) -> None:
    core = world.core("fork", budget=64, num_kv_blocks=30, num_residual_units=120)
    chosen = ("base", "fork8", "fork40", "alora16")
    asks = tuple(replace(ask, n=3, temperature=1.0, max_tokens=40) for ask in ASKS if ask.name in chosen)
    completions = run_all(core, asks)
    assert core.stats().preemptions_total > 0
    assert_equal(world.reference("fork"), asks, completions)
    assert_clean(core)


def test_an_answer_that_comes_back_in_a_longer_prompt(world: TinyWorld) -> None:
    """Private blocks and base blocks of earlier turns are read by later ones, at the definition's fork point."""
    core, reference = world.core("fork", budget=48), world.reference("fork")
    for name in ("fork8", "plain8", "alora16", None):
        ask = Ask(f"{name} turn 1", (*DOCUMENT, *INVOCATION, *random_tokens(9, 20)), name, fork_at=80)
        completions = run_all(core, [ask])
        assert_equal(reference, (ask,), completions)
        for turn in (2, 3):
            history = (*ask.prompt, *completions[ask.name, 0].token_ids, *random_tokens(11, 20 + turn))
            ask = replace(ask, name=f"{name} turn {turn}", prompt=history)
            completions = run_all(core, [ask])
            assert_equal(reference, (ask,), completions)
            usage = completions[ask.name, 0].usage
            assert usage is not None and usage.computed < 32, usage
    assert_clean(core)


def test_a_failed_step_changes_no_answer(world: TinyWorld) -> None:
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
    assert_equal(reference, ASKS, completions)
    assert_clean(core, failed_steps=2)
