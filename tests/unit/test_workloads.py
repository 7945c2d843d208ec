"""The pure parts of the workloads: traces, counted tokens, percentiles, what is required, the picture."""

from __future__ import annotations

import argparse
import itertools
import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib import workload_claims, workload_report
from benchmarks.lib.machine import MachineRates
from benchmarks.lib.svg import Bar, bar_charts
from benchmarks.lib.workload_options import WorkloadOptions, add_arguments, parse
from benchmarks.lib.workload_report import Report, Row
from benchmarks.peers.registry import chosen
from benchmarks.workloads.client import Outcome
from benchmarks.workloads.scenarios import DEFAULTS, QUICK, SCENARIOS, Sizes
from benchmarks.workloads.summary import percentile, summarise
from benchmarks.workloads.trace import Session, Step, Tokens, Trace, prefill_tokens, walk

RATES = MachineRates(20.0, 200.0, 2, "a processor", "2.13.0")


def text(num_tokens: int, key: int) -> Tokens:
    rng = random.Random(key)
    return tuple(rng.randrange(10, 49000) for _ in range(num_tokens))


def make(name: str, **sizes: int) -> tuple[Trace, ...]:
    return SCENARIOS[name](replace(QUICK[name], **sizes), text)


@pytest.mark.parametrize("name", SCENARIOS)
def test_traces_are_functions_of_their_seed(name: str) -> None:
    assert make(name) == make(name)
    assert make(name, seed=5) != make(name)
    for trace in make(name):
        agents = {step.agent for step, _, _ in walk(trace)}
        assert agents <= {None} if name == "plain" else agents <= set(range(trace.num_agents))


def test_fanout_asks_the_same_both_ways() -> None:
    apart, together = make("fanout", agents=4, tokens=100)
    assert (len(apart.sessions), len(together.sessions)) == (1, 4)
    for trace in (apart, together):
        prompts = [prompt for _, prompt, _ in walk(trace)]
        assert len({prompt[:100] for prompt in prompts}) == 1 and len(set(prompts)) == 4
        assert {len(prompt) for prompt in prompts} == {148}
    assert next(walk(apart))[1][:100] != next(walk(together))[1][:100], "the second part would find the first one's"


@pytest.mark.parametrize(("tokens", "total", "ratio"), [(5000, 5008, 2.39), (9100, 9104, 2.63), (17300, 17296, 2.80)])
def test_lragent_trace_is_the_published_one(tokens: int, total: int, ratio: float) -> None:
    (trace,) = make("lragent", tokens=tokens)
    assert trace.num_requests == 17 and trace.longest == total
    assert [step.agent for step, _, _ in walk(trace)] == [0, 0, 1] * 5 + [2, 2]
    counted = prefill_tokens(trace, shared=False) / prefill_tokens(trace, shared=True)
    assert round(counted, 2) == ratio


def test_turns_share_96_percent() -> None:
    (trace,) = SCENARIOS["turns"](DEFAULTS["turns"], text)
    prompts = [prompt for _, prompt, _ in walk(trace)]
    new = sum(len(step.tokens) + step.max_tokens for step, _, _ in walk(trace))
    assert len(prompts) == 43
    assert 1 - new / sum(map(len, prompts)) == pytest.approx(0.96, abs=0.005)
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(prompts))


def test_open_loop_arrives_by_its_rate_and_prefers_first_adapters() -> None:
    (trace,) = make("open", agents=64, requests=2000, tokens=1)
    starts = [session.start_s for session in trace.sessions]
    assert starts == sorted(starts) and starts[-1] == pytest.approx(2000 / QUICK["open"].requests_per_s, rel=0.1)
    counts = [sum(step.agent == agent for step, _, _ in walk(trace)) for agent in range(64)]
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.3) and counts[0] > 20 * counts[63]


def test_counted_tokens_of_a_trace_by_hand() -> None:
    a, b = text(100, 1), text(40, 2)
    steps = (Step(0, a, 4), Step(1, b, 4, keep=100), Step(0, b, 4, keep=100), Step(None, b, 4, keep=100))
    trace = Trace("by hand", 2, (Session(steps),))
    assert prefill_tokens(trace, shared=False) == 100 + 140 + 40 + 140
    # Fork points at 32 and 64. The base model then finds the 64 tokens in front of the latest one.
    assert prefill_tokens(trace, shared=True) == 100 + (140 - 32) + (140 - 64) + (140 - 64)


