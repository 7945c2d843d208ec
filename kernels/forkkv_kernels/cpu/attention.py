"""Attention over paged blocks read in place, for CPUs: `kernels` run a plan made by `plan.make_plan`.

A work item is a range of context tokens that some queries see under one block table. Its base keys are turned once for
all of them, its base values read once; a run of queries with one residual shares the expansion of its keys. Items are
independent: threads take them one by one, and a last pass merges the items of each query by log-sum-exp.

    keys      score = q . (K_base + RoPE(rK @ B_k))      turned and expanded in tiles that stay in the first cache
    values    out = P @ V_base + (P @ rV) @ B_v          the rank-r accumulator is expanded once per item

Everything comes through `p`, the block that `parameters` describes: Numba compiles and calls functions of one pointer
far faster than functions of thirty arrays. These functions carry no annotations; Numba infers their types.
"""

from __future__ import annotations

import functools
import logging
import math
import time

import numpy as np
from numba import njit

from forkkv_kernels.cpu import jit  # noqa: F401  configures Numba
from forkkv_kernels.cpu import parameters as P
from forkkv_kernels.cpu.expansion import add_own_scores, expand_and_score
from forkkv_kernels.cpu.microkernels import FUSED, mix_values, score_rows, score_tile, soften, turn
from forkkv_kernels.cpu.plan import (
    CHUNK,
    ENTRY_LIMIT,
    ENTRY_TOKEN,
    ITEM_BEGIN,
    ITEM_END,
    ITEM_ENTRIES,
    ITEM_FIRST_ENTRY,
    ITEM_FIRST_RUN,
    ITEM_PARTIAL,
    ITEM_ROW,
    ITEM_RUNS,
    KNOWN,
    PART_COUNT,
    PART_FIRST,
    PART_INDEX,
    RUN_ENTRIES,
    RUN_K_TILES,
    RUN_LENGTH,
    RUN_ROW,
    RUN_SLOT,
    RUN_V_TILES,
    TILE,
    WorkTables,
)
from forkkv_kernels.cpu.pointers import block_pointer, floats, further, int32s, int64s, next_of, prefetch
from forkkv_kernels.cpu.team import TeamKernel

logger = logging.getLogger(__name__)

COLUMNS = 16
"""Columns of a residual unit."""
_HALF = TILE // 2
_LINE = 16
"""Floats in a cache line."""
_ITEM, _RUN, _ENTRY, _PART = WorkTables.widths()


@njit
def _memory(p, which, thread):
    """One of the buffers of a thread."""
    return further(floats(p, P.SCRATCH), thread * p[P.SCRATCH_SIZE] + p[which])


@njit
def _find_rows(table, stride, block_size, begin, tokens, end, out):
    """Rows of a paged cache that hold `tokens` positions from `begin`; row 0, of zeros, from `end` on. Block b is
    `table[b * stride]`. Runs block by block: a division per token would cost as much as the token's scores."""
    known = max(min(tokens, end - begin), 0)
    for j in range(known, tokens):
        out[j] = 0
    block, offset, j = begin // block_size, begin % block_size, 0
    while j < known:
        row, count = np.int64(table[block * stride]) * block_size + offset, min(block_size - offset, known - j)
        for i in range(count):
            out[j + i] = row + i
        block, offset, j = block + 1, 0, j + count


