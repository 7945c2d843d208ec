"""The five workloads. Each is a function of its sizes and a seed: the same traces on every machine.

`Text` gives the tokens: `text(n, key)` are n tokens of ordinary text; texts of two keys differ within the first tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workloads.trace import Session, Step, Tokens, Trace

Text = Callable[[int, int], Tokens]

QUESTION_TOKENS = 48
LRAGENT_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_LRAGENT_FIXED = 912
"""Tokens of the LRAgent trace beside its four long tool results."""
TURNS = 43
_TURN_ANSWER = 10
OPEN_DOCUMENTS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """`tokens`: the document (fanout, open), the whole trajectory at its end (lragent, turns), the prompt (plain).
    `requests_per_s` and `requests` are for the open loop."""

    agents: int
    tokens: int
    max_tokens: int = 32
    requests: int = 64
    requests_per_s: float = 1.0
    seed: int = 0


def fanout(sizes: Sizes, text: Text) -> tuple[Trace, ...]:
    """N agents ask about one document: one after another, then together about another document."""
    parts = []
    for number, part in enumerate(("one after another", "together")):
        document = text(sizes.tokens, sizes.seed + number)
        questions = [text(QUESTION_TOKENS, sizes.seed + 100 + agent) for agent in range(sizes.agents)]
        first = [Step(agent, document + question, sizes.max_tokens) for agent, question in enumerate(questions)]
        later = [Step(agent, question, sizes.max_tokens, len(document)) for agent, question in enumerate(questions)]
        sessions = tuple(Session((step,)) for step in first) if number else (Session((first[0], *later[1:])),)
        parts.append(Trace(part, sizes.agents, sessions))
    return tuple(parts)


def lragent(sizes: Sizes, text: Text) -> tuple[Trace, ...]:
    """The trace that LRAgent was timed with: 17 steps of three agents on one trajectory, (tokens added, tokens
    answered). Its size is the published one next to `tokens`."""
    plan, action, reflect = range(3)
    length = min(LRAGENT_CONTEXTS, key=lambda context: abs(4 * context + _LRAGENT_FIXED - sizes.tokens))
    loop = [(plan, length, 32), (plan, 8, 8), (action, 8, 8)]
    shape = [(plan, 512, 32), (plan, 8, 8), (action, 8, 8), *loop * 4, (reflect, 32, 32), (reflect, 8, 8)]
    steps = (Step(agent, text(size, sizes.seed + i), answer) for i, (agent, size, answer) in enumerate(shape))
    return (Trace(f"{(4 * length + _LRAGENT_FIXED) / 1000:.1f}k", 3, (Session(tuple(steps)),)),)


def turns(sizes: Sizes, text: Text) -> tuple[Trace, ...]:
    """A team in turns on a growing trajectory: 43 turns, each adds a tool result and a short answer. 96 % of all
    prompt tokens stood in an earlier turn, as in recorded sessions of agents."""
    grown = sizes.tokens // (7 + TURNS - 1)  # with seven parts in the first turn 96 % are old
    added = [7 * grown, *[grown - _TURN_ANSWER] * (TURNS - 1)]
    steps = (Step(i % sizes.agents, text(n, sizes.seed + i), _TURN_ANSWER) for i, n in enumerate(added))
    return (Trace(f"{TURNS} turns", sizes.agents, (Session(tuple(steps)),)),)


def open_loop(sizes: Sizes, text: Text) -> tuple[Trace, ...]:
    """Requests arrive by a Poisson process whatever the server does; the adapter's number follows Zipf's law (weight
    1/k), and each asks about one of eight documents."""
    rng = random.Random(sizes.seed)
    documents = [text(sizes.tokens, sizes.seed + number) for number in range(OPEN_DOCUMENTS)]
    weights = [1 / (k + 1) for k in range(sizes.agents)]
    sessions, at = [], 0.0
    for number in range(sizes.requests):
        (agent,) = rng.choices(range(sizes.agents), weights)
        prompt = rng.choice(documents) + text(QUESTION_TOKENS, sizes.seed + 100 + number)
        sessions.append(Session((Step(agent, prompt, sizes.max_tokens),), at))
        at += rng.expovariate(sizes.requests_per_s)
    return (Trace(f"{sizes.requests_per_s:g} requests/s", sizes.agents, tuple(sessions)),)


def plain(sizes: Sizes, text: Text) -> tuple[Trace, ...]:
    """One user of the base model, no adapters: a new prompt of `tokens` tokens, then two short follow-ups on it."""
    steps = [Step(None, text(sizes.tokens, sizes.seed), sizes.max_tokens)]
    steps += [Step(None, text(QUESTION_TOKENS, sizes.seed + 100 + i), sizes.max_tokens) for i in range(2)]
    return (Trace("one user", 0, (Session(tuple(steps)),)),)


SCENARIOS = {"fanout": fanout, "lragent": lragent, "turns": turns, "open": open_loop, "plain": plain}
DEFAULTS = {
    "fanout": Sizes(8, 4000),
    "lragent": Sizes(3, 5008),
    "turns": Sizes(3, 5000),
    "open": Sizes(64, 1000),
    "plain": Sizes(0, 2000, 64),
}
LEAST_TOKENS = {"fanout": 16, "lragent": 1936, "turns": 1000, "open": 16, "plain": 16}
QUICK = {
    "fanout": Sizes(3, 256, 8),
    "lragent": Sizes(3, 1936),
    "turns": Sizes(3, 1000),
    "open": Sizes(8, 128, 8, 12, 4.0),
    "plain": Sizes(0, 256, 16),
}
