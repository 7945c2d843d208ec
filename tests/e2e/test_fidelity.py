"""Forced answers through the real engine, against the oracle and against greedy generation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib.fidelity_data import MAX_ANSWER_TOKENS, Item, Team
from benchmarks.lib.fidelity_run import TeamRunner
from benchmarks.lib.fidelity_stats import Record
from forkkv.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tests.e2e.harness import Ask, KnownAdapter, Reference, run_all
from tests.e2e.tiny import random_tokens
from tests.models.factory import ATTENTION, make_adapter, make_model

AGENTS = ("one", "two")
TAIL = 24
ITEMS = [
    Item(
        str(document),
        str(document),
        agent,
        (*random_tokens(90, document), *random_tokens(20 + i, 9 + i)),
        random_tokens(6, i),
        None,
    )
    for document in range(3)
    for i, agent in enumerate(AGENTS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fidelity")
    model = make_model(root / "model")
    for seed, name in enumerate(AGENTS, start=1):
        make_adapter(root / name, model, rank=8, targets=ATTENTION, seed=seed)
    return root


@pytest.fixture(scope="module")
def runner(folder: Path) -> TeamRunner:
    config = EngineConfig(
        model=ModelConfig(str(folder / "model"), dtype="float32", device="cpu", enforce_eager=True),
        cache=CacheConfig(memory_bytes=16 << 20),
        scheduler=SchedulerConfig(fork_tail=TAIL),
    )
    return TeamRunner(Team("plain", {name: folder / name for name in AGENTS}), config)


@pytest.fixture(scope="module")
def records(runner: TeamRunner) -> dict[tuple[str, str, str], Record]:
    found = [record for batch in runner.batches(ITEMS) for record in runner.score(batch, ("none", "fork"), "250")]
    assert len(found) == 2 * len(ITEMS)
    return {(record.mode, record.question, record.agent): record for record in found}


def oracle(folder: Path, mode: str) -> Reference:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    known = {name: KnownAdapter.read(folder / name, "plain") for name in AGENTS}
    return Reference(model, known, mode=mode, fork_tail=TAIL)


def test_divergence_and_agreement_are_those_of_the_oracle(
    folder: Path, runner: TeamRunner, records: dict[tuple[str, str, str], Record]
) -> None:
    """KL(plain in private caches || read as `fork`) over the whole vocabulary, token by token of the given answer."""
    private, forked = oracle(folder, "none"), oracle(folder, "fork")
    for item in ITEMS:
        answer = [*item.answer, runner.executor.eos_token_ids[0]]  # type: ignore[misc]
        ask = Ask("", item.prompt, item.agent)
        p, q = private.logprobs(ask, answer), forked.logprobs(ask, answer)
        found = records["fork", item.question, item.agent]
        assert found.tokens == len(answer)
        assert found.fork_point == forked.meaning(ask)[1] > 0
        assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
        assert found.kl > 0.01
        assert found.agreed == int((p.argmax(-1) == q.argmax(-1)).sum())
        own = records["none", item.question, item.agent]
        assert (own.kl, own.agreed, own.fork_point) == (0.0, len(answer), 0)
        assert own.exact == bool((p.argmax(-1) == torch.tensor(answer)).all())


def test_an_answer_is_right_if_and_only_if_it_is_generated(runner: TeamRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers taken from greedy generation under `fork`, whose fourth token is declared the end: right there, and
    under `none` if and only if that generates the same."""
    generated = {}
    for mode in ("none", "fork"):
        asks = [Ask(f"{i}", item.prompt, item.agent, max_tokens=4) for i, item in enumerate(ITEMS)]
        done = run_all(runner.core(mode), asks)  # type: ignore[arg-type]
        generated[mode] = [tuple(done[ask.name, 0].token_ids) for ask in asks]
    same = []
    for item, private, forked in zip(ITEMS, generated["none"], generated["fork"], strict=True):
        monkeypatch.setattr(runner.executor, "eos_token_ids", (forked[3],))
        asked = replace(item, answer=forked[:3])
        found = {record.mode: record.exact for record in runner.score([asked], ("none", "fork"), "250")}
        assert found == {"none": private == forked, "fork": True}
        same.append(private == forked)
    assert not all(same)


def test_without_a_right_answer_the_reference_s_own_is_the_measure(runner: TeamRunner) -> None:
    item = Item("0", "0", "one", ITEMS[0].prompt, None)
    own, other = runner.score([item], ("none", "fork"), "own")
    assert own.exact and own.kl == 0.0
    assert own.tokens == other.tokens <= MAX_ANSWER_TOKENS
    greedy = run_all(runner.core("none"), [Ask("", item.prompt, "one", max_tokens=own.tokens)])["", 0].token_ids
    again = runner.score([Item("0", "0", "one", item.prompt, tuple(greedy[:-1]))], ("none",), "own")[0]
    assert again.agreed == own.tokens and not other.exact


def test_batches_keep_documents_together_and_have_room(runner: TeamRunner) -> None:
    many = [Item(str(i // 2), str(i), AGENTS[i % 2], (5,) * 90, (5,) * 6) for i in range(50)]
    batches = list(runner.batches(many))
    assert [item for batch in batches for item in batch] == many
    assert all(len({item.document for item in batch}) * 2 == len(batch) <= 32 for batch in batches)
    assert len(batches) == 2


def test_an_agent_reads_what_another_one_wrote(runner: TeamRunner) -> None:
    assert [runner.writer_of(name) for name in AGENTS] == ["two", "one"]


def test_shared_a_is_run_for_teams_that_share_a(folder: Path, runner: TeamRunner) -> None:
    copies = dict.fromkeys(AGENTS, folder / "one")
    assert TeamRunner(Team("copies", copies), runner.config).refusal("shared-a") is None
    assert runner.refusal("shared-a") == "no two agents share A, so this is its first-writer"
    assert runner.refusal("first-writer") is None
