"""The modes of the published systems on tiny random models, against their definitions in `tests.oracle`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from forkkv.engine.core import EngineCore
from forkkv.sharing import CONTROLS
from forkkv.types import KVSharing, StepPlan, StepResult
from tests.e2e.harness import Ask, Completion, run_all
from tests.e2e.tiny import ARCHS, BLOCK, INVOCATION, TOLERANCE, TinyWorld, assert_clean, random_tokens
from tests.models.factory import ALL_MODULES, ATTENTION, MLP
from tests.oracle import Stretch, sharing_logprobs

ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {"rank": 8, "targets": ALL_MODULES},
    "fork": {"rank": 20, "targets": ATTENTION, "kind": "fork"},
    "qv": {"rank": 4, "targets": ("q_proj", "v_proj"), "rslora": True, "alpha": 4},
    "mlp": {"rank": 4, "targets": MLP},
    "set-1": {"rank": 8, "targets": ("q_proj", "v_proj", "down_proj"), "a_seed": 100},
    "set-2": {"rank": 8, "targets": ("q_proj", "v_proj", "down_proj"), "a_seed": 100},
    "alora": {"rank": 16, "targets": ALL_MODULES, "kind": "alora", "invocation_tokens": INVOCATION},
}


DOCUMENT = random_tokens(103, 1)
SHARED = len(DOCUMENT) // BLOCK * BLOCK


def ask(name: str, adapter: str | None, tail: int, **fields: Any) -> Ask:
    """A request on the document; agents whose `tail` differ share the document alone."""
    return Ask(name, (*DOCUMENT, *random_tokens(21, tail)), adapter, **fields)


class World(TinyWorld):
    """With what agents leave of the tokens that they process."""

    def oracle(
        self, request: Ask, completion: Completion, found: Sequence[Stretch] = (), start: int = 0, merged: bool = False
    ) -> tuple[Tensor, Stretch]:
        """Log-probs of the answer's tokens, and what the agent leaves of the tokens from `start` on."""
        tokens = (*request.prompt, *completion.token_ids[:-1])
        assert request.adapter is not None
        adapter = self.known[request.adapter].weights
        rows, left = sharing_logprobs(self.model, tokens, adapter, found, start, merged=merged)
        return rows[-request.max_tokens :], left

    def plain(self, request: Ask, completion: Completion) -> float:
        """Difference of an answer to PEFT's numerics (base, or aLoRA's)."""
        assert completion.is_whole(request), completion
        return completion.difference(self.reference("none").logprobs(request, completion.token_ids))


@pytest.fixture(scope="module", params=ARCHS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp(f"modes-{request.param}"), request.param, ADAPTERS)


def run(core: EngineCore, request: Ask) -> Completion:
    completion = run_all(core, [request])[request.name, 0]
    assert completion.is_whole(request), completion
    return completion


def cut(stretch: Stretch, start: int, end: int) -> Stretch:
    """Tokens [start, end) of what an agent left."""
    return stretch[0], [states[start:end] for states in stretch[1]]


def assert_near(rows: Tensor, completion: Completion) -> None:
    difference = completion.difference(rows)
    assert difference < TOLERANCE, f"log-probs differ by {difference}: {completion}"


@pytest.mark.parametrize("budget", [512, 33], ids=["unchunked", "chunked"])
@pytest.mark.parametrize("mode", CONTROLS)
def test_two_agents(world: World, mode: KVSharing, budget: int) -> None:
    """A cold first agent, others on what it left, each twice; base model, aLoRA and a private request beside."""
    core = world.core(mode, budget=budget)
    first = ask("first", "first", 2)
    completion = run(core, first)
    assert world.plain(first, completion) < TOLERANCE, "the first writer is plain LoRA"
    _, left = world.oracle(first, completion)
    found = [cut(left, 0, SHARED)]
    # An agent whose A nobody shares processes the whole prompt itself, as under first-writer.
    start = SHARED if mode == "full" else 0
    for tail, name in enumerate(("fork", "qv"), start=3):
        second = ask(name, name, tail)
        completion = run(core, second)
        usage = completion.usage
        assert usage is not None and usage.base == SHARED and usage.residual == 0
        assert usage.computed == len(second.prompt) - start
        rows, _ = world.oracle(second, completion, found, start, merged=mode == "full")
        assert_near(rows, completion)
        assert world.plain(second, completion) > 10 * TOLERANCE, "sharing changes nothing: the test is void"
        again = run(core, second)
        assert again.usage is not None and again.usage.computed <= BLOCK
        assert again.token_ids == completion.token_ids
        assert_near(rows, again)
    others = (
        ask("base", None, 2),
        ask("private", "fork", 2, kv_sharing="none"),
        Ask("aLoRA", (*DOCUMENT, *INVOCATION, 7, 8), "alora"),
    )
    for other in others:
        for _ in range(2):
            assert world.plain(other, run(core, other)) < TOLERANCE
    assert_clean(core)


