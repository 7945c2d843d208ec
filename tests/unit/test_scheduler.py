"""Named behaviours of the scheduler, one by one, on the shadow memory."""

from __future__ import annotations

import pytest

from forkkv.config import SchedulerConfig
from forkkv.errors import RequestError
from forkkv.kvcache.manager import KVCacheManager
from forkkv.lora.registry import AdapterRegistry, AdapterSlots
from forkkv.scheduler.scheduler import Scheduler
from forkkv.types import EngineRequest, SamplingParams, StepResult
from tests.unit.shadow import ShadowExecutor, answer, expect, make_adapters

BLOCK, TAIL = 4, 5
DOCUMENT = [0, 1, 2, 1, 0, 0, 2, 2] * 6


class Engine:
    """Scheduler and shadow executor with the loop of `EngineCore`."""

    def __init__(
        self, *, kv_blocks=200, units=200, mode="auto", slots=4, budget=32, reuse=True, fanout=3, max_len=200, chunk=512
    ):
        self.adapters = make_adapters()
        self.mode = mode
        config = SchedulerConfig(16, budget, mode, TAIL, fanout, chunk)
        self.kv = KVCacheManager(BLOCK, kv_blocks, units)
        registry, self.slots = AdapterRegistry(self.adapters), AdapterSlots(slots)
        self.scheduler = Scheduler(
            config, self.kv, registry, self.slots, max_model_len=max_len, enable_reuse=reuse, eos_token_ids=()
        )
        self.executor = ShadowExecutor(BLOCK, self.adapters)
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.wanted: dict[tuple[str, int], list[int]] = {}
        self.usage = {}
        self.finish = {}
        self.errors = {}
        self.plans = []

    def add(self, name, prompt, adapter_id=0, *, n=1, max_tokens=3, **fields):
        sampling = SamplingParams(max_tokens=max_tokens, seed=1)
        request = EngineRequest(name, list(prompt), sampling, adapter_id, n, **fields)
        expected = expect(request, self.executor.by_id.get(adapter_id), self.mode, BLOCK, TAIL)
        self.scheduler.add(request)
        for index in range(n):
            self.executor.expected[name if n == 1 else f"{name}#{index}"] = expected
            self.wanted[name, index] = answer(expected, request.prompt_token_ids, 1 + index, max_tokens)

    def step(self, fail=False):
        plan = self.scheduler.schedule()
        outputs = self.scheduler.take_outputs() if plan is None else []
        if plan is not None:
            self.plans.append(plan)
            result = StepResult(plan.step_id, error="planted") if fail else self.executor.execute(plan)
            outputs = self.scheduler.apply(result)
        self.kv.check(self.scheduler.caches())
        for output in outputs:
            key = output.request_id, output.index
            self.answers.setdefault(key, []).extend(output.new_token_ids)
            self.usage.setdefault(key, output.usage)
            if output.finish_reason:
                self.finish[key], self.errors[key] = output.finish_reason, output.error
        return plan

    def run(self):
        for _ in range(2000):
            if not self.scheduler.has_work:
                return self
            self.step()
        raise AssertionError("requests never finish")

    def check_answers(self):
        assert self.answers == self.wanted
        assert self.kv.tree.num_leases == 0 and self.kv.flush()


def test_agents_that_arrive_together_prefill_the_context_once():
    engine = Engine()
    for adapter_id in (1, 2, 4):
        engine.add(f"agent{adapter_id}", DOCUMENT, adapter_id)
    engine.run()
    fork_point = (len(DOCUMENT) - TAIL) // BLOCK * BLOCK
    assert engine.executor.base_tokens == fork_point
    assert engine.scheduler.counters.duplicate_blocks == 0
    assert engine.scheduler.counters.backfill_tokens == 0
    engine.check_answers()


def test_a_late_agent_of_the_team_computes_its_tail_alone():
    engine = Engine()
    engine.add("first", DOCUMENT, 1)
    engine.run()
    engine.add("second", DOCUMENT, 2)
    engine.run()
    usage = engine.usage["second", 0]
    assert usage.base == usage.residual == usage.fork_point == 40
    assert usage.computed == len(DOCUMENT) - 40
    engine.check_answers()


