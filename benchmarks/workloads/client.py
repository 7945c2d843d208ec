"""The load: a trace replayed over HTTP against any OpenAI-compatible server, as light as asyncio and httpx allow.

Prompts are token ids (`/v1/completions`), so that every server gets exactly the same ones. What was generated enters a
session's later prompts: as token ids where the server tells them, else its text is encoded again and cut or filled up
to the same length.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.workloads.trace import Session, Step, Tokens, Trace

_FILL = 0
"""Token id that fills up an answer whose text became fewer tokens than were generated."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to ask. `choose`: the fields of a request that choose an agent's adapter, or the base model for None;
    `extra`: fields that every request gets; `encode`: text to token ids, of the model's own tokenizer."""

    url: str
    choose: Callable[[int | None], dict[str, Any]]
    encode: Callable[[str], Sequence[int]]
    extra: dict[str, Any] = field(default_factory=dict)


def by_model(base: str, adapters: Sequence[str]) -> Callable[[int | None], dict[str, Any]]:
    """Choose adapters through `model`, as vLLM and forkkv understand it."""
    return lambda agent: {"model": base if agent is None else adapters[agent]}


def by_lora_name(base: str, adapters: Sequence[str]) -> Callable[[int | None], dict[str, Any]]:
    """Choose adapters through `lora_name` beside the base model's `model`."""
    return lambda agent: {"model": base} | ({} if agent is None else {"lora_name": adapters[agent]})


@dataclass(slots=True)
class Outcome:
    """What one request did. Times are seconds since the trace began; `gaps_s` are the times between tokens, those of
    a chunk with several tokens evenly spread. `cached_tokens` None: the server does not tell. `token_ids` are as long
    as the answer; `retold` where they are its text, encoded again."""

    agent: int | None
    prompt_tokens: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    retold: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s


async def replay(trace: Trace, target: Target, limit_s: float = 3600) -> list[Outcome]:
    """Outcomes of all requests of `trace`, in the order in which they were sent. After `limit_s` seconds what runs is
    cut off with an error, and what was not sent is missing."""
    outcomes: list[Outcome] = []
    # A connection for each request: a kept one may be closed by the server in the moment it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(limit_s, connect=60)
    async with httpx.AsyncClient(base_url=target.url, timeout=timeout, limits=limits, trust_env=False) as client:
        began = time.perf_counter()
        run = _Run(client, target, began, outcomes)
        tasks = [asyncio.create_task(run.session(session)) for session in trace.sessions]
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return sorted(outcomes, key=lambda outcome: outcome.sent_s)


@dataclass(slots=True)
class _Run:
    client: httpx.AsyncClient
    target: Target
    began: float
    outcomes: list[Outcome]

    def now(self) -> float:
        return time.perf_counter() - self.began

    async def session(self, session: Session) -> None:
        await asyncio.sleep(max(0.0, session.start_s - self.now()))
        context: Tokens = ()
        for step in session.steps:
            prompt = context[: step.keep] + step.tokens
            outcome = await self.ask(step, prompt)
            if outcome.error is not None:
                return  # what would follow stands on an answer that is not there
            context = prompt + outcome.token_ids

    async def ask(self, step: Step, prompt: Tokens) -> Outcome:
        body = {
            "prompt": list(prompt),
            "max_tokens": step.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **self.target.extra,
            **self.target.choose(step.agent),
        }
        content = json.dumps(body)
        outcome = Outcome(step.agent, len(prompt), self.now())
        self.outcomes.append(outcome)
        try:
            await self.stream(content, outcome, step.max_tokens)
        except httpx.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            outcome.error = "cut off at the time limit"
            raise
        return outcome

    async def stream(self, content: str, outcome: Outcome, max_tokens: int) -> None:
        """Send the request and fill `outcome` from the stream of its answer."""
        headers = {"content-type": "application/json"}
        text = ""
        ids: list[int] = []
        usage: dict[str, Any] = {}
        async with self.client.stream("POST", "/v1/completions", content=content, headers=headers) as response:
            if response.status_code != 200:
                outcome.error = f"status {response.status_code}: {(await response.aread())[:300].decode()}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    outcome.error = str(chunk["error"])[:300]
                    return
                usage = chunk.get("usage") or usage
                new_text, new_ids = _content(chunk)
                if new_text or new_ids:
                    self.count_chunk(outcome, max(1, len(new_ids)))
                text += new_text
                ids += new_ids
        outcome.output_tokens = usage.get("completion_tokens", len(ids))
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        outcome.retold = not ids
        answer = tuple(ids or self.target.encode(text))[:max_tokens]
        outcome.token_ids = answer + (_FILL,) * (max_tokens - len(answer))
        if not outcome.first_s:
            outcome.error = "nothing was streamed"
        elif outcome.output_tokens != max_tokens:
            outcome.error = f"{outcome.output_tokens} tokens generated, {max_tokens} asked for"

    def count_chunk(self, outcome: Outcome, tokens: int) -> None:
        now = self.now()
        if outcome.first_s:
            outcome.gaps_s += [(now - outcome.last_s) / tokens] * tokens
        else:
            outcome.first_s = now
        outcome.last_s = now


def _content(chunk: dict[str, Any]) -> tuple[str, list[int]]:
    """Text and token ids of one chunk of a completion. llama-server tells the ids under `__verbose`."""
    choices = chunk.get("choices") or [{}]
    verbose = chunk.get("__verbose", {})
    ids = choices[0].get("token_ids") or ([] if verbose.get("stop") else verbose.get("tokens"))
    return choices[0].get("text") or "", ids or []
