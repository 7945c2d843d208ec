"""Work lists of split decode attention, planned with NumPy: who reads which blocks together, and in how many pieces.

The contexts of all decode rows are cut into *ranges*: blocks that several rows share, or the rest of one row. A range
is read by *tiles* of at most a fixed number of query heads, a tile in several *splits*; one split of one tile is an
*item*, one program per KV head. Every item leaves one *partial* result per row, which a second kernel merges.

All of it is one int32 array of fixed size and layout, so that a captured CUDA graph sees new work in old memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

Numbers = Sequence[int] | np.ndarray

CHUNK = 16
"""Query heads in one chunk of a tile: the smallest M of a matrix instruction."""
RECORD = 8
"""int32 words of one item and of one entry."""
WIDE_TILES = (16, 32, 64, 128)
"""Query heads of the tiles that kernels are compiled for."""
CLASSES = ("narrow base", "narrow residual", "wide base", "wide residual")
"""Items are sorted by class: tiles of one chunk or more, without and with residuals."""

_MAX_SPLITS = 64
_ENTRY_COST = 0.25
"""Cost of one residual entry of rank 16 over that of reading the base once: per token and KV head the base part is
4 * head_dim bytes, an entry about 2 * head_dim * (16 + 16) flops, and a card does some 300 flops in the time of a byte
when its tiles are this small."""


@dataclass(frozen=True, slots=True)
class RowTables:
    """A batch of B rows, int32. `tokens` [B]: index of the row's (first) query; `seq_lens`,
    `read_slot`, `residual_len`, `k_tiles`, `v_tiles` [B]; `kv_block_table` [B, NB]; residual tables [B, NB * tiles]."""

    tokens: Numbers
    seq_lens: Numbers
    read_slot: Numbers
    residual_len: Numbers
    k_tiles: Numbers
    v_tiles: Numbers
    kv_block_table: np.ndarray
    residual_k_table: np.ndarray
    residual_v_table: np.ndarray

    def listed(self) -> RowTables:
        """The same with lists for the columns, whose elements planning reads one by one."""
        names = ("tokens", "seq_lens", "read_slot", "residual_len", "k_tiles", "v_tiles")
        return replace(self, **{name: np.asarray(getattr(self, name)).tolist() for name in names})


@dataclass(frozen=True, slots=True)
class Capacity:
    """Places in a work list, and the constants it is planned for.

    `heads`: query heads per KV head, at most 16; `wide`: query heads of a wide tile, of `WIDE_TILES`.
    """

    heads: int
    kv_heads: int
    wide: int
    rows: int
    items: int
    partials: int
    lanes: int
    entries: int

    @classmethod
    def for_limits(cls, max_rows: int, heads: int, kv_heads: int, wide: int, programs: int) -> Capacity:
        """Room for `max_rows` rows when items are cut so that `programs` programs (items times KV heads) run at once;
        how long the rows are does not matter, since longer ones have longer items. Any batch fits without sharing
        and splits; `plan_work` makes the others fit.

        Raises `ValueError` for more than 16 query heads per KV head.
        """
        if not 1 <= heads <= CHUNK:
            raise ValueError(f"{heads} query heads per KV head: 1 to {CHUNK} are supported")
        members = CHUNK // heads
        per_wide = wide // CHUNK * members
        wide_tiles = 1 + max_rows // (members + 1) + max_rows // per_wide
        splits = -(-programs // kv_heads)
        return cls(
            heads=heads,
            kv_heads=kv_heads,
            wide=wide,
            rows=max_rows,
            items=splits + 3 * max_rows,
            partials=splits * min(per_wide, max_rows) + 3 * max_rows,
            # An even number, so that the sections behind keep the alignment that kernels are compiled for.
            lanes=2 * (max_rows * members + -(-wide_tiles * per_wide // 2)),
            entries=4 * max_rows,
        )

    @property
    def members(self) -> int:
        """Rows of one chunk."""
        return CHUNK // self.heads

    @property
    def offsets(self) -> dict[str, int]:
        """First word of each section of the array."""
        bounds, items = 0, RECORD
        lanes = items + self.items * RECORD
        entries = lanes + self.lanes * 2
        rows = entries + self.entries * RECORD
        return {"bounds": bounds, "items": items, "lanes": lanes, "entries": entries, "rows": rows}

    @property
    def words(self) -> int:
        """Length of the array."""
        return self.offsets["rows"] + self.rows * 4


@dataclass(frozen=True, slots=True)
class Range:
    """Context tokens [begin, end) of `rows`, the same blocks for all of them."""

    begin: int
    end: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkList:
    """Sections of one step's work, see `Capacity.offsets`.

    `bounds` [5]: items of class c are [bounds[c], bounds[c + 1]). `items` [n, 8]: table row, first token, end token,
    first lane, split, first entry, end entry, 0. `lanes` [n, 2]: query token (-1: nobody), partial of split 0; a chunk
    holds `Capacity.members` of them. `entries` [n, 8]: table row, adapter slot, residual_len, K tiles, V tiles, first
    and end query head of the tile, 0; an entry stays within one chunk. `rows` [n, 4]: query token (-1: nobody), first
    partial, number of partials, 0.
    """

    capacity: Capacity
    bounds: np.ndarray
    items: np.ndarray
    lanes: np.ndarray
    entries: np.ndarray
    rows: np.ndarray

    @property
    def num_partials(self) -> int:
        return int(self.rows[:, 2].sum())

    def write(self, out: np.ndarray, num_rows: int | None = None) -> None:
        """Fill `out` [capacity.words] int32. Rows from `num_rows` on are nobody's; rows between those of the list and
        `num_rows` (padding) get no partials, so that the merge writes zeros for the tokens of their number."""
        for name, first in self.capacity.offsets.items():
            section: np.ndarray = getattr(self, name)
            out[first : first + section.size] = section.ravel()
        rows = out[self.capacity.offsets["rows"] :].reshape(-1, 4)
        rows[len(self.rows) :] = (-1, 0, 0, 0)
        if num_rows is not None:
            rows[len(self.rows) : num_rows, 0] = np.arange(len(self.rows), num_rows)


def tile_heads(rows: int, heads: int, head_dim: int) -> int:
    """Query heads of the tile for groups of up to `rows` rows: the smallest that holds them, at most 128 (32 for heads
    above 128, whose accumulators would not fit into registers)."""
    needed = -(-rows // (CHUNK // heads)) * CHUNK
    sizes = [size for size in WIDE_TILES if size <= 32 or head_dim <= 128]
    return next((size for size in sizes if size >= needed), sizes[-1])


def plan_work(
    tables: RowTables,
    rows: Sequence[int],
    groups: Sequence[Sequence[int]],
    capacity: Capacity,
    *,
    block_size: int,
    programs: int,
    tile_tokens: int = 64,
    min_shared_tokens: int = 64,
) -> WorkList:
    """Work of the decode rows `rows` of a batch. `groups`: rows that may share leading blocks, disjoint; what they
    share is read from the tables. Items are cut so that about `programs` programs of equal cost run, at multiples of
    `tile_tokens`. Blocks shared by fewer than `min_shared_tokens` tokens are read by each row.

    If the capacity does not suffice, there are fewer splits, then no sharing. Raises `ValueError` for more rows than
    the capacity has.
    """
    if len(rows) > capacity.rows:
        raise ValueError(f"{len(rows)} decode rows, room for {capacity.rows}")
    tables = tables.listed()
    shared = list(find_ranges(tables, rows, groups, block_size, max(1, min_shared_tokens)))
    planner = _Planner(tables, capacity, block_size, max(tile_tokens, block_size))
    items = programs // capacity.kv_heads
    for wanted in (items, items // 2, items // 4, 0):
        work = planner.plan(rows, shared, wanted)
        if work is not None:
            return work
    alone = [Range(0, int(tables.seq_lens[row]), (row,)) for row in rows]
    work = planner.plan(rows, alone, 0)
    assert work is not None, "rows without sharing and splits fit by construction"
    return work


def find_ranges(
    tables: RowTables, rows: Sequence[int], groups: Sequence[Sequence[int]], block_size: int, min_shared_tokens: int
) -> Iterator[Range]:
    """Cut the contexts of `rows` into ranges; every (row, token) lies in exactly one."""
    left = dict.fromkeys(rows)
    for group in groups:
        members = [row for row in group if row in left]
        if len(members) > 1:
            yield from _part(tables, members, 0, block_size, min_shared_tokens)
            for row in members:
                del left[row]
    for row in left:
        yield Range(0, int(tables.seq_lens[row]), (row,))


def _part(tables: RowTables, members: list[int], begin: int, block_size: int, min_shared: int) -> Iterator[Range]:
    """Ranges of `members` from block `begin` on, up to which they are covered: what all share, then what the rows
    that go on alike share, and so on (two documents behind one system prompt)."""
    if len(members) == 1:
        yield Range(begin * block_size, int(tables.seq_lens[members[0]]), (members[0],))
        return
    # Full blocks only: whoever still writes a block has it alone.
    deepest = min(int(tables.seq_lens[row]) for row in members) // block_size
    blocks = tables.kv_block_table[members, begin:deepest]
    differs = (blocks != blocks[0]).any(axis=0)
    common = begin + (int(differs.argmax()) if differs.any() else deepest - begin)
    progress = (common - begin) * block_size >= min_shared
    if progress:
        yield Range(begin * block_size, common * block_size, tuple(members))
    start = common if progress else begin
    by_next: dict[int, list[int]] = {}
    for row in members:
        if int(tables.seq_lens[row]) > start * block_size:
            within = common < tables.kv_block_table.shape[1]
            by_next.setdefault(int(tables.kv_block_table[row, common]) if within else -1, []).append(row)
    if not progress and len(by_next) == 1:
        for row in members:
            yield Range(start * block_size, int(tables.seq_lens[row]), (row,))
        return
    for part in by_next.values():
        yield from _part(tables, part, start, block_size, min_shared)


@dataclass(frozen=True, slots=True)
class _Tile:
    """One tile of a range: `lanes` hold rows (-1: nobody) by chunk; `entries` as in `WorkList`."""

    begin: int
    end: int
    lanes: list[int]
    entries: list[tuple[int, ...]]
    cost: float

    def item_class(self, members: int) -> int:
        return 2 * (len(self.lanes) > members) + bool(self.entries)


@dataclass(frozen=True, slots=True)
class _Planner:
    """From ranges to a work list, or to the answer that it does not fit. `quantum`: tokens to cut at multiples of."""

    tables: RowTables
    capacity: Capacity
    block_size: int
    quantum: int

    def plan(self, rows: Sequence[int], ranges: Sequence[Range], items: int) -> WorkList | None:
        """The work list with about `items` items (0: one per tile); None if it does not fit."""
        tiles = [tile for part in ranges for tile in self._tiles(part)]
        total = sum(tile.cost for tile in tiles)
        per_item = total / items if items > 0 else float("inf")
        tiles.sort(key=lambda tile: tile.item_class(self.capacity.members))
        splits = [self._num_splits(tile, per_item) for tile in tiles]
        counts = dict.fromkeys(rows, 0)
        for tile, count in zip(tiles, splits, strict=True):
            for row in tile.lanes:
                if row >= 0:
                    counts[row] += count
        if not self._fits(tiles, sum(splits), sum(counts.values())):
            return None
        starts = dict(zip(counts, np.cumsum([0, *counts.values()])[:-1].tolist(), strict=True))
        table: list[tuple[int, ...]] = [(int(self.tables.tokens[row]), starts[row], counts[row], 0) for row in rows]
        return self._assemble(tiles, splits, starts, table)

    def _fits(self, tiles: list[_Tile], items: int, partials: int) -> bool:
        room = self.capacity
        lanes, entries = sum(len(tile.lanes) for tile in tiles), sum(len(tile.entries) for tile in tiles)
        return items <= room.items and partials <= room.partials and lanes <= room.lanes and entries <= room.entries

    def _num_splits(self, tile: _Tile, per_item: float) -> int:
        longest = -(-(tile.end - tile.begin) // self.quantum)
        return max(1, min(round(tile.cost / per_item), longest, _MAX_SPLITS))

    def _assemble(
        self, tiles: list[_Tile], splits: list[int], starts: dict[int, int], table: list[tuple[int, ...]]
    ) -> WorkList:
        next_partial = dict(starts)
        items: list[tuple[int, ...]] = []
        lanes: list[tuple[int, int]] = []
        entries: list[tuple[int, ...]] = []
        bounds = [0] * (len(CLASSES) + 1)
        for tile, count in zip(tiles, splits, strict=True):
            last_entry = len(entries) + len(tile.entries)
            for split, (begin, end) in enumerate(pairwise(self._cuts(tile, count))):
                items.append((tile.lanes[0], begin, end, len(lanes), split, len(entries), last_entry, 0))
            for row in tile.lanes:
                lanes.append((int(self.tables.tokens[row]), next_partial[row]) if row >= 0 else (-1, 0))
                if row >= 0:
                    next_partial[row] += count
            entries += tile.entries
            bounds[tile.item_class(self.capacity.members) + 1] += count
        return WorkList(
            self.capacity,
            np.cumsum(bounds, dtype=np.int32),
            np.array(items, dtype=np.int32).reshape(-1, RECORD),
            np.array(lanes, dtype=np.int32).reshape(-1, 2),
            np.array(entries, dtype=np.int32).reshape(-1, RECORD),
            np.array(table, dtype=np.int32).reshape(-1, 4),
        )

    def _cuts(self, tile: _Tile, count: int) -> list[int]:
        """Bounds of `count` pieces of a tile's tokens, about equal multiples of the quantum."""
        total = -(-(tile.end - tile.begin) // self.quantum)
        return [tile.begin + total * i // count * self.quantum for i in range(count)] + [tile.end]

    def _tiles(self, part: Range) -> Iterator[_Tile]:
        """Pack the rows of a range into tiles; rows that read one residual stand together and share its expansion."""
        capacity = self.capacity
        packed = [(row, number) for number, rows in enumerate(self._sources(part)) for row in rows]
        per_tile = capacity.wide // CHUNK * capacity.members
        for at in range(0, len(packed), per_tile):
            own = packed[at : at + per_tile]
            width = capacity.members if len(own) <= capacity.members else per_tile
            lanes = [row for row, _ in own] + [-1] * (width - len(own))
            entries = list(self._entries(own, part.begin))
            weight = sum(1 + max(entry[3], entry[4]) for entry in entries) / 2
            yield _Tile(part.begin, part.end, lanes, entries, (part.end - part.begin) * (1 + _ENTRY_COST * weight))

    def _sources(self, part: Range) -> list[list[int]]:
        """Rows of a range by the residual that they read in it, largest sets first, rows without one last."""
        tables = self.tables
        if len(part.rows) == 1:
            return [list(part.rows)]
        by_key: dict[tuple[object, ...], list[int]] = {}
        plain: list[int] = []
        for row in part.rows:
            if not self._reads(row, part.begin):
                plain.append(row)
                continue
            units = (self._units(table, row, part) for table in (tables.residual_k_table, tables.residual_v_table))
            key = (int(tables.read_slot[row]), int(tables.residual_len[row]), *units)
            by_key.setdefault(key, []).append(row)
        return sorted(by_key.values(), key=len, reverse=True) + ([plain] if plain else [])

    def _units(self, table: np.ndarray, row: int, part: Range) -> bytes:
        """The residual units that a row reads in a range, and its first one, which tells whether it has K."""
        tiles = table.shape[1] // self.tables.kv_block_table.shape[1]
        end = -(-min(part.end, int(self.tables.residual_len[row])) // self.block_size)
        return table[row, :1].tobytes() + table[row, part.begin // self.block_size * tiles : end * tiles].tobytes()

    def _reads(self, row: int, begin: int) -> bool:
        """Whether a row reads a residual from token `begin` on."""
        tables = self.tables
        has_tiles = tables.k_tiles[row] > 0 or tables.v_tiles[row] > 0
        return bool(tables.read_slot[row] >= 0 and tables.residual_len[row] > begin and has_tiles)

    def _entries(self, own: list[tuple[int, int]], begin: int) -> Iterator[tuple[int, ...]]:
        """One entry per source and chunk of the packed (row, source) pairs of a tile, for sources with a residual."""
        tables, heads, members = self.tables, self.capacity.heads, self.capacity.members
        at = 0
        while at < len(own):
            row, source = own[at]
            chunk = at // members
            end = at + 1
            while end < len(own) and own[end][1] == source and end // members == chunk:
                end += 1
            if self._reads(row, begin):
                fields = (tables.read_slot, tables.residual_len, tables.k_tiles, tables.v_tiles)
                lo = chunk * CHUNK + at % members * heads
                yield (row, *(int(field[row]) for field in fields), lo, lo + (end - at) * heads, 0)
            at = end
