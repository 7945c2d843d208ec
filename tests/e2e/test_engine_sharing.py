"""What sharing saves, counted: tokens that enter layer 0, blocks and units that are held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig, SchedulerConfig
from forkkv.engine.core import EngineCore
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import KVSharing, StepPlan, StepResult
from tests.e2e.harness import Ask, LayerTokens, engine_request, run_all
from tests.e2e.tiny import BLOCK, random_tokens
from tests.models.factory import ATTENTION, make_adapter, make_model

RANKS = {"extract": 8, "sql": 24, "audit": 16}
DOCUMENT = random_tokens(400, 1)
FORK = len(DOCUMENT) // BLOCK * BLOCK
AGENTS = tuple(
    Ask(name, (*DOCUMENT, *random_tokens(20 + 3 * i, 2 + i)), name, fork_at=FORK, max_tokens=8)
    for i, name in enumerate(RANKS)
)
SUFFIXES = sum(len(ask.prompt) - FORK for ask in AGENTS)
DECODED = sum(ask.max_tokens - 1 for ask in AGENTS)
"""The last token of an answer never runs through the model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharing")
    model = make_model(root / "model")
    for seed, (name, rank) in enumerate(RANKS.items(), start=1):
        make_adapter(root / name, model, rank=rank, targets=ATTENTION, seed=seed, kind="fork")
        make_adapter(root / f"{name}-plain", model, rank=rank, targets=ATTENTION, seed=seed)
    return root


def make_core(
    folder: Path, *, budget: int = 128, fanout: int = 8, mode: KVSharing = "auto", **cache: float
) -> EngineCore:
    names = (*RANKS, *(f"{name}-plain" for name in RANKS))
    config = EngineConfig(
        model=ModelConfig(str(folder / "model"), dtype="float32", device="cpu"),
        cache=CacheConfig(block_size=BLOCK, memory_bytes=32 << 20, **cache),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            kv_sharing=mode,
            residual_fanout=fanout,  # type: ignore[arg-type]
        ),
        lora=LoRAConfig(
            modules=tuple(LoRAModule(name, str(folder / name)) for name in names), teams=(("orders", tuple(RANKS)),)
        ),
    )
    return EngineCore(config, UniprocExecutor(config, progress=False, poison=True), debug_checks=True)


@pytest.fixture
def core(folder: Path) -> EngineCore:
    return make_core(folder)


@pytest.fixture
def entered(core: EngineCore) -> Iterator[LayerTokens]:
    counter = LayerTokens(core)
    yield counter
    counter.close()


def used(core: EngineCore) -> tuple[int, int]:
    """(K/V blocks, residual units) that are not free."""
    stats = core.stats()
    return stats.kv_pool.total - stats.kv_pool.free, stats.residual_pool.total - stats.residual_pool.free


def test_three_agents_together_prefill_the_document_once(core: EngineCore, entered: LayerTokens) -> None:
    run_all(core, AGENTS)
    assert entered.base == FORK
    assert entered.adapter == SUFFIXES + DECODED
    stats = core.stats()
    assert stats.base_weight_tokens_total == FORK and stats.duplicate_blocks_total == 0
    assert stats.backfill_tokens_total == 0 and stats.fanout_tokens_total == 2 * FORK
    assert stats.active_residual_adapters == len(RANKS)


def test_one_after_another_run_their_own_part_alone(core: EngineCore, entered: LayerTokens) -> None:
    for index, ask in enumerate(AGENTS):
        entered.reset()
        usage = run_all(core, [ask])[ask.name, 0].usage
        assert entered.base == (FORK if index == 0 else 0)
        assert entered.adapter == len(ask.prompt) - FORK + ask.max_tokens - 1
        found = FORK if index else 0
        assert usage is not None and (usage.base, usage.residual) == (found, found)
        assert usage.computed == len(ask.prompt) - found
    assert core.stats().backfill_tokens_total == 0


def test_agents_that_arrive_one_step_apart(core: EngineCore, entered: LayerTokens) -> None:
    for ask in AGENTS:
        core.add_request(engine_request(core, ask, ask.name))
        core.step()
    while core.has_work():
        core.step()
    assert entered.base == FORK and core.stats().duplicate_blocks_total == 0


def test_the_base_model_reads_what_agents_computed_and_the_other_way_round(
    core: EngineCore, entered: LayerTokens
) -> None:
    base = Ask("base", (*DOCUMENT, *random_tokens(30, 9)), max_tokens=1)
    run_all(core, [AGENTS[0]])
    entered.reset()
    run_all(core, [base])
    assert entered.base == len(base.prompt) - FORK
    assert core.flush_cache()
    run_all(core, [base])
    entered.reset()
    run_all(core, AGENTS)
    # The residuals are there as well: the base request's prefill fanned out to the adapters used last.
    assert entered.base == 0 and core.stats().backfill_tokens_total == 0


def test_without_fan_out_a_late_adapter_runs_the_prefix_again_and_stores_no_second_copy(folder: Path) -> None:
    core = make_core(folder, fanout=0)
    entered = LayerTokens(core)
    run_all(core, AGENTS[:1])
    assert entered.base == FORK
    blocks, _ = used(core)
    run_all(core, AGENTS[1:2])
    assert entered.base == 2 * FORK and core.stats().backfill_tokens_total == FORK
    assert used(core)[0] - blocks == (len(AGENTS[1].prompt) - FORK + AGENTS[1].max_tokens - 1) // BLOCK
    assert core.stats().duplicate_blocks_total == 0


def test_completions_of_one_request_share_prompt_and_fork(core: EngineCore, entered: LayerTokens) -> None:
    run_all(core, [replace(AGENTS[0], n=3, temperature=1.0)])
    ask = AGENTS[0]
    assert entered.base == FORK
    # A child recomputes the prompt's last token, to sample from it with its own seed.
    assert entered.adapter == len(ask.prompt) - FORK + 2 + 3 * (ask.max_tokens - 1)


def private_blocks_at_the_end(core: EngineCore, asks: tuple[Ask, ...]) -> dict[str, int]:
    """Run `asks`; private blocks of each in its last step, whose partial one is freed when that step is applied."""
    last: dict[str, int] = {}
    execute = core.executor.execute

    def recorded(plan: StepPlan) -> StepResult:
        for sequence in core.scheduler.running:
            cache = sequence.cache
            last[sequence.request_id.split("/")[0]] = len(cache.kv_blocks) - cache.private_from // BLOCK
        return execute(plan)

    core.executor.execute = recorded  # type: ignore[method-assign]
    run_all(core, asks)
    return last


def test_bytes_are_those_of_the_formula(folder: Path) -> None:
    core = make_core(folder)
    last = private_blocks_at_the_end(core, AGENTS)
    for ask in AGENTS:
        stored = len(ask.prompt) - FORK + ask.max_tokens - 1
        assert last[ask.name] == -(-stored // BLOCK)
    full = sum((len(ask.prompt) - FORK + ask.max_tokens - 1) // BLOCK for ask in AGENTS)
    tiles = sum(-(-rank // 16) for rank in RANKS.values())
    assert used(core) == (FORK // BLOCK + full, FORK // BLOCK * 2 * tiles)


def test_private_caches_cost_one_prefill_and_one_copy_each(folder: Path) -> None:
    core = make_core(folder, mode="none")
    entered = LayerTokens(core)
    run_all(core, AGENTS)
    assert entered.base == 0 and entered.adapter == sum(len(ask.prompt) for ask in AGENTS) + DECODED
    assert used(core) == (sum((len(ask.prompt) + ask.max_tokens - 1) // BLOCK for ask in AGENTS), 0)
