"""Decode attention in Triton: split over the context, grouped over the rows of one prefix, merged by log-sum-exp.

One program takes one item of the work list (see `worklist`) and one KV head: a range of context tokens, and the query
heads of all its rows as one tile of M rows. A tile of base K and V is loaded once and multiplied with all of them. What
differs by adapter is added row-wise: for each *entry* (rows that read one residual) the K residual is expanded from rK
and B_k, rotated, multiplied with those rows' queries, and added to their part of the score tile before the one softmax;
behind it P of those rows times rV goes into an accumulator of the residual's rank, which B_v expands once per item.
Expanded K never leaves the chip, expanded V never exists.

Bytes from memory for N rows on S shared tokens: base K, V once (2 * S * Hkv * D elements) + N residuals
(S * (rank_k + rank_v) each, or one per distinct residual) + N private tails + the partials, 4 * H * D bytes per row and
split, written and read. Base is read twice only by a group with more query heads per KV head than the widest tile has.

Two alternatives were left. Scores of the residual made by a kernel of their own and added later cost 8 bytes per row,
head and token through memory: for 32 heads eight times the residual of rank 16. One product of all M rows with every
expanded K spends M / 16 times the flops; hence chunks of 16 rows, in one of which an entry always stands.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkkv_kernels.triton.aot import HEAD_DIMS, RANKS, CompileSpec, Target, allowed_spill
from forkkv_kernels.triton.configs import DecodeConfig, columns_of, decode_config, device_arch
from forkkv_kernels.triton.decode_work import DecodeWork
from forkkv_kernels.triton.worklist import CHUNK, RECORD, WIDE_TILES

_LOG2E = 1.4426950408889634
_TILE = tl.constexpr(16)
"""Columns of a residual unit."""
_CHUNK = tl.constexpr(CHUNK)
_RECORD = tl.constexpr(RECORD)


@triton.jit
def _lanes(lanes_ptr, lane, GROUP: tl.constexpr):
    """Query token (-1: nobody) and partial of split 0 of the tile's rows `lane` [M]."""
    member = lane % _CHUNK // GROUP
    real = member < _CHUNK // GROUP
    at = lanes_ptr + (lane // _CHUNK * (_CHUNK // GROUP) + member) * 2
    return tl.load(at, mask=real, other=-1), tl.load(at + 1, mask=real, other=0)


@triton.jit
def _queries(q_ptr, token, heads, stride_token, stride_head, D: tl.constexpr, DH: tl.constexpr):
    """Halves [M, DH] of the queries at (token, heads) [M]; zeros for token -1 and behind D / 2."""
    half = tl.arange(0, DH)
    at = q_ptr + token.to(tl.int64) * stride_token + heads * stride_head
    mask = (token >= 0)[:, None] & (half < D // 2)[None, :]
    first = tl.load(at[:, None] + half[None, :], mask=mask, other=0.0)
    return first, tl.load(at[:, None] + half[None, :] + D // 2, mask=mask, other=0.0)


@triton.jit
def _expanded_keys(
    t, reads, row, slot, tiles, head,
    residual_ptr, units_ptr, b_ptr, cos_ptr, sin_ptr, stride_units, unit_tiles, stride_slot,
    D: tl.constexpr, DH: tl.constexpr, N: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Halves [N, DH] of RoPE_t(rK[t] B_k) for a row and KV head, tile by tile of its rank; zeros where not `reads`."""
    half, column = tl.arange(0, DH), tl.arange(0, _TILE)
    units = units_ptr + row.to(tl.int64) * stride_units + t // BLOCK_SIZE * unit_tiles
    b = b_ptr + slot.to(tl.int64) * stride_slot + column[:, None] * (KV_HEADS * D) + head * D + half[None, :]
    b_mask = (half < D // 2)[None, :]
    first = tl.zeros([N, DH], dtype=tl.float32)
    second = tl.zeros([N, DH], dtype=tl.float32)
    for tile in range(tiles):
        unit = tl.load(units + tile, mask=reads, other=0).to(tl.int64)
        at = residual_ptr + unit * (BLOCK_SIZE * _TILE) + t % BLOCK_SIZE * _TILE
        r = tl.load(at[:, None] + column[None, :], mask=reads[:, None], other=0.0)
        first = tl.dot(r, tl.load(b, mask=b_mask, other=0.0), first, input_precision=PRECISION)
        second = tl.dot(r, tl.load(b + D // 2, mask=b_mask, other=0.0), second, input_precision=PRECISION)
        b += _TILE * KV_HEADS * D
    mask = reads[:, None] & (half < D // 2)[None, :]
    angle = t[:, None] * (D // 2) + half[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _add_scores(
    scores, q1, q2, lane, t, reads, head, entry, q_ptr, lanes_ptr, stride_q_token, stride_q_head,
    kv_block, k_rms_ptr, residual_rms_ptr,
    residual_ptr, units_ptr, b_ptr, cos_ptr, sin_ptr, stride_units, unit_tiles, stride_slot,
    GROUP: tl.constexpr, D: tl.constexpr, DH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QK_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Complete the scores [M, N] (not yet scaled) of one entry's rows by their residual."""
    row = tl.load(entry)
    k1, k2 = _expanded_keys(
        t, reads, row, tl.load(entry + 1), tl.load(entry + 3), head,
        residual_ptr, units_ptr, b_ptr, cos_ptr, sin_ptr, stride_units, unit_tiles, stride_slot,
        D, DH, N, KV_HEADS, BLOCK_SIZE, PRECISION,
    )  # fmt: skip
    lo, hi = tl.load(entry + 5), tl.load(entry + 6)
    k1 = tl.trans(k1.to(q1.dtype))
    k2 = tl.trans(k2.to(q1.dtype))
    if M == _CHUNK:
        extra = tl.dot(q1, k1, input_precision=PRECISION)
        extra = tl.dot(q2, k2, extra, input_precision=PRECISION)
    else:
        own = lo // _CHUNK * _CHUNK + tl.arange(0, _CHUNK)
        token, _ = _lanes(lanes_ptr, own, GROUP)
        o1, o2 = _queries(q_ptr, token, head * GROUP + own % _CHUNK % GROUP, stride_q_token, stride_q_head, D, DH)
        part = tl.dot(o1, k1, input_precision=PRECISION)
        part = tl.dot(o2, k2, part, input_precision=PRECISION)
        extra = tl.reshape(tl.broadcast_to(part[None, :, :], [M // _CHUNK, _CHUNK, N]), [M, N])
    mine = ((lane >= lo) & (lane < hi))[:, None]
    if QK_NORM:
        first = units_ptr + row.to(tl.int64) * stride_units
        unit = tl.load(first + t // BLOCK_SIZE * unit_tiles, mask=reads, other=0).to(tl.int64)
        # A row whose first unit is null has no K residual: its keys keep the norm that they have.
        normed = tl.load(first + t * 0, mask=reads, other=0) != 0
        where = t % BLOCK_SIZE * KV_HEADS + head
        adapted = tl.load(residual_rms_ptr + unit * (BLOCK_SIZE * KV_HEADS) + where, mask=normed, other=1.0)
        base = tl.load(k_rms_ptr + kv_block * (BLOCK_SIZE * KV_HEADS) + where, mask=normed, other=1.0)
        return tl.where(mine, (scores * base[None, :] + extra) / adapted[None, :], scores)
    return tl.where(mine, scores + extra, scores)


@triton.jit
def _add_values(
    mixed, p, lane, t, reads, entry, residual_ptr, units_ptr, stride_units, unit_tiles,
    RV: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mixed [M, RV] += P rV of one entry's rows; p [M, N]."""
    column = tl.arange(0, RV)
    tile, tiles = column // _TILE, tl.load(entry + 4)
    mask = reads[:, None] & (tile < tiles)[None, :]
    units = units_ptr + tl.load(entry).to(tl.int64) * stride_units + t // BLOCK_SIZE * unit_tiles
    unit = tl.load(units[:, None] + tile[None, :], mask=mask, other=0).to(tl.int64)
    at = unit * (BLOCK_SIZE * _TILE) + (t % BLOCK_SIZE * _TILE)[:, None] + (column % _TILE)[None, :]
    r = tl.load(residual_ptr + at, mask=mask, other=0.0)
    mine = (lane >= tl.load(entry + 5)) & (lane < tl.load(entry + 6))
    return tl.dot(tl.where(mine[:, None], p, 0.0).to(r.dtype), r, mixed, input_precision=PRECISION)


@triton.jit
def _expand_values(
    acc, mixed, lane, head, entry, b_ptr, stride_slot,
    RV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KV_HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [M, DP] += mixed B_v of one entry's rows; both normalised."""
    column, d = tl.arange(0, RV), tl.arange(0, DP)
    b = b_ptr + tl.load(entry + 1).to(tl.int64) * stride_slot + column[:, None] * (KV_HEADS * D) + head * D + d[None, :]
    mask = (column < tl.load(entry + 4) * _TILE)[:, None] & (d < D)[None, :]
    b_v = tl.load(b, mask=mask, other=0.0)
    extra = tl.dot(mixed.to(b_v.dtype), b_v, input_precision=PRECISION)
    mine = (lane >= tl.load(entry + 5)) & (lane < tl.load(entry + 6))
    return tl.where(mine[:, None], acc + extra, acc)


# Numbers that change from step to step must not select another compilation.
_PLAIN = ["stride_table", "stride_k_units", "stride_v_units", "k_tiles", "v_tiles", "first_class", "last_class"]


@triton.jit(do_not_specialize=_PLAIN)
def decode_items(
    q_ptr, k_ptr, v_ptr, table_ptr, bounds_ptr, items_ptr, lanes_ptr, entries_ptr, partial_ptr, partial_lse_ptr,
    residual_ptr, k_units_ptr, v_units_ptr, b_k_ptr, b_v_ptr, cos_ptr, sin_ptr, k_rms_ptr, residual_rms_ptr,
    score_scale, stride_q_token, stride_q_head, stride_slot,
    stride_table, stride_k_units, stride_v_units, k_tiles, v_tiles, first_class, last_class,
    M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DH: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_K: tl.constexpr, RV: tl.constexpr, QK_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Items of the classes first_class .. last_class: program p computes item p // KV_HEADS of them for KV head
    p % KV_HEADS and leaves out [H, D] / sum and log2 sum exp2 [H] of its rows in their partials."""
    head = tl.program_id(0) % KV_HEADS
    index = tl.load(bounds_ptr + first_class) + tl.program_id(0) // KV_HEADS
    if index >= tl.load(bounds_ptr + last_class + 1):
        return
    item = items_ptr + index * _RECORD
    begin, end = tl.load(item + 1), tl.load(item + 2)
    table = table_ptr + tl.load(item).to(tl.int64) * stride_table
    lanes_ptr += tl.load(item + 3) * 2
    first_entry, end_entry = tl.load(item + 5), tl.load(item + 6)

    lane, half, d = tl.arange(0, M), tl.arange(0, DH), tl.arange(0, DP)
    token, partial = _lanes(lanes_ptr, lane, GROUP)
    heads = head * GROUP + lane % _CHUNK % GROUP
    q1, q2 = _queries(q_ptr, token, heads, stride_q_token, stride_q_head, D, DH)
    top = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, DP], dtype=tl.float32)
    if RV > 0:
        mixed = tl.zeros([M, RV], dtype=tl.float32)
    for start in range(begin, end, N):
        t = start + tl.arange(0, N)
        valid = t < end
        block = tl.load(table + t // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        at = block * (BLOCK_SIZE * KV_HEADS * D) + t % BLOCK_SIZE * (KV_HEADS * D) + head * D
        k_at = k_ptr + at[None, :] + half[:, None]
        k_mask = valid[None, :] & (half < D // 2)[:, None]
        scores = tl.dot(q1, tl.load(k_at, mask=k_mask, other=0.0), input_precision=PRECISION)
        scores = tl.dot(q2, tl.load(k_at + D // 2, mask=k_mask, other=0.0), scores, input_precision=PRECISION)
        if HAS_K:
            for e in range(first_entry, end_entry):
                entry = entries_ptr + e * _RECORD
                length = tl.load(entry + 2)
                if (length > start) & (tl.load(entry + 3) > 0):
                    scores = _add_scores(
                        scores, q1, q2, lane, t, valid & (t < length), head, entry, q_ptr, lanes_ptr,
                        stride_q_token, stride_q_head, block, k_rms_ptr, residual_rms_ptr,
                        residual_ptr, k_units_ptr, b_k_ptr, cos_ptr, sin_ptr, stride_k_units, k_tiles, stride_slot,
                        GROUP, D, DH, M, N, KV_HEADS, BLOCK_SIZE, QK_NORM, PRECISION,
                    )  # fmt: skip
        scores = tl.where(valid[None, :], scores * score_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        alpha = tl.exp2(top - new_top)
        total = total * alpha + tl.sum(p, 1)
        top = new_top
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        if RV > 0:
            mixed = mixed * alpha[:, None]
            for e in range(first_entry, end_entry):
                entry = entries_ptr + e * _RECORD
                length = tl.load(entry + 2)
                if (length > start) & (tl.load(entry + 4) > 0):
                    mixed = _add_values(
                        mixed, p, lane, t, valid & (t < length), entry, residual_ptr, v_units_ptr, stride_v_units,
                        v_tiles, RV, BLOCK_SIZE, PRECISION,
                    )  # fmt: skip

    acc = acc / total[:, None]
    if RV > 0:
        mixed = mixed / total[:, None]
        for e in range(first_entry, end_entry):
            entry = entries_ptr + e * _RECORD
            if (tl.load(entry + 2) > begin) & (tl.load(entry + 4) > 0):
                acc = _expand_values(
                    acc, mixed, lane, head, entry, b_v_ptr, stride_slot, RV, D, DP, KV_HEADS, PRECISION
                )  # fmt: skip
    at = (partial + tl.load(item + 4)).to(tl.int64) * (GROUP * KV_HEADS) + heads
    tl.store(partial_lse_ptr + at, top + tl.log2(total), mask=token >= 0)
    mask = (token >= 0)[:, None] & (d < D)[None, :]
    tl.store(partial_ptr + at[:, None] * D + d[None, :], acc, mask=mask)


@triton.jit
def merge_partials(
    partial_ptr, partial_lse_ptr, rows_ptr, out_ptr, lse_ptr, stride_token, stride_head,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Program p joins the partials of row p // HEADS, head p % HEADS. A row without partials gets zeros."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    token = tl.load(rows_ptr + row * 4)
    if token < 0:
        return
    first, count = tl.load(rows_ptr + row * 4 + 1), tl.load(rows_ptr + row * 4 + 2)
    d = tl.arange(0, DP)
    top, total = float("-inf"), 0.0
    acc = tl.zeros([DP], dtype=tl.float32)
    for begin in range(0, count, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        real = split < count
        at = (first + split).to(tl.int64) * HEADS + head
        lse = tl.load(partial_lse_ptr + at, mask=real, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top)
        alpha = tl.exp2(top - new_top)
        mask = real[:, None] & (d < D)[None, :]
        part = tl.load(partial_ptr + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        total = total * alpha + tl.sum(weight, 0)
        top = new_top
    to = token.to(tl.int64)
    if WITH_LSE:
        tl.store(lse_ptr + to * HEADS + head, (top + tl.log2(total)) * 0.6931471805599453)
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + to * stride_token + head * stride_head + d, acc, mask=d < D)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_block_table: Tensor,
    work: DecodeWork,
    out: Tensor,
    *,
    scale: float,
    residual_cache: Tensor | None = None,
    residual_k_table: Tensor | None = None,
    residual_v_table: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_rms: Tensor | None = None,
    residual_rms: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Attention of the rows of a work list, as `forkkv_kernels.residual_attention` defines it; arguments as there.

    Writes `out` [T, H, D] (and `lse` [T, H] float32) at the tokens of the list, nothing else but the partials of
    `work`. Caches and B are contiguous, q and out along D. Waits for nothing, so it can be captured.

    Raises `ValueError` for tensors that are laid out in another way.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    _check_layout(q, k_cache, v_cache, out, residual_cache, b_k, b_v)
    offsets = work.capacity.offsets
    bounds, items, lanes, entries, rows = (
        work.words[offsets[name] :] for name in ("bounds", "items", "lanes", "entries", "rows")
    )
    num_blocks = kv_block_table.shape[1]
    k_tiles, v_tiles = (_tiles(table, num_blocks) for table in (residual_k_table, residual_v_table))
    arch, nothing = device_arch(q.device), k_cache
    for launch in work.launches:
        own_k = k_tiles if launch.residual and b_k is not None else 0
        own_v = v_tiles if launch.residual and b_v is not None else 0
        block_m = work.capacity.wide if launch.wide else CHUNK
        config = decode_config(arch, head_dim, own_k, own_v, q.element_size(), block_m)
        decode_items[(launch.items * kv_heads,)](
            q,
            k_cache,
            v_cache,
            kv_block_table,
            bounds,
            items,
            lanes,
            entries,
            work.partial,
            work.partial_lse,
            nothing if residual_cache is None else residual_cache,
            kv_block_table if residual_k_table is None else residual_k_table,
            kv_block_table if residual_v_table is None else residual_v_table,
            nothing if b_k is None else b_k,
            nothing if b_v is None else b_v,
            nothing if cos is None else cos,
            nothing if sin is None else sin,
            nothing if k_rms is None else k_rms,
            nothing if residual_rms is None else residual_rms,
            scale * _LOG2E,
            q.stride(0),
            q.stride(1),
            0 if b_k is None else b_k.stride(0),
            kv_block_table.stride(0),
            0 if residual_k_table is None else residual_k_table.stride(0),
            0 if residual_v_table is None else residual_v_table.stride(0),
            k_tiles,
            v_tiles,
            launch.first,
            launch.last,
            GROUP=work.capacity.heads,
            KV_HEADS=kv_heads,
            BLOCK_SIZE=block_size,
            QK_NORM=own_k > 0 and k_rms is not None and residual_rms is not None,
            **_constants(config, head_dim, own_k, own_v),
            **config.options,
        )
    merge_partials[(work.rows * num_heads,)](
        work.partial,
        work.partial_lse,
        rows,
        out,
        work.partial_lse if lse is None else lse,
        out.stride(0),
        out.stride(1),
        HEADS=num_heads,
        D=head_dim,
        DP=triton.next_power_of_2(head_dim),
        SPLITS=16,
        WITH_LSE=lse is not None,
        num_warps=4,
    )


def _tiles(table: Tensor | None, num_blocks: int) -> int:
    """Tiles per block of a residual table."""
    return 0 if table is None else table.shape[1] // num_blocks


def _constants(config: DecodeConfig, head_dim: int, k_tiles: int, v_tiles: int) -> dict[str, object]:
    """Constexprs of `decode_items` that follow from the configuration and the widths of the residual halves."""
    return {
        "M": config.block_m,
        "N": config.block_n,
        "D": head_dim,
        "DH": max(16, triton.next_power_of_2(head_dim // 2)),
        "DP": triton.next_power_of_2(head_dim),
        "HAS_K": k_tiles > 0,
        "RV": columns_of(v_tiles),
        "PRECISION": "ieee",
    }


def _check_layout(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, *others: Tensor | None) -> None:
    for tensor in (k_cache, v_cache, *others):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError("decode attention reads contiguous caches and B matrices")
    if q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("decode attention takes queries and outputs that are contiguous along a head")


def compile_specs(target: Target) -> list[CompileSpec]:
    """The default configurations for one row (16 query heads) and for groups of 32, 64 and 128, see `tile_heads`, in
    bfloat16. float16 for one tile: a configuration knows the size of the type only, layouts and matrix instructions
    have the same shapes for both types, and just the conversions differ. float32, which tests use, for the smallest;
    the merge reads float32 whatever it writes."""
    return [
        *(
            _items_spec(target, head_dim, rank, block_m, "bf16")
            for head_dim in HEAD_DIMS
            for rank in RANKS
            for block_m in WIDE_TILES
            if block_m <= 32 or head_dim <= 128
        ),
        _items_spec(target, 128, 16, 16, "bf16", qk_norm=True),
        *(_items_spec(target, 128, rank, 16, "fp16") for rank in RANKS),
        *(_items_spec(target, 64, rank, 16, "fp32") for rank in (0, 16, 64)),
        *(_merge_spec(head_dim, "bf16") for head_dim in HEAD_DIMS),
    ]


_TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
_IN_CACHE_TYPE = ("q_ptr", "k_ptr", "v_ptr", "residual_ptr", "b_k_ptr", "b_v_ptr", "cos_ptr", "sin_ptr")
_FLOATS = ("partial_ptr", "partial_lse_ptr", "k_rms_ptr", "residual_rms_ptr")


def _items_spec(
    target: Target, head_dim: int, rank: int, block_m: int, dtype: str, qk_norm: bool = False
) -> CompileSpec:
    """Eight KV heads of four query heads and blocks of 16, as in Llama 3.1 8B."""
    tiles = rank // 16
    config = decode_config(target.name, head_dim, tiles, tiles, _TYPES[dtype], block_m)
    constants = _constants(config, head_dim, tiles, tiles)
    constants |= {"GROUP": 4, "KV_HEADS": 8, "BLOCK_SIZE": 16, "QK_NORM": qk_norm}
    names = [name for name in decode_items.arg_names if name not in constants]
    signature = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names}
    signature |= dict.fromkeys(_IN_CACHE_TYPE, f"*{dtype}") | dict.fromkeys(_FLOATS, "*fp32") | {"score_scale": "fp32"}
    signature |= dict.fromkeys(("stride_q_token", "stride_q_head", "stride_slot"), "i32:16")
    return CompileSpec(
        f"decode D{head_dim} R{rank} M{block_m} {dtype}{' norm' if qk_norm else ''}",
        decode_items,
        signature,
        constants,
        config.options,
        allowed_spill(head_dim, rank),
        matrix=dtype != "fp32",
        quick=(head_dim, rank, dtype) == (128, 64, "bf16")
        and (block_m == 16 or (block_m == 64 and target.backend == "cuda")),
    )


def _merge_spec(head_dim: int, dtype: str) -> CompileSpec:
    constants = {"HEADS": 32, "D": head_dim, "DP": triton.next_power_of_2(head_dim), "SPLITS": 16, "WITH_LSE": False}
    signature = dict.fromkeys(("partial_ptr", "partial_lse_ptr", "lse_ptr"), "*fp32")
    signature |= {"rows_ptr": "*i32", "out_ptr": f"*{dtype}", "stride_token": "i32:16", "stride_head": "i32:16"}
    name = f"merge D{head_dim} {dtype}"
    return CompileSpec(name, merge_partials, signature, constants, {"num_warps": 4})
