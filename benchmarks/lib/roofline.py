"""Bytes and flops that each kernel of a step cannot do without, counted from the step's plan.

Counted are the rows, groups, tables, residual writes and slots of a `ForwardBatch`, which the executor builds from a
`StepPlan`; no formula in the number of agents stands anywhere. Each count is a lower bound for any implementation:

* bytes: every distinct operand once, every result once. K and V of a group's shared blocks count once for all of its
  rows; residual units once for all rows of a group that read the same ones; intermediate results (partial sums of a
  split, LoRA's x·A excepted, since shrink and expand are two kernels) not at all.
* flops: multiplications and additions of matrix products, two each. Softmax, rotation and norms are not counted. A
  residual's K costs its expansion, r·B for each token and KV head; that it is added to K before the product with q, or
  multiplied by q on its own, is the kernel's choice and not counted. Its V costs P·rV for each head and one expansion
  of the rank-r sum for each query.
* ranks are those stored and computed: whole tiles of 16 columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.lib.cards import Rates
from forkkv.attention.batch import ForwardBatch, HostRows
from forkkv.models.spec import ModelSpec
from forkkv.models.tensors import module_shape
from forkkv.types import RESIDUAL_TILE, SharedPrefix

FUSED: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Projections that read the same input, and are therefore one product."""

AdapterRanks = Mapping[int, Mapping[str, int]]
"""Rank of each adapted module, by adapter slot."""


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved to or from main memory and flops of matrix products, by what they are for."""

    bytes: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def floor(self, rates: Rates) -> float:
        """Seconds that this takes at least at `rates`."""
        return rates.floor(self.total_bytes, self.total_flops)

    def __add__(self, other: Work) -> Work:
        return Work(_sum(self.bytes, other.bytes), _sum(self.flops, other.flops))

    def times(self, count: int) -> Work:
        """The same work `count` times, e.g. in every layer."""
        return Work({k: n * count for k, n in self.bytes.items()}, {k: n * count for k, n in self.flops.items()})


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in dict.fromkeys((*a, *b))}


# ---- attention --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Read:
    """What one set of rows reads together: tokens of K and V, and each residual with its length.

    `base`: tokens read once for the set, the group's shared blocks; of a row on its own those below its residual."""

    base: int
    own: int
    residuals: dict[tuple[int, bytes, bytes], tuple[int, int, int]]
    """(slot, K units, V units) -> (length, K columns, V columns)."""


def decode_rows(host: HostRows) -> list[int]:
    """Rows with one query."""
    return [row for row in range(host.num_rows) if host.query_len(row) == 1]


def prefill_rows(host: HostRows) -> list[int]:
    """Rows with several queries."""
    return [row for row in range(host.num_rows) if host.query_len(row) > 1]


def attention_work(
    batch: ForwardBatch, spec: ModelSpec, rows: Sequence[int], itemsize: int, *, grouped: bool = True
) -> Work:
    """Attention of `rows` in one layer. `itemsize`: bytes of an element of cache, queries and weights.

    With `grouped`, rows of one of the batch's groups read the shared blocks once, together; else each for itself.
    """
    host = batch.host
    sets = _reading_sets(host, rows, batch.groups if grouped else (), batch.block_size)
    kv_token = 2 * spec.kv_size * itemsize
    out = Work({"base K, V": kv_token * sum(s.base for s in sets), "own K, V": kv_token * sum(s.own for s in sets)})
    for read in sets:
        out += _residual_reads(read, spec, itemsize)
    for row in rows:
        out += _row_products(host, row, spec)
    queries = sum(host.query_len(row) for row in rows)
    distinct = {key[0]: columns for read in sets for key, (_, *columns) in read.residuals.items()}
    expansion = sum(k + v for k, v in distinct.values()) * spec.kv_size * itemsize
    rotated = max((n for read in sets for n, k, _ in read.residuals.values() if k), default=0)
    rest = {
        "queries, output": 2 * queries * spec.q_size * itemsize,
        "B": expansion,
        "rotation": rotated * spec.head_dim * itemsize,
        "tables": _table_bytes(host, rows, batch.block_size),
    }
    return out + Work(rest)


