"""Section "server": start, idleness, and what 500 requests with random disconnects leave behind.

The resident set is compared between the end of the first half of the requests and the end of all, each time after the
traffic has ended and the cache was flushed. The halves are alike (same lengths, settings and disconnects, other
documents), and the caches (0.5 GiB) are smaller than what either half writes, so that the first half touches every
page that an honest server will ever need: pools, allocator arenas, compiled regular expressions. What grows after that
is a leak.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.common import ROOT, Line, Workspace
from benchmarks.lib.process import Server, free_port, running

SECTION = "server"
READY_SECONDS = 20.0
IDLE_SECONDS = 10.0
IDLE_CPU_SECONDS = 0.1
REQUESTS = 500
CONCURRENCY = 16
RSS_GROWTH = 0.02
DISCONNECT_SHARE = 0.2
DOCUMENTS = 24


@contextlib.contextmanager
def running_server(log: Path, *flags: str, ready_within: float = 120) -> Iterator[Server]:
    """`python -m forkkv.entrypoints.openai.api_server` with `flags`, ready; ended on the way out. Raises
    `RuntimeError` with its log if it does not get ready within that many seconds."""
    port = free_port()
    command = [sys.executable, "-m", "forkkv.entrypoints.openai.api_server", "--port", str(port), *flags]
    with running(command, port, log, ready_path="/ready", ready_within=ready_within) as server:
        yield server


def run(work: Workspace) -> list[Line]:
    """Start and idleness of the demo server, then traffic on one with a small cache."""
    _ = work.tokenizer  # a first start converts the tokenizer; the start measured is a warm one
    with running_server(work.folder / "demo.log", "--enable-forkkv", "--config", str(_demo_config(work))) as server:
        lines = [_ready_line(server), _idle_line(server, 2.0 if work.quick else IDLE_SECONDS)]
    folders = {**work.team(), "plain": work.adapter("server-plain", rank=8, seed=80)}
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    flags = ["--enable-forkkv", "--cpu-memory-gib", "0.5", "--log-level", "warning", "--lora-modules", *modules]
    with running_server(work.folder / "traffic.log", *flags) as server:
        return lines + _traffic_lines(work, server, ["smollm2", *folders])


def _demo_config(work: Workspace) -> Path:
    """configs/demo.yaml, or the same with random adapters where the trained ones are missing."""
    config = ROOT / "configs/demo.yaml"
    team = work.team()
    if all(folder.is_relative_to(config.parent) for folder in team.values()):
        return config
    text = config.read_text()
    for name, folder in team.items():
        text = text.replace(f"demo/adapters/{name}}}", f"{folder}}}")
    replaced = work.folder / "demo.yaml"
    replaced.write_text(text)
    return replaced


def _ready_line(server: Server) -> Line:
    seconds = server.ready_seconds
    good = seconds <= READY_SECONDS
    return Line(
        SECTION, "launch until /ready answers 200", f"{seconds:.1f} s", f"<= {READY_SECONDS:.0f} s", good, seconds
    )


def _idle_line(server: Server, seconds: float) -> Line:
    time.sleep(1.0)
    before = server.cpu_seconds()
    time.sleep(seconds)
    used = server.cpu_seconds() - before
    name = f"CPU seconds of all its processes in {seconds:.0f} idle seconds"
    return Line(SECTION, name, f"{used:.2f} s", f"< {IDLE_CPU_SECONDS} s", used < IDLE_CPU_SECONDS, used)


# ---- traffic ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One request; the client leaves after `chunks` chunks of a stream, or `seconds` after asking for a whole one."""

    body: dict[str, Any]
    leaves: bool
    chunks: int
    seconds: float