@njit
def _prefetch_tokens(p, item, position, count):
    """Ask for what `count` tokens from `position` on will be read for. A tile is computed for longer than memory takes
    to bring the next one, but unasked the processor begins only when the first load waits for it; and asked for all at
    once it waits, too, for a place to note the lines. So every head of a tile asks for a few tokens of the next."""
    k_cache, v_cache, residual = floats(p, P.K_CACHE), floats(p, P.V_CACHE), floats(p, P.RESIDUAL)
    block_size, width = p[P.BLOCK_SIZE], p[P.KV_HEADS] * p[P.DIM]
    table = further(int32s(p, P.KV_TABLE), item[ITEM_ROW] * p[P.NUM_BLOCKS])
    block, offset = position // block_size, position % block_size
    for _ in range(min(count, item[ITEM_END] - position)):
        begin = (np.int64(table[block]) * block_size + offset) * width
        for line in range(begin, begin + width, _LINE):
            prefetch(k_cache, line)
            prefetch(v_cache, line)
        for r in range(item[ITEM_RUNS]):
            run = further(int64s(p, P.RUNS), (item[ITEM_FIRST_RUN] + r) * _RUN)
            if block * block_size + offset < run[RUN_LENGTH]:
                row = run[RUN_ROW] * p[P.NUM_BLOCKS] + block
                for tile in range(run[RUN_K_TILES]):
                    unit = np.int64(int32s(p, P.K_UNITS)[row * p[P.K_WIDTH] + tile])
                    prefetch(residual, (unit * block_size + offset) * COLUMNS)
                for tile in range(run[RUN_V_TILES]):
                    unit = np.int64(int32s(p, P.V_UNITS)[row * p[P.V_WIDTH] + tile])
                    prefetch(residual, (unit * block_size + offset) * COLUMNS)
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0


@njit
def _gather_queries(p, item, out):
    """Scaled queries of an item's entries, [Hkv, entries * G, D]."""
    q, scale = floats(p, P.Q), floats(p, P.SCALE)[0]
    entries = further(int64s(p, P.ENTRIES), item[ITEM_FIRST_ENTRY] * _ENTRY)
    width, count = p[P.PER_KV] * p[P.DIM], item[ITEM_ENTRIES]
    for e in range(count):
        source = entries[e * _ENTRY + ENTRY_TOKEN] * p[P.Q_STRIDE]
        for h in range(p[P.KV_HEADS]):
            for d in range(width):
                out[(h * count + e) * width + d] = q[source + h * width + d] * scale


@njit
def _norm_factors(p, slots, rows, h, out):
    """QK-norm: rms_b / rms_a and 1 / rms_a of a tile's tokens for head h; 1 and 0 where there is no residual."""
    k_rms, residual_rms, kv_heads = floats(p, P.K_RMS), floats(p, P.RESIDUAL_RMS), p[P.KV_HEADS]
    for j in range(TILE):
        out[j] = np.float32(1.0)
        out[TILE + j] = np.float32(0.0)
        if rows[j] >= p[P.BLOCK_SIZE]:
            adapted = residual_rms[rows[j] * kv_heads + h]
            out[j] = k_rms[slots[j] * kv_heads + h] / adapted
            out[TILE + j] = np.float32(1.0) / adapted


@njit
def _turn_base(p, item, ahead, step, slots, out):
    """Base keys of one tile, turned: [Hkv, D, TILE]. Meanwhile asks for `step` tokens from `ahead` on per column."""
    k_cache, width = floats(p, P.K_CACHE), p[P.KV_HEADS] * p[P.DIM]
    for half in range(0, TILE, _HALF):
        for c in range(0, width, COLUMNS):
            if step > 0 and half == 0:
                _prefetch_tokens(p, item, ahead, step)
                ahead += step
            turn(k_cache, slots, half, width, c, out, c * TILE + half)


@njit
def _turn_residual(p, run, position, rows, out):
    """rK of one tile and run, turned: [rank, TILE]. Asks for that of the next tile."""
    residual, width = floats(p, P.RESIDUAL), p[P.K_WIDTH]
    units = further(int32s(p, P.K_UNITS), run[RUN_ROW] * p[P.NUM_BLOCKS] * width)
    for tile in range(run[RUN_K_TILES]):
        _find_rows(further(units, tile), width, p[P.BLOCK_SIZE], position, 2 * TILE, run[RUN_LENGTH], rows)
        for t in range(TILE, 2 * TILE):
            prefetch(residual, rows[t] * COLUMNS)
        turn(residual, rows, 0, COLUMNS, 0, out, tile * COLUMNS * TILE)
        turn(residual, rows, _HALF, COLUMNS, 0, out, tile * COLUMNS * TILE + _HALF)


