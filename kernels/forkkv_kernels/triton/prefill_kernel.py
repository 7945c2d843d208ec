"""`residual_attention` for rows with several queries: the kernel. `prefill.py` starts it.

One program computes a tile of BLOCK_M (query, head) pairs of one row and one KV head. All query heads of the KV head
stand in the tile, so K and V are read, and K is completed, once for the whole group. Pair f of a row is query
f // GROUP and head f % GROUP, which wastes nothing for any group size.

The context is walked in tiles of BLOCK_N tokens, in four loops: residual tiles that every query sees whole; residual
tiles that need a mask (the residual's last one and those on the diagonal); then the same two kinds without residual.

K of a residual tile is completed on chip, `K + RoPE(rK B_k)`, and multiplied with q once; a product of q with each of
the two summands would cost half as many matrix instructions again. CHUNK pairs of columns (i, i + HEAD_DIM / 2) are
completed at a time: the rotation is elementwise on the pair's members, which two column slices of B_k make, so it
moves no data between threads, and only a chunk in float32 has to be held in registers.

V uses the rank-r accumulator of Flash-LoRA-Attention: `P rV` is summed over the residual tiles and goes through B_v
once per program, after the residual loops, so that the loops without residual carry nothing of it. Where the rank is
too wide for that (MAX_ACCUMULATED) V is completed on chip like K, V_CHUNK columns at a time.
"""

# Tuples of tensors grow in unrolled loops, which is no type error in Triton.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from forkkv_kernels.triton.common import load_residual_tile, load_tile, softmax_step, token_offsets

MAX_ACCUMULATED = tl.constexpr(1)
"""Tiles of V's residual up to which `P rV` is accumulated. A wider accumulator takes registers in every loop step that
the completion of K needs, and from rank 64 on no fewer multiplications than completing the V tile like K."""


@triton.jit
def _load_residual(residual, table, table_tiles, t, limit, unit_stride, BLOCK_SIZE, TILES, MASKED):
    """All tiles of a residual half: a tuple of TILES tensors [N, 16]; see `load_residual_tile`.

    The tiles stay apart because they lie in different units: as one tensor, every thread would hold an address for
    each of its columns."""
    columns = ()
    for tile in tl.static_range(TILES):
        columns += (load_residual_tile(residual, table + tile, table_tiles, t, limit, unit_stride, BLOCK_SIZE, MASKED),)
    return columns


