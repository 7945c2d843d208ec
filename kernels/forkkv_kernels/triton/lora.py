"""Multi-LoRA shrink and expand, and the shrink of base states straight into the residual cache.

Index tables (`forkkv_kernels.lora_plan`) tell every program its tokens and its adapter. Programs without work leave at
once: unused entries of a table, tokens without adapter, rank tiles beyond an adapter's rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkkv_kernels.lora_plan import TILE, ResidualTable, TokenTiles
from forkkv_kernels.triton.aot import CompileSpec, Target

_SPLIT_LENGTH = 512
"""Inner dimension of one split of the shrink. A decode step has few rows and a rank of 16, so the inner dimension is
the only thing to spread over a card: 4,096 in 8 splits x 8 adapters are 64 programs that read at least 16 KiB of A
each; shorter splits would write more partial sums than they save."""
_SMALL = {"num_warps": 4, "num_stages": 4}
"""16 rows: the tiles are 16 x 64 and 64 x 16..64, a few KiB a stage. What counts is loads in flight, so four stages;
longer ones cost registers (a spill under Triton 3.6) and gain nothing."""
_LARGE = {"num_warps": 4, "num_stages": 3}
"""64 rows: 64 x 64 accumulators are 32 registers a thread; three stages of 64 x 64 and 64 x 64 are 48 KiB at 2 bytes,
which leaves room for two programs and more on every chip."""
_FLOAT32 = {"num_warps": 8, "num_stages": 2}
"""Exact float32 has no matrix instructions: operands live in registers, and tiles are twice as large in memory."""


@triton.jit(do_not_specialize=["num_tokens"])
def lora_shrink_kernel(
    x,
    a,
    out,
    order,
    tiles,
    slot_tiles,
    in_size,
    split_length,
    num_tokens,
    rank,
    stride_x,
    stride_a_in,
    stride_a_slot,
    stride_a_column,
    MODULES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Program (rank tile, token tile, split): the columns of one rank tile of all modules side by side, so that x is
    read once for ranks up to 16."""
    rank_tile = tl.program_id(0)
    slot = tl.load(tiles + tl.program_id(1) * 3).to(tl.int64)
    if slot < 0:
        return
    column = tl.arange(0, COLUMNS)
    module = column // TILE
    used = tl.load(slot_tiles + slot * MODULES + module, mask=module < MODULES, other=0) > rank_tile
    if tl.max(used.to(tl.int32), axis=0) == 0:
        return
    position = tl.load(tiles + tl.program_id(1) * 3 + 1) + tl.arange(0, ROWS)
    row = position < tl.load(tiles + tl.program_id(1) * 3 + 2)
    token = tl.load(order + position, mask=row, other=0).to(tl.int64)
    column = module * rank + rank_tile * TILE + column % TILE
    inner = tl.program_id(2) * split_length + tl.arange(0, INNER)
    x_ptrs = x + token[:, None] * stride_x + inner[None, :]
    a_ptrs = a + slot * stride_a_slot + inner[:, None].to(tl.int64) * stride_a_in + column[None, :] * stride_a_column
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(0, split_length, INNER):
        inside = inner + done < in_size
        xs = tl.load(x_ptrs + done, mask=row[:, None] & inside[None, :], other=0.0)
        a_tile = tl.load(a_ptrs, mask=inside[:, None] & used[None, :], other=0.0)
        acc = tl.dot(xs, a_tile, acc, input_precision="ieee")
        a_ptrs += INNER * stride_a_in
    target = (tl.program_id(2) * num_tokens + token[:, None]) * (MODULES * rank) + column[None, :]
    tl.store(out + target, acc, mask=row[:, None] & used[None, :])


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def lora_expand_kernel(
    y,
    shrunk,
    b,
    order,
    tiles,
    slot_tiles,
    num_tokens,
    splits,
    rank,
    out_0,
    out_1,
    out_2,
    stride_y,
    stride_b_slot,
    stride_b_row,
    MODULES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (column block, token tile). A column block lies in one module, and only that module's rows of B are
    read: the other blocks of the block diagonal are zeros."""
    slot = tl.load(tiles + tl.program_id(1) * 3).to(tl.int64)
    if slot < 0:
        return
    block = tl.program_id(0)
    blocks_0, blocks_1 = tl.cdiv(out_0, COLUMNS), tl.cdiv(out_1, COLUMNS)
    module = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    start = tl.where(module > 0, out_0, 0) + tl.where(module > 1, out_1, 0)
    width = tl.where(module == 0, out_0, tl.where(module == 1, out_1, out_2))
    block -= tl.where(module > 0, blocks_0, 0) + tl.where(module > 1, blocks_1, 0)
    count = tl.load(slot_tiles + slot * MODULES + module)
    if count == 0:
        return
    position = tl.load(tiles + tl.program_id(1) * 3 + 1) + tl.arange(0, ROWS)
    row = position < tl.load(tiles + tl.program_id(1) * 3 + 2)
    token = tl.load(order + position, mask=row, other=0).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    mask = row[:, None] & (column < width)[None, :]
    k = tl.arange(0, TILE)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for rank_tile in range(count):
        k_row = module * rank + rank_tile * TILE + k
        source = shrunk + token[:, None] * (MODULES * rank) + k_row[None, :]
        part = tl.zeros((ROWS, TILE), dtype=tl.float32)
        for _ in range(splits):
            part += tl.load(source, mask=row[:, None], other=0.0)
            source += num_tokens * (MODULES * rank)
        b_ptrs = b + slot * stride_b_slot + k_row[:, None] * stride_b_row + (start + column)[None, :]
        b_tile = tl.load(b_ptrs, mask=(column < width)[None, :], other=0.0)
        acc = tl.dot(part.to(b.dtype.element_ty), b_tile, acc, input_precision="ieee")
    target = y + token[:, None] * stride_y + (start + column)[None, :]
    old = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (old + acc).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_columns"])
def residual_write_kernel(
    h,
    a,
    cache,
    tiles,
    tile_ids,
    targets,
    in_size,
    num_columns,
    block_size,
    stride_h,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Program (block of COLUMNS / 16 rank tiles of any adapters, token tile): h·A, stored as rows of 16."""
    job = tl.load(tiles + tl.program_id(1) * 3)
    if job < 0:
        return
    column = tl.arange(0, COLUMNS)
    entry = tl.program_id(0) * (COLUMNS // TILE) + column // TILE
    tile = tl.load(tile_ids + job * num_columns + entry, mask=entry < num_columns, other=-1).to(tl.int64)
    used = tile >= 0
    if tl.max(used.to(tl.int32), axis=0) == 0:
        return
    token = tl.load(tiles + tl.program_id(1) * 3 + 1) + tl.arange(0, ROWS)
    row = token < tl.load(tiles + tl.program_id(1) * 3 + 2)
    token = token.to(tl.int64)
    inner = tl.arange(0, INNER)
    h_ptrs = h + token[:, None] * stride_h + inner[None, :]
    a_ptrs = a + (tile * TILE + column % TILE)[None, :] * in_size + inner[:, None]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(0, in_size, INNER):
        inside = inner + done < in_size
        states = tl.load(h_ptrs + done, mask=row[:, None] & inside[None, :], other=0.0)
        a_tile = tl.load(a_ptrs + done, mask=inside[:, None] & used[None, :], other=0.0)
        acc = tl.dot(states, a_tile, acc, input_precision="ieee")
    known = row[:, None] & used[None, :]
    target = tl.load(targets + token[:, None] * num_columns + entry[None, :], mask=known, other=-1)
    # Slots below block_size belong to the null unit 0.
    tl.store(
        cache + target * TILE + (column % TILE)[None, :], acc.to(cache.dtype.element_ty), mask=target >= block_size
    )


def lora_shrink(x: Tensor, a: Tensor, tokens: TokenTiles, slot_tiles: Tensor) -> Tensor:
    """See `forkkv_kernels.ops.lora_shrink`."""
    num_tokens, in_size = x.shape
    modules, width = slot_tiles.shape[1], a.shape[2]
    rank = width // modules
    splits = triton.cdiv(in_size, _SPLIT_LENGTH) if tokens.block_rows == 16 else 1
    blocks, options = shrink_config(tokens.block_rows, modules, x.dtype)
    # The loop runs in whole blocks of INNER, so a split is a multiple of it.
    split_length = _SPLIT_LENGTH if splits > 1 else triton.cdiv(in_size, blocks["INNER"]) * blocks["INNER"]
    out = torch.empty(splits, num_tokens, width, dtype=torch.float32, device=x.device)
    if num_tokens and rank:
        lora_shrink_kernel[(triton.cdiv(rank, TILE), len(tokens.tiles), splits)](
            x,
            a,
            out,
            tokens.order,
            tokens.tiles,
            slot_tiles,
            in_size,
            split_length,
            num_tokens,
            rank,
            x.stride(0),
            *a.stride(),
            MODULES=modules,
            TILE=TILE,
            **blocks,
            **options,
        )
    return out


def lora_expand(
    y: Tensor, shrunk: Tensor, b: Tensor, tokens: TokenTiles, slot_tiles: Tensor, outputs: tuple[int, ...]
) -> None:
    """See `forkkv_kernels.ops.lora_expand`. Raises `ValueError` for more than three modules."""
    if len(outputs) > 3 or len(outputs) != slot_tiles.shape[1]:
        raise ValueError(f"{len(outputs)} modules, {slot_tiles.shape[1]} in the table, at most 3 supported")
    blocks, options = expand_config(tokens.block_rows, y.dtype)
    rank = b.shape[1] // len(outputs)
    if not y.shape[0] or not rank:
        return
    lora_expand_kernel[(sum(triton.cdiv(out, blocks["COLUMNS"]) for out in outputs), len(tokens.tiles))](
        y,
        shrunk,
        b,
        tokens.order,
        tokens.tiles,
        slot_tiles,
        y.shape[0],
        shrunk.shape[0],
        rank,
        *outputs,
        *(0 for _ in range(3 - len(outputs))),
        y.stride(0),
        b.stride(0),
        b.stride(1),
        MODULES=len(outputs),
        TILE=TILE,
        **blocks,
        **options,
    )


def residual_shrink_write(h: Tensor, a: Tensor, table: ResidualTable, residual_cache: Tensor) -> None:
    """See `forkkv_kernels.ops.residual_shrink_write`."""
    num_columns = table.tile_ids.shape[1]
    if num_columns == 0 or len(table.tiles) == 0:
        return
    blocks, options = residual_config(table.block_rows, num_columns, h.dtype)
    residual_write_kernel[(triton.cdiv(num_columns * TILE, blocks["COLUMNS"]), len(table.tiles))](
        h,
        a,
        residual_cache,
        table.tiles,
        table.tile_ids,
        table.targets,
        h.shape[1],
        num_columns,
        residual_cache.shape[1],
        h.stride(0),
        TILE=TILE,
        **blocks,
        **options,
    )


def shrink_config(rows: int, modules: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """(block sizes, launch options) of the shrink for token tiles of so many rows."""
    columns = triton.next_power_of_2(modules * TILE)
    if rows == 16:
        return {"ROWS": 16, "COLUMNS": columns, "INNER": 64}, _FLOAT32 if dtype == torch.float32 else _SMALL
    return {"ROWS": rows, "COLUMNS": columns, **_inner(dtype)}, _FLOAT32 if dtype == torch.float32 else _LARGE


def expand_config(rows: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """(block sizes, launch options) of the expand. 128 columns are 256 contiguous bytes of B and y at 2 bytes a number,
    whole lines of the cache."""
    options = _FLOAT32 if dtype == torch.float32 else {"num_warps": 4, "num_stages": 2}
    return {"ROWS": rows, "COLUMNS": 128}, options


def residual_config(rows: int, tiles: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """(block sizes, launch options) of the residual write. Up to 128 columns (8 tiles: K and V of four adapters of
    rank 16) share one pass over h; more would cost registers and only save reads that hit L2."""
    columns = min(128, triton.next_power_of_2(tiles * TILE))
    return {"ROWS": rows, "COLUMNS": columns, **_inner(dtype)}, _FLOAT32 if dtype == torch.float32 else _LARGE


def _inner(dtype: torch.dtype) -> dict[str, int]:
    """128 bytes of a row a step: whole lines of the cache, and no more registers for float32."""
    return {"INNER": 32 if dtype == torch.float32 else 64}


def compile_specs(target: Target) -> list[CompileSpec]:
    """Default configurations: decode (16 rows) and prefill (64 rows), every number of fused modules; float16, which
    compiles to the shapes of bfloat16, and float32, which tests use, once."""
    variants = [(1, "bf16"), (2, "bf16"), *((3, dtype) for dtype in _DTYPES)]
    widths = [(1, "bf16"), (2, "bf16"), (4, "bf16"), *((8, dtype) for dtype in _DTYPES)]
    specs = [
        *(_shrink_spec(rows, modules, dtype) for rows in (16, 64) for modules, dtype in variants),
        *(_expand_spec(rows, modules, dtype) for rows in (16, 64) for modules, dtype in variants),
        *(_residual_spec(rows, tiles, dtype) for rows in (16, 64) for tiles, dtype in widths),
    ]
    quick = {
        "sm_90": ("lora_shrink rows64 modules3 bf16", "residual_write rows16 tiles8 bf16"),
        "sm_80": ("lora_expand rows64 modules3 bf16",),
    }
    return [replace(spec, quick=spec.name in quick.get(target.name, ())) for spec in specs]


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INDEX = {"order": "*i32", "tiles": "*i32", "slot_tiles": "*i32"}


def _shrink_spec(rows: int, modules: int, dtype: str) -> CompileSpec:
    blocks, options = shrink_config(rows, modules, _DTYPES[dtype])
    signature = {
        "x": f"*{dtype}",
        "a": f"*{dtype}",
        "out": "*fp32",
        **_INDEX,
        **dict.fromkeys(("in_size", "split_length", "rank", "stride_x", "stride_a_slot", "stride_a_column"), "i32:16"),
        "num_tokens": "i32",
    }
    # A is kept with the inner dimension contiguous on GPUs.
    constants = {"stride_a_in": 1, "MODULES": modules, "TILE": TILE, **blocks}
    return CompileSpec(
        f"lora_shrink rows{rows} modules{modules} {dtype}",
        lora_shrink_kernel,
        signature,
        constants,
        dict(options),
        matrix=dtype != "fp32",
    )


def _expand_spec(rows: int, modules: int, dtype: str) -> CompileSpec:
    blocks, options = expand_config(rows, _DTYPES[dtype])
    signature = {
        "y": f"*{dtype}",
        "shrunk": "*fp32",
        "b": f"*{dtype}",
        **_INDEX,
        **dict.fromkeys(("num_tokens", "splits"), "i32"),
        **dict.fromkeys(("rank", "out_0", "out_1", "out_2", "stride_y", "stride_b_slot", "stride_b_row"), "i32:16"),
    }
    return CompileSpec(
        f"lora_expand rows{rows} modules{modules} {dtype}",
        lora_expand_kernel,
        signature,
        {"MODULES": modules, "TILE": TILE, **blocks},
        dict(options),
        matrix=dtype != "fp32",
    )


def _residual_spec(rows: int, tiles: int, dtype: str) -> CompileSpec:
    blocks, options = residual_config(rows, tiles, _DTYPES[dtype])
    signature = {
        **dict.fromkeys(("h", "a", "cache"), f"*{dtype}"),
        **dict.fromkeys(("tiles", "tile_ids"), "*i32"),
        "targets": "*i64",
        **dict.fromkeys(("in_size", "block_size", "stride_h"), "i32:16"),
        "num_columns": "i32",
    }
    return CompileSpec(
        f"residual_write rows{rows} tiles{tiles} {dtype}",
        residual_write_kernel,
        signature,
        {"TILE": TILE, **blocks},
        dict(options),
        matrix=dtype != "fp32",
    )