def test_own_answers_are_found_but_for_their_last_token() -> None:
    trace = Trace("one agent", 1, (Session((Step(0, text(50, 1), 10), Step(0, text(5, 2), 10))),))
    assert prefill_tokens(trace, shared=False) == 50 + 5 + 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_percentiles(values: list[float]) -> None:
    ordered = sorted(values)
    assert percentile(values, 0) == ordered[0] and percentile(values, 100) == ordered[-1]
    assert ordered[0] <= percentile(values, 50) <= percentile(values, 95) <= ordered[-1]


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([], 50) != percentile([], 50)


def outcome(sent: float, first: float, last: float, **fields: object) -> Outcome:
    gaps = [(last - first) / 3] * 3
    return replace(Outcome(0, 100, sent, first, last, gaps, 4, 60, (1, 2, 3, 4)), **fields)  # type: ignore[arg-type]


def test_summary_counts_only_what_was_answered() -> None:
    failed = outcome(0, 0, 0, error="status 500", cached_tokens=None)
    found = summarise([outcome(1, 2, 5), outcome(3, 6, 9), failed], requests=4)
    assert (found.requests, found.failed, found.errors) == (4, 2, ("status 500",))
    assert (found.seconds, found.ttft_p50_s, found.ttft_sum_s) == (8, 2, 4)
    assert (found.output_tokens, found.output_per_s) == (8, 1.0)
    assert (found.prompt_tokens, found.cached_tokens, found.itl_p50_s) == (200, 120, 1.0)
    assert summarise([outcome(1, 2, 5, cached_tokens=None)], 1).cached_tokens is None


def report(workload: str, *rows: Row, **sizes: int) -> Report:
    sized = replace(DEFAULTS[workload], **sizes)
    options = WorkloadOptions(workload, {}, sized, 60, Path(), quick=False, anyway=False)
    found = Report(options, SCENARIOS[workload](sized, text), RATES, 8, {})
    found.rows = list(rows)
    return found


def row(peer: str, part: str, *outcomes: Outcome) -> Row:
    return Row(peer, part, summarise(outcomes, len(outcomes)), outcomes, 1 << 30, 1 << 20, 2.0, 3.0, (8, 8))


def test_fanout_is_judged_against_the_best_other_server() -> None:
    def rows(peer: str, first: float, later: float) -> list[Row]:
        apart = [outcome(0, first, first + 1), outcome(first + 1, first + 1 + later, first + 2 + later)]
        together = [outcome(0, first, first + 1), outcome(0, first + later, first + later + 1)]
        return [row(peer, "one after another", *apart), row(peer, "together", *together)]

    found = report("fanout", *rows("forkkv", 2, 0.1), *rows("peft", 3, 3), *rows("vllm", 20, 20), tokens=64, agents=2)
    found.tail_forward_s = 0.05
    lines = {line.name: line for line in workload_claims.lines(found)}
    assert [round(line.value, 3) for line in lines.values()] == [round(4.1 / 8, 3), round(3.1 / 7, 3), 2.0, 0.033, 1.0]
    assert [line.passed for line in lines.values()] == [False, True, False, True, True]
    assert "peft" in next(iter(lines.values())).measured


def test_lragent_is_judged_by_its_counted_tokens() -> None:
    found = report("lragent", row("forkkv", "5.0k", outcome(0, 2, 5)), row("forkkv-none", "5.0k", outcome(0, 4, 7)))
    ttft, throughput = workload_claims.lines(found)
    assert ttft.value == 2.0 and not ttft.passed and "counted 2.39; LRAgent reports 2.27" in ttft.measured
    assert throughput.value == 7 / 5 and throughput.passed and "predicted 1.5" in throughput.measured


def test_a_server_that_failed_or_is_missing_is_told_and_not_judged() -> None:
    broken = row("forkkv-none", "5.0k", outcome(0, 4, 7), outcome(0, 0, 0, error="cut off at the time limit"))
    missing = Row("vllm", "all", note="not available: not set up")
    found = report("lragent", row("forkkv", "5.0k", outcome(0, 2, 5)), broken, missing)
    assert workload_claims.lines(found) == []
    table = workload_report.text(found, [])
    assert "1 of 2 not answered" in table and "not available: not set up" in table and "ratio 2.39" in table


