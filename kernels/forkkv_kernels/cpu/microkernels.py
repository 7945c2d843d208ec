"""The inner loops of CPU attention, written so that what is used more than once stays in registers.

Tokens come in tiles of 32, two vectors. Keys that many queries meet are turned once per tile, so that a vector holds
one dimension of 16 tokens and scores need no horizontal sums. Values keep their layout: a vector holds 16 dimensions of
one token.

What is read from the caches is asked for some tokens ahead, line by line between the multiplications: a processor's own
prefetching keeps too few lines under way, and stops where heads make the order of the lines irregular.

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
"""Queries so few that the scores of keys in registers are added up at once."""
_ROWS = 4
"""Tokens that queries are multiplied with at a time where keys are not turned."""
VECTORS = TILE // WIDTH
"""Vectors in a tile."""
_MAX_QUERIES = 6
_IN_FLIGHT = 8
"""Sums that keep the multipliers busy: two units, four cycles each."""
_SLICE = 4
"""Value vectors (64 dimensions) whose accumulators are in registers at a time; for 6 queries that takes 24."""
_AHEAD = 8
"""Tokens ahead of those in work whose values are asked for."""


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
        emit_scores(Emitter(builder), *args)
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
        later = [emit.scalar(args[2], args[3], WIDTH + group + r) for r in range(_ROWS)]
        later = [builder.add(builder.mul(row, args[4]), args[5]) for row in later]
        sums = emit.variables([emit.fixed(0.0)] * (queries * _ROWS))
        with emit.loop(args[0], WIDTH) as d:
            for row in later:
                emit.prefetch(args[1], row, d)
            keys = [emit.load(args[1], row, d) for row in rows]
            for i, begin in enumerate(begins):
                query = emit.load(args[6], begin, d)
                for r, key in enumerate(keys):
                    place = sums[i * _ROWS + r]
                    place.set(emit.fma(query, key, place.get()))
        for i in range(queries):
            found[i].append(emit.fold([place.get() for place in sums[i * _ROWS : (i + 1) * _ROWS]], 1))
    return [emit.fold(parts, _ROWS) for parts in found]


def emit_scores(
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
        sums = emit.variables([emit.fixed(0.0)] * (queries * VECTORS * chains))
        begins = [builder.add(q_at, builder.mul(emit.sum(first, i), dim)) for i in range(queries)]
        with emit.loop(dim, chains) as d:
            for chain in range(chains):
                tile = emit.sum(keys_at, emit.times(d, TILE), chain * TILE)
                tokens = [emit.load(keys, tile, j * WIDTH) for j in range(VECTORS)]
                for i, begin in enumerate(begins):
                    value = emit.broadcast(q, begin, d, chain)
                    for j in range(VECTORS):
                        place = sums[(chain * queries + i) * VECTORS + j]
                        place.set(emit.fma(value, tokens[j], place.get()))
        half = queries * VECTORS
        for i in range(queries):
            to = builder.add(out_at, builder.mul(emit.sum(first, i), out_stride))
            for j in range(VECTORS):
                total = sums[i * VECTORS + j].get()
                if chains == 2:
                    total = builder.fadd(total, sums[half + i * VECTORS + j].get())
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

    The value of token t, `width` floats (a multiple of 16), begins at `rows[rows_at + t] * size + shift`; `rows` has
    room for some tokens more, which are asked for whatever stands there. Query i has its
    probabilities from `probs_at + i * probs_stride`, its factor at `factors_at + i`, its sum from
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
                later = builder.mul(emit.scalar(index, args[2], t, _AHEAD), args[4])
                later = builder.add(builder.add(later, args[5]), column)
                for v in range(vectors):
                    emit.prefetch(source, later, v * WIDTH)
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


def function(code: Any) -> Any:
    """`code`, which Numba would expand wherever it is named, as a function that is compiled once and called."""

    @njit
    def call(*args):
        return code(*args)

    return call


turn, score_tile, score_rows = function(_turn), function(_score_tile), function(_score_rows)
soften, mix_values = function(_soften), function(_mix_values)
