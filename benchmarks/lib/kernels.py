"""`make bench-kernels`: attention on the CPU against its floor and against private caches.

Caches of all layers are run through in rotation, as a model does, so that no layer's K and V are still in a core's
cache when they are read again. Contenders take turns: each round runs every one of them once, and ratios are medians
of the rounds' ratios. What the floor's rates are measured by takes part, so that a moment in which the whole machine is
slow says as much as any other. A step is the backend's `plan` and `run` in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from benchmarks.lib.cards import Rates
from benchmarks.lib.common import Line, median
from benchmarks.lib.problem import PrivateCaches, Problem
from benchmarks.lib.roofline import Work, attention_work
from benchmarks.lib.steps import SHAPES, Step, decode_step, prefill_step
from benchmarks.lib.text import columns
from benchmarks.lib.timing import Step as TimedStep
from benchmarks.lib.timing import Times, seconds_of, take_turns

SECTION = "kernels"
BASE_RATIO = 1.7
GROUPED_RATIO = 2.5
CONTEXT = 4000
PRIVATE = 64
AGENTS = 8
RANK = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """`context` tokens shared, `private` tokens of each agent, `layers` in rotation, `rounds` of every contender."""

    context: int = CONTEXT
    private: int = PRIVATE
    layers: int = 30
    rounds: int = 15


QUICK = Sizes(context=256, private=16, layers=2, rounds=3)


class Ceilings(Protocol):
    """The machine's rates: steps to be timed, and what their seconds say. See `CpuCeilings`."""

    steps: dict[str, TimedStep]

    def rates(self, seconds: Mapping[str, float]) -> Rates: ...


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: what was run, its work, the times, and the rates of each round."""

    name: str
    work: Work
    times: Times
    plan_s: float
    rates: tuple[Rates, ...]

    @property
    def floor_s(self) -> float:
        return median([self.work.floor(rates) for rates in self.rates])

    @property
    def is_set_by_memory(self) -> bool:
        """Whether it is bytes, and not products, that set the floor in most rounds."""
        return median([self.work.total_bytes / rates.bytes_per_s / self.work.floor(rates) for rates in self.rates]) >= 1

    def over_floor(self, contender: str) -> float:
        """Median over the rounds of the time over that round's floor."""
        pairs = zip(self.times.seconds[contender], self.rates, strict=True)
        return median([seconds / self.work.floor(rates) for seconds, rates in pairs])


