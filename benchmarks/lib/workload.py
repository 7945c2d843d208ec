"""`run.py --workload`: one workload against several servers, one at a time: table, plot, JSON."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.lib import workload_claims, workload_report
from benchmarks.lib.common import Workspace
from benchmarks.lib.machine import MachineRates
from benchmarks.lib.process import Server
from benchmarks.lib.workload_options import WorkloadOptions
from benchmarks.lib.workload_report import Report, Row
from benchmarks.peers.site import Peer, Running, Site
from benchmarks.workloads.client import Outcome, Target, replay
from benchmarks.workloads.scenarios import SCENARIOS
from benchmarks.workloads.summary import summarise
from benchmarks.workloads.trace import Session, Step, Tokens, Trace, shared_tokens

GATE_TOKENS = 8
GATE_AGREE = 4
"""Leading greedy tokens, of `GATE_TOKENS`, in which a peer has to agree with the first server before it is timed."""
WARM_UP_TOKENS = 512
_SAMPLE_S = 1.0


def run(options: WorkloadOptions, rates: MachineRates) -> bool:
    """Measure, print and write everything; whether all that is required of this workload holds, and every request to
    our own server, or to the given one, was answered."""
    with tempfile.TemporaryDirectory(prefix="forkkv-workload-") as folder:
        work = Workspace(Path(folder))
        traces = SCENARIOS[options.workload](options.sizes, work.document)
        site = Site(work, traces[0].num_agents, max(WARM_UP_TOKENS + 64, *(trace.longest for trace in traces)))
        descriptions = {name: peer.description for name, peer in options.peers.items()}
        report = Report(options, traces, rates, GATE_TOKENS, descriptions)
        gate = _Gate(work.document(40, 900), site.agents > 0)
        rounds: dict[str, list[Row]] = {name: [] for name in options.peers}
        for _ in range(options.rounds):
            for name, peer in options.peers.items():
                began = time.monotonic()
                rounds[name] += _measure(name, peer, site, report, gate)
                print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        report.rows = [row for rows in rounds.values() for row in workload_report.typical(rows)]
    lines = workload_claims.lines(report)
    print("\n" + workload_report.text(report, lines))
    workload_report.write(report, options.out, lines)
    print(f"\nwritten to {options.out}")
    ours = [row.summary for row in report.rows if row.peer == "given" or row.peer.startswith("forkkv")]
    return all(line.passed for line in lines) and all(summary and not summary.failed for summary in ours)


def _measure(name: str, peer: Peer, site: Site, report: Report, gate: _Gate) -> list[Row]:
    """Rows of one server; one row with the reason where it cannot be measured."""
    if reason := peer.missing():
        return [Row(name, "all", note=f"not available: {reason}")]
    try:
        with peer.start(site, site.work.folder / f"{name}.log") as server:
            agreed = gate.agreement(server.target)
            if min(agreed) < GATE_AGREE:
                return [Row(name, "all", gate=agreed, note="not timed: it answers like another model")]
            _warm_up(server.target, site)
            rows = [_replay(name, trace, server, agreed, report.options.limit_s) for trace in report.traces]
            if name == "peft" and report.options.workload == "fanout" and report.usable(rows[-1]):
                report.tail_forward_s = _tail_forward(report.traces[-1], server.target)
            return rows
    except (RuntimeError, OSError, httpx.HTTPError, psutil.Error) as error:
        traceback.print_exc()
        words = str(error).strip().splitlines() or [type(error).__name__]
        return [Row(name, "all", note=f"not available: {words[-1]}"[:160])]


def _replay(name: str, trace: Trace, server: Running, gate: tuple[int, ...], limit_s: float) -> Row:
    server.flush()
    own = server.server
    others = None if own is None else _others_cpu_seconds(own)
    began, client = time.monotonic(), time.process_time()
    with _peaks(server) as peaks:
        outcomes = asyncio.run(replay(trace, server.target, limit_s))
    percent = 100 / (time.monotonic() - began)
    summary = summarise(outcomes, trace.num_requests)
    return Row(
        peer=name,
        part=trace.part,
        summary=summary,
        outcomes=tuple(outcomes),
        peak_rss=peaks.rss,
        peak_kv=peaks.kv,
        client_load=(time.process_time() - client) * percent,
        other_load=None if own is None or others is None else (_others_cpu_seconds(own) - others) * percent,
        gate=gate,
        note="; ".join(summary.errors)[:160],
    )


def _others_cpu_seconds(server: Server) -> float:
    """CPU seconds of the machine so far that neither this process nor the server used."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = machine.user + machine.nice + machine.system + machine.irq + machine.softirq
    return float(busy - own.user - own.system - server.cpu_seconds())


def _one(agent: int | None, prompt: Tokens, max_tokens: int, target: Target) -> Outcome:
    """The outcome of a single request. Raises `RuntimeError` if it is not answered."""
    trace = Trace("single", 0, (Session((Step(agent, prompt, max_tokens),)),))
    (outcome,) = asyncio.run(replay(trace, target, 600))
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    return outcome


class _Gate:
    """Greedy answers to one short prompt by the base model and by the first adapter: those of the first server that is
    asked are the measure of the others, so that no other model is timed."""

    def __init__(self, prompt: Tokens, with_adapter: bool):
        self.prompt = prompt
        self.agents = (None, 0) if with_adapter else (None,)
        self.expected: list[Tokens] = []

    def agreement(self, target: Target) -> tuple[int, ...]:
        """Leading tokens of each answer that agree."""
        answers = [_one(agent, self.prompt, GATE_TOKENS, target).token_ids for agent in self.agents]
        self.expected = self.expected or answers
        return tuple(map(_leading, answers, self.expected))


def _leading(one: Tokens, other: Tokens) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _warm_up(target: Target, site: Site) -> None:
    """A longer prompt for the base model, a short one for every agent; no other request begins like them."""
    _one(None, site.work.document(WARM_UP_TOKENS, 901), 4, target)
    for agent in range(site.agents):
        _one(agent, site.work.document(32, 902 + agent), 2, target)


def _tail_forward(trace: Trace, target: Target) -> float:
    """Time to first token, over HTTP, of the first agent's prompt with a new tail, as long as the one our server's
    adapters run behind the fork point, when all in front of it is cached. Median of three."""
    (step,) = trace.sessions[0].steps
    shared = shared_tokens(step.tokens)
    times = []
    for number in range(3):
        tail = tuple(2000 + number * 100 + i for i in range(len(step.tokens) - shared))
        times.append(_one(step.agent, step.tokens[:shared] + tail, 1, target).ttft_s)
    return sorted(times)[1]


# ---- memory -----------------------------------------------------------------------------------------------------


@dataclass
class _Peaks:
    rss: int | None = None
    kv: float | None = None

    def sample(self, server: Running) -> None:
        try:
            if server.server is not None:
                self.rss = max(self.rss or 0, server.server.rss())
            held = server.kv_bytes()
        except (psutil.Error, httpx.HTTPError, RuntimeError):
            return
        if held is not None:
            self.kv = max(self.kv or 0.0, held)


@contextmanager
def _peaks(server: Running) -> Iterator[_Peaks]:
    """Largest resident set of the server's processes, and bytes its caches hold, looked at once a second."""
    peaks, done = _Peaks(), threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            peaks.sample(server)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()
        peaks.sample(server)
