"""Collects one `StepPlan` while the scheduler walks its queues."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkkv.kvcache.sequence_cache import Growth
from forkkv.scheduler.sequence import Sequence
from forkkv.types import (
    AdapterLoad,
    BlockCopy,
    BlockId,
    NewSequence,
    Segment,
    SharedPrefix,
    StepPlan,
    TableUpdate,
)


@dataclass(slots=True)
class _Tables:
    kv_blocks: list[BlockId] = field(default_factory=list)
    k_units: list[BlockId] = field(default_factory=list)
    v_units: list[BlockId] = field(default_factory=list)


class PlanBuilder:
    """A plan under construction. `sequences` are those with tokens in it, `touched` those whose tables it changes.

    A draft without segments is not launched; what it holds (table updates, adapter loads) waits for the next one.
    """

    def __init__(self, step_id: int):
        self.step_id = step_id
        self.segments: list[Segment] = []
        self.sequences: dict[str, Sequence] = {}
        self.copies: list[BlockCopy] = []
        self.loads: list[AdapterLoad] = []
        self.dropped: list[str] = []
        self.touched: dict[str, Sequence] = {}
        self._new: dict[str, NewSequence] = {}
        self._tables: dict[str, _Tables] = {}
        self._rows: list[Sequence] = []

    def enter(self, sequence: Sequence) -> None:
        """`sequence` joins the running batch: the executor learns its tokens. Mutates the plan."""
        residual = sequence.adapter if sequence.cache.uses_residual else None
        self._new[sequence.sequence_id] = NewSequence(
            request_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            seed=sequence.seed,
            k_tiles=residual.k_tiles if residual else 0,
            v_tiles=residual.v_tiles if residual else 0,
        )

    def forget(self, sequence: Sequence) -> None:
        """Take back what the plan says of a sequence without tokens in it, before its blocks are released."""
        self._new.pop(sequence.sequence_id, None)
        self._tables.pop(sequence.sequence_id, None)
        self.touched.pop(sequence.sequence_id, None)
        own = sequence.cache.owned
        self.copies = [copy for copy in self.copies if copy.dst not in own]

    def append(self, sequence: Sequence, growth: Growth) -> None:
        """Append ids to the executor's copy of a sequence's tables. Mutates the plan."""
        if growth.kv_blocks or growth.k_units or growth.v_units:
            self.touched[sequence.sequence_id] = sequence
            tables = self._tables.setdefault(sequence.sequence_id, _Tables())
            tables.kv_blocks.extend(growth.kv_blocks)
            tables.k_units.extend(growth.k_units)
            tables.v_units.extend(growth.v_units)

    def add(self, sequence: Sequence, segment: Segment) -> None:
        """Run `segment`; its sequence is pinned until the plan is applied. Mutates both."""
        self.segments.append(segment)
        self._rows.append(sequence)
        self.sequences[sequence.sequence_id] = sequence
        sequence.in_flight = True

    def build(self) -> StepPlan:
        updates = (
            TableUpdate(name, tuple(t.kv_blocks), tuple(t.k_units), tuple(t.v_units))
            for name, t in self._tables.items()
        )
        return StepPlan(
            step_id=self.step_id,
            new=tuple(self._new.values()),
            tables=tuple(updates),
            segments=tuple(self.segments),
            groups=self._groups(),
            copies=tuple(self.copies),
            adapter_loads=tuple(self.loads),
            dropped=tuple(self.dropped),
        )

    def _groups(self) -> tuple[SharedPrefix, ...]:
        """Rows that read the same leading blocks, so that attention can load those once for all of them.

        Only blocks wholly before a row's first token count: every token of the row sees all of the shared part.
        """
        by_first: dict[BlockId, list[int]] = {}
        for row, (segment, sequence) in enumerate(zip(self.segments, self._rows, strict=True)):
            blocks = sequence.cache.kv_blocks
            if segment.start >= sequence.cache.block_size and blocks:
                by_first.setdefault(blocks[0], []).append(row)
        groups = []
        for rows in by_first.values():
            if len(rows) < 2:
                continue
            tables = [self._leading_blocks(row) for row in rows]
            groups.append(SharedPrefix(_common_prefix(tables), tuple(rows)))
        return tuple(groups)

    def _leading_blocks(self, row: int) -> list[BlockId]:
        cache = self._rows[row].cache
        return cache.kv_blocks[: self.segments[row].start // cache.block_size]


def _common_prefix(tables: list[list[BlockId]]) -> int:
    """Length of the common prefix of all lists: that of the smallest and the largest one."""
    low, high = min(tables), max(tables)
    for index, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return index
    return len(low)
