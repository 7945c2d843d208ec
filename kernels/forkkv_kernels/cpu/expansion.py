"""An agent's own keys, RoPE(rK @ B_k), and their scores, one tile of tokens and one KV head at a time.

Both rK and keys are turned, a vector holding one column or dimension of 16 tokens: rotation is elementwise, and the
expansion is a product whose 16 accumulators (8 dimensions by 2 vectors) never leave the registers.

    expand_and_score    base keys are turned, too, and what is scored is base + own: where several runs read the tile
    add_own_scores      base keys were scored as they lie in the cache: where so few queries read it that turning costs
                        more than the sum of products
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forkkv_kernels.cpu.codegen import FLOATS, INT64S, WIDTH, Emitter, Variable
from forkkv_kernels.cpu.microkernels import FUSED, TILE, VECTORS, emit_scores, function

PAIRS = 4
"""Rotation pairs (dimensions i and i + D / 2) that one pass of the expansion completes."""
_UNROLL = 4
"""Columns of a residual (a multiple of 16) per turn of the expansion's loop."""


@dataclass(frozen=True, slots=True)
class _Own:
    """What both code generators begin with: a residual, the B_k it goes through, and the tile's rotation."""

    dim: ir.Value
    residual: ir.Value
    rank: ir.Value
    b: ir.Value
    b_at: ir.Value
    b_rank: ir.Value
    rope: ir.Value


@dataclass(frozen=True, slots=True)
class _Expand(_Own):
    """Operands of `_expand_and_score`, in its order."""

    base: ir.Value
    base_at: ir.Value
    factors: ir.Value
    factors_at: ir.Value
    out: ir.Value
    q: ir.Value
    q_at: ir.Value
    count: ir.Value
    scores: ir.Value
    scores_at: ir.Value
    scores_stride: ir.Value

    @property
    def queries(self) -> tuple[ir.Value, ...]:
        """Queries and the place of their scores, as `emit_scores` takes them."""
        return self.q, self.q_at, self.count, self.scores, self.scores_at, self.scores_stride


