"""The inner loops of CPU attention, written so that what is used more than once stays in registers.

Tokens come in tiles of 32, two vectors. Keys are turned once per tile, so that a vector holds one dimension of 16
tokens: scores then need no horizontal sums, rotation is elementwise, and the expansion rK @ B_k is a product whose 16
accumulators (8 dimensions by 2 vectors) never leave the registers. Values keep their layout: a vector holds 16
dimensions of one token.

Every function takes flat buffers and offsets in elements. What is unrolled is constant, so that one compiled version
serves every model.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from forkkv_kernels.cpu.codegen import FLOATS, INT64S, WIDTH, Emitter, Variable

TILE = 32
"""Tokens in a tile."""
FUSED = 4
"""Queries whose scores are added up while keys are expanded: 8 accumulators beside the 16 of the expansion."""
_ROWS = 4
"""Tokens that queries are multiplied with at a time where keys are not turned."""
PAIRS = 4
"""Rotation pairs (dimensions i and i + D / 2) that one pass of the expansion completes."""
_VECTORS = TILE // WIDTH
_UNROLL = 4
"""Columns of a residual (a multiple of 16) per turn of the expansion's loop."""
_MAX_QUERIES = 6
_IN_FLIGHT = 8
"""Sums that keep the multipliers busy: two units, four cycles each."""
_SLICE = 4
"""Value vectors (64 dimensions) whose accumulators are in registers at a time; for 6 queries that takes 24."""


