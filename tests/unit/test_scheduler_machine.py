"""Scheduler and KVCacheManager driven at random against the shadow memory of `tests.unit.shadow`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forkkv.config import SchedulerConfig
from forkkv.errors import RequestError
from forkkv.kvcache.manager import KVCacheManager
from forkkv.lora.registry import AdapterRegistry, AdapterSlots
from forkkv.scheduler.scheduler import Scheduler
from forkkv.sharing import CONTROLS
from forkkv.types import EngineOutput, EngineRequest, KVSharing, SamplingParams
from tests.unit.shadow import VOCAB, Expected, ShadowExecutor, answer, expect, make_adapters

BLOCK = 4
TAIL = 5
MAX_LEN = 64

# Few openings and a tiny vocabulary: most prompts share some prefix, and branch inside blocks as well as between.
openings = st.sampled_from([[0] * 24, [0] * 12 + [1] * 12, [1, 2, 0] * 9])
prompts = st.builds(
    lambda opening, cut, rest: (opening[:cut] + rest) or [0],
    openings,
    st.integers(0, 27),
    st.lists(st.integers(0, VOCAB - 1), max_size=9),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, runs, fails, aborts, evicts and drops; every answer must equal the one computed from its definition."""

    modes: tuple[KVSharing, ...] = ("fork", "auto", "none")

    @initialize(
        kv_blocks=st.integers(14, 60),
        units=st.integers(14, 80),
        mode=st.integers(0, 2),
        reuse=st.sampled_from([True, True, True, False]),
        slots=st.integers(1, 4),
        budget=st.sampled_from([10, 16, 40]),
        chunk=st.sampled_from([4, 9, 40]),
    )
    def start(self, kv_blocks, units, mode, reuse, slots, budget, chunk):
        self.adapters = make_adapters()
        self.config = SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            kv_sharing=self.modes[mode],
            fork_tail=TAIL,
            residual_fanout=3,
            chunked_prefill_size=chunk,
        )
        self.kv = KVCacheManager(BLOCK, kv_blocks, units)
        self.scheduler = Scheduler(
            self.config,
            self.kv,
            AdapterRegistry(self.adapters),
            AdapterSlots(slots),
            max_model_len=MAX_LEN,
            enable_reuse=reuse,
        )
        self.executor = ShadowExecutor(BLOCK, self.adapters)
        self.requests: dict[str, tuple[EngineRequest, Expected]] = {}
        self.received: dict[tuple[str, int], list[int]] = {}
        self.count = 0
        self.history: list[tuple[list[int], int, str]] = []
        self.failures_in_a_row = 0
        self.in_step = False

    @precondition(lambda self: len(self.requests) < 10)
    @rule(
        prompt=prompts,
        adapter_id=st.integers(0, 7),
        salt=st.sampled_from(["", "", "s"]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 9),
        fork_at=st.sampled_from([None, None, 3, 8, 13, 99]),
        sharing=st.sampled_from([None, None, None, "none"]),
        copies=st.sampled_from([1, 1, 3]),
        alike=st.booleans(),
    )
    def add(self, prompt, adapter_id, salt, n, max_tokens, fork_at, sharing, copies, alike):
        for copy in range(copies):
            more = 0 if alike else BLOCK * copy
            self._add(prompt, adapter_id, salt, n, max_tokens + more, fork_at if alike else more, sharing)

    @precondition(lambda self: self.history and len(self.requests) < 10)
    @rule(
        which=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5]),
        adapter_id=st.sampled_from([None, None, 0, 1, 5]),
        more=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        fork_at=st.sampled_from([None, 3, 8, 13, 99]),
        sharing=st.sampled_from([None, None, "none"]),
    )
    def add_again(self, which, adapter_id, more, fork_at, sharing):
        """An earlier prompt, perhaps with its answer and more, from the same or another agent, forked elsewhere."""
        prompt, earlier_id, salt = self.history[which % len(self.history)]
        self._add(prompt + more, earlier_id if adapter_id is None else adapter_id, salt, 1, 3, fork_at, sharing)

    def _add(self, prompt, adapter_id, salt, n, max_tokens, fork_at, sharing):
        self.count += 1
        self._remember(list(prompt), adapter_id, salt)
        sampling = SamplingParams(max_tokens=max_tokens, seed=7, ignore_eos=True)
        request = EngineRequest(f"r{self.count}", list(prompt), sampling, adapter_id, n, salt, sharing, fork_at=fork_at)
        adapter = self.executor.by_id.get(adapter_id)
        expected = expect(request, adapter, self.config.kv_sharing, BLOCK, TAIL)
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.requests[request.request_id] = (request, expected)
        for index in range(n):
            name = request.request_id if n == 1 else f"{request.request_id}#{index}"
            self.executor.expected[name] = expected
            self.received[request.request_id, index] = []

    def _remember(self, tokens, adapter_id, salt):
        self.history = [(tokens, adapter_id, salt), *self.history[:5]]

    @rule(data=st.data(), fail=st.sampled_from([False] * 7 + [True]), abort=st.sampled_from([False] * 5 + [True]))
    def step(self, data, fail, abort):
        self._step(fail and self.failures_in_a_row < 2, data if abort else None)

    @rule(count=st.sampled_from([4, 16]))
    def steps(self, count):
        self._steps(count)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(prompt=prompts, adapter_id=st.integers(0, 7), reader=st.integers(0, 7), longer=st.integers(4, 12))
    def race(self, prompt, adapter_id, reader, longer):
        """Two equal requests side by side, the second one longer; then someone goes on from its answer."""
        for max_tokens in (3, 3 + longer):
            self._add(prompt, adapter_id, "", 1, max_tokens, None, None)
        self._steps(20)
        self._add([*self.history[0][0], 0], reader, "", 1, 2, None, None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        self._abort(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(what=st.sampled_from(["all", "kv", "kv", "some kv", "d1", "d2", "d5"]))
    def lose(self, what):
        """Cached blocks go: by a flush, by eviction that leaves residuals behind, or with an adapter."""
        if what == "all":
            self.kv.flush()
        elif what.endswith("kv"):
            kept = 6 if what == "some kv" else 0
            self.kv.room_for_kv(self.kv.kv_pool.num_free + max(0, self.kv.tree.kv_unleased - kept))
        else:
            self.kv.drop_digest(what)

    def _steps(self, count):
        for _ in range(count):
            self._step(False, None)

    def _step(self, fail, data):
        self.in_step = True
        plan = self.scheduler.schedule()
        if plan is None:
            self._receive(self.scheduler.take_outputs())
            self.in_step = False
            return
        self._check()
        if data is not None and self.requests:
            self._abort(data.draw(st.sampled_from(sorted(self.requests))))
            self._check()
        self.failures_in_a_row = self.failures_in_a_row + 1 if fail else 0
        self._receive(self.scheduler.apply(self.executor.execute(plan, fail)))
        self.in_step = False

    def _abort(self, request_id):
        self.scheduler.abort([request_id])
        request, _ = self.requests.pop(request_id)
        for index in range(request.n):
            self.received.pop((request_id, index), None)

    def _receive(self, outputs: list[EngineOutput]):
        for output in outputs:
            key = output.request_id, output.index
            if key not in self.received:
                assert output.request_id not in self.requests, "output of an unknown sequence"
                continue
            request, expected = self.requests[output.request_id]
            tokens = self.received[key]
            if not tokens and output.new_token_ids:
                usage = output.usage
                assert usage is not None and usage.computed > 0
                assert usage.cached_tokens(len(request.prompt_token_ids)) < len(request.prompt_token_ids)
            tokens.extend(output.new_token_ids)
            wanted = answer(expected, request.prompt_token_ids, 7 + output.index, len(tokens))
            assert tokens == wanted, f"{key} got {tokens}, wants {wanted}"
            if output.finish_reason:
                if output.finish_reason == "error":
                    assert self.scheduler.counters.failed_steps >= 2
                self._remember(request.prompt_token_ids + tokens, request.adapter_id, request.cache_salt)
                del self.received[key]
                if not any(name == output.request_id for name, _ in self.received):
                    del self.requests[output.request_id]

    @invariant()
    def consistent(self):
        if hasattr(self, "kv"):
            self._check()

    def _check(self):
        self.kv.check(self.scheduler.caches())
        self.scheduler.slots.check()
        assert self.scheduler.slots.num_users == sum(s.slot >= 0 for s in self.scheduler.running)
        running = self.scheduler.running
        assert len({s.sequence_id for s in running}) == len(running) <= self.config.max_num_seqs

    def teardown(self):
        if not hasattr(self, "kv") or self.in_step:
            return  # never started, or a step raised: that is the failure to report
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self._step(False, None)
        assert not self.scheduler.has_work, "requests never finish"
        assert not self.received and not self.requests, "an answer is missing"
        assert self.kv.tree.num_leases == 0
        assert self.kv.flush(), "blocks leaked"


machine_settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = machine_settings


class MixedTreeMachine(SchedulerMachine):
    """The same under the modes in which agents read what agents wrote."""

    modes = CONTROLS


TestMixedTreeMachine = MixedTreeMachine.TestCase
TestMixedTreeMachine.settings = machine_settings