def test_disturbed_rows_are_told_and_judged_only_anyway() -> None:
    rows = [row("forkkv", "5.0k", outcome(0, 2, 5)), row("forkkv-none", "5.0k", outcome(0, 4, 7))]
    found = report("lragent", rows[0], replace(rows[1], other_load=50.0))
    assert workload_claims.lines(found) == []
    assert "disturbed: others used 50 % of a core" in workload_report.text(found, [])
    found.options = replace(found.options, anyway=True)
    assert len(workload_claims.lines(found)) == 2


def test_of_several_rounds_the_median_counts_unless_one_failed() -> None:
    runs = [row("forkkv", "5.0k", outcome(0, 1, seconds)) for seconds in (9, 5, 7, 6)]
    assert workload_report.typical(runs) == [runs[3]]
    disturbed = [replace(run, other_load=50.0) for run in runs[1:]]
    assert workload_report.typical([*disturbed, runs[0]]) == [runs[0]]
    assert workload_report.typical(disturbed) == [disturbed[2]]
    broken = row("forkkv", "5.0k", outcome(0, 0, 0, error="refused"))
    assert workload_report.typical([*runs, broken]) == [broken]
    apart = row("forkkv", "apart", outcome(0, 1, 2))
    assert workload_report.typical([apart, runs[0], apart]) == [apart, runs[0]]


def test_the_picture_is_well_formed() -> None:
    bars = [Bar("a & <b>", 2.0, "2.00", True), Bar("c", None, "not available", False), Bar("d", 4.0, "4.00", False)]
    root = ElementTree.fromstring(bar_charts("title", [("chart", bars), ("empty", [])]))
    widths = [float(element.get("width", "")) for element in root.iter() if element.tag.endswith("rect")]
    assert widths[1] == pytest.approx(widths[2] / 2)
    assert "a & <b>" in {element.text for element in root.iter()}


def test_choice_of_peers() -> None:
    assert list(chosen("all", adapters=True)) == ["forkkv", "forkkv-none", "peft", "llama-server", "vllm"]
    assert "forkkv-none" not in chosen("all", adapters=False) and "llama-server-q8" in chosen("all", adapters=False)
    assert list(chosen("ours", adapters=True)) == ["forkkv", "forkkv-none"]
    assert list(chosen("vllm, forkkv", adapters=True)) == ["forkkv", "vllm"]
    with pytest.raises(ValueError, match="no peer sglang"):
        chosen("sglang", adapters=True)


def parsed(*arguments: str) -> WorkloadOptions | None:
    parser = argparse.ArgumentParser()
    for flag in ("--quick", "--anyway"):
        parser.add_argument(flag, action="store_true")
    add_arguments(parser)
    return parse(parser, parser.parse_args(arguments))


def test_options() -> None:
    assert parsed() is None
    found = parsed("--workload", "fanout", "--agents", "4", "--tokens", "2000", "--peers", "forkkv,peft")
    assert found is not None and found.sizes == Sizes(4, 2000) and list(found.peers) == ["forkkv", "peft"]
    given = parsed("--workload", "turns", "--url", "http://127.0.0.1:1", "--names", "b,x,y")
    assert given is not None and given.sizes.agents == 2 and list(given.peers) == ["given"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workload", "lragent", "--agents", "2"),
        ("--workload", "plain", "--agents", "2"),
        ("--workload", "fanout", "--agents", "0"),
        ("--workload", "turns", "--tokens", "400"),
        ("--workload", "fanout", "--peers", "nobody"),
        ("--workload", "fanout", "--rounds", "0"),
        ("--workload", "fanout", "--url", "http://127.0.0.1:1"),
        ("--workload", "lragent", "--url", "http://127.0.0.1:1", "--names", "b,x"),
    ],
)
def test_contradicting_options_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)


def test_default_sizes_exist_for_every_workload() -> None:
    assert SCENARIOS.keys() == DEFAULTS.keys() == QUICK.keys()
    assert DEFAULTS["fanout"] == Sizes(8, 4000) and DEFAULTS["open"].agents == 64
