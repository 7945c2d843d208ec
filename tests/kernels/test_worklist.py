"""Work lists of split decode: every token of every row exactly once, shared blocks once per group, within capacity."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkkv_kernels.triton.worklist import CHUNK, Capacity, RowTables, WorkList, plan_work, tile_heads

BLOCK = 16


class Batch:
    """Rows by the documents that they read: each document is a list of blocks, the last block of a row is its own."""

    def __init__(self) -> None:
        self.next_id = 1
        self.blocks: list[list[int]] = []
        self.lengths: list[int] = []
        self.adapters: list[tuple[int, int, int]] = []
        """(slot, residual tokens, tiles) by row."""

    def fresh(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def add(self, shared: list[int], tail: int, slot: int = -1, residual: int = 0, tiles: int = 1) -> int:
        """A row on the blocks `shared` with `tail` > 0 tokens of its own; returns its number."""
        own = self.fresh(-(-tail // BLOCK))
        self.blocks.append([*shared, *own])
        self.lengths.append(len(shared) * BLOCK + tail)
        self.adapters.append((slot, min(residual, self.lengths[-1]), tiles))
        return len(self.blocks) - 1

    def tables(self) -> RowTables:
        width = max(len(blocks) for blocks in self.blocks)
        table = np.zeros((len(self.blocks), width), dtype=np.int32)
        for row, blocks in enumerate(self.blocks):
            table[row, : len(blocks)] = blocks
        slots, residual, tiles = (np.array(column, dtype=np.int32) for column in zip(*self.adapters, strict=True))
        reads = slots >= 0
        most = int(tiles.max())
        units = np.zeros((len(self.blocks), width, most), dtype=np.int32)
        # One unit per (slot, block, tile): rows of one adapter on one document read the same residual.
        for row in np.flatnonzero(reads):
            for tile in range(tiles[row]):
                units[row, :, tile] = np.where(
                    table[row] > 0, (slots[row] * most + tile) * self.next_id + table[row], 0
                )
        units = units.reshape(len(self.blocks), -1)
        tiles = np.where(reads & (residual > 0), tiles, 0)
        tokens = np.arange(len(self.blocks), dtype=np.int32) + 100
        lengths = np.array(self.lengths, dtype=np.int32)
        return RowTables(tokens, lengths, slots, residual, tiles, tiles, table, units, units)


def make_plan(
    batch: Batch,
    groups: list[list[int]],
    *,
    rows: list[int] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    wide: int | None = None,
    programs: int = 64,
    capacity: Capacity | None = None,
    min_shared_tokens: int = 1,
) -> WorkList:
    rows = list(range(len(batch.blocks))) if rows is None else rows
    largest = max((len(group) for group in groups), default=1)
    capacity = capacity or Capacity.for_limits(
        len(rows), heads, kv_heads, wide or tile_heads(largest, heads, 64), programs
    )
    return plan_work(
        batch.tables(),
        rows,
        groups,
        capacity,
        block_size=BLOCK,
        programs=programs,
        min_shared_tokens=min_shared_tokens,
    )


def members(work: WorkList, number: int) -> list[tuple[int, int, int]]:
    """(row, partial, first query head in the tile) of the rows of item `number`."""
    room, item = work.capacity, work.items[number]
    count = room.members if number < work.bounds[2] else room.wide // CHUNK * room.members
    lanes = work.lanes[item[3] : item[3] + count]
    return [
        (int(token) - 100, int(partial + item[4]), i // room.members * CHUNK + i % room.members * room.heads)
        for i, (token, partial) in enumerate(lanes)
        if token >= 0
    ]


def check(batch: Batch, work: WorkList, rows: list[int] | None = None) -> None:
    """All that holds for any list."""
    tables, room = batch.tables(), work.capacity
    rows = list(range(len(batch.blocks))) if rows is None else rows
    assert len(work.items) <= room.items and len(work.lanes) <= room.lanes and len(work.entries) <= room.entries
    assert len(work.rows) <= room.rows and work.num_partials <= room.partials
    assert work.bounds[0] == 0 and work.bounds[-1] == len(work.items) and (np.diff(work.bounds) >= 0).all()
    covered = {row: np.zeros(int(tables.seq_lens[row]), dtype=int) for row in rows}
    partials: dict[int, list[int]] = {row: [] for row in rows}
    for number, item in enumerate(work.items):
        first, begin, end = (int(word) for word in item[:3])
        own = members(work, number)
        assert 0 <= begin < end and begin % BLOCK == 0 and first in [row for row, _, _ in own]
        assert (number >= work.bounds[2]) == (len(own) > room.members)
        assert (item[6] > item[5]) == (work.bounds[1] <= number < work.bounds[2] or number >= work.bounds[3])
        for row, partial, _ in own:
            covered[row][begin:end] += 1
            assert end <= tables.seq_lens[row], "no item reaches beyond a member's context"
            blocks = slice(begin // BLOCK, -(-end // BLOCK))
            assert (tables.kv_block_table[row, blocks] == tables.kv_block_table[first, blocks]).all()
            partials[row].append(partial)
        check_entries(tables, work, number)
    for row in rows:
        assert (covered[row] == 1).all(), f"row {row}: every token exactly once"
    for number, row in enumerate(rows):
        token, start, count = (int(word) for word in work.rows[number, :3])
        assert token == row + 100 and sorted(partials[row]) == list(range(start, start + count))
    everyone = [partial for own in partials.values() for partial in own]
    assert sorted(everyone) == list(range(len(everyone)))


def check_entries(tables: RowTables, work: WorkList, number: int) -> None:
    """The rows of an item that read a residual there stand in one entry each, with what they read."""
    begin, end, first_entry, end_entry = (int(work.items[number, word]) for word in (1, 2, 5, 6))
    fields = (tables.read_slot, tables.residual_len, tables.k_tiles, tables.v_tiles)
    per_block = tables.residual_k_table.shape[1] // tables.kv_block_table.shape[1]
    served = []
    for entry in work.entries[first_entry:end_entry].tolist():
        source, _, length, _, _, lo, hi, _ = entry
        assert lo // CHUNK == (hi - 1) // CHUNK, "an entry stays in one chunk"
        span = slice(begin // BLOCK * per_block, -(-min(end, length) // BLOCK) * per_block)
        for row, _, lane in members(work, number):
            if lo <= lane < hi:
                served.append(row)
                assert entry[1:5] == [int(field[row]) for field in fields]
                assert (tables.residual_k_table[row, span] == tables.residual_k_table[source, span]).all()
    wanted = {row for row, _, _ in members(work, number) if reads(tables, row, begin)}
    assert len(served) == len(set(served)) and wanted <= set(served)
    assert all(tables.read_slot[row] >= 0 for row in served), "rows without adapter are in no entry"


def reads(tables: RowTables, row: int, begin: int) -> bool:
    return bool(tables.read_slot[row] >= 0 and tables.residual_len[row] > begin and tables.k_tiles[row] > 0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, list[list[int]]]:
    """Up to three trees of documents behind a common beginning, rows at their leaves, adapters of any popularity."""
    batch, groups = Batch(), []
    for _ in range(draw(st.integers(1, 3))):
        system = batch.fresh(draw(st.integers(0, 6)))
        group = []
        for _ in range(draw(st.integers(1, 3))):
            document = system + batch.fresh(draw(st.integers(0, 12)))
            for _ in range(draw(st.integers(1, 5))):
                slot = draw(st.integers(-1, 2))
                residual = draw(st.one_of(st.just(len(document) * BLOCK), st.integers(0, 200))) if slot >= 0 else 0
                whole = draw(st.booleans()) and len(document) > 0
                tail = draw(st.integers(1, 60))
                row = batch.add(document, tail, slot, residual, draw(st.integers(1, 3)))
                if whole:  # a full hit: the last token of the row lies in a shared block
                    batch.blocks[row], batch.lengths[row] = list(document), len(document) * BLOCK
                    batch.adapters[row] = (slot, min(residual, len(document) * BLOCK), batch.adapters[row][2])
                group.append(row)
        groups.append(group)
    return batch, groups


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    batches(),
    st.integers(1, 16),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((32, 64, 128)),
    st.sampled_from((1, 8, 64, 300)),
    st.sampled_from((1, 64)),
)
def test_covers_everything_once(
    made: tuple[Batch, list[list[int]]], heads: int, kv_heads: int, wide: int, programs: int, min_shared: int
) -> None:
    batch, groups = made
    options = {"heads": heads, "kv_heads": kv_heads, "wide": wide, "programs": programs}
    work = make_plan(batch, groups, **options, min_shared_tokens=min_shared)  # type: ignore[arg-type]
    check(batch, work)
    alone = make_plan(batch, [], **options)  # type: ignore[arg-type]
    check(batch, alone)
    assert len(alone.lanes) == len(batch.blocks) * work.capacity.members


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches(), st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_falls_back_when_the_capacity_is_small(
    made: tuple[Batch, list[list[int]]], items: int, partials: int, lanes: int
) -> None:
    """Whatever the room is beyond that for rows alone, the list fits and is complete."""
    batch, groups = made
    rows = len(batch.blocks)
    full = Capacity.for_limits(rows, 4, 2, 32, 64)
    small = replace(
        full,
        items=rows + items,
        partials=rows + partials,
        lanes=rows * full.members + lanes,
        entries=rows,
    )
    work = make_plan(batch, groups, capacity=small)
    assert work.capacity is small
    check(batch, work)


def blocks_read(batch: Batch, work: WorkList) -> Counter[int]:
    """How many items read each block."""
    table = batch.tables().kv_block_table
    read: Counter[int] = Counter()
    for row, begin, end in work.items[:, :3].tolist():
        read.update(table[row, begin // BLOCK : -(-end // BLOCK)].tolist())
    return read


def test_shared_blocks_are_read_once() -> None:
    """Eight agents with eight adapters on one document, split over many items: each of its blocks stands in exactly
    one item, and so does each private block."""
    batch = Batch()
    document = batch.fresh(256)
    rows = [batch.add(document, 20 + row, row, len(document) * BLOCK) for row in range(8)]
    work = make_plan(batch, [rows], kv_heads=8, programs=264)
    check(batch, work)
    assert set(blocks_read(batch, work).values()) == {1}
    assert set(blocks_read(batch, make_plan(batch, [], kv_heads=8, programs=264)).values()) == {1, 8}
    items = len(work.items)
    assert 264 // 8 * 0.8 <= items <= 264 // 8 + len(rows) + 1, f"{items} items for 264 programs"


def test_documents_behind_one_system_prompt() -> None:
    """Every level is read once: the system prompt for all rows, each document for its own."""
    batch = Batch()
    system = batch.fresh(8)
    documents = [system + batch.fresh(20), system + batch.fresh(30)]
    rows = [batch.add(documents[i % 2], 5 + i, i % 3, 300) for i in range(6)]
    work = make_plan(batch, [rows], min_shared_tokens=64)
    check(batch, work)
    assert set(blocks_read(batch, work).values()) == {1}


def test_rows_of_one_adapter_share_its_expansion() -> None:
    """Same slot and units: one entry per chunk of four rows instead of one per row."""
    batch = Batch()
    document = batch.fresh(16)
    rows = [batch.add(document, 10, 0, 256) for _ in range(8)]
    work = make_plan(batch, [rows])
    check(batch, work)
    wide = work.items[work.bounds[3] :]
    assert len(wide) and all(item[6] - item[5] == 2 for item in wide)
    other = Batch()
    document = other.fresh(16)
    distinct = make_plan(other, [[other.add(document, 10, i, 256) for i in range(8)]])
    assert all(item[6] - item[5] == 8 for item in distinct.items[distinct.bounds[3] :])


def test_members_beyond_one_tile() -> None:
    """More rows than the widest tile holds: as few tiles as possible, each with its own items."""
    batch = Batch()
    document = batch.fresh(10)
    rows = [batch.add(document, 3, i % 5, 160) for i in range(70)]
    assert tile_heads(70, 4, 128) == 128 and tile_heads(70, 4, 256) == 32
    work = make_plan(batch, [rows], programs=1)
    check(batch, work)
    shared = [len(members(work, number)) for number, item in enumerate(work.items) if item[1] == 0]
    assert sorted(shared) == [6, 32, 32]


def test_some_rows_of_a_batch() -> None:
    """Prefill rows of the batch and of a group stay out."""
    batch = Batch()
    document = batch.fresh(6)
    rows = [batch.add(document, 7, row % 2, 90) for row in range(5)]
    work = make_plan(batch, [rows], rows=[1, 3, 4])
    check(batch, work, rows=[1, 3, 4])


def test_words_of_padded_rows() -> None:
    """Rows behind the list: padding gets its own token and no partials, the rest is nobody's."""
    batch = Batch()
    document = batch.fresh(6)
    rows = [batch.add(document, 7, 0, 96) for _ in range(3)]
    capacity = Capacity.for_limits(6, 4, 2, 64, 64)
    work = make_plan(batch, [rows], capacity=capacity)
    words = np.full(capacity.words, 7, dtype=np.int32)
    work.write(words, num_rows=5)
    table = words[capacity.offsets["rows"] :].reshape(-1, 4)
    assert table[:3].tolist() == work.rows.tolist()
    assert table[3:].tolist() == [[3, 0, 0, 0], [4, 0, 0, 0], [-1, 0, 0, 0]]
    items = words[capacity.offsets["items"] :][: work.items.size].reshape(-1, 8)
    assert (items == work.items).all() and (words[:5] == work.bounds).all()
    with pytest.raises(ValueError, match="7 decode rows, room for 6"):
        make_plan(_copies(7), [], capacity=capacity)


def test_more_than_sixteen_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="17 query heads"):
        Capacity.for_limits(4, 17, 1, 16, 64)


def _copies(count: int) -> Batch:
    batch = Batch()
    for _ in range(count):
        batch.add([], 5)
    return batch
