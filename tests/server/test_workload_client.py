"""The workloads' load client against the real server: what it counts is what the server did."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib.machine import MachineRates
from benchmarks.lib.workload import run
from benchmarks.lib.workload_options import WorkloadOptions
from benchmarks.peers.given_server import GivenServer
from benchmarks.workloads.client import Target, by_lora_name, by_model, replay
from benchmarks.workloads.scenarios import QUICK, Sizes, fanout
from benchmarks.workloads.trace import Session, Step, Tokens, Trace
from tests.server.conftest import RealServer

pytestmark = pytest.mark.e2e
AGENTS = ("fork1", "fork2", "fork3")


def text(num_tokens: int, key: int) -> Tokens:
    return tuple(200 + (key * 37 + i * 11) % 4000 for i in range(num_tokens))


def encode(text: str) -> list[int]:
    return [7] * 99


def make_target(real: RealServer, **changes: object) -> Target:
    target = Target(real.url, by_model("tiny", AGENTS), encode, {"return_token_ids": True})
    return replace(target, **changes)  # type: ignore[arg-type]


def test_fanout_shares_and_is_counted(real: RealServer) -> None:
    apart, together = fanout(replace(QUICK["fanout"], tokens=160), text)
    for trace in (apart, together):
        outcomes = asyncio.run(replay(trace, make_target(real)))
        assert [outcome.error for outcome in outcomes] == [None] * 3
        for outcome in outcomes:
            assert outcome.prompt_tokens == 208 and outcome.output_tokens == len(outcome.token_ids) == 8
            # The first chunk may hold several tokens, which have no gap between them.
            assert outcome.sent_s < outcome.first_s <= outcome.last_s and 1 <= len(outcome.gaps_s) <= 7
            assert sum(outcome.gaps_s) == pytest.approx(outcome.last_s - outcome.first_s)
        cached = [outcome.cached_tokens for outcome in outcomes]
        assert sorted(cached, key=lambda tokens: tokens or 0) == [0, 144, 144]


def test_answers_enter_the_next_prompt(real: RealServer) -> None:
    steps = (Step(0, text(40, 500), 24), Step(0, text(10, 501), 4), Step(None, text(5, 502), 4, keep=20))
    first, second, base = asyncio.run(replay(Trace("chain", 1, (Session(steps),)), make_target(real)))
    assert (first.prompt_tokens, second.prompt_tokens, base.prompt_tokens) == (40, 74, 25)
    again = {"model": "fork1", "prompt": list(text(40, 500)), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    told = real.http.post("/v1/completions", json={**again, "return_token_ids": True}).json()["choices"][0]
    assert list(first.token_ids) == told["token_ids"] and not first.retold


def test_lora_name_chooses_the_adapter_and_text_stands_in_for_ids(real: RealServer) -> None:
    trace = Trace("single", 3, (Session((Step(1, text(30, 600), 6),)),))
    target = make_target(real)
    (by_its_model,) = asyncio.run(replay(trace, target))
    named = replace(target, choose=by_lora_name("tiny", AGENTS))
    assert asyncio.run(replay(trace, named))[0].token_ids == by_its_model.token_ids
    (retold,) = asyncio.run(replay(trace, replace(named, extra={})))
    assert retold.retold and retold.token_ids == (7,) * 6 and retold.output_tokens == 6


def test_refusals_and_time_limits_become_errors(real: RealServer) -> None:
    trace = Trace("single", 3, (Session((Step(2, text(30, 700), 2), Step(2, text(5, 701), 2))),))
    unknown = make_target(real, choose=by_model("tiny", ["nobody"] * 3))
    (refused,) = asyncio.run(replay(trace, unknown))
    assert refused.error is not None and refused.error.startswith("status 404")
    long = Trace("long", 3, (Session((Step(0, text(30, 702), 3000),)),))
    (late,) = asyncio.run(replay(long, make_target(real), limit_s=0.3))
    assert late.error == "cut off at the time limit"


def test_a_whole_run_against_a_given_server(
    real: RealServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gate, warm-up, both parts, table, plot and JSON; two runs against one cache would find each other's documents."""
    given = GivenServer(real.url, ("tiny", "fork1", "fork2"), "lora_name")
    nobody = GivenServer(real.url, ("tiny", "nobody", "fork2"), "model")
    sizes = Sizes(agents=2, tokens=128, max_tokens=4, seed=40)
    options = WorkloadOptions(
        "fanout", {"given": given, "nobody": nobody}, sizes, 60, tmp_path, quick=True, anyway=False
    )
    assert run(options, MachineRates(20.0, 200.0, 2, "a processor", "2.13.0"))
    table = capsys.readouterr().out
    assert "8+8 of 8" in table and "112/352" in table and "not available: status 404" in table
    assert "112/352" in (tmp_path / "table.md").read_text() and "<svg" in (tmp_path / "plot.svg").read_text()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [len(row["outcomes"]) for row in rows] == [2, 2, 0]