@intrinsic
def _turn(typingctx: Any, source: Any, rows: Any, first: Any, size: Any, shift: Any, out: Any, out_at: Any) -> Any:
    """Turn 16 rows of 16 floats: element [r, c] of `out` (row stride TILE, from `out_at`) is element r of source row c.

    Source row c begins at `rows[first + c] * size + shift`. Writes `out`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        src, index, dst = args[0], args[1], args[5]
        begins = [builder.mul(emit.scalar(index, args[2], c), args[3]) for c in range(WIDTH)]
        for r, column in enumerate(emit.transpose([emit.load(src, begin, args[4]) for begin in begins])):
            emit.store(column, dst, args[6], r * TILE)
        return context.get_dummy_value()

    return types.void(FLOATS, INT64S, types.int64, types.int64, types.int64, FLOATS, types.int64), generate


@intrinsic
def _expand_and_score(
    typingctx: Any,
    dim: Any,
    residual: Any,
    residual_at: Any,
    rank: Any,
    b: Any,
    b_at: Any,
    b_rank: Any,
    cos: Any,
    sin: Any,
    rope_at: Any,
    rope_stride: Any,
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

    residual: turned rK [rank, TILE] from `residual_at`; b: one slot and head of `pack_b_k`'s layout, made for
    `b_rank` columns, from `b_at`; cos, sin turned [D / 2, positions], dimension stride `rope_stride`, from `rope_at`;
    base [D, TILE] from `base_at`; out [D, TILE].
    `factors_at` >= 0: multiply base by factors[factors_at:][:TILE] and the residual by the TILE after it (QK-norm).
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        count = args[18]
        # Loops of their own, so that models without QK-norm do not branch at every vector.
        scaled = builder.icmp_signed(">=", args[14], emit.const(0))
        many = builder.or_(scaled, builder.icmp_signed(">", count, emit.const(FUSED)))
        with builder.if_then(scaled, likely=False):
            _expand_tile(emit, args, scaled=True)
        with builder.if_then(builder.and_(many, builder.not_(scaled))):
            _expand_tile(emit, args)
        with builder.if_then(many):
            _emit_scores(emit, args[0], args[15], emit.const(0), *args[16:22])
        for n in range(1, FUSED + 1):
            with builder.if_then(builder.and_(builder.not_(many), builder.icmp_signed("==", count, emit.const(n)))):
                _expand_tile(emit, args, queries=n)
        return context.get_dummy_value()

    ints = types.int64
    signature = types.void(
        ints, FLOATS, ints, ints, FLOATS, ints, ints, FLOATS, FLOATS, ints, ints, FLOATS, ints, FLOATS, ints, FLOATS,
        FLOATS, ints, ints, FLOATS, ints, ints,
    )  # fmt: skip
    return signature, generate


def _expand_tile(emit: Emitter, args: list[ir.Value], scaled: bool = False, queries: int = 0) -> None:
    """The loop of `_expand_and_score` over groups of rotation pairs, with or without the factors of QK-norm. `queries`:
    add up their scores and store those; 0: store the keys."""
    builder, half = emit.builder, emit.builder.lshr(args[0], emit.const(1))
    begins = [builder.add(args[17], builder.mul(emit.const(n), args[0])) for n in range(queries)]
    scores = emit.variables([emit.fixed(0.0)] * (queries * _VECTORS))
    with emit.loop(half, PAIRS) as i:
        group = builder.add(args[5], builder.mul(emit.times(i, 2), args[6]))
        sums = _expand_group(emit, args[1], args[2], args[3], args[4], group)
        for p in range(PAIRS):
            low = emit.sum(i, p)
            high = builder.add(low, half)
            keys = _complete_pair(emit, args, low, high, sums[p * _VECTORS :], sums[(PAIRS + p) * _VECTORS :], scaled)
            for d, tile in zip((low, high), keys, strict=True):
                for j, key in enumerate(tile):
                    if not queries:
                        emit.store(key, args[15], emit.times(d, TILE), j * WIDTH)
                for n, begin in enumerate(begins):
                    value = emit.broadcast(args[16], begin, d)
                    for j, key in enumerate(tile):
                        place = scores[n * _VECTORS + j]
                        place.set(emit.fma(value, key, place.get()))
    for n in range(queries):
        to = builder.add(args[20], builder.mul(emit.const(n), args[21]))
        for j in range(_VECTORS):
            emit.store(scores[n * _VECTORS + j].get(), args[19], to, j * WIDTH)


def _complete_pair(
    emit: Emitter,
    args: list[ir.Value],
    low: ir.Value,
    high: ir.Value,
    ones: list[Variable],
    twos: list[Variable],
    scaled: bool,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Keys of dimensions `low` and `high`, rotation partners, from their expansions: vectors of the tile's tokens."""
    builder, cos, sin, base, factors = emit.builder, args[7], args[8], args[11], args[13]
    rope = builder.add(args[9], builder.mul(low, args[10]))
    keys: tuple[list[ir.Value], list[ir.Value]] = ([], [])
    for j in range(_VECTORS):
        cos_at, sin_at = (emit.load(table, rope, j * WIDTH) for table in (cos, sin))
        one, two = ones[j].get(), twos[j].get()
        own_low, own_high = (emit.load(base, args[12], emit.times(d, TILE), j * WIDTH) for d in (low, high))
        if scaled:
            own_factor = emit.load(factors, args[14], j * WIDTH)
            factor = emit.load(factors, args[14], TILE + j * WIDTH)
            own_low, own_high = builder.fmul(own_low, own_factor), builder.fmul(own_high, own_factor)
            one, two = builder.fmul(one, factor), builder.fmul(two, factor)
        keys[0].append(emit.fnma(two, sin_at, emit.fma(one, cos_at, own_low)))
        keys[1].append(emit.fma(one, sin_at, emit.fma(two, cos_at, own_high)))
    return keys