@triton.jit
def _expand(columns, b, TILES: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Sum of `columns[i] @ b[FIRST + i * STEP]`, [N, 16] times [16, C], over the tiles."""
    expanded = tl.dot(columns[0], b[FIRST], input_precision="ieee")
    for tile in tl.static_range(1, TILES):
        expanded = tl.dot(columns[tile], b[FIRST + tile * STEP], expanded, input_precision="ieee")
    return expanded


@triton.jit
def _expand_rolled(
    residual, table, table_tiles, t, limit, unit_stride, b, row_stride, column, tiles, width, HALVES, APART,
    BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """HALVES tensors [N, C]: all tiles of a residual half times `column` [C] of B at `b`, `b + APART`, ...

    Reads one tile of the residual and of B at a time, so registers and shared memory do not grow with the rank; the
    price is that they are read for every chunk of columns, and a wait in every step."""
    rank = tl.arange(0, 16)
    expanded = ()
    for _ in tl.static_range(HALVES):
        expanded += (tl.zeros((t.shape[0], column.shape[0]), tl.float32),)
    for tile in tl.range(0, tiles):
        r = load_residual_tile(residual, table + tile, table_tiles, t, limit, unit_stride, BLOCK_SIZE, MASKED)
        grown = ()
        for half in tl.static_range(HALVES):
            rows = load_tile(b + half * APART, (tile * 16 + rank) * row_stride, column, rank >= 0, width, False, CUT)
            grown += (tl.dot(r, rows, expanded[half], input_precision="ieee"),)
        expanded = grown
    return expanded


@triton.jit
def _complete_keys(k_first, k_second, extra_first, extra_second, cos, sin, base_factor, factor):
    """`base_factor * K + factor * RoPE(extra)` for the pairs of a chunk, all [N, CHUNK], in the type of K; the factors
    are [N] or None."""
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    rotated_first = extra_first * cos - extra_second * sin
    rotated_second = extra_second * cos + extra_first * sin
    wide_first, wide_second = k_first.to(tl.float32), k_second.to(tl.float32)
    if factor is not None:
        wide_first *= base_factor[:, None]
        wide_second *= base_factor[:, None]
        rotated_first *= factor[:, None]
        rotated_second *= factor[:, None]
    return (wide_first + rotated_first).to(k_first.dtype), (wide_second + rotated_second).to(k_second.dtype)


@triton.jit
def _add_scores(scores, q_first, q_second, k_first, k_second):
    """`scores` [M, N] + q K^T over the pairs of a chunk."""
    scores = tl.dot(q_first, tl.trans(k_first), scores, input_precision="ieee")
    return tl.dot(q_second, tl.trans(k_second), scores, input_precision="ieee")


@triton.jit
def _halves(rows, PAIRS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Rows [X] of pointers to heads, cut into chunks of pairs: two tuples of CHUNKS tensors [X, CHUNK], the first and
    the second members. Columns behind the head are zeros."""
    first = ()
    second = ()
    for c in tl.static_range(CHUNKS):
        column = c * CHUNK + tl.arange(0, CHUNK)
        mask = (column < PAIRS)[None, :]
        first += (tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0),)
        second += (tl.load(rows[:, None] + PAIRS + column[None, :], mask=mask, other=0.0),)
    return first, second


