"""A shadow memory in place of a device: every cell remembers what was written, every read is compared.

Content of a K/V cell is (writer, tokens up to it, scope), where the writer is the base model or an adapter with its
fork point; content of a residual cell adds adapter, half and tile. `ShadowExecutor` derives from a request alone what
each segment must read and which weights must run, so a scheduler that shares too much, too little, too early or too
late reads a cell that differs.

In a mixed tree what an agent reads depends on who came first. There every write of a cell has a number. A K/V cell
names its own and that of the cell before it, as its writer read it; a residual cell names the K/V cell that it
completes. A reader must find an unbroken chain of cells that agents wrote, and residuals made over just these cells.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from forkkv.scheduler.fork import ForkPoint, fork_point
from forkkv.sharing import CONTROLS, is_shared
from forkkv.types import (
    RESIDUAL_TILE,
    AdapterMeta,
    EngineRequest,
    KVSharing,
    ResidualWrite,
    Segment,
    StepPlan,
    StepResult,
    TokenLogprob,
)

VOCAB = 3


@dataclass(frozen=True)
class MixedCell:
    """K, V that an agent wrote: the `number` of this write, that of the token before, and whether the adapter's part
    is in it."""

    writer: str
    merged: bool
    prefix: int
    scope: str
    number: int
    before: int


@dataclass
class Expected:
    """What a request means, from the definition alone."""

    adapter: AdapterMeta | None
    fork: ForkPoint
    scope: str
    uses_residual: bool
    mode: KVSharing = "none"
    mixed: bool = False
    """An agent under a control: its own weights run on every token, K, V and residuals of which are shared."""

    @property
    def weights_from(self) -> float:
        if self.mixed:
            return 0
        return float("inf") if self.fork.weights_from is None else self.fork.weights_from

    def residual_len(self, end: int) -> int:
        """Tokens whose residual an adapter segment that ends at `end` reads."""
        if not self.uses_residual:
            return 0
        return end if self.mixed else (self.fork.private_from or 0)

    @property
    def residual_name(self) -> str:
        assert self.adapter is not None
        return self.adapter.a_digest if self.mode == "shared-a" else self.adapter.digest

    def kv(self, prefixes: list[int], position: int) -> tuple[object, ...]:
        if position < self.weights_from:
            return ("base", prefixes[position], self.scope)
        assert self.adapter is not None
        return (self.adapter.digest, self.weights_from, self.uses_residual, prefixes[position], self.scope)


def expect(
    request: EngineRequest, adapter: AdapterMeta | None, mode: KVSharing, block_size: int, tail: int
) -> Expected:
    shared = adapter is not None and is_shared(adapter, mode, request.kv_sharing)
    point = fork_point(
        request.prompt_token_ids,
        block_size,
        kind=adapter.kind if adapter else None,
        shared=shared,
        fork_tail=tail,
        invocation_tokens=adapter.invocation_tokens if adapter else (),
        fork_at=request.fork_at,
    )
    has_residual = adapter is not None and adapter.kind != "alora" and bool(adapter.rank_k or adapter.rank_v)
    if adapter is not None and adapter.kind != "alora" and mode in CONTROLS and request.kv_sharing != "none":
        everything = ForkPoint(len(request.prompt_token_ids), None)
        return Expected(adapter, everything, request.cache_salt, has_residual and mode != "full", mode, mixed=True)
    return Expected(adapter, point, request.cache_salt, has_residual and bool(point.private_from))


def next_token(expected: Expected, tokens: Sequence[int], seed: int, index: int) -> int:
    """What the shadow model answers: a function of the definition, the tokens, and (seed, i)."""
    adapter = expected.adapter.digest if expected.adapter and not expected.fork.is_base else ""
    return zlib.crc32(repr((adapter, expected.fork.weights_from, list(tokens), seed, index)).encode()) % VOCAB


def answer(expected: Expected, prompt: list[int], seed: int, count: int) -> list[int]:
    """The tokens that a request must get, whatever else runs."""
    tokens = list(prompt)
    for index in range(count):
        tokens.append(next_token(expected, tokens, seed, index))
    return tokens[len(prompt) :]


@dataclass
class Row:
    tokens: list[int]
    num_prompt: int
    seed: int
    kv: list[int] = field(default_factory=list)
    k_units: list[int] = field(default_factory=list)
    v_units: list[int] = field(default_factory=list)

    def prefixes(self) -> list[int]:
        out, running = [], 0
        for token in self.tokens:
            running = hash((running, token))
            out.append(running)
        return out


class ShadowExecutor:
    """Runs plans against the shadow memory. `expected` maps sequence ids to what they mean."""

    def __init__(self, block_size: int, adapters: Sequence[AdapterMeta]):
        self.block_size = block_size
        self.by_id = {adapter.adapter_id: adapter for adapter in adapters}
        agents = [adapter for adapter in adapters if adapter.kind != "alora"]
        self.agents = {adapter.digest for adapter in agents}
        self.with_residual = {adapter.digest for adapter in agents if adapter.rank_k or adapter.rank_v}
        self.expected: dict[str, Expected] = {}
        self.rows: dict[str, Row] = {}
        self.slots: dict[int, int] = {}
        self.kv: dict[tuple[int, int], object] = {}
        self.residual: dict[tuple[int, int], object] = {}
        self.base_tokens = 0
        self.writes = 0

    def execute(self, plan: StepPlan, fail: bool = False) -> StepResult:
        if fail and plan.step_id % 2:
            return StepResult(plan.step_id, error="failed before anything was done")
        self._take_state(plan)
        written: set[tuple[int, int]] = set()
        for segment in plan.segments:
            self._write(segment, written, garbage=fail)
        if fail:
            return StepResult(plan.step_id, error="failed after writing garbage")
        self._check_groups(plan)
        tokens = {}
        for segment in plan.segments:
            self._check(segment)
            if segment.sample:
                row = self.rows[segment.request_id]
                expected = self.expected[segment.request_id]
                token = next_token(expected, row.tokens, row.seed, len(row.tokens) - row.num_prompt)
                row.tokens.append(token)
                tokens[segment.request_id] = token
        return StepResult(
            plan.step_id, tokens=tokens, logprobs={name: TokenLogprob(t, 0.0) for name, t in tokens.items()}
        )

    def _take_state(self, plan: StepPlan) -> None:
        for name in plan.dropped:
            self.rows.pop(name, None)
        for new in plan.new:
            self.rows[new.request_id] = Row(list(new.token_ids), new.num_prompt_tokens, new.seed)
        for update in plan.tables:
            row = self.rows[update.request_id]
            row.kv.extend(update.kv_blocks)
            row.k_units.extend(update.k_units)
            row.v_units.extend(update.v_units)
        for copy in plan.copies:
            for offset in range(self.block_size):
                self.kv[copy.dst, offset] = self.kv.get((copy.src, offset))
        for load in plan.adapter_loads:
            self.slots[load.slot] = load.adapter_id

    def _write(self, segment: Segment, written: set[tuple[int, int]], *, garbage: bool) -> None:
        row, expected = self.rows[segment.request_id], self.expected[segment.request_id]
        prefixes, size = row.prefixes(), self.block_size
        for position in range(max(segment.start, segment.kv_write_from), segment.end):
            cell = row.kv[position // size], position % size
            assert cell[0] != 0, "a write to the null block"
            assert cell not in written, "two segments write one cell"
            written.add(cell)
            self.kv[cell] = "garbage" if garbage else self._content(expected, row, prefixes, position)
        for write in segment.residual_writes:
            self._write_residual(segment, write, expected, row, prefixes, garbage=garbage)

    def _content(self, expected: Expected, row: Row, prefixes: list[int], position: int) -> object:
        if not expected.mixed:
            return expected.kv(prefixes, position)
        assert expected.adapter is not None
        self.writes += 1
        before = self._number(row, position - 1)
        merged = not expected.uses_residual
        return MixedCell(expected.adapter.digest, merged, prefixes[position], expected.scope, self.writes, before)

    def _number(self, row: Row, position: int) -> int:
        """Number of the write of the mixed cell that a row has at `position`; 0 before the first, -1 for another."""
        if position < 0:
            return 0
        cell = self.kv.get((row.kv[position // self.block_size], position % self.block_size))
        return cell.number if isinstance(cell, MixedCell) else -1

    def _write_residual(
        self, segment: Segment, write: ResidualWrite, expected: Expected, row: Row, prefixes: list[int], garbage: bool
    ) -> None:
        adapter, size = self.by_id[write.adapter_id], self.block_size
        assert (segment.weights_slot >= 0) == expected.mixed, "residuals come from the states that the definition says"
        assert segment.start <= write.write_from < segment.end
        if expected.mixed:
            assert expected.adapter is not None and write.adapter_id == expected.adapter.adapter_id, "no fan-out"
        else:
            assert write.write_from % size == 0
        first = write.write_from // size
        for half, units, tiles in (("k", write.k_units, adapter.k_tiles), ("v", write.v_units, adapter.v_tiles)):
            for index, unit in enumerate(units):
                block, tile = divmod(index, tiles)
                for position in range(max(write.write_from, (first + block) * size), (first + block + 1) * size):
                    if position >= segment.end:
                        assert expected.mixed, "a residual unit is written whole"
                        break
                    content = self._residual(adapter, expected, half, tile, row, prefixes, position)
                    self.residual[unit, position % size] = "garbage" if garbage else content

    def _residual(
        self, adapter: AdapterMeta, expected: Expected, half: str, tile: int, row: Row, prefixes: list[int], at: int
    ) -> tuple[object, ...]:
        """Content of the residual cell of token `at`."""
        if expected.mixed:
            return (expected.residual_name, half, tile, prefixes[at], expected.scope, self._number(row, at))
        return (adapter.digest, half, tile, prefixes[at], expected.scope)

    def _check(self, segment: Segment) -> None:
        row, expected = self.rows[segment.request_id], self.expected[segment.request_id]
        assert segment.num_tokens > 0 and segment.end <= len(row.tokens)
        assert segment.sample == (segment.end == len(row.tokens))
        self._check_weights(segment, expected)
        prefixes, size = row.prefixes(), self.block_size
        if segment.weights_slot == -1:
            self.base_tokens += segment.num_tokens
        for position in range(segment.end):
            found = self.kv.get((row.kv[position // size], position % size))
            if expected.mixed:
                self._check_mixed(found, expected, row, prefixes, position)
                continue
            wanted = expected.kv(prefixes, position)
            assert found == wanted, f"{segment.request_id} reads {found} at {position}, wants {wanted}"
        if segment.read_slot >= 0:
            self._check_residual(segment, row, expected, prefixes)

    def _check_mixed(self, found: object, expected: Expected, row: Row, prefixes: list[int], position: int) -> None:
        assert isinstance(found, MixedCell), f"an agent reads {found} in a mixed tree"
        merged = expected.mode == "full" or (found.writer not in self.with_residual)
        before = self._number(row, position - 1)
        wanted = MixedCell(found.writer, merged, prefixes[position], expected.scope, found.number, before)
        assert found == wanted, f"an agent reads {found} at {position}, wants {wanted}"
        assert found.writer in self.agents, "agents read what agents wrote"

    def _check_weights(self, segment: Segment, expected: Expected) -> None:
        runs_adapter = segment.start >= expected.weights_from
        assert runs_adapter == (segment.weights_slot >= 0), "the wrong weights run"
        assert runs_adapter or segment.end <= expected.weights_from
        completes = expected.mixed and expected.uses_residual
        assert segment.write == ("merged" if runs_adapter and not completes else "base")
        wanted = expected.residual_len(segment.end) if runs_adapter else 0
        assert segment.residual_len == wanted, f"residual read up to {segment.residual_len}, not {wanted}"
        assert (segment.read_slot >= 0) == (wanted > 0)
        for slot in (segment.weights_slot, segment.read_slot):
            if slot >= 0:
                assert expected.adapter and self.by_id[self.slots[slot]].digest == expected.adapter.digest

    def _check_residual(self, segment: Segment, row: Row, expected: Expected, prefixes: list[int]) -> None:
        adapter, size = expected.adapter, self.block_size
        assert adapter is not None
        for half, units, tiles in (("k", row.k_units, adapter.k_tiles), ("v", row.v_units, adapter.v_tiles)):
            for position in range(segment.residual_len if tiles else 0):
                for tile in range(tiles):
                    unit = units[position // size * tiles + tile]
                    wanted = self._residual(adapter, expected, half, tile, row, prefixes, position)
                    found = self.residual.get((unit, position % size))
                    assert found == wanted, f"{segment.request_id} reads residual {found}, wants {wanted}"

    def _check_groups(self, plan: StepPlan) -> None:
        for group in plan.groups:
            tables = {tuple(self.rows[plan.segments[row].request_id].kv[: group.num_blocks]) for row in group.rows}
            assert len(tables) == 1 and len(group.rows) > 1, "rows of a group share their leading blocks"
            assert all(plan.segments[row].start >= group.num_blocks * self.block_size for row in group.rows)


def make_adapters() -> list[AdapterMeta]:
    """Every kind, one and two tiles, one half missing, two names of one digest, a team, and two that share A."""
    wide = RESIDUAL_TILE + 1
    return [
        AdapterMeta(1, "fork-kv", "d1", "fork", 8, 8, team="t", a_digest="a1"),
        AdapterMeta(2, "fork-wide-k", "d2", "fork", wide, 0, team="t", a_digest="a2"),
        AdapterMeta(3, "fork-v", "d3", "fork", 0, 4, a_digest="a3"),
        AdapterMeta(4, "fork-no-kv", "d4", "fork", 0, 0, a_digest="a4"),
        AdapterMeta(5, "plain", "d5", "plain", 8, 8, a_digest="a1"),
        AdapterMeta(6, "alora", "d6", "alora", 8, 8, invocation_tokens=(2, 1), a_digest="a6"),
        AdapterMeta(7, "fork-kv-again", "d1", "fork", 8, 8, a_digest="a1"),
    ]