def _expand_group(
    emit: Emitter, residual: ir.Value, residual_at: ir.Value, rank: ir.Value, b: ir.Value, group: ir.Value
) -> list[Variable]:
    """rK @ B_k for PAIRS dimensions and their partners (their weights from `group`), times TILE tokens."""
    sums = emit.variables([emit.fixed(0.0)] * (2 * PAIRS * _VECTORS))
    with emit.loop(rank, _UNROLL) as r:
        for u in range(_UNROLL):
            row, weights = emit.times(emit.sum(r, u), TILE), emit.times(emit.sum(r, u), 2 * PAIRS)
            tokens = [emit.load(residual, residual_at, row, j * WIDTH) for j in range(_VECTORS)]
            for d in range(2 * PAIRS):
                weight = emit.broadcast(b, group, weights, d)
                for j in range(_VECTORS):
                    place = sums[d * _VECTORS + j]
                    place.set(emit.fma(weight, tokens[j], place.get()))
    return sums


@intrinsic
def _score_tile(
    typingctx: Any,
    dim: Any,
    keys: Any,
    q: Any,
    q_at: Any,
    q_stride: Any,
    count: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
) -> Any:
    """Scores of `count` queries with one tile: out[i, :] = q[i] . keys, keys turned [D, TILE].

    Query i begins at `q_at + i * q_stride`, its TILE scores are written from `out_at + i * out_stride` on.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _emit_scores(Emitter(builder), *args)
        return context.get_dummy_value()

    ints = types.int64
    return types.void(ints, FLOATS, ints, FLOATS, ints, ints, FLOATS, ints, ints), generate


@intrinsic
def _score_rows(
    typingctx: Any,
    dim: Any,
    source: Any,
    rows: Any,
    first: Any,
    size: Any,
    shift: Any,
    q: Any,
    q_at: Any,
    count: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
) -> Any:
    """Scores of up to FUSED queries with 16 tokens, straight from the cache: the key of token t, `dim` floats, begins
    at `rows[first + t] * size + shift`. For so few queries turning keys costs more than adding up their products.

    Queries and scores as in `_score_tile`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        for queries in range(1, FUSED + 1):
            with builder.if_then(builder.icmp_signed("==", args[8], emit.const(queries))):
                for i, scores in enumerate(_dots(emit, args, queries)):
                    to = builder.add(args[10], builder.mul(emit.const(i), args[11]))
                    emit.store(scores, args[9], to)
        return context.get_dummy_value()

    ints = types.int64
    signature = types.void(ints, FLOATS, INT64S, ints, ints, ints, FLOATS, ints, ints, FLOATS, ints, ints)
    return signature, generate


def _dots(emit: Emitter, args: list[ir.Value], queries: int) -> list[ir.Value]:
    """For each query its products with the 16 tokens, as a vector. Arguments of `_score_rows`."""
    builder = emit.builder
    begins = [builder.add(args[7], builder.mul(emit.const(i), args[0])) for i in range(queries)]
    found: list[list[ir.Value]] = [[] for _ in range(queries)]
    for group in range(0, WIDTH, _ROWS):
        rows = [emit.scalar(args[2], args[3], group + r) for r in range(_ROWS)]
        rows = [builder.add(builder.mul(row, args[4]), args[5]) for row in rows]
        sums = emit.variables([emit.fixed(0.0)] * (queries * _ROWS))
        with emit.loop(args[0], WIDTH) as d:
            keys = [emit.load(args[1], row, d) for row in rows]
            for i, begin in enumerate(begins):
                query = emit.load(args[6], begin, d)
                for r, key in enumerate(keys):
                    place = sums[i * _ROWS + r]
                    place.set(emit.fma(query, key, place.get()))
        for i in range(queries):
            found[i].append(emit.fold([place.get() for place in sums[i * _ROWS : (i + 1) * _ROWS]], 1))
    return [emit.fold(parts, _ROWS) for parts in found]


