"""Work of one step for the CPU kernel, as flat integer tables. NumPy only; made once, used by every layer.

entry   one query token and how much of its context it sees
run     consecutive entries of an item that read one residual
item    a range of context tokens, the entries that see it under one block table, and a place for its results
part    one item's result for one entry; the parts of a token are merged at the end
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CHUNK = 128
"""Context tokens whose scores are kept at a time; items begin at multiples of it within their range."""
TILE = 32
"""Context tokens whose keys are turned at a time; every item begins at a multiple of it."""
KNOWN = CHUNK + TILE
"""Context tokens whose places in the caches are looked up at a time: a tile more, to ask for it ahead."""

ENTRY_TOKEN, ENTRY_LIMIT = range(2)
RUN_ENTRIES, RUN_ROW, RUN_SLOT, RUN_K_TILES, RUN_V_TILES, RUN_LENGTH = range(6)
ITEM_ROW, ITEM_BEGIN, ITEM_END, ITEM_FIRST_ENTRY, ITEM_ENTRIES, ITEM_FIRST_RUN, ITEM_RUNS, ITEM_PARTIAL = range(8)
PART_FIRST, PART_COUNT, PART_INDEX = range(3)

MAX_ENTRIES = 64
"""Query tokens of an item: enough to make turning and expanding its keys cheap, few enough for its scores to stay in
the second cache."""
_ITEMS_PER_THREAD = 4


class WorkTables(NamedTuple):
    """int64 tables, columns as named by the constants above; results of item i begin at unit `ITEM_PARTIAL` of
    Hq rows. `parts` of token `tokens[j]` are `parts[part_begin[j] : part_begin[j + 1]]`."""

    items: np.ndarray
    runs: np.ndarray
    entries: np.ndarray
    tokens: np.ndarray
    part_begin: np.ndarray
    parts: np.ndarray

    @staticmethod
    def widths() -> tuple[int, int, int, int]:
        """Columns of items, runs, entries and parts."""
        return 8, 6, 2, 3


@dataclass(frozen=True, slots=True)
class Rows:
    """Attention rows of a step, arrays over rows: query tokens [cu_seqlens_q[i], cu_seqlens_q[i + 1]), the last at
    position seq_lens[i] - 1; `slot` -1 or residual_len 0: no residual; tiles of the row's own K and V residual."""

    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    slot: np.ndarray
    residual_len: np.ndarray
    k_tiles: np.ndarray
    v_tiles: np.ndarray
    k_units: np.ndarray
    v_units: np.ndarray


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """`tables` for the kernel, and the sizes of the buffers that it needs: units of Hq rows, entries of an item,
    columns of the K residuals of an item together, of the widest V residual."""

    tables: WorkTables
    num_partials: int
    max_entries: int
    max_k_rank: int
    max_v_rank: int


