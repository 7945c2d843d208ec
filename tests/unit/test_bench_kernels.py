"""What `benchmarks/bench_kernels.py` measures is the right computation, and its lines judge what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from benchmarks.lib import kernels
from benchmarks.lib.cards import Rates
from benchmarks.lib.problem import PrivateCaches, Problem
from benchmarks.lib.rates import CpuCeilings
from benchmarks.lib.roofline import Work
from benchmarks.lib.steps import SHAPES, decode_step, prefill_step
from benchmarks.lib.timing import Step, Times

SPEC = SHAPES["tiny"]
SIZES = kernels.Sizes(context=64, private=8, layers=1, rounds=2)


@pytest.mark.parametrize(
    ("step", "adapters"),
    [
        (decode_step(3, 64, 5), 3),
        (decode_step(3, 64, 5, grouped=False), 3),
        (decode_step(3, 64, 5, shuffled=True), 3),
        (prefill_step(20, 64, suffix=True), 1),
        (prefill_step(20, 64), 0),
    ],
)
def test_problems_compute_what_the_reference_does(step: object, adapters: int) -> None:
    problem = Problem(SPEC, step, layers=2, backend="torch", rank=16 if adapters else 0, num_adapters=adapters)  # type: ignore[arg-type]
    expected = problem.with_backend("reference").run_step()
    torch.testing.assert_close(problem.run_step(), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(problem.run_layer(0, problem.plan()), expected), "layers differ"


def test_residuals_matter() -> None:
    """A problem whose residual did not reach the result would measure something cheaper."""
    problem = Problem(SPEC, decode_step(2, 64, 5), layers=1, backend="torch", rank=16, num_adapters=2)
    with_residual = problem.run_step()
    problem.lora = None
    assert float((with_residual - problem.run_step()).abs().max()) > 0.01


def test_private_caches_attend_to_all_tokens_both_ways() -> None:
    caches = PrivateCaches(SPEC, 3, 20, layers=1)
    k, v, q = caches.k[0], caches.v[0], caches.q[0]
    probs = torch.softmax(torch.einsum("akgd,aktd->akgt", q, k) * SPEC.head_dim**-0.5, dim=-1)
    expected = torch.einsum("akgt,aktd->akgd", probs, v)
    torch.testing.assert_close(caches._heads_as_queries(0), expected)
    torch.testing.assert_close(caches._grouped_heads(0), expected)


class Fixed:
    """A machine whose rates are known."""

    def __init__(self, rates: Rates) -> None:
        self.steps: dict[str, Step] = {}
        self._rates = rates

    def rates(self, seconds: Mapping[str, float]) -> Rates:
        return self._rates


def test_a_slow_moment_of_the_machine_changes_no_ratio() -> None:
    ceilings = CpuCeilings(num_bytes=1 << 12, size=8)
    calm, slow = (ceilings.rates({"copy": s, "read": s, "product": s}) for s in (1.0, 3.0))
    case = kernels.Case("any", Work({"k": 1000}, {}), Times({"x": [2.0, 6.0, 2.0]}), 0.0, (calm, slow, calm))
    assert case.over_floor("x") == pytest.approx(2.0 / case.floor_s) and case.is_set_by_memory


def test_lines_compare_with_floor_and_private_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "smollm2-135m", SPEC)
    slow = Rates("slower than anything", 1e3, 1e3)
    lines, cases = kernels.run(kernels.Bench(SIZES, Fixed(slow), "torch", "reference"), only_claims=True)
    assert [line.passed for line in lines[:2]] == [True, True]
    assert all("private" in case.times.seconds for case in cases[1:])
    assert set(cases[0].times.seconds) == {"torch", "reference"}
    fast = replace(slow, bytes_per_s=1e15, flop_per_s=1e18)
    lines, cases = kernels.run(kernels.Bench(SIZES, Fixed(fast), "torch", None), only_claims=True)
    assert [line.passed for line in lines[:2]] == [False, False]
    grouped = cases[1]
    assert lines[2].passed == (grouped.times.ratio("private", "torch") >= 1)
    assert "8 agents" in kernels.table(cases, "torch", None)


def test_ratios_are_medians_of_pairs() -> None:
    """A round in which the whole machine was slow says as much as any other."""
    times = Times({"a": [1.0, 10.0, 2.0], "b": [2.0, 20.0, 1.0]})
    assert times.ratio("a", "b") == 0.5
    assert times.median("a") == 2.0