@njit
def _turn_residuals(p, item, position, rows, out):
    """rK of one tile and all runs of an item, one behind the other."""
    for r in range(item[ITEM_RUNS]):
        run = further(int64s(p, P.RUNS), (item[ITEM_FIRST_RUN] + r) * _RUN)
        if run[RUN_K_TILES] > 0 and position < run[RUN_LENGTH]:
            _turn_residual(p, run, position, rows, out)
        out = further(out, run[RUN_K_TILES] * COLUMNS * TILE)


@njit
def _own_factors(p, run, position, slots, rows, h, thread):
    """QK-norm's factors of a tile of a run's own keys, in the factors' buffer: where they begin, or -1: no QK-norm."""
    if p[P.K_RMS] == 0:
        return -1
    units = further(int32s(p, P.K_UNITS), run[RUN_ROW] * p[P.NUM_BLOCKS] * p[P.K_WIDTH])
    _find_rows(units, p[P.K_WIDTH], p[P.BLOCK_SIZE], position, TILE, run[RUN_LENGTH], rows)
    _norm_factors(p, slots, rows, h, _memory(p, P.FACTORS_AT, thread))
    return 0


@njit
def _expand_and_score(p, run, position, h, turned, slots, rows, query, count, out, thread):
    """Scores of `count` queries from number `query` on with one tile of a run's own keys, from what was turned, to
    elements `out` on, CHUNK apart."""
    dim, queries, scores = p[P.DIM], _memory(p, P.QUERIES_AT, thread), _memory(p, P.SCORES_AT, thread)
    factors_at = _own_factors(p, run, position, slots, rows, h, thread)
    expand_and_score(
        dim, turned, run[RUN_K_TILES] * COLUMNS, floats(p, P.B_K), _b_at(p, run, h), p[P.B_RANK],
        _rope(p, position), _memory(p, P.BASE_AT, thread), h * dim * TILE, _memory(p, P.FACTORS_AT, thread), factors_at,
        _memory(p, P.KEYS_AT, thread), queries, query * dim, count, scores, out, CHUNK,
    )  # fmt: skip


@njit
def _add_own_scores(p, run, position, h, turned, slots, rows, query, count, out, thread):
    """Add the scores with a run's own keys to those with base keys that `_score_from_cache` left, as
    `_expand_and_score` takes and puts them. Meanwhile asks for the tile's base values."""
    dim, queries, scores = p[P.DIM], _memory(p, P.QUERIES_AT, thread), _memory(p, P.SCORES_AT, thread)
    factors_at = _own_factors(p, run, position, slots, rows, h, thread)
    add_own_scores(
        dim, turned, run[RUN_K_TILES] * COLUMNS, floats(p, P.B_K), _b_at(p, run, h), p[P.B_RANK],
        _rope(p, position), _memory(p, P.FACTORS_AT, thread), factors_at, queries, query * dim, count, scores, out,
        CHUNK, floats(p, P.V_CACHE), slots, p[P.KV_HEADS] * dim, h * dim,
    )  # fmt: skip


@njit
def _b_at(p, run, h):
    """Where B_k of a run and head begins."""
    return (run[RUN_SLOT] * p[P.KV_HEADS] + h) * p[P.DIM] * p[P.B_RANK]