@intrinsic
def _expand_and_score(
    typingctx: Any,
    dim: Any,
    residual: Any,
    rank: Any,
    b: Any,
    b_at: Any,
    b_rank: Any,
    rope: Any,
    base: Any,
    base_at: Any,
    factors: Any,
    factors_at: Any,
    out: Any,
    q: Any,
    q_at: Any,
    count: Any,
    scores: Any,
    scores_at: Any,
    scores_stride: Any,
) -> Any:
    """Scores of `count` queries with the keys of one tile and KV head, base + RoPE(rK @ B_k), turned [D, TILE].

    Up to FUSED queries take every key as it leaves the registers; for more the keys are written to `out` and read by
    `_score_tile`. Queries and scores as there.

    residual: turned rK [rank, TILE]; b: one slot and head of `pack_b_k`'s layout, made for `b_rank` columns, from
    `b_at`; rope: cos of D / 2 angles, then sin, of the tile's positions [D, TILE]; base [D, TILE] from `base_at`; out
    [D, TILE].
    `factors_at` >= 0: multiply base by factors[factors_at:][:TILE] and the residual by the TILE after it (QK-norm).
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit, given = Emitter(builder), _Expand(*args)
        count = given.count
        # Loops of their own, so that models without QK-norm do not branch at every vector.
        scaled = builder.icmp_signed(">=", given.factors_at, emit.const(0))
        many = builder.or_(scaled, builder.icmp_signed(">", count, emit.const(FUSED)))
        with builder.if_then(scaled, likely=False):
            _expand_tile(emit, given, scaled=True)
        with builder.if_then(builder.and_(many, builder.not_(scaled))):
            _expand_tile(emit, given)
        with builder.if_then(many):
            emit_scores(emit, given.dim, given.out, emit.const(0), *given.queries)
        for n in range(1, FUSED + 1):
            with builder.if_then(builder.and_(builder.not_(many), builder.icmp_signed("==", count, emit.const(n)))):
                _expand_tile(emit, given, queries=n)
        return context.get_dummy_value()

    ints = types.int64
    signature = types.void(
        ints, FLOATS, ints, FLOATS, ints, ints, FLOATS, FLOATS, ints, FLOATS, ints, FLOATS, FLOATS, ints, ints, FLOATS,
        ints, ints,
    )  # fmt: skip
    return signature, generate


def _expand_tile(emit: Emitter, given: _Expand, scaled: bool = False, queries: int = 0) -> None:
    """The loop of `_expand_and_score` over groups of rotation pairs, with or without the factors of QK-norm. `queries`:
    add up their scores and store those; 0: store the keys."""
    builder, half = emit.builder, emit.builder.lshr(given.dim, emit.const(1))
    begins = [builder.add(given.q_at, builder.mul(emit.const(n), given.dim)) for n in range(queries)]
    scores = emit.variables([emit.fixed(0.0)] * (queries * VECTORS))
    with emit.loop(half, PAIRS) as i:
        group = builder.add(given.b_at, builder.mul(emit.times(i, 2), given.b_rank))
        sums = _expand_group(emit, given, group)
        for p in range(PAIRS):
            low = emit.sum(i, p)
            high = builder.add(low, half)
            keys = _complete_pair(emit, given, low, high, sums[p * VECTORS :], sums[(PAIRS + p) * VECTORS :], scaled)
            for d, tile in zip((low, high), keys, strict=True):
                for j, key in enumerate(tile):
                    if not queries:
                        emit.store(key, given.out, emit.times(d, TILE), j * WIDTH)
                for n, begin in enumerate(begins):
                    value = emit.broadcast(given.q, begin, d)
                    for j, key in enumerate(tile):
                        place = scores[n * VECTORS + j]
                        place.set(emit.fma(value, key, place.get()))
    for n in range(queries):
        to = builder.add(given.scores_at, builder.mul(emit.const(n), given.scores_stride))
        for j in range(VECTORS):
            emit.store(scores[n * VECTORS + j].get(), given.scores, to, j * WIDTH)


def _complete_pair(
    emit: Emitter,
    given: _Expand,
    low: ir.Value,
    high: ir.Value,
    ones: list[Variable],
    twos: list[Variable],
    scaled: bool,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Keys of dimensions `low` and `high`, rotation partners, from their expansions: vectors of the tile's tokens."""
    builder, rope, base, factors = emit.builder, given.rope, given.base, given.factors
    keys: tuple[list[ir.Value], list[ir.Value]] = ([], [])
    for j in range(VECTORS):
        cos_at, sin_at = (emit.load(rope, emit.times(d, TILE), j * WIDTH) for d in (low, high))
        one, two = ones[j].get(), twos[j].get()
        own_low, own_high = (emit.load(base, given.base_at, emit.times(d, TILE), j * WIDTH) for d in (low, high))
        if scaled:
            base_factor = emit.load(factors, given.factors_at, j * WIDTH)
            factor = emit.load(factors, given.factors_at, TILE + j * WIDTH)
            own_low, own_high = builder.fmul(own_low, base_factor), builder.fmul(own_high, base_factor)
            one, two = builder.fmul(one, factor), builder.fmul(two, factor)
        keys[0].append(emit.fnma(two, sin_at, emit.fma(one, cos_at, own_low)))
        keys[1].append(emit.fma(one, sin_at, emit.fma(two, cos_at, own_high)))
    return keys


def _expand_group(emit: Emitter, given: _Own, group: ir.Value) -> list[Variable]:
    """rK @ B_k for PAIRS dimensions and their partners (their weights from `group`), times TILE tokens."""
    sums = emit.variables([emit.fixed(0.0)] * (2 * PAIRS * VECTORS))
    with emit.loop(given.rank, _UNROLL) as r:
        for u in range(_UNROLL):
            row, weights = emit.times(emit.sum(r, u), TILE), emit.times(emit.sum(r, u), 2 * PAIRS)
            tokens = [emit.load(given.residual, row, j * WIDTH) for j in range(VECTORS)]
            for d in range(2 * PAIRS):
                weight = emit.broadcast(given.b, group, weights, d)
                for j in range(VECTORS):
                    place = sums[d * VECTORS + j]
                    place.set(emit.fma(weight, tokens[j], place.get()))
    return sums


@dataclass(frozen=True, slots=True)
class _AddOwn(_Own):
    """Operands of `_add_own_scores`, in its order."""

    factors: ir.Value
    factors_at: ir.Value
    q: ir.Value
    q_at: ir.Value
    count: ir.Value
    scores: ir.Value
    scores_at: ir.Value
    scores_stride: ir.Value
    values: ir.Value
    rows: ir.Value
    size: ir.Value
    shift: ir.Value