@triton.jit
def _rms_factors(k_rms, residual_rms, k_units, k_table_tiles, blocks, t, known, block_stride, unit_stride, BLOCK_SIZE):
    """(rms_b / rms_a, 1 / rms_a) [N] of tokens `t`; ones for tokens that are not `known` [N]. `k_rms` and
    `residual_rms` point at the KV head."""
    offset = (t % BLOCK_SIZE) * tl.num_programs(1)
    block = tl.load(blocks + t // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    unit = tl.load(k_units + (t // BLOCK_SIZE) * k_table_tiles, mask=known, other=0).to(tl.int64)
    base = tl.load(k_rms + block * block_stride + offset, mask=known, other=1.0).to(tl.float32)
    inverse = 1.0 / tl.load(residual_rms + unit * unit_stride + offset, mask=known, other=1.0).to(tl.float32)
    return base * inverse, inverse


@triton.jit
def _expansion_halves(b_head, row_stride, TILES, PAIRS, CHUNK, CHUNKS):
    """B_k of a KV head as two tuples of TILES * CHUNKS tensors [16, CHUNK], tile by tile: see `_halves`."""
    first = ()
    second = ()
    for tile in tl.static_range(TILES):
        of_tile = _halves(b_head + (tile * 16 + tl.arange(0, 16)) * row_stride, PAIRS, CHUNK, CHUNKS)
        first += of_tile[0]
        second += of_tile[1]
    return first, second


@triton.jit
def _expansion_rows(b_head, row_stride, first_column, HEAD_DIM, TILES, CHUNK: tl.constexpr, PARTS, CUT):
    """Columns from `first_column` on of B_v of a KV head: TILES * PARTS tensors [16, CHUNK], tile by tile."""
    rows = ()
    for tile in tl.static_range(TILES):
        rank = tile * 16 + tl.arange(0, 16)
        for part in tl.static_range(PARTS):
            column = first_column + part * CHUNK + tl.arange(0, CHUNK)
            rows += (load_tile(b_head, rank * row_stride, column, rank >= 0, HEAD_DIM, False, CUT),)
    return rows


@triton.jit
def _add_values(acc, p, decay, v_head, at, first_column, known, columns, b, HEAD_DIM, TILES, CHUNK, PARTS, MASKED, CUT):
    """`acc * decay + p V` for PARTS accumulators [M, CHUNK]; V is completed by TILES tiles of its residual."""
    grown = ()
    for part in tl.static_range(PARTS):
        column = first_column + part * CHUNK + tl.arange(0, CHUNK)
        v = load_tile(v_head, at, column, known, HEAD_DIM, MASKED, CUT)
        if TILES > 0:
            v = (v.to(tl.float32) + _expand(columns, b, TILES, part, PARTS)).to(v.dtype)
        grown += (tl.dot(p, v, acc[part] * decay[:, None], input_precision="ieee"),)
    return grown


@triton.jit
def _add_rolled_values(
    acc, p, decay, v_head, at, first_column, known,
    residual, table, table_tiles, t, limit, unit_stride, b, row_stride, tiles,
    HEAD_DIM, CHUNK: tl.constexpr, PARTS, BLOCK_SIZE, MASKED, CUT,
):  # fmt: skip
    """`_add_values` with V completed by `_expand_rolled`."""
    grown = ()
    for part in tl.static_range(PARTS):
        column = first_column + part * CHUNK + tl.arange(0, CHUNK)
        extra = _expand_rolled(
            residual, table, table_tiles, t, limit, unit_stride, b, row_stride, column, tiles, HEAD_DIM, 1, 0,
            BLOCK_SIZE, MASKED, CUT,
        )  # fmt: skip
        v = load_tile(v_head, at, column, known, HEAD_DIM, MASKED, CUT)
        v = (v.to(tl.float32) + extra[0]).to(v.dtype)
        grown += (tl.dot(p, v, acc[part] * decay[:, None], input_precision="ieee"),)
    return grown


@triton.jit
def residual_prefill_kernel(
    q,
    k_cache,
    v_cache,
    kv_table,
    cu_seqlens_q,
    seq_lens,
    residual,
    k_table,
    v_table,
    residual_len,
    read_slot,
    b_k,
    b_v,
    cos,
    sin,
    k_rms,
    residual_rms,
    out,
    lse,
    work,
    scale_log2,
    q_stride,
    k_block_stride,
    k_token_stride,
    v_block_stride,
    v_token_stride,
    kv_table_stride,
    unit_stride,
    k_table_stride,
    v_table_stride,
    k_table_tiles,
    v_table_tiles,
    b_k_slot_stride,
    b_k_row_stride,
    b_v_slot_stride,
    b_v_row_stride,
    rms_block_stride,
    rms_unit_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_TILES: tl.constexpr,
    V_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_CHUNK: tl.constexpr,
    RELOAD: tl.constexpr,
    ROLLED: tl.constexpr,
):
    """Grid (work items, KV heads, parts of V's columns); work [items, 2] int32: a row and a tile of its pairs.

    K_TILES, V_TILES: tiles of the residual halves that are read, 0 for no such half. With both 0 the program does rows
    without residual, else rows with one, and returns at once for others; `read_slot` may be None for the former if the
    work holds no others. `k_rms` is None without QK-norm, `lse` where it is not wanted. WIDTH: HEAD_DIM rounded up to
    a power of two. CHUNK: pairs of columns of K that are completed at a time. V_WIDTH: columns of V and of the output
    that one program does, V_CHUNK of them at a time. RELOAD: read B_k for every tile instead of keeping it. ROLLED: go
    through the rank in a loop, keeping neither B nor the residual. Strides in elements; heads and columns lie side by
    side."""
    RESIDUAL: tl.constexpr = K_TILES + V_TILES > 0
    PADDED: tl.constexpr = WIDTH != HEAD_DIM
    PAIRS: tl.constexpr = HEAD_DIM // 2
    CHUNKS: tl.constexpr = (PAIRS + CHUNK - 1) // CHUNK
    V_CUT: tl.constexpr = HEAD_DIM % V_WIDTH != 0
    # Registers hold either the finished chunks of K or, from the first product on, the scores: whatever is less.
    AT_ONCE: tl.constexpr = CHUNKS <= 2
    ACCUMULATE: tl.constexpr = V_TILES > 0 and V_TILES <= MAX_ACCUMULATED
    COMPLETE_TILES: tl.constexpr = 0 if ACCUMULATE else V_TILES
    V_PARTS: tl.constexpr = V_WIDTH // V_CHUNK
    DTYPE: tl.constexpr = k_cache.dtype.element_ty
    kv_head = tl.program_id(1)
    row = tl.load(work + 2 * tl.program_id(0)).to(tl.int64)
    first_pair = tl.load(work + 2 * tl.program_id(0) + 1) * BLOCK_M
    begin = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - begin
    if first_pair >= q_len * GROUP:
        return
    if read_slot is not None:
        slot = tl.load(read_slot + row).to(tl.int64)
        limit = tl.load(residual_len + row)
        if ((slot >= 0) & (limit > 0)) != RESIDUAL:
            return

    # Pairs behind the row's last one repeat it: they compute something finite, which is not stored.
    pair = first_pair + tl.arange(0, BLOCK_M)
    last_pair = q_len * GROUP - 1
    query = tl.minimum(pair, last_pair) // GROUP
    head = kv_head * GROUP + tl.minimum(pair, last_pair) % GROUP
    start = tl.load(seq_lens + row) - q_len
    position = start + query
    seen_by_all = start + first_pair // GROUP + 1
    end = start + tl.minimum(first_pair + BLOCK_M - 1, last_pair) // GROUP + 1

    wide = tl.arange(0, WIDTH)
    v_column = tl.program_id(2) * V_WIDTH
    token = tl.arange(0, BLOCK_N)
    q_rows = q + (begin + query).to(tl.int64) * q_stride + head * HEAD_DIM
    if RESIDUAL:
        q_first, q_second = _halves(q_rows, PAIRS, CHUNK, CHUNKS)
    else:
        q_whole = tl.load(q_rows[:, None] + wide[None, :], mask=(wide < HEAD_DIM)[None, :], other=0.0)
    k_head = k_cache + kv_head * HEAD_DIM
    v_head = v_cache + kv_head * HEAD_DIM
    blocks = kv_table + row * kv_table_stride
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = ()
    for _ in tl.static_range(V_PARTS):
        acc += (tl.zeros((BLOCK_M, V_CHUNK), tl.float32),)

    base_begin = 0
    b_whole = ()
    if RESIDUAL:
        limit = tl.minimum(end, limit)
        whole = tl.minimum(seen_by_all, limit) // BLOCK_N * BLOCK_N
        base_begin = tl.cdiv(limit, BLOCK_N) * BLOCK_N
        if K_TILES > 0:
            k_units = k_table + row * k_table_stride
            b_k_head = b_k + slot * b_k_slot_stride + kv_head * HEAD_DIM
            if not (RELOAD or ROLLED):
                b_first, b_second = _expansion_halves(b_k_head, b_k_row_stride, K_TILES, PAIRS, CHUNK, CHUNKS)
            if k_rms is not None:
                # A row whose adapter leaves K alone keeps the norm of the base model.
                norm_limit = tl.where(tl.load(k_units) != 0, limit, 0)
        if V_TILES > 0:
            v_units = v_table + row * v_table_stride
            b_v_head = b_v + slot * b_v_slot_stride + kv_head * HEAD_DIM
            acc_r = ()
            for _ in tl.static_range(V_TILES if ACCUMULATE else 0):
                acc_r += (tl.zeros((BLOCK_M, 16), tl.float32),)
            if not (ACCUMULATE or ROLLED):
                b_whole = _expansion_rows(
                    b_v_head, b_v_row_stride, v_column, HEAD_DIM, V_TILES, V_CHUNK, V_PARTS, V_CUT
                )
        for masked in tl.static_range(2):
            for n in tl.range(whole if masked else 0, base_begin if masked else whole, BLOCK_N):
                t = n + token
                at = token_offsets(blocks, t, end, k_block_stride, k_token_stride, BLOCK_SIZE, masked)
                base_factor = None
                factor = None
                if K_TILES > 0:
                    if RELOAD and not ROLLED:
                        # n >> 30 is 0, but says so to nobody who would move the loads out of the loop (or unroll one).
                        b_k_now = b_k_head + (n >> 30) * 16
                        b_first, b_second = _expansion_halves(b_k_now, b_k_row_stride, K_TILES, PAIRS, CHUNK, CHUNKS)
                    if not ROLLED:
                        columns = _load_residual(
                            residual, k_units, k_table_tiles, t, limit, unit_stride, BLOCK_SIZE, K_TILES, masked
                        )
                    if k_rms is not None:
                        base_factor, factor = _rms_factors(
                            k_rms + kv_head,
                            residual_rms + kv_head,
                            k_units,
                            k_table_tiles,
                            blocks,
                            t,
                            t < norm_limit,
                            rms_block_stride,
                            rms_unit_stride,
                            BLOCK_SIZE,
                        )
                s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                keys = ()
                for c in tl.static_range(CHUNKS):
                    column = c * CHUNK + tl.arange(0, CHUNK)
                    cut = (c + 1) * CHUNK > PAIRS
                    k_first = load_tile(k_head, at, column, t < end, PAIRS, masked, cut)
                    k_second = load_tile(k_head + PAIRS, at, column, t < end, PAIRS, masked, cut)
                    if K_TILES > 0:
                        if ROLLED:
                            extra_first, extra_second = _expand_rolled(
                                residual, k_units, k_table_tiles, t, limit, unit_stride, b_k_head, b_k_row_stride,
                                column, K_TILES + (n >> 30), PAIRS, 2, PAIRS, BLOCK_SIZE, masked, cut,
                            )  # fmt: skip
                        else:
                            extra_first = _expand(columns, b_first, K_TILES, c, CHUNKS)
                            extra_second = _expand(columns, b_second, K_TILES, c, CHUNKS)
                        k_first, k_second = _complete_keys(
                            k_first,
                            k_second,
                            extra_first,
                            extra_second,
                            load_tile(cos, t * PAIRS, column, t < limit, PAIRS, masked, cut),
                            load_tile(sin, t * PAIRS, column, t < limit, PAIRS, masked, cut),
                            base_factor,
                            factor,
                        )
                    if AT_ONCE:
                        keys += (k_first, k_second)
                    else:
                        s = _add_scores(s, q_first[c], q_second[c], k_first, k_second)
                for c in tl.static_range(CHUNKS if AT_ONCE else 0):
                    s = _add_scores(s, q_first[c], q_second[c], keys[2 * c], keys[2 * c + 1])
                if masked:
                    s = tl.where(t[None, :] <= position[:, None], s, float("-inf"))
                p, decay, peak, total = softmax_step(s, peak, total, scale_log2)
                p = p.to(DTYPE)
                at = token_offsets(blocks, t, end, v_block_stride, v_token_stride, BLOCK_SIZE, masked)
                columns = ()
                if V_TILES > 0 and (ACCUMULATE or not ROLLED):
                    columns = _load_residual(
                        residual, v_units, v_table_tiles, t, limit, unit_stride, BLOCK_SIZE, V_TILES, masked
                    )
                if ACCUMULATE:
                    grown = ()
                    for tile in tl.static_range(V_TILES):
                        scaled = acc_r[tile] * decay[:, None]
                        grown += (tl.dot(p, columns[tile], scaled, input_precision="ieee"),)
                    acc_r = grown
                if ROLLED and COMPLETE_TILES > 0:
                    acc = _add_rolled_values(
                        acc, p, decay, v_head, at, v_column, t < end,
                        residual, v_units, v_table_tiles, t, limit, unit_stride, b_v_head, b_v_row_stride,
                        V_TILES + (n >> 30), HEAD_DIM, V_CHUNK, V_PARTS, BLOCK_SIZE, masked, V_CUT,
                    )  # fmt: skip
                else:
                    acc = _add_values(
                        acc, p, decay, v_head, at, v_column, t < end, columns, b_whole,
                        HEAD_DIM, COMPLETE_TILES, V_CHUNK, V_PARTS, masked, V_CUT,
                    )  # fmt: skip
        if ACCUMULATE:
            # Divided by the weights so far, acc_r is an average of rV, which float16 can hold; acc likewise from here
            # on, as if one token of weight 1 and the peak's logarithm of the sum had been seen.
            b_whole = _expansion_rows(b_v_head, b_v_row_stride, v_column, HEAD_DIM, V_TILES, V_CHUNK, V_PARTS, V_CUT)
            grown = ()
            for part in tl.static_range(V_PARTS):
                average = acc[part] / total[:, None]
                for tile in tl.static_range(V_TILES):
                    average_r = (acc_r[tile] / total[:, None]).to(DTYPE)
                    average = tl.dot(average_r, b_whole[tile * V_PARTS + part], average, input_precision="ieee")
                grown += (average,)
            acc = grown
            peak += tl.log2(total)
            total = tl.full((BLOCK_M,), 1.0, tl.float32)

    base_whole = tl.maximum(seen_by_all // BLOCK_N * BLOCK_N, base_begin)
    for masked in tl.static_range(2):
        for n in tl.range(base_whole if masked else base_begin, end if masked else base_whole, BLOCK_N):
            t = n + token
            at = token_offsets(blocks, t, end, k_block_stride, k_token_stride, BLOCK_SIZE, masked)
            if RESIDUAL:
                s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for c in tl.static_range(CHUNKS):
                    column = c * CHUNK + tl.arange(0, CHUNK)
                    cut = (c + 1) * CHUNK > PAIRS
                    k_first = load_tile(k_head, at, column, t < end, PAIRS, masked, cut)
                    k_second = load_tile(k_head + PAIRS, at, column, t < end, PAIRS, masked, cut)
                    s = _add_scores(s, q_first[c], q_second[c], k_first, k_second)
            else:
                k_whole = load_tile(k_head, at, wide, t < end, HEAD_DIM, masked, PADDED)
                s = tl.dot(q_whole, tl.trans(k_whole), input_precision="ieee")
            if masked:
                s = tl.where(t[None, :] <= position[:, None], s, float("-inf"))
            p, decay, peak, total = softmax_step(s, peak, total, scale_log2)
            at = token_offsets(blocks, t, end, v_block_stride, v_token_stride, BLOCK_SIZE, masked)
            acc = _add_values(
                acc,
                p.to(DTYPE),
                decay,
                v_head,
                at,
                v_column,
                t < end,
                None,
                None,
                HEAD_DIM,
                0,
                V_CHUNK,
                V_PARTS,
                masked,
                V_CUT,
            )

    stored = pair <= last_pair
    flat = (begin + query).to(tl.int64) * (GROUP * tl.num_programs(1)) + head
    for part in tl.static_range(V_PARTS):
        column = v_column + part * V_CHUNK + tl.arange(0, V_CHUNK)
        tl.store(
            out + flat[:, None] * HEAD_DIM + column[None, :],
            (acc[part] / total[:, None]).to(out.dtype.element_ty),
            mask=stored[:, None] & (column < HEAD_DIM)[None, :],
        )
    if lse is not None:  # noqa: SIM102 (decided when compiled, the other when run)
        if tl.program_id(2) == 0:
            tl.store(lse + flat, (peak + tl.log2(total)) * 0.6931471805599453, mask=stored)