@njit
def _rope(p, position):
    """cos and sin of the tile from `position`."""
    return further(floats(p, P.ROPE), position // TILE * p[P.DIM] * TILE)


@njit
def _expands(p, item, position):
    """Whether a run of an item has keys of its own in the tile from `position`."""
    for r in range(item[ITEM_RUNS]):
        run = further(int64s(p, P.RUNS), (item[ITEM_FIRST_RUN] + r) * _RUN)
        if run[RUN_K_TILES] > 0 and position < run[RUN_LENGTH]:
            return True
    return False


@njit
def _score_from_cache(p, item, at, thread):
    """Scores of an item of few queries with base keys, half a tile of all heads at a time."""
    kv_heads, dim, count = p[P.KV_HEADS], p[P.DIM], item[ITEM_ENTRIES] * p[P.PER_KV]
    queries, scores = _memory(p, P.QUERIES_AT, thread), _memory(p, P.SCORES_AT, thread)
    slots, k_cache = further(int64s(p, P.INDEX), thread * p[P.INDEX_SIZE] + at), floats(p, P.K_CACHE)
    for half in range(0, TILE, _HALF):
        for h in range(kv_heads):
            out = h * count * CHUNK + at + half
            score_rows(
                dim, k_cache, slots, half, kv_heads * dim, h * dim, queries, h * count * dim, count, scores, out, CHUNK
            )  # fmt: skip


@njit
def _score(p, item, position, at, thread):
    """Scores of all queries of an item with the tile from `position`, into columns `at` of [Hkv, queries, CHUNK]. Head
    by head, so that the head's base keys stay in the first cache for all runs."""
    kv_heads, per_kv, dim = p[P.KV_HEADS], p[P.PER_KV], p[P.DIM]
    queries, scores = _memory(p, P.QUERIES_AT, thread), _memory(p, P.SCORES_AT, thread)
    base, few = _memory(p, P.BASE_AT, thread), item[ITEM_ENTRIES] * per_kv <= FUSED
    index = further(int64s(p, P.INDEX), thread * p[P.INDEX_SIZE])
    slots, rows = further(index, at), further(index, KNOWN)
    ahead, step = position + TILE, 0
    if few:
        _score_from_cache(p, item, at, thread)
        if not _expands(p, item, position):
            return
    else:
        columns = kv_heads * dim // COLUMNS
        if _expands(p, item, position):
            parts = item[ITEM_RUNS] * kv_heads + columns
            step = (TILE + parts - 1) // parts
        _turn_base(p, item, ahead, step, slots, base)
        ahead += columns * step
    _turn_residuals(p, item, position, rows, _memory(p, P.TURNED_AT, thread))
    for h in range(kv_heads):
        turned, own = _memory(p, P.TURNED_AT, thread), h * item[ITEM_ENTRIES] * per_kv
        for r in range(item[ITEM_RUNS]):
            run = further(int64s(p, P.RUNS), (item[ITEM_FIRST_RUN] + r) * _RUN)
            count, out = run[RUN_ENTRIES] * per_kv, own * CHUNK + at
            if step > 0 and ahead < position + 2 * TILE:
                _prefetch_tokens(p, item, ahead, step)
                ahead += step
            expands = run[RUN_K_TILES] > 0 and position < run[RUN_LENGTH]
            if few and expands:
                _add_own_scores(p, run, position, h, turned, slots, rows, own, count, out, thread)
            elif expands:
                _expand_and_score(p, run, position, h, turned, slots, rows, own, count, out, thread)
            elif not few:
                score_tile(dim, base, h * dim * TILE, queries, own * dim, count, scores, out, CHUNK)
            turned = further(turned, run[RUN_K_TILES] * COLUMNS * TILE)
            own += count


@njit
def _hide(p, item, begin, tokens, scores):
    """Set scores of tokens that an entry does not see, or that lie behind the item, to minus infinity."""
    entries = further(int64s(p, P.ENTRIES), item[ITEM_FIRST_ENTRY] * _ENTRY)
    count, per_kv = item[ITEM_ENTRIES], p[P.PER_KV]
    for e in range(count):
        seen = max(min(entries[e * _ENTRY + ENTRY_LIMIT], item[ITEM_END]) - begin, 0)
        for h in range(p[P.KV_HEADS]):
            for g in range(per_kv):
                row = ((h * count + e) * per_kv + g) * CHUNK
                for t in range(seen, tokens):
                    scores[row + t] = -np.inf


@njit
def _mix_base(p, item, tokens, thread):
    """Softmax of a chunk's scores, and the base values it weighs, added to the item's results."""
    kv_heads, dim, heads = p[P.KV_HEADS], p[P.DIM], p[P.KV_HEADS] * p[P.PER_KV]
    scores, factors = _memory(p, P.SCORES_AT, thread), _memory(p, P.FACTORS_AT, thread)
    slots = further(int64s(p, P.INDEX), thread * p[P.INDEX_SIZE])
    states, partials, values = floats(p, P.STATES), floats(p, P.PARTIALS), floats(p, P.V_CACHE)
    total, place = item[ITEM_ENTRIES] * p[P.PER_KV], item[ITEM_PARTIAL] * heads
    padded = (tokens + TILE - 1) // TILE * TILE
    for i in range(kv_heads * total):
        factors[i] = soften(scores, i * CHUNK, padded, states, 2 * (place + i))
    for h in range(kv_heads):
        own = h * total
        mix_values(
            values, slots, 0, tokens, kv_heads * dim, h * dim, dim, scores, own * CHUNK, CHUNK, factors, own, total,
            partials, (place + own) * dim, dim,
        )  # fmt: skip


@njit
def _mix_residual(p, item, begin, tokens, thread):
    """The V residual that a chunk's probabilities weigh, added to the rank-r accumulators."""
    kv_heads, per_kv, rank = p[P.KV_HEADS], p[P.PER_KV], p[P.V_RANK]
    scores, factors = _memory(p, P.SCORES_AT, thread), _memory(p, P.FACTORS_AT, thread)
    mixed, residual = _memory(p, P.MIXED_AT, thread), floats(p, P.RESIDUAL)
    rows = further(int64s(p, P.INDEX), thread * p[P.INDEX_SIZE] + KNOWN)
    total, width, first = item[ITEM_ENTRIES] * per_kv, p[P.V_WIDTH], 0
    for r in range(item[ITEM_RUNS]):
        run = further(int64s(p, P.RUNS), (item[ITEM_FIRST_RUN] + r) * _RUN)
        count, length = run[RUN_ENTRIES] * per_kv, max(min(tokens, run[RUN_LENGTH] - begin), 0)
        units = further(int32s(p, P.V_UNITS), run[RUN_ROW] * p[P.NUM_BLOCKS] * width)
        for tile in range(run[RUN_V_TILES]):
            _find_rows(further(units, tile), width, p[P.BLOCK_SIZE], begin, length, run[RUN_LENGTH], rows)
            for h in range(kv_heads):
                own = h * total + first
                mix_values(
                    residual, rows, 0, length, COLUMNS, 0, COLUMNS, scores, own * CHUNK, CHUNK, factors, own, count,
                    mixed, own * rank + tile * COLUMNS, rank,
                )  # fmt: skip
        first += count


@njit
def _expand_values(p, item, thread):
    """Add the rank-r accumulators, expanded by B_v, to the item's results."""
    kv_heads, per_kv, dim, rank = p[P.KV_HEADS], p[P.PER_KV], p[P.DIM], p[P.V_RANK]
    mixed, factors = _memory(p, P.MIXED_AT, thread), _memory(p, P.FACTORS_AT, thread)
    columns = further(int64s(p, P.INDEX), thread * p[P.INDEX_SIZE])
    b_v, partials, width = floats(p, P.B_V), floats(p, P.PARTIALS), kv_heads * dim
    total, first = item[ITEM_ENTRIES] * per_kv, 0
    place = item[ITEM_PARTIAL] * kv_heads * per_kv
    for i in range(rank):
        columns[i] = i
    for i in range(kv_heads * total):
        factors[i] = np.float32(1.0)
    for r in range(item[ITEM_RUNS]):
        run = further(int64s(p, P.RUNS), (item[ITEM_FIRST_RUN] + r) * _RUN)
        count, used = run[RUN_ENTRIES] * per_kv, run[RUN_V_TILES] * COLUMNS
        for h in range(kv_heads if used else 0):
            own, source = h * total + first, run[RUN_SLOT] * p[P.B_RANK] * width + h * dim
            mix_values(
                b_v, columns, 0, used, width, source, dim, mixed, own * rank, rank, factors, own, count,
                partials, (place + own) * dim, dim,
            )  # fmt: skip
        first += count


@njit
def _run_item(p, i, thread):
    """Compute item i into its place of the partials (unnormalised sums) and states (maximum, sum)."""
    item = further(int64s(p, P.ITEMS), i * _ITEM)
    heads, dim, rank = p[P.KV_HEADS] * p[P.PER_KV], p[P.DIM], p[P.V_RANK]
    states, partials, mixed = floats(p, P.STATES), floats(p, P.PARTIALS), _memory(p, P.MIXED_AT, thread)
    rows, place = item[ITEM_ENTRIES] * heads, item[ITEM_PARTIAL] * heads
    for j in range(rows * dim):
        partials[place * dim + j] = np.float32(0.0)
    for j in range(rows * rank):
        mixed[j] = np.float32(0.0)
    for j in range(place, place + rows):
        states[2 * j] = -np.inf
        states[2 * j + 1] = np.float32(0.0)
    _gather_queries(p, item, _memory(p, P.QUERIES_AT, thread))
    table = further(int32s(p, P.KV_TABLE), item[ITEM_ROW] * p[P.NUM_BLOCKS])
    slots = further(int64s(p, P.INDEX), thread * p[P.INDEX_SIZE])
    for begin in range(item[ITEM_BEGIN], item[ITEM_END], CHUNK):
        tokens = min(CHUNK, item[ITEM_END] - begin)
        _find_rows(table, 1, p[P.BLOCK_SIZE], begin, KNOWN, item[ITEM_END], slots)
        for at in range(0, tokens, TILE):
            _score(p, item, begin + at, at, thread)
        _hide(p, item, begin, (tokens + TILE - 1) // TILE * TILE, _memory(p, P.SCORES_AT, thread))
        _mix_base(p, item, tokens, thread)
        _mix_residual(p, item, begin, tokens, thread)
    _expand_values(p, item, thread)


@njit
def _merge(p, j):
    """Output and log-sum-exp of query token number j from its parts."""
    heads, per_kv, dim = p[P.KV_HEADS] * p[P.PER_KV], p[P.PER_KV], p[P.DIM]
    states, partials, out, lse = floats(p, P.STATES), floats(p, P.PARTIALS), floats(p, P.OUT), floats(p, P.LSE)
    parts, bounds, token = int64s(p, P.PARTS), int64s(p, P.PART_BEGIN), int64s(p, P.TOKENS)[j]
    for head in range(heads):
        peak, total, row = np.float32(-np.inf), np.float32(0.0), token * heads + head
        for d in range(dim):
            out[row * dim + d] = np.float32(0.0)
        for i in range(bounds[j], bounds[j + 1]):
            peak = max(peak, states[2 * _place(parts, i, heads, per_kv, head)])
        for i in range(bounds[j], bounds[j + 1]):
            place = _place(parts, i, heads, per_kv, head)
            weight = np.float32(math.exp(states[2 * place] - peak))
            total += weight * states[2 * place + 1]
            for d in range(dim):
                out[row * dim + d] += weight * partials[place * dim + d]
        for d in range(dim):
            out[row * dim + d] /= total
        if p[P.LSE] != 0:
            lse[row] = peak + np.float32(math.log(total))


@njit
def _place(parts, i, heads, per_kv, head):
    """Row of the partials that holds part i of one query head."""
    entry = (head // per_kv) * parts[i * _PART + PART_COUNT] + parts[i * _PART + PART_INDEX]
    return parts[i * _PART + PART_FIRST] * heads + entry * per_kv + head % per_kv


def _attend(block):
    """Compute items until none is left; run by every thread of a team."""
    p = block_pointer(block)
    thread = next_of(further(p, P.NEXT_THREAD))
    i = next_of(further(p, P.NEXT_ITEM))
    while i < p[P.NUM_ITEMS]:
        _run_item(p, i, thread)
        i = next_of(further(p, P.NEXT_ITEM))


def _finish(block):
    """Merge the items of all tokens, when every item is done."""
    p = block_pointer(block)
    j = next_of(further(p, P.NEXT_TOKEN))
    while j < p[P.NUM_TOKENS]:
        _merge(p, j)
        j = next_of(further(p, P.NEXT_TOKEN))


@functools.cache
def kernels() -> tuple[TeamKernel, TeamKernel]:
    """(`_attend`, `_finish`), compiled or from disk; says so in the log, since compiling takes seconds."""
    begin = time.perf_counter()
    attend, finish = TeamKernel(_attend), TeamKernel(_finish)
    how = "from disk" if attend.from_disk else "compiled"
    logger.info("CPU kernel ready: attention (%s, %.1f s)", how, time.perf_counter() - begin)
    return attend, finish