@intrinsic
def _add_own_scores(
    typingctx: Any,
    dim: Any,
    residual: Any,
    rank: Any,
    b: Any,
    b_at: Any,
    b_rank: Any,
    rope: Any,
    factors: Any,
    factors_at: Any,
    q: Any,
    q_at: Any,
    count: Any,
    scores: Any,
    scores_at: Any,
    scores_stride: Any,
    values: Any,
    rows: Any,
    size: Any,
    shift: Any,
) -> Any:
    """Add the scores of up to FUSED queries with RoPE(rK @ B_k) to those with the base keys of a tile. Writes `scores`.

    Operands as in `_expand_and_score`; rope: cos and sin of the tile, [D, TILE]. `factors_at` >= 0: the scores of the
    base are multiplied by factors[factors_at:][:TILE], the own ones by the TILE after it (QK-norm).
    Meanwhile asks for the TILE times D values from `rows[t] * size + shift` on, evenly over the loop: memory would be
    idle, and lines that are asked for all at once wait for a place to be noted.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit, given = Emitter(builder), _AddOwn(*args)
        for n in range(1, FUSED + 1):
            with builder.if_then(builder.icmp_signed("==", given.count, emit.const(n))):
                sums = _own_scores(emit, given, n)
                _add_scores(emit, given, sums)
        return context.get_dummy_value()

    ints = types.int64
    signature = types.void(
        ints, FLOATS, ints, FLOATS, ints, ints, FLOATS, FLOATS, ints, FLOATS, ints, ints, FLOATS, ints, ints,
        FLOATS, INT64S, ints, ints,
    )  # fmt: skip
    return signature, generate


def _own_scores(emit: Emitter, given: _AddOwn, queries: int) -> list[list[Variable]]:
    """The loop of `_add_own_scores` over groups of rotation pairs: for each query its scores, by vectors."""
    builder, half = emit.builder, emit.builder.lshr(given.dim, emit.const(1))
    begins = [builder.add(given.q_at, builder.mul(emit.const(n), given.dim)) for n in range(queries)]
    scores = [emit.variables([emit.fixed(0.0)] * VECTORS) for _ in range(queries)]
    with emit.loop(half, PAIRS) as i:
        _ask_for_values(emit, given, builder.sdiv(i, emit.const(PAIRS)))
        group = builder.add(given.b_at, builder.mul(emit.times(i, 2), given.b_rank))
        sums = _expand_group(emit, given, group)
        for p in range(PAIRS):
            low = emit.sum(i, p)
            high = builder.add(low, half)
            for j in range(VECTORS):
                cos, sin = (emit.load(given.rope, emit.times(d, TILE), j * WIDTH) for d in (low, high))
                one, two = sums[p * VECTORS + j].get(), sums[(PAIRS + p) * VECTORS + j].get()
                own_low = emit.fnma(two, sin, builder.fmul(one, cos))
                own_high = emit.fma(one, sin, builder.fmul(two, cos))
                for begin, places in zip(begins, scores, strict=True):
                    for d, key in ((low, own_low), (high, own_high)):
                        places[j].set(emit.fma(emit.broadcast(given.q, begin, d), key, places[j].get()))
    return scores


def _ask_for_values(emit: Emitter, given: _AddOwn, group: ir.Value) -> None:
    """The share of group number `group` (of D / 8) in what `_add_own_scores` asks for: a line of half the tokens."""
    line = emit.times(emit.builder.lshr(group, emit.const(1)), WIDTH)
    first = emit.times(emit.builder.and_(group, emit.const(1)), TILE // 2)
    for t in range(TILE // 2):
        emit.prefetch(given.values, emit.builder.mul(emit.scalar(given.rows, first, t), given.size), given.shift, line)


def _add_scores(emit: Emitter, given: _AddOwn, own: list[list[Variable]]) -> None:
    """The end of `_add_own_scores`."""
    builder, scores = emit.builder, given.scores
    scaled = builder.icmp_signed(">=", given.factors_at, emit.const(0))
    for n, places in enumerate(own):
        to = builder.add(given.scores_at, builder.mul(emit.const(n), given.scores_stride))
        for j, place in enumerate(places):
            base = emit.load(scores, to, j * WIDTH)
            with builder.if_else(scaled, likely=False) as (with_norm, without):
                with with_norm:
                    factor, own_factor = (
                        emit.load(given.factors, given.factors_at, at + j * WIDTH) for at in (0, TILE)
                    )
                    total = emit.fma(place.get(), own_factor, builder.fmul(base, factor))
                    emit.store(total, scores, to, j * WIDTH)
                with without:
                    emit.store(builder.fadd(base, place.get()), scores, to, j * WIDTH)


expand_and_score, add_own_scores = function(_expand_and_score), function(_add_own_scores)