@pytest.mark.parametrize("budget", [512, 33], ids=["unchunked", "chunked"])
def test_agents_that_share_a(world: World, budget: int) -> None:
    core = world.core("shared-a", budget=budget)
    first, second = ask("first", "set-1", 2), ask("second", "set-2", 3)
    _, left = world.oracle(first, run(core, first))
    found = [cut(left, 0, SHARED)]
    completion = run(core, second)
    usage = completion.usage
    assert usage is not None and usage.base == usage.residual == SHARED
    assert usage.computed == len(second.prompt) - SHARED
    rows, _ = world.oracle(second, completion, found, SHARED)
    assert_near(rows, completion)
    again = run(core, second)
    assert again.usage is not None and again.usage.computed <= BLOCK
    assert_near(rows, again)
    assert_clean(core)


@pytest.mark.parametrize("mode", CONTROLS)
def test_an_agent_reads_what_another_generated(world: World, mode: KVSharing) -> None:
    """Tokens of three writers in one prompt, blocks filled by decode among them. Under shared-a the last agent finds
    no residual of what `mlp` wrote, which needs none itself, and begins there."""
    core = world.core(mode, budget=48)
    found: list[Stretch] = []
    stored = 0
    ends: list[int] = []
    history: tuple[int, ...] = DOCUMENT
    for turn, name in enumerate(("set-1", "set-2", "mlp", "set-1")):
        request = Ask(f"turn {turn}", (*history, *random_tokens(5, turn)), name, max_tokens=40)
        completion = run(core, request)
        start = stored
        if mode == "shared-a" and turn == 3:
            start = ends[1]
        elif mode == "first-writer" and name != "mlp":
            start = ends[0] if turn == 3 else 0
        usage = completion.usage
        assert usage is not None and usage.base == stored
        assert usage.computed == len(request.prompt) - start
        rows, left = world.oracle(request, completion, found, start, merged=mode == "full")
        assert_near(rows, completion)
        history = (*request.prompt, *completion.token_ids)
        end = (len(history) - 1) // BLOCK * BLOCK
        found.append(cut(left, stored - start, end - start))
        stored = end
        ends.append(end)
    assert_clean(core)


@pytest.mark.parametrize("mode", CONTROLS)
def test_one_agent_is_plain_whatever_happens(world: World, mode: KVSharing) -> None:
    """Several completions, preemption and a failed step: what an agent itself left is exact."""
    core = world.core(mode, budget=64, num_kv_blocks=24, num_residual_units=70)
    asks = tuple(
        replace(ask(f"{index}", "first", index), n=1 + 2 * (index == 1), temperature=1.0, max_tokens=40)
        for index in range(4)
    )
    execute, calls = core.executor.execute, [0]

    def sometimes(plan: StepPlan) -> StepResult:
        calls[0] += 1
        result = execute(plan)
        return StepResult(plan.step_id, error="injected") if calls[0] in (3, 20) else result

    core.executor.execute = sometimes  # type: ignore[method-assign]
    completions = run_all(core, asks)
    assert core.stats().preemptions_total > 0
    for request in asks:
        for index in range(request.n):
            assert world.plain(request, completions[request.name, index]) < TOLERANCE
    assert_clean(core, failed_steps=2)


@pytest.mark.parametrize("mode", CONTROLS)
def test_attention_backends_agree(world: World, mode: KVSharing) -> None:
    """The reference implementation reads the same partial residual blocks, in a batch of several agents."""
    asks = (ask("a", "first", 2), ask("b", "fork", 2), ask("c", "qv", 4), ask("d", None, 2))
    results = [run_all(world.core(mode, budget=64, backend=name), asks) for name in ("auto", "torch", "reference")]
    for key, completion in results[0].items():
        for other in results[1:]:
            assert other[key].token_ids == completion.token_ids
            pairs = zip(completion.logprobs, other[key].logprobs, strict=True)
            assert max(abs(one.logprob - two.logprob) for one, two in pairs) < TOLERANCE
