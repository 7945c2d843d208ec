"""Which cells are run, how much work they are, and how long that takes here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib.fidelity_data import MAX_ANSWER_TOKENS, Item
from benchmarks.lib.fidelity_run import Pace, TeamRunner
from benchmarks.lib.forcing import Track
from forkkv.sharing import CONTROLS
from forkkv.types import KVSharing

CALIBRATION_TOKENS = 12
QUICK_MODES: tuple[KVSharing, ...] = ("none", "fork")
RECOMPUTING = frozenset({"none", "first-writer"})
"""Modes in which every reader's prompt runs whole, in the latter for its own residual."""
PAIR = ("plain", "fork")
"""The teams of the pass line."""


@dataclass(frozen=True, slots=True)
class Block:
    """Cells that share their prompts: `teams` (None: all that there are) times `modes` on `documents` order logs of
    `length` tokens, or on the user's own prompts (None)."""

    length: int | None
    documents: int
    modes: tuple[KVSharing, ...]
    teams: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        return "own" if self.length is None else str(self.length)

    def has(self, team: str) -> bool:
        return self.teams is None or team in self.teams


def full_grid(modes: Sequence[KVSharing], documents: int = 200) -> list[Block]:
    """Everything at 250 and 1,000 tokens; at 4,000 a quarter of the documents in the cells of the pass line and the two
    beside them."""
    return [
        Block(250, documents, tuple(modes)),
        Block(1000, documents, tuple(modes)),
        Block(4000, documents // 4, tuple(mode for mode in modes if mode in QUICK_MODES), PAIR),
    ]


def quick_grid(modes: Sequence[KVSharing], documents: int = 16, teams: Sequence[str] = PAIR) -> list[Block]:
    """`modes` and `teams` at 250 and 1,000 tokens."""
    return [Block(length, documents, tuple(modes), tuple(teams)) for length in (250, 1000)]


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that run through the model: `prefill` of prompts, and `decode` of answers."""

    prefill: int
    decode: int

    def __add__(self, other: Work) -> Work:
        return Work(self.prefill + other.prefill, self.decode + other.decode)


def work_of(items: Sequence[Item], mode: KVSharing, *, fork_tail: int) -> Work:
    """Work of one cell: where readers recompute, their prompts run whole; else once a document up to the earliest fork
    point, then each its tail. With writers two prompts of a document are written before."""
    prefill = 0
    for _, group in itertools.groupby(items, key=lambda item: item.document):
        lengths = [len(item.prompt) for item in group]
        saved = 0 if mode in RECOMPUTING else (len(lengths) - 1) * max(0, min(lengths) - fork_tail)
        written = 2 * max(lengths) if mode in CONTROLS else 0
        prefill += sum(lengths) - saved + written
    decode = sum(len(item.answer) + 1 if item.answer is not None else MAX_ANSWER_TOKENS for item in items)
    return Work(prefill, decode)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of the batches that the cells consist of."""

    prefill: float
    decode: float

    def seconds(self, work: Work) -> float:
        return work.prefill / self.prefill + work.decode / self.decode


def measure_rates(runner: TeamRunner, items: Sequence[Item]) -> Rates:
    """Rates of the first tokens of a batch, in private caches, behind one answer that warms up."""
    core = runner.core(runner.reference)
    runner.answer(core, items[:1], [""])
    runner.pace = Pace()
    tracks = [Track(len(item.prompt), list(item.prompt[:CALIBRATION_TOKENS])) for item in items]
    runner.answer(core, items, [""] * len(items), tracks)
    pace = runner.pace
    return Rates(pace.prefill_tokens / pace.prefill_seconds, pace.decode_tokens / pace.decode_seconds)