def _reading_sets(host: HostRows, rows: Sequence[int], groups: Sequence[SharedPrefix], block_size: int) -> list[_Read]:
    """The rows as the groups put them together; a row in no group, or alone in it, reads for itself."""
    left = dict.fromkeys(rows)
    sets: list[_Read] = []
    for group in groups:
        members = [row for row in group.rows if row in left]
        if len(members) > 1:
            sets.append(_read_together(host, members, group.num_blocks * block_size, block_size))
            for row in members:
                del left[row]
    return sets + [_read_together(host, [row], _residual_length(host, row), block_size) for row in left]


def _residual_length(host: HostRows, row: int) -> int:
    return int(host.residual_len[row]) if host.read_slot[row] >= 0 else 0


def _read_together(host: HostRows, members: list[int], base: int, block_size: int) -> _Read:
    read = _Read(base, sum(int(host.seq_lens[row]) - base for row in members), {})
    for row in members:
        if not (length := _residual_length(host, row)):
            continue
        k_tiles, v_tiles = int(host.k_tiles[row]), int(host.v_tiles[row])
        blocks = -(-length // block_size)
        units = [
            table[row].reshape(host.kv_block_table.shape[1], -1)[:blocks, :tiles].tobytes()
            for table, tiles in ((host.residual_k_table, k_tiles), (host.residual_v_table, v_tiles))
        ]
        read.residuals[int(host.read_slot[row]), units[0], units[1]] = (
            length,
            k_tiles * RESIDUAL_TILE,
            v_tiles * RESIDUAL_TILE,
        )
    return read


def _residual_reads(read: _Read, spec: ModelSpec, itemsize: int) -> Work:
    """Loading the residuals of a set of rows, and expanding their K."""
    loaded = sum(n * (k + v) for n, k, v in read.residuals.values()) * itemsize
    expanded = sum(2 * n * k * spec.kv_size for n, k, _ in read.residuals.values())
    return Work({"residual": loaded}, {"K expansion": expanded})


def _row_products(host: HostRows, row: int, spec: ModelSpec) -> Work:
    """q·K and P·V over what each query sees, P·rV over the part with a residual, and its expansion."""
    queries, length = host.query_len(row), int(host.seq_lens[row])
    start = length - queries
    limit = _residual_length(host, row)
    v_columns = int(host.v_tiles[row]) * RESIDUAL_TILE if limit else 0
    flops = {
        "q·K, P·V": 4 * spec.q_size * _pairs(start, queries, length),
        "P·rV": 2 * spec.num_heads * v_columns * _pairs(start, queries, limit),
        "V expansion": 2 * queries * v_columns * spec.q_size,
    }
    return Work({}, flops)


def _pairs(start: int, queries: int, limit: int) -> int:
    """Pairs of a query at position start .. start + queries - 1 and a position that it sees below `limit`."""
    return int(np.minimum(np.arange(start, start + queries) + 1, limit).sum())


def _table_bytes(host: HostRows, rows: Sequence[int], block_size: int) -> int:
    """int32 block ids of the context and unit ids of the residual."""
    total = 0
    for row in rows:
        total += -(-int(host.seq_lens[row]) // block_size)
        total += -(-_residual_length(host, row) // block_size) * int(host.k_tiles[row] + host.v_tiles[row])
    return 4 * total


# ---- everything else --------------------------------------------------------------------------------------------


def _padded(rank: int) -> int:
    return -(-rank // RESIDUAL_TILE) * RESIDUAL_TILE


def lora_work(batch: ForwardBatch, spec: ModelSpec, adapters: AdapterRanks, itemsize: int) -> tuple[Work, Work]:
    """(shrink, expand) of all projections in one layer: x·A of the tokens that run an adapter, and y += (x·A)·B.

    Base tokens cost nothing; A and B of an adapter count once for each projection.
    """
    shrink, expand = Work(), Work()
    tokens = _tokens_by_slot(batch.host)
    for name, modules in FUSED.items():
        for slot, count in tokens.items():
            ranks = {module: _padded(adapters[slot].get(module, 0)) for module in modules}
            columns, inputs = sum(ranks.values()), module_shape(spec, modules[0])[1]
            outputs = {module: module_shape(spec, module)[0] for module in modules if ranks[module]}
            if not columns:
                continue
            middle = count * columns * itemsize
            shrink += Work(
                {f"{name} x": count * inputs * itemsize, "A": columns * inputs * itemsize, "x·A": middle},
                {name: 2 * count * inputs * columns},
            )
            products = sum(ranks[module] * size for module, size in outputs.items())
            y = count * sum(outputs.values()) * itemsize
            expand += Work({"x·A": middle, "B": products * itemsize, "y": 2 * y}, {name: 2 * count * products})
    return shrink, expand


def _tokens_by_slot(host: HostRows) -> dict[int, int]:
    tokens: dict[int, int] = {}
    for row in range(host.num_rows):
        slot = int(host.weights_slot[row])
        if slot >= 0:
            tokens[slot] = tokens.get(slot, 0) + host.query_len(row)
    return tokens


def residual_write_work(batch: ForwardBatch, spec: ModelSpec, itemsize: int) -> Work:
    """h·A of all adapters of a fan-out set, stored: h once, all A once, every unit once. One layer.

    A write covers the whole blocks of its units; its tiles are the units that it names for each of them.
    """
    out = Work()
    for row in batch.residual_writes:
        count = batch.host.query_len(row.row)
        widest = 0
        for write in row.writes:
            tokens = count - (write.write_from - row.start)
            blocks = tokens // batch.block_size
            for units in (write.k_units, write.v_units):
                if not units or not blocks:
                    continue
                columns = len(units) // blocks * RESIDUAL_TILE
                stored = blocks * batch.block_size
                widest = max(widest, stored)
                out += Work(
                    {"A": columns * spec.hidden_size * itemsize, "residual": stored * columns * itemsize},
                    {"h·A": 2 * stored * spec.hidden_size * columns},
                )
        out += Work({"h": widest * spec.hidden_size * itemsize})
    return out


def rope_write_work(batch: ForwardBatch, spec: ModelSpec, itemsize: int) -> Work:
    """Rotating q and k and storing K and V of the tokens that the plan stores. One layer."""
    tokens, stored = batch.num_tokens, int(batch.kv_slots.shape[0])
    return Work(
        {
            "q, k": tokens * (2 * spec.q_size + spec.kv_size) * itemsize,
            "v": stored * spec.kv_size * itemsize,
            "rotation": tokens * spec.head_dim * itemsize,
            "cache": 2 * stored * spec.kv_size * itemsize,
        }
    )


def dense_work(batch: ForwardBatch, spec: ModelSpec, itemsize: int) -> Work:
    """The projections of one layer: weights once, inputs and outputs once."""
    out = Work()
    for name, modules in FUSED.items():
        shapes = [module_shape(spec, module) for module in modules]
        inputs, outputs = shapes[0][1], sum(shape[0] for shape in shapes)
        out += _product(name, batch.num_tokens, inputs, outputs, itemsize)
    return out


def head_work(batch: ForwardBatch, spec: ModelSpec, itemsize: int) -> Work:
    """Logits of the tokens that are sampled, once a step."""
    return _product("head", int(batch.sample_tokens.shape[0]), spec.hidden_size, spec.vocab_size, itemsize)


def _product(name: str, rows: int, inputs: int, outputs: int, itemsize: int) -> Work:
    moved = {"weights": inputs * outputs * itemsize, "x, y": rows * (inputs + outputs) * itemsize}
    return Work(moved, {name: 2 * rows * inputs * outputs})


def count_layer(
    batch: ForwardBatch, spec: ModelSpec, adapters: AdapterRanks, itemsize: int, *, grouped: bool = True
) -> dict[str, Work]:
    """Work of every kernel of one layer; kernels without work are left out."""
    shrink, expand = lora_work(batch, spec, adapters, itemsize)
    host = batch.host
    found = {
        "dense layers": dense_work(batch, spec, itemsize),
        "shrink": shrink,
        "expand": expand,
        "residual write": residual_write_work(batch, spec, itemsize),
        "rope, cache write": rope_write_work(batch, spec, itemsize),
        "attention, prefill": attention_work(batch, spec, prefill_rows(host), itemsize),
        f"attention, decode{'' if grouped else ', ungrouped'}": attention_work(
            batch, spec, decode_rows(host), itemsize, grouped=grouped
        ),
    }
    return {name: work for name, work in found.items() if work.total_bytes or work.total_flops}


def total(works: Iterable[Work]) -> Work:
    """Sum of several kernels' work."""
    out = Work()
    for work in works:
        out += work
    return out