def _emit_scores(
    emit: Emitter,
    dim: ir.Value,
    keys: ir.Value,
    keys_at: ir.Value,
    q: ir.Value,
    q_at: ir.Value,
    count: ir.Value,
    out: ir.Value,
    out_at: ir.Value,
    out_stride: ir.Value,
) -> None:
    """The code of `_score_tile`."""
    builder = emit.builder

    def body(first: ir.Value, queries: int) -> None:
        chains = 1 if queries > 2 else 2
        sums = emit.variables([emit.fixed(0.0)] * (queries * _VECTORS * chains))
        begins = [builder.add(q_at, builder.mul(emit.sum(first, i), dim)) for i in range(queries)]
        with emit.loop(dim, chains) as d:
            for chain in range(chains):
                tile = emit.sum(keys_at, emit.times(d, TILE), chain * TILE)
                tokens = [emit.load(keys, tile, j * WIDTH) for j in range(_VECTORS)]
                for i, begin in enumerate(begins):
                    value = emit.broadcast(q, begin, d, chain)
                    for j in range(_VECTORS):
                        place = sums[(chain * queries + i) * _VECTORS + j]
                        place.set(emit.fma(value, tokens[j], place.get()))
        half = queries * _VECTORS
        for i in range(queries):
            to = builder.add(out_at, builder.mul(emit.sum(first, i), out_stride))
            for j in range(_VECTORS):
                total = sums[i * _VECTORS + j].get()
                if chains == 2:
                    total = builder.fadd(total, sums[half + i * _VECTORS + j].get())
                emit.store(total, out, to, j * WIDTH)

    _in_groups(emit, count, _MAX_QUERIES, body)


