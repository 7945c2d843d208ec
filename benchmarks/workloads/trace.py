"""What a workload is, as plain data: who asks what, when, behind which context. And how many tokens it must prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkkv.scheduler.fork import fork_point

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a session. Its prompt is the first `keep` tokens of the session's context (None: all of it, the
    answers included) and then `tokens`; `agent` is an adapter's index, None asks the base model. The answer is exactly
    `max_tokens` long."""

    agent: int | None
    tokens: Tokens
    max_tokens: int
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Steps one after another, each sent when the one before it was answered; the first at `start_s` seconds."""

    steps: tuple[Step, ...]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """`part` tells traces of one workload apart. Sessions run side by side."""

    part: str
    num_agents: int
    sessions: tuple[Session, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(session.steps) for session in self.sessions)

    @property
    def longest(self) -> int:
        """Most tokens of one prompt with its answer."""
        return max(len(prompt) + len(answer) for _, prompt, answer in walk(self))


def walk(trace: Trace) -> Iterator[tuple[Step, Tokens, Tokens]]:
    """Every step with its prompt and its answer, session by session. Tokens of answers, which only a server can tell,
    are negative numbers that occur once."""
    unknown = -1
    for session in trace.sessions:
        context: Tokens = ()
        for step in session.steps:
            prompt = context[: step.keep] + step.tokens
            answer = tuple(range(unknown, unknown - step.max_tokens, -1))
            unknown -= step.max_tokens
            yield step, prompt, answer
            context = prompt + answer


BLOCK_SIZE, FORK_TAIL = 16, 64
"""The server's defaults."""


def shared_tokens(prompt: Tokens) -> int:
    """Tokens in front of a prompt's fork point, where the server is told nothing about it."""
    return fork_point(prompt, BLOCK_SIZE, kind="plain", shared=True, fork_tail=FORK_TAIL).private_from or 0


def prefill_tokens(trace: Trace, *, shared: bool) -> int:
    """Prompt tokens that a server with endless memory must run through the model, sessions in order.

    Not `shared`: every adapter finds what it processed itself, to the token, its answers included. `shared`: the base
    model's blocks up to the fork point are found whoever wrote them, and each adapter runs its tail; what lies behind
    the fork point is not found again.
    """
    written: dict[int | None, list[NDArray[np.int64]]] = {}
    count = 0
    for step, prompt, answer in walk(trace):
        tokens = np.asarray(prompt, dtype=np.int64)
        if not shared or step.agent is None:
            found = min(_longest_prefix(written.get(step.agent, ()), tokens), len(tokens) - 1)
            count += len(tokens) - found
            # The last token of an answer is never run through the model.
            written.setdefault(step.agent, []).append(np.asarray(prompt + answer[:-1], dtype=np.int64))
            continue
        point = shared_tokens(prompt)
        found = min(_longest_prefix(written.get(None, ()), tokens), point) // BLOCK_SIZE * BLOCK_SIZE
        count += len(tokens) - found
        written.setdefault(None, []).append(tokens[:point])
    return count


def _longest_prefix(known: Sequence[NDArray[np.int64]], tokens: NDArray[np.int64]) -> int:
    longest = 0
    for other in known:
        size = min(len(other), len(tokens))
        differs = np.flatnonzero(other[:size] != tokens[:size])
        longest = max(longest, int(differs[0]) if len(differs) else size)
    return longest