def make_plan(rows: Rows, groups: Sequence[tuple[int, Sequence[int]]], num_heads: int, threads: int) -> WorkPlan:
    """Cut the context of `groups` = (tokens that all its rows share under one block table, rows) into items.

    Every row that is to be computed stands in exactly one group; a row alone shares nothing (0 tokens) or all but its
    own query tokens. `num_heads`: query heads per KV head, for the balance of the items.
    """
    builder = _Builder(rows, num_heads)
    spans: list[_Span] = []
    for shared, members in groups:
        shared -= shared % TILE
        pieces = [piece for row in sorted(members, key=builder.residual) for piece in builder.pieces(row)]
        if shared:
            spans += [builder.span(together, 0, shared) for together in _batches(pieces)]
        spans += [builder.span([piece], shared, piece.end) for piece in pieces]
    target = max(sum(span.cost for span in spans) / (threads * _ITEMS_PER_THREAD), 1.0)
    parts: list[tuple[float, _Span, int, int]] = []
    for span in spans:
        length = span.end - span.begin
        count = min(max(1, round(span.cost / target)), -(-length // CHUNK))
        size = -(-length // (count * TILE)) * TILE
        parts += [(span.cost / count, span, at, min(at + size, span.end)) for at in range(span.begin, span.end, size)]
    # Longest first: whoever is done early takes one of the small ones that are left.
    for _, span, begin, end in sorted(parts, key=lambda part: -part[0]):
        builder.add(span, begin, end)
    return builder.finish()


class _Piece(NamedTuple):
    """Query tokens [first, last) of a row; the last of them sees the context [0, end)."""

    row: int
    first: int
    last: int
    end: int


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """`pieces` in their order, as many together as one item may have."""
    batch, count = list[_Piece](), 0
    for piece in pieces:
        if batch and count + piece.last - piece.first > MAX_ENTRIES:
            yield batch
            batch, count = [], 0
        batch.append(piece)
        count += piece.last - piece.first
    yield batch


@dataclass(frozen=True, slots=True)
class _Span:
    """Context [begin, end) under the block table of `row`, the entries and runs that see it, and what it costs."""

    row: int
    begin: int
    end: int
    first_entry: int
    entries: int
    first_run: int
    runs: int
    cost: float


class _Builder:
    """Collects items."""

    def __init__(self, rows: Rows, num_heads: int) -> None:
        self._rows, self._num_heads = rows, num_heads
        self._bounds, self._seq_lens = rows.cu_seqlens_q.tolist(), rows.seq_lens.tolist()
        self._slots, self._k_tiles, self._v_tiles = rows.slot.tolist(), rows.k_tiles.tolist(), rows.v_tiles.tolist()
        self._reads = np.where(rows.slot >= 0, rows.residual_len, 0).tolist()
        self._residuals: dict[int, tuple[int, int, bytes]] = {}
        self._items: list[tuple[int, ...]] = []
        self._runs: list[tuple[int, ...]] = []
        self._entries: list[tuple[int, ...]] = []
        self._parts: dict[int, list[tuple[int, ...]]] = {}
        self._partials = 0
        self._max_k_tiles = 0

    def residual(self, row: int) -> tuple[int, int, bytes]:
        """Equal for rows that read the same residual: (slot, length, units)."""
        if row not in self._residuals:
            key = (-1, 0, b"")
            if self._reads[row]:
                units = self._rows.k_units[row].tobytes() + self._rows.v_units[row].tobytes()
                key = (self._slots[row], self._reads[row], units)
            self._residuals[row] = key
        return self._residuals[row]

    def pieces(self, row: int) -> list[_Piece]:
        """The query tokens of `row`, at most `MAX_ENTRIES` in each piece."""
        first, last = self._bounds[row], self._bounds[row + 1]
        bounds = [*range(first, last, MAX_ENTRIES), last]
        unseen = last - self._seq_lens[row]
        return [_Piece(row, begin, end, end - unseen) for begin, end in itertools.pairwise(bounds)]

    def span(self, members: list[_Piece], begin: int, end: int) -> _Span:
        """Note entries and runs of `members`, those with one residual side by side.

        The cost counts multiplications per KV head and dimension; turning the keys of a token counts as eight.
        """
        first_entry, first_run, cost = len(self._entries), len(self._runs), 8.0
        key = None
        for row, first, last, seen in members:
            self._entries += [(token, seen - last + token + 1) for token in range(first, last)]
            cost += 2 * self._num_heads * (last - first)
            if (own := self.residual(row)) == key:
                self._runs[-1] = (self._runs[-1][0] + last - first, *self._runs[-1][1:])
                continue
            key, reads = own, self._reads[row]
            tiles = (self._k_tiles[row], self._v_tiles[row]) if reads else (0, 0)
            self._runs.append((last - first, row, self._slots[row], *tiles, reads))
            cost += 16 * tiles[0] + 4 if reads > begin else 0
        entries, runs = len(self._entries) - first_entry, len(self._runs) - first_run
        self._max_k_tiles = max(self._max_k_tiles, sum(run[RUN_K_TILES] for run in self._runs[first_run:]))
        return _Span(members[0].row, begin, end, first_entry, entries, first_run, runs, cost * (end - begin))

    def add(self, span: _Span, begin: int, end: int) -> None:
        """Make [begin, end) of a span an item."""
        place = (span.first_entry, span.entries, span.first_run, span.runs, self._partials)
        self._items.append((span.row, begin, end, *place))
        for index in range(span.entries):
            token, limit = self._entries[span.first_entry + index]
            if limit > begin:
                self._parts.setdefault(token, []).append((self._partials, span.entries, index))
        self._partials += span.entries

    def finish(self) -> WorkPlan:
        tokens = sorted(self._parts)
        bounds = np.zeros(len(tokens) + 1, dtype=np.int64)
        np.cumsum([len(self._parts[token]) for token in tokens], out=bounds[1:])
        item, run, entry, part = WorkTables.widths()
        return WorkPlan(
            WorkTables(
                _table(self._items, item),
                _table(self._runs, run),
                _table(self._entries, entry),
                np.asarray(tokens, dtype=np.int64),
                bounds,
                _table([part for token in tokens for part in self._parts[token]], part),
            ),
            self._partials,
            max(row[ITEM_ENTRIES] for row in self._items),
            16 * self._max_k_tiles,
            16 * max(row[RUN_V_TILES] for row in self._runs),
        )


def _table(rows: list[tuple[int, ...]], width: int) -> np.ndarray:
    return np.asarray(rows, dtype=np.int64).reshape(-1, width)