@intrinsic
def _soften(typingctx: Any, scores: Any, at: Any, count: Any, state: Any, state_at: Any) -> Any:
    """One step of the online softmax of one query: `count` (a multiple of 16) scores become exp(score - max).

    state[state_at:][:2] is (running maximum, running sum) and is updated. Returns the factor by which what was
    accumulated under the old maximum is to be multiplied. Source: Milakov and Gimelshein, arXiv 1805.02867.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        row, memory = args[0], args[3]
        before = emit.scalar(memory, args[4])
        best = Variable(builder, emit.splat(before))
        with emit.loop(args[2], WIDTH) as t:
            best.set(emit.maximum(best.get(), emit.load(row, args[1], t)))
        after = emit.reduce(best.get(), largest=True)
        # A row of which nothing was visible yet has no maximum; anything finite keeps -inf - max out of NaN.
        hidden = builder.fcmp_ordered("<", after, ir.Constant(ir.FloatType(), -3e38))
        after = builder.select(hidden, ir.Constant(ir.FloatType(), 0.0), after)
        peak = emit.splat(after)
        total = Variable(builder, emit.fixed(0.0))
        with emit.loop(args[2], WIDTH) as t:
            weight = emit.exp(builder.fsub(emit.load(row, args[1], t), peak))
            emit.store(weight, row, args[1], t)
            total.set(builder.fadd(total.get(), weight))
        factor = builder.extract_element(emit.exp(emit.splat(builder.fsub(before, after))), emit.const(0))
        grown = builder.fadd(builder.fmul(emit.scalar(memory, emit.sum(args[4], 1)), factor), emit.reduce(total.get()))
        builder.store(builder.select(hidden, before, after), emit.at(memory, args[4]))
        builder.store(grown, emit.at(memory, args[4], 1))
        return factor

    return types.float32(FLOATS, types.int64, types.int64, FLOATS, types.int64), generate


@intrinsic
def _mix_values(
    typingctx: Any,
    values: Any,
    rows: Any,
    rows_at: Any,
    tokens: Any,
    size: Any,
    shift: Any,
    width: Any,
    probs: Any,
    probs_at: Any,
    probs_stride: Any,
    factors: Any,
    factors_at: Any,
    count: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
) -> Any:
    """out[i] = factor[i] * out[i] + sum_t probs[i, t] * value[t] for `count` queries and `tokens` tokens.

    The value of token t, `width` floats (a multiple of 16), begins at `rows[rows_at + t] * size + shift`. Query i has
    its probabilities from `probs_at + i * probs_stride`, its factor at `factors_at + i`, its sum from
    `out_at + i * out_stride`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        source, index = args[0], args[1]
        weight, factor, dst = (args[7], args[10], args[13])

        def body(first: ir.Value, queries: int, column: ir.Value, vectors: int) -> None:
            places = [
                builder.add(args[14], builder.add(builder.mul(emit.sum(first, i), args[15]), column))
                for i in range(queries)
            ]
            begins = [builder.add(args[8], builder.mul(emit.sum(first, i), args[9])) for i in range(queries)]
            # A sum takes its next term only when the last one is done: few sums wait, unless each is cut in several.
            chains = max(1, _IN_FLIGHT // (queries * vectors))
            sums = [emit.variables([emit.fixed(0.0)] * (queries * vectors)) for _ in range(chains)]
            for i, place in enumerate(places):
                scale = emit.broadcast(factor, args[11], emit.sum(first, i))
                for v in range(vectors):
                    sums[0][i * vectors + v].set(builder.fmul(scale, emit.load(dst, place, v * WIDTH)))

            def add(t: ir.Value, chain: list[Variable]) -> None:
                begin = builder.mul(emit.scalar(index, args[2], t), args[4])
                begin = builder.add(builder.add(begin, args[5]), column)
                row = [emit.load(source, begin, v * WIDTH) for v in range(vectors)]
                for i in range(queries):
                    prob = emit.broadcast(weight, begins[i], t)
                    for v in range(vectors):
                        place = chain[i * vectors + v]
                        place.set(emit.fma(prob, row[v], place.get()))

            rounds = builder.mul(builder.sdiv(args[3], emit.const(chains)), emit.const(chains))
            with emit.loop(rounds, chains) as t:
                for c, chain in enumerate(sums):
                    add(emit.sum(t, c), chain)
            if chains > 1:
                with emit.loop(builder.sub(args[3], rounds)) as t:
                    add(builder.add(rounds, t), sums[0])
            for i, place in enumerate(places):
                for v in range(vectors):
                    total = sums[0][i * vectors + v].get()
                    for chain in sums[1:]:
                        total = builder.fadd(total, chain[i * vectors + v].get())
                    emit.store(total, dst, place, v * WIDTH)

        def all_queries(column: ir.Value, vectors: int) -> None:
            _in_groups(emit, args[12], _MAX_QUERIES, lambda first, queries: body(first, queries, column, vectors))

        whole = builder.mul(builder.sdiv(args[6], emit.const(_SLICE * WIDTH)), emit.const(_SLICE * WIDTH))
        with emit.loop(whole, _SLICE * WIDTH) as column:
            all_queries(column, _SLICE)
        with emit.loop(builder.sub(args[6], whole), WIDTH) as column:
            all_queries(builder.add(whole, column), 1)
        return context.get_dummy_value()

    ints = types.int64
    signature = types.void(
        FLOATS, INT64S, ints, ints, ints, ints, ints, FLOATS, ints, ints, FLOATS, ints, ints, FLOATS, ints, ints
    )
    return signature, generate


def _in_groups(emit: Emitter, count: ir.Value, largest: int, body: Any) -> None:
    """Call `body(first, n)` over `count` items, `largest` at a time, then once for the 1 to `largest` - 1 left."""
    whole = emit.builder.mul(emit.builder.sdiv(count, emit.const(largest)), emit.const(largest))
    with emit.loop(whole, largest) as first:
        body(first, largest)
    left = emit.builder.sub(count, whole)
    for n in range(1, largest):
        with emit.builder.if_then(emit.builder.icmp_signed("==", left, emit.const(n))):
            body(whole, n)


def _function(code: Any) -> Any:
    """`code`, which Numba would expand wherever it is named, as a function that is compiled once and called."""

    @njit
    def call(*args):
        return code(*args)

    return call


turn, expand_and_score, score_tile = _function(_turn), _function(_expand_and_score), _function(_score_tile)
score_rows, soften, mix_values = _function(_score_rows), _function(_soften), _function(_mix_values)