def test_a_stranger_backfills_its_residual_and_writes_no_kv():
    engine = Engine(fanout=0)
    engine.add("first", DOCUMENT, 1)
    engine.run()
    blocks = engine.kv.tree.base.num_ids
    engine.add("late", DOCUMENT, 3, max_tokens=1)
    engine.run()
    assert engine.scheduler.counters.backfill_tokens == 40
    assert engine.usage["late", 0].base == 40 and engine.usage["late", 0].residual == 0
    assert engine.kv.tree.base.num_ids == blocks
    engine.check_answers()


def test_base_prompts_fan_out_to_recent_adapters_and_decode_does_not():
    engine = Engine(fanout=2)
    engine.add("base", DOCUMENT, 0, max_tokens=12)
    engine.run()
    written = {write.adapter_id for plan in engine.plans for s in plan.segments for write in s.residual_writes}
    assert written == {1, 2}
    assert all(not s.residual_writes for plan in engine.plans for s in plan.segments if s.num_tokens == 1)
    engine.add("agent", DOCUMENT, 1)
    engine.run()
    assert engine.usage["agent", 0].computed == len(DOCUMENT) - 40
    engine.check_answers()


def test_fan_out_of_a_backfill_goes_to_who_lacks_the_residual():
    engine = Engine(fanout=1)
    engine.add("base", DOCUMENT, 0, max_tokens=1)  # for adapter 1, the first of those never used
    engine.run()
    engine.add("third", DOCUMENT, 3, max_tokens=1)
    engine.run()
    assert engine.scheduler.counters.backfill_tokens == 40
    for adapter_id in (1, 2):
        engine.add(f"agent {adapter_id}", DOCUMENT, adapter_id)
        engine.run()
        assert engine.usage[f"agent {adapter_id}", 0].residual == 40
    assert engine.scheduler.counters.backfill_tokens == 40
    engine.check_answers()


def test_fan_out_never_evicts_what_was_read():
    # room for one document's residual of adapter 1 (2 units a block) and little more
    engine = Engine(units=24, fanout=3)
    for name in ("a", "b"):
        engine.add(name, DOCUMENT, 1)
        engine.run()
    read_before = engine.usage["b", 0].residual
    assert read_before == 40
    engine.add("other", [1] * 40, 0)
    engine.run()
    engine.add("c", DOCUMENT, 1)
    engine.run()
    assert engine.usage["c", 0].residual == 40


def test_full_hit_recomputes_one_token_and_writes_nothing():
    engine = Engine()
    for name in ("one", "two"):
        engine.add(name, DOCUMENT, 0, max_tokens=1)
        engine.run()
    assert engine.usage["two", 0].computed == 1
    segment = engine.plans[-1].segments[0]
    assert segment.num_tokens == 1 and segment.kv_write_from == len(DOCUMENT)
    engine.check_answers()


def test_salts_do_not_share():
    engine = Engine()
    engine.add("a", DOCUMENT, 1, cache_salt="x")
    engine.run()
    engine.add("b", DOCUMENT, 1, cache_salt="y")
    engine.run()
    assert engine.usage["b", 0].base == 0
    engine.check_answers()


def test_without_the_tree_every_request_runs_alone():
    engine = Engine(reuse=False)
    for name in ("a", "b"):
        engine.add(name, DOCUMENT, 1, n=2)
    engine.run()
    assert engine.usage["b", 0].base == 0
    engine.check_answers()
    assert engine.kv.kv_pool.num_free == engine.kv.kv_pool.total


@pytest.mark.parametrize("adapter_id", [0, 1, 5])
def test_n_completions_prefill_once_and_copy_the_partial_block(adapter_id):
    engine = Engine()
    prompt = DOCUMENT[:-2]
    engine.add("many", prompt, adapter_id, n=3, max_tokens=6)
    engine.run()
    assert engine.usage["many", 1].computed == 1
    assert sum(len(plan.copies) for plan in engine.plans) == 2
    assert len({tuple(engine.answers["many", i]) for i in range(3)}) > 1, "children draw with their own seeds"
    engine.check_answers()


def test_preempted_sequences_give_the_same_answer():
    engine = Engine(kv_blocks=30, units=60)
    for index, adapter_id in enumerate((0, 1, 5, 0)):
        engine.add(f"r{index}", [index % 3] * 20, adapter_id, max_tokens=30)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    engine.check_answers()