class Bench:
    """Cases on the small model's shape in fp32. `backend` is measured, `beside` (None: nothing) runs beside it."""

    def __init__(self, sizes: Sizes, ceilings: Ceilings, backend: str | None, beside: str | None) -> None:
        self.sizes, self.ceilings, self.spec = sizes, ceilings, SHAPES["smollm2-135m"]
        self.backend, self.beside = backend, beside
        self.name = self._problem(decode_step(1, 0, 16, rank=0), layers=1).backend.name
        self.beside = None if beside == self.name else beside

    def _problem(self, step: Step, *, agents: int = 0, rank: int = 0, layers: int) -> Problem:
        return Problem(self.spec, step, layers=layers, backend=self.backend, rank=rank, num_adapters=agents)

    def case(self, name: str, step: Step, *, agents: int = 0, rank: int = 0, private: int = 0) -> Case:
        """Measure one step; with `private`, beside it as many rows as `agents` on private caches of that length."""
        layers = self.sizes.layers
        problem = self._problem(step, agents=agents, rank=rank, layers=layers)
        contenders: dict[str, tuple[Callable[[], object], int]] = {self.name: (problem.run_step, layers)}
        if self.beside is not None:
            contenders[self.beside] = (problem.with_backend(self.beside).run_step, layers)
        if private:
            few = max(1, layers // agents)
            caches = PrivateCaches(self.spec, agents, private, layers=few)
            caches.choose_faster()
            contenders["private"] = (caches.run_step, few)
        contenders |= {step: (action, 1) for step, action in self.ceilings.steps.items()}
        times = take_turns(contenders, self.sizes.rounds)
        rates = [
            self.ceilings.rates({step: times.seconds[step][i] for step in self.ceilings.steps})
            for i in range(self.sizes.rounds)
        ]
        plan = median([seconds_of(problem.plan) for _ in range(self.sizes.rounds)])
        rows = list(range(problem.batch.host.num_rows))
        work = attention_work(problem.batch, self.spec, rows, problem.dtype.itemsize)
        return Case(name, work, times, plan, tuple(rates))

    def base_only(self) -> Case:
        """One base row, all of its context in base blocks."""
        step = decode_step(1, self.sizes.context - 16, 16, rank=0)
        return self.case(f"base row, {self.sizes.context:,} tokens", step)

    def agents(self, count: int, rank: int = RANK, private: bool = True, shuffled: bool = False) -> Case:
        """`count` agents on one prefix, each with a residual of `rank` for K and V and a private tail."""
        sizes = self.sizes
        step = decode_step(count, sizes.context, sizes.private, rank=rank, shuffled=shuffled)
        name = f"{count} agent{'s' if count > 1 else ''}, rank {rank}, {sizes.context:,} shared + {sizes.private}"
        name += ", blocks in random order" if shuffled else ""
        length = sizes.context + sizes.private if private else 0
        return self.case(name, step, agents=count, rank=rank, private=length)

    def base_rows(self, count: int) -> Case:
        """`count` base rows on one prefix, each with a tail of its own."""
        step = decode_step(count, self.sizes.context, self.sizes.private, rank=0)
        return self.case(f"{count} base rows, {self.sizes.context:,} shared + {self.sizes.private}", step)

    def suffix(self, queries: int) -> Case:
        """An adapter's own tokens behind a shared prefix that its residual completes."""
        step = prefill_step(queries, self.sizes.context, suffix=True)
        return self.case(f"prefill of {queries} behind {self.sizes.context:,}, rank {RANK}", step, agents=1, rank=RANK)

    def chunk(self, queries: int) -> Case:
        """A base chunk in the middle of a document."""
        step = prefill_step(queries, self.sizes.context // 2 // 16 * 16)
        return self.case(f"base prefill of {queries} behind {self.sizes.context // 2 // 16 * 16:,}", step)


def run(bench: Bench, *, only_claims: bool = False) -> tuple[list[Line], list[Case]]:
    """(the lines with a requirement, all cases)."""
    base, grouped = bench.base_only(), bench.agents(AGENTS)
    lines = [
        _floor_line("base-only decode", base, bench.name, BASE_RATIO),
        _floor_line(f"grouped decode of {AGENTS} agents", grouped, bench.name, GROUPED_RATIO),
        _private_line(grouped, bench.name),
    ]
    cases = [base, grouped]
    if not only_claims:
        cases += [bench.agents(count) for count in (1, 2, 4, 16)]
        cases += [bench.agents(AGENTS, rank, private=False) for rank in (8, 64)]
        cases += [bench.agents(AGENTS, shuffled=True, private=False), bench.base_rows(AGENTS)]
        cases += [bench.suffix(16), bench.suffix(64), bench.chunk(512)]
    return lines, cases


def _floor_line(what: str, case: Case, backend: str, limit: float) -> Line:
    over = case.over_floor(backend)
    return Line(
        SECTION,
        f"{what} ({case.name}) over its floor",
        f"{over:.2f}x ({1e3 * case.times.median(backend):.2f} of {1e3 * case.floor_s:.2f} ms a layer)",
        f"<= {limit}x",
        over <= limit,
        over,
        {"seconds": case.times.seconds, "bytes": case.work.bytes, "flops": case.work.flops, "floor_s": case.floor_s},
    )


def _private_line(case: Case, backend: str) -> Line:
    ratio = case.times.ratio("private", backend)
    ours, theirs = (1e3 * case.times.median(name) for name in (backend, "private"))
    return Line(
        SECTION,
        f"the same against {AGENTS} private caches through torch SDPA",
        f"{ratio:.2f}x as fast ({ours:.2f} of {theirs:.2f} ms a layer)",
        ">= 1x",
        ratio >= 1,
        ratio,
        {"seconds": case.times.seconds},
    )


def table(cases: list[Case], backend: str, beside: str | None) -> str:
    """All cases: time of a layer, its floor and what sets it, the plan, and what ran beside it."""
    head = ["case, ms a layer", backend, "floor", "set by", "over floor", "plan a step"]
    rows = []
    for case in cases:
        by = "memory" if case.is_set_by_memory else "products"
        row = [case.name, _ms(case.times.median(backend)), _ms(case.floor_s), by]
        row += [f"{case.over_floor(backend):.2f}x", _ms(case.plan_s)]
        for other in filter(None, (beside, "private")):
            there = other in case.times.seconds
            row += [
                _ms(case.times.median(other)) if there else "",
                f"{case.times.ratio(other, backend):.2f}x" if there else "",
            ]
        rows.append(row)
    for other in filter(None, (beside, "private SDPA")):
        head += [other, f"over {backend}"]
    return columns(head, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def as_dict(case: Case) -> dict[str, object]:
    """For the JSON file."""
    return {
        "name": case.name,
        "seconds": case.times.seconds,
        "floor_s": case.floor_s,
        "plan_s": case.plan_s,
        "bytes": case.work.bytes,
        "flops": case.work.flops,
    }