def _calls(work: Workspace, models: list[str], count: int, first_document: int) -> list[Call]:
    """`count` calls. All but the documents is drawn from one seed, so that two halves differ in tokens only."""
    rng = random.Random(7)
    documents = [list(work.document(rng.randint(100, 250), first_document + i)) for i in range(DOCUMENTS)]
    calls: list[Call] = []
    for index in range(count):
        prompt = documents[rng.randrange(DOCUMENTS)] + list(work.question(index, rng.randint(20, 50)))
        body: dict[str, Any] = {
            "model": rng.choice(models),
            "prompt": prompt,
            "max_tokens": rng.randint(1, 24),
            "n": rng.randint(1, 3),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "stream": rng.random() < 0.5,
            "ignore_eos": rng.random() < 0.5,
        }
        optional = {"fork_at": rng.randint(0, 300), "logprobs": 2, "cache_salt": "other", "kv_sharing": "none"}
        body |= {name: value for name, value in optional.items() if rng.random() < 0.15}
        calls.append(Call(body, rng.random() < DISCONNECT_SHARE, rng.randint(0, 4), rng.uniform(0.0, 0.6)))
    return calls


async def _send_all(url: str, calls: list[Call]) -> Counter[str]:
    """Outcomes of `calls`, `CONCURRENCY` at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=2 * CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:

        async def send(call: Call) -> str:
            async with gate:
                return await (_stream(client, call) if call.body["stream"] else _whole(client, call))

        return Counter(await asyncio.gather(*(send(call) for call in calls)))


async def _stream(client: httpx.AsyncClient, call: Call) -> str:
    async with client.stream("POST", "/v1/completions", json=call.body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        seen, last = 0, ""
        async for text in response.aiter_lines():
            if not text.startswith("data: "):
                continue
            if call.leaves and seen >= call.chunks:
                return "left"
            seen, last = seen + 1, text
    return "answered" if last == "data: [DONE]" else "cut"


async def _whole(client: httpx.AsyncClient, call: Call) -> str:
    try:
        wait = call.seconds if call.leaves else None
        response = await asyncio.wait_for(client.post("/v1/completions", json=call.body), wait)
    except TimeoutError:
        return "left"
    good = response.status_code == 200 and len(response.json()["choices"]) == call.body["n"]
    return "answered" if good else f"status {response.status_code}"


def _settle(server: Server) -> bool:
    """Wait for the end of all work and drop the caches; whether the server says that both pools are free."""
    deadline = time.monotonic() + 120
    names = ("forkkv_num_requests_running", "forkkv_num_requests_waiting")
    while any(server.metric(name) for name in names) and time.monotonic() < deadline:
        time.sleep(0.1)
    answer = httpx.post(f"{server.url}/reset_prefix_cache", timeout=60, trust_env=False).json()
    return bool(answer["success"])


def _traffic_lines(work: Workspace, server: Server, models: list[str]) -> list[Line]:
    half = (40 if work.quick else REQUESTS) // 2
    outcomes: Counter[str] = Counter()
    resident: list[int] = []
    flushed = True
    for part in range(2):
        outcomes += asyncio.run(_send_all(server.url, _calls(work, models, half, 100 + part * DOCUMENTS)))
        flushed = _settle(server) and flushed
        resident.append(server.rss())
    bad = sum(count for name, count in outcomes.items() if name not in ("answered", "left"))
    told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    missing = 0.0
    for pool in ("base", "residual"):
        total, free = (server.metric(f'forkkv_pool_blocks{{pool="{pool}",state="{s}"}}') for s in ("total", "free"))
        missing += total - free
    leases = server.metric("forkkv_leases")
    growth = resident[1] / resident[0] - 1
    mib = [size / 2**20 for size in resident]
    clean = flushed and missing == 0 and leases == 0
    lost = f"{missing:.0f} blocks missing, {leases:.0f} leases"
    return [
        Line(SECTION, f"{2 * half} mixed requests, random disconnects", told, "no other outcome", bad == 0, bad),
        Line(SECTION, "after a flush: pools and leases", lost, "0 blocks missing, 0 leases", clean, missing),
        Line(
            SECTION,
            "resident memory, second half of the requests over the first",
            f"{growth:+.1%} ({mib[0]:.0f} to {mib[1]:.0f} MiB)",
            f"<= +{RSS_GROWTH:.0%}",
            growth <= RSS_GROWTH,
            growth,
        ),
    ]