def test_a_prompt_larger_than_the_pool_is_refused_at_once():
    engine = Engine(kv_blocks=11, max_len=1000)
    with pytest.raises(RequestError, match="holds 40") as refused:
        engine.add("huge", [0] * 41)
    assert refused.value.code == "context_length_exceeded"
    engine.add("fits", [0] * 30, max_tokens=2)
    engine.run()
    assert engine.answers["fits", 0] == engine.wanted["fits", 0]


def test_a_residual_larger_than_its_pool_is_refused():
    engine = Engine(units=10, max_len=1000)
    with pytest.raises(RequestError, match="rCache"):
        engine.add("huge", DOCUMENT, 1)


def test_an_answer_that_outgrows_the_pool_ends_with_length():
    engine = Engine(kv_blocks=11)
    engine.add("grows", [0] * 20, max_tokens=100)
    engine.add("small", [1] * 4, max_tokens=2)
    engine.run()
    assert engine.finish["grows", 0] == "length"
    assert engine.answers["small", 0] == engine.wanted["small", 0]
    assert engine.kv.flush()


def test_a_failed_step_is_withdrawn_and_run_again():
    engine = Engine()
    engine.add("a", DOCUMENT, 1)
    engine.add("b", DOCUMENT, 2)
    engine.step(fail=True)
    assert engine.kv.tree.base.num_ids == 0 and engine.kv.tree.residual.num_ids == 0
    engine.run()
    engine.check_answers()


def test_a_poisoned_request_takes_nobody_with_it():
    engine = Engine()
    engine.add("poison", [2] * 9, 0)
    engine.add("good", DOCUMENT, 1, max_tokens=8)
    for _ in range(200):
        if not engine.scheduler.has_work:
            break
        upcoming = {s.request_id for s in engine.scheduler.running} | {s.request_id for s in engine.scheduler.waiting}
        suspect = next((s for s in engine.scheduler.waiting if s.failures), None)
        poisoned = "poison" in upcoming and (suspect is None or suspect.request_id == "poison")
        engine.step(fail=poisoned)
    assert engine.finish["poison", 0] == "error" and "planted" in engine.errors["poison", 0]
    assert engine.answers["good", 0] == engine.wanted["good", 0]
    assert engine.kv.flush()


def test_an_abort_while_the_step_runs_waits_for_it():
    engine = Engine()
    engine.add("gone", DOCUMENT, 1)
    plan = engine.scheduler.schedule()
    engine.scheduler.abort(["gone"])
    engine.kv.check(engine.scheduler.caches())
    assert engine.scheduler.apply(engine.executor.execute(plan)) == []
    assert not engine.scheduler.has_work and engine.kv.flush()
    assert engine.scheduler.counters.aborts == 1


def test_dropping_an_adapter_leaves_its_running_request_alone():
    engine = Engine(budget=8 + 16)
    engine.add("running", DOCUMENT, 1, max_tokens=5)
    engine.step()
    engine.kv.drop_digest("d1")
    engine.run()
    engine.check_answers()


def test_one_slot_serves_all_adapters_in_turn():
    engine = Engine(slots=1)
    for index in range(6):
        engine.add(f"r{index}", DOCUMENT, 1 + index % 3)
    engine.run()
    assert engine.scheduler.counters.adapter_loads >= 3
    engine.check_answers()


def test_prefill_takes_a_smaller_share_while_others_decode():
    engine = Engine(budget=40, chunk=8)
    engine.add("alone", DOCUMENT, 0, max_tokens=12)
    engine.step()
    assert engine.plans[-1].num_tokens == 40
    engine.step()
    engine.add("long", [1] * 40, 0)
    plan = engine.step()
    assert sorted(segment.num_tokens for segment in plan.segments) == [1, 8]
    engine.run()
    engine.check_answers()


def test_rows_on_one_prefix_are_grouped():
    engine = Engine()
    for adapter_id in (1, 2):
        engine.add(f"agent{adapter_id}", DOCUMENT, adapter_id, max_tokens=8)
    engine.run()
    decode = [plan for plan in engine.plans if [s.num_tokens for s in plan.segments] == [1, 1]]
    assert decode and all(plan.groups[0].num_blocks == 10 for plan in decode)
