"""Named behaviours of the modes of the published systems, on the shadow memory."""

from __future__ import annotations

import pytest

from forkkv.errors import RequestError
from forkkv.sharing import CONTROLS, is_shared, residual_digest, takes_fanout, writer_class
from forkkv.types import AdapterMeta
from tests.unit.test_scheduler import BLOCK, DOCUMENT, Engine

N = len(DOCUMENT)
FORK_KV, WIDE_K, V_ONLY, NO_KV, PLAIN, ALORA, SAME_DIGEST = range(1, 8)
"""Adapters of `make_adapters`; FORK_KV and PLAIN share A."""


def run(engine, name, adapter_id, prompt=None, **fields):
    engine.add(name, DOCUMENT if prompt is None else prompt, adapter_id, **fields)
    engine.run()
    return engine.usage[name, 0]


@pytest.mark.parametrize(
    ("kind", "mode", "requested", "wanted"),
    [
        (None, "first-writer", None, "base"),
        ("alora", "full", None, "base"),
        ("plain", "full", None, "mixed"),
        ("fork", "shared-a", None, "mixed"),
        ("plain", "first-writer", "none", "base"),
        ("plain", "fork", None, "base"),
        ("fork", "auto", None, "base"),
    ],
)
def test_whose_blocks_are_read(kind, mode, requested, wanted):
    assert writer_class(kind, mode, requested) == wanted


def test_key_of_the_residual():
    both = AdapterMeta(1, "a", "d", "fork", 8, 8, a_digest="a")
    assert residual_digest(both, "auto") == residual_digest(both, "first-writer") == "d"
    assert residual_digest(both, "shared-a") == "a"
    assert residual_digest(both, "full") is residual_digest(both, "shared-a", "none") is None
    for other in (AdapterMeta(1, "a", "d", "fork", 0, 0), AdapterMeta(1, "a", "d", "alora", 8, 8)):
        assert all(residual_digest(other, mode) is None for mode in ("auto", *CONTROLS))
    assert residual_digest(AdapterMeta(1, "a", "d", "plain", 8, 8), "auto") is None


def test_only_base_written_blocks_fan_out():
    adapter = AdapterMeta(1, "a", "d", "plain", 8, 8, a_digest="a")
    assert takes_fanout(adapter, "fork") and not takes_fanout(adapter, "auto")
    assert not any(takes_fanout(adapter, mode) for mode in CONTROLS)
    assert all(is_shared(adapter, mode) and not is_shared(adapter, mode, "none") for mode in CONTROLS)


def test_first_writer_runs_an_own_prefill_over_the_base_of_another():
    engine = Engine(mode="first-writer")
    first = run(engine, "first", PLAIN, max_tokens=1)
    assert (first.fork_point, first.base, first.computed) == (N, 0, N)
    blocks = engine.kv.tree.base.num_ids
    second = run(engine, "second", V_ONLY, max_tokens=1)
    assert (second.base, second.residual, second.computed) == (N, 0, N)
    assert engine.kv.tree.base.num_ids == blocks
    assert engine.scheduler.counters.backfill_tokens == N
    again = run(engine, "again", V_ONLY, max_tokens=1)
    assert (again.base, again.residual, again.computed) == (N, N, 1)
    assert engine.scheduler.counters.fanout_tokens == engine.scheduler.counters.base_weight_tokens == 0
    engine.check_answers()


def test_agents_that_share_a_hit_base_and_residual():
    engine = Engine(mode="shared-a")
    run(engine, "first", PLAIN)
    same = run(engine, "same A", FORK_KV)
    assert (same.base, same.residual, same.computed) == (N, N, 1)
    other = run(engine, "other A", WIDE_K)
    assert (other.base, other.residual, other.computed) == (N, 0, N)
    assert engine.kv.tree.num_residual_digests == 2
    engine.check_answers()


@pytest.mark.parametrize("mode", ["full", "first-writer"])
def test_without_a_residual_the_second_agent_computes_what_is_not_cached(mode):
    engine = Engine(mode=mode)
    run(engine, "first", PLAIN)
    second = run(engine, "second", PLAIN if mode == "full" else NO_KV)
    assert (second.base, second.computed) == (N, 1)
    engine.check_answers()


