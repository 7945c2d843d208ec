"""From scores of single answers to a cell's figures, their intervals and the pass line. No torch.

Answers on one document are not independent of each other, so what is drawn with replacement is documents. The same
draws serve every cell of a table, which makes differences between cells paired ones.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
LEARNT = 0.8
"""Exactness of plain adapters in private caches from which a cell says something about sharing."""
MARGIN = -0.05
"""What the lower bound of the paired difference must stay above."""
PLAIN_PRIVATE, FORK_SHARED = ("plain", "none"), ("fork", "fork")
"""(team, mode) of the two sides of the pass line."""


@dataclass(frozen=True, slots=True)
class Record:
    """Scores of one answer. `kl` is the sum over its tokens in nats, `agreed` counts tokens whose most likely one is
    that of the reference, which is the same prompt under the mode `reference`."""

    team: str
    mode: str
    reference: str
    length: str
    document: str
    question: str
    agent: str
    exact: bool
    tokens: int
    kl: float
    agreed: int
    prompt_tokens: int
    fork_point: int

    @property
    def cell(self) -> Cell:
        return Cell(self.length, self.team, self.mode)

    @property
    def prompt(self) -> tuple[str, str]:
        """Identity of the prompt within a length: what pairs answers of different cells."""
        return self.question, self.agent

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Cell(NamedTuple):
    length: str
    team: str
    mode: str


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the bounds of its two-sided 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@functools.lru_cache(maxsize=4)
def bootstrap_weights(num_documents: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """[resamples, num_documents] int64: how often each document is drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size=resamples)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """sum(numerators) / sum(denominators), one entry a document, by the percentile bootstrap over documents.

    Raises `ValueError` for no documents and for denominators that are not positive.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if not len(above) or len(above) != len(below) or (below <= 0).any():
        raise ValueError("a ratio needs one positive denominator a document")
    weights = bootstrap_weights(len(above))
    ratios = (weights @ above) / (weights @ below)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(above.sum() / below.sum()), float(low), float(high))


def paired_difference(ours: Iterable[Record], theirs: Iterable[Record]) -> Interval:
    """Exactness of `ours` minus that of `theirs` on the answers that both have. Raises `ValueError` without any."""
    other = {record.prompt: record.exact for record in theirs}
    gains: dict[str, list[int]] = defaultdict(list)
    for record in ours:
        if record.prompt in other:
            gains[record.document].append(int(record.exact) - int(other[record.prompt]))
    return ratio_interval([sum(gains[name]) for name in sorted(gains)], [len(gains[name]) for name in sorted(gains)])


@dataclass(frozen=True, slots=True)
class CellFigures:
    """One row of the table. `kl` is in nats per token of the answer."""

    cell: Cell
    is_reference: bool
    answers: int
    documents: int
    exact: Interval
    kl: Interval
    top1: Interval
    shared: float
    """Share of the prompts' tokens below the fork point; 0 under `none`, where aLoRA has one and shares nothing."""


def figures(records: Sequence[Record]) -> CellFigures:
    """Figures of one cell's records."""
    documents: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        documents[record.document].append(record)

    def per_document(value: Callable[[Record], float]) -> list[float]:
        return [sum(map(value, documents[name])) for name in sorted(documents)]

    answers, tokens = per_document(lambda record: 1), per_document(lambda record: record.tokens)
    below = 0 if records[0].mode == "none" else sum(record.fork_point for record in records)
    return CellFigures(
        records[0].cell,
        records[0].mode == records[0].reference,
        len(records),
        len(documents),
        ratio_interval(per_document(lambda record: record.exact), answers),
        ratio_interval(per_document(lambda record: record.kl), tokens),
        ratio_interval(per_document(lambda record: record.agreed), tokens),
        below / sum(record.prompt_tokens for record in records),
    )


def by_cell(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    """Records of each cell, cells in the order in which they came."""
    cells: dict[Cell, list[Record]] = defaultdict(list)
    for record in records:
        cells[record.cell].append(record)
    return dict(cells)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The pass line at one length. `outcome` is "pass", "FAIL" or "task not learnt", which is no pass."""

    length: str
    plain: float
    fork: float
    difference: Interval
    outcome: str


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """The pass line at every length that has both sides: the lower bound of fork-LoRA under `fork` minus plain LoRA
    under `none` is above -0.05, where the latter reaches 0.8."""
    cells = by_cell(records)
    found = []
    for length in dict.fromkeys(cell.length for cell in cells):
        plain, fork = cells.get(Cell(length, *PLAIN_PRIVATE)), cells.get(Cell(length, *FORK_SHARED))
        if not plain or not fork:
            continue
        rates = [sum(record.exact for record in side) / len(side) for side in (plain, fork)]
        difference = paired_difference(fork, plain)
        found.append(Verdict(length, rates[0], rates[1], difference, outcome(rates[0], difference)))
    return found


def outcome(plain: float, difference: Interval) -> str:
    """See `Verdict`."""
    if plain < LEARNT:
        return "task not learnt"
    return "pass" if difference.low > MARGIN else "FAIL"