@pytest.mark.parametrize("mode", CONTROLS)
def test_generated_tokens_are_shared(mode):
    engine = Engine(mode=mode)
    run(engine, "first", PLAIN, max_tokens=2 * BLOCK + 1)
    prompt = [*DOCUMENT, *engine.answers["first", 0], 1, 2]
    second = run(engine, "second", PLAIN, prompt)
    assert second.base == N + 2 * BLOCK and second.computed == len(prompt) - second.base
    engine.check_answers()


@pytest.mark.parametrize("mode", CONTROLS)
@pytest.mark.parametrize("other", [0, ALORA])
def test_base_and_alora_read_only_base_written_blocks(mode, other):
    engine = Engine(mode=mode)
    prompt = [*DOCUMENT, 2, 1, 0]
    run(engine, "agent", PLAIN, prompt)
    assert run(engine, "first", other, prompt).base == 0
    second = run(engine, "second", other, prompt)
    assert second.base > 0 and second.residual == 0
    assert run(engine, "private", PLAIN, prompt, kv_sharing="none").base == 0
    engine.check_answers()


def test_a_residual_is_not_read_over_a_base_that_was_written_again():
    engine = Engine(mode="first-writer")
    run(engine, "writer", PLAIN, max_tokens=1)
    run(engine, "reader", V_ONLY, max_tokens=1)
    units = engine.kv.tree.residual.num_ids
    engine.kv._free_kv(engine.kv.tree.evict_kv(engine.kv.kv_pool.total))
    run(engine, "new writer", WIDE_K, max_tokens=1)
    assert engine.kv.tree.residual.num_ids > units, "the old residual is still there"
    again = run(engine, "reader again", V_ONLY, max_tokens=1)
    assert (again.base, again.residual) == (N, 0)
    engine.check_answers()


@pytest.mark.parametrize("mode", CONTROLS)
def test_who_comes_second_with_equal_tokens_publishes_nothing_behind_them(mode):
    # both decode over one prefix side by side; the second one's own block differs from the one in the tree
    engine = Engine(mode=mode)
    engine.add("first", DOCUMENT, PLAIN, max_tokens=3 * BLOCK)
    engine.add("second", DOCUMENT, SAME_DIGEST if mode != "full" else PLAIN, max_tokens=3 * BLOCK)
    engine.run()
    engine.check_answers()
    same = Engine(mode=mode)
    same.add("first", DOCUMENT, PLAIN, max_tokens=3 * BLOCK)
    same.add("twin", DOCUMENT, PLAIN, max_tokens=3 * BLOCK)
    same.run()
    assert same.scheduler.counters.duplicate_blocks == 1, "later blocks of the twin are not offered"
    assert same.kv.tree.base.num_ids == (N + 3 * BLOCK - 1) // BLOCK
    same.check_answers()


def test_n_completions_over_a_residual_recompute_the_partial_block():
    engine = Engine(mode="first-writer")
    engine.add("many", DOCUMENT[:-2], PLAIN, n=3, max_tokens=6)
    engine.run()
    assert engine.usage["many", 1].computed == (N - 2) % BLOCK
    assert sum(len(plan.copies) for plan in engine.plans) == 0
    engine.check_answers()


@pytest.mark.parametrize("mode", CONTROLS)
def test_chunks_preemption_and_failures(mode):
    engine = Engine(mode=mode, kv_blocks=36, units=90, budget=24)
    for index, adapter_id in enumerate((PLAIN, V_ONLY, WIDE_K, 0, ALORA)):
        engine.add(f"r{index}", DOCUMENT[: 30 - index], adapter_id, max_tokens=30)
    for _ in range(6):
        engine.step()
    engine.step(fail=True)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    engine.check_answers()


def test_a_residual_that_cannot_fit_is_refused():
    engine = Engine(mode="first-writer", units=20)
    with pytest.raises(RequestError, match=f"residual of 'plain' for {N} tokens needs {2 * N // BLOCK}"):
        engine.add("huge", DOCUMENT, PLAIN)
