"""`lora_rows`: the adapters' part of a projection for the few tokens of a decode step, each with its own adapter.

A product of one row with a rank-16 adapter is a few microseconds of reading its matrices; as PyTorch operations it is
several calls, and one product for all adapters multiplies every row by every adapter. Here up to four tokens of one
adapter go together through its A and B, which are read once for them.
"""

from __future__ import annotations

import functools
import logging
import time
from array import array
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from forkkv_kernels import reference_ops
from forkkv_kernels.cpu import jit  # noqa: F401  configures Numba
from forkkv_kernels.cpu.codegen import FLOATS, INT32S, WIDTH, Emitter, pointer_to
from forkkv_kernels.cpu.team import TeamKernel, address_of, parameter, take
from forkkv_kernels.lora_plan import ROWS_TOGETHER, TILE, TokenTiles

logger = logging.getLogger(__name__)

_CHAINS = 4
_TILES, _ORDER, _NUM_TILES, _MODULES, _SLOT_TILES, _SCRATCH, _INS, _RANK = range(8)
_X, _X_STRIDE, _Y, _Y_STRIDE, _A, _A_SLOT, _A_ROW, _B, _B_SLOT, _B_ROW, _OUTPUTS = range(8, 19)
_NEXT, _BLOCK = 24, 32
"""The counter of tiles taken has a cache line of its own."""


_floats, _int32s = pointer_to(FLOATS), pointer_to(INT32S)


def _rows_of(emit: Emitter, order: ir.Value, base: ir.Value, stride: ir.Value, rows: int) -> list[ir.Value]:
    """Pointers to the tokens order[0], ..., order[rows - 1] of a matrix."""
    build = emit.builder
    tokens = [build.sext(emit.scalar(order, row), ir.IntType(64)) for row in range(rows)]
    return [emit.at(base, build.mul(token, stride)) for token in tokens]


def _make_shrink(rows: int) -> Any:
    @intrinsic
    def shrink(typingctx: Any, order: Any, x: Any, x_stride: Any, a: Any, a_row: Any, ins: Any, out: Any) -> Any:
        """out[row, 0:16] = sum over i of x[order[row], i] * a[i, 0:16]; `ins` is a multiple of `_CHAINS`."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            emit = Emitter(builder)
            order, x, x_stride, a, a_row, ins, out = args
            inputs = _rows_of(emit, order, x, x_stride, rows)
            # Sums side by side, or each would wait for its last addition; as many for any `rows`, so that a token's
            # result does not depend on who shares its adapter.
            sums = [emit.variables([emit.fixed(0.0)] * _CHAINS) for _ in range(rows)]
            with emit.loop(ins, _CHAINS) as i:
                for step in range(_CHAINS):
                    at = emit.sum(i, step)
                    weights = emit.load(a, builder.mul(at, a_row))
                    for row in range(rows):
                        place = sums[row][step]
                        place.set(emit.fma(emit.broadcast(inputs[row], at), weights, place.get()))
            for row in range(rows):
                total = sums[row][0].get()
                for other in sums[row][1:]:
                    total = builder.fadd(total, other.get())
                emit.store(total, out, row * WIDTH)
            return context.get_dummy_value()

        arguments = (INT32S, FLOATS, types.int64, FLOATS, types.int64, types.int64, FLOATS)
        return types.void(*arguments), generate

    return shrink


def _make_expand(rows: int) -> Any:
    @intrinsic
    def expand(typingctx: Any, order: Any, y: Any, y_stride: Any, shrunk: Any, b: Any, b_row: Any, width: Any) -> Any:
        """y[order[row], 0:width] += sum over c of shrunk[row, c] * b[c, 0:width]."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            emit = Emitter(builder)
            order, y, y_stride, shrunk, b, b_row, width = args
            outputs = _rows_of(emit, order, y, y_stride, rows)
            lines = [emit.at(b, emit.times(b_row, column)) for column in range(TILE)]
            with emit.loop(width, WIDTH) as i:
                sums = [emit.load(output, i) for output in outputs]
                for column, line in enumerate(lines):
                    weights = emit.load(line, i)
                    sums = [
                        emit.fma(emit.broadcast(shrunk, row * WIDTH + column), weights, total)
                        for row, total in enumerate(sums)
                    ]
                for output, total in zip(outputs, sums, strict=True):
                    emit.store(total, output, i)
            return context.get_dummy_value()

        arguments = (INT32S, FLOATS, types.int64, FLOATS, FLOATS, types.int64, types.int64)
        return types.void(*arguments), generate

    return expand


def _make_apply(rows: int) -> Any:
    shrink, expand = _make_shrink(rows), _make_expand(rows)

    @njit
    def apply(block, slot, order, scratch):
        """All modules and rank tiles of `rows` tokens."""
        x, x_stride, ins = _floats(parameter(block, _X)), parameter(block, _X_STRIDE), parameter(block, _INS)
        a_row, b_row, rank = parameter(block, _A_ROW), parameter(block, _B_ROW), parameter(block, _RANK)
        a = parameter(block, _A) + 4 * slot * parameter(block, _A_SLOT)
        b = parameter(block, _B) + 4 * slot * parameter(block, _B_SLOT)
        modules = parameter(block, _MODULES)
        used = _int32s(parameter(block, _SLOT_TILES) + 4 * slot * modules)
        column = 0
        for module in range(modules):
            width = parameter(block, _OUTPUTS + module)
            y = _floats(parameter(block, _Y) + 4 * column)
            for tile in range(used[module]):
                row = module * rank + TILE * tile
                shrink(order, x, x_stride, _floats(a + 4 * row), a_row, ins, scratch)
                lines = _floats(b + 4 * (row * b_row + column))
                expand(order, y, parameter(block, _Y_STRIDE), scratch, lines, b_row, width)
            column += width

    return apply


_one, _two, _four = _make_apply(1), _make_apply(2), _make_apply(4)


def _lora(block):
    tiles = _int32s(parameter(block, _TILES))
    tile = take(address_of(block) + 8 * _NEXT)
    while tile < parameter(block, _NUM_TILES):
        slot, row, end = tiles[3 * tile], tiles[3 * tile + 1], tiles[3 * tile + 2]
        scratch = _floats(parameter(block, _SCRATCH) + 4 * tile * ROWS_TOGETHER * WIDTH)
        while slot >= 0 and row < end:
            order = _int32s(parameter(block, _ORDER) + 4 * row)
            if end - row >= 4:
                _four(block, slot, order, scratch)
                row += 4
            elif end - row >= 2:
                _two(block, slot, order, scratch)
                row += 2
            else:
                _one(block, slot, order, scratch)
                row += 1
        tile = take(address_of(block) + 8 * _NEXT)


@functools.cache
def kernel() -> TeamKernel:
    """Compiled or from disk; says so in the log, since compiling takes seconds."""
    begin = time.perf_counter()
    compiled = TeamKernel(_lora)
    how = "from disk" if compiled.from_disk else "compiled"
    logger.info("CPU kernel ready: adapters (%s, %.1f s)", how, time.perf_counter() - begin)
    return compiled


def lora_rows(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, tokens: TokenTiles, slot_tiles: Tensor, outputs: tuple[int, ...]
) -> None:
    """See `forkkv_kernels.ops.lora_rows`. Fast where a slot's A [in, n * R] is contiguous."""
    if not _supported(x, y, a, b, tokens, outputs):
        return reference_ops.lora_rows_reference(x, y, a, b, tokens, slot_tiles, outputs)
    num_tiles = tokens.tiles.shape[0]
    scratch = torch.empty(num_tiles * ROWS_TOGETHER * WIDTH)
    plan = (tokens.tiles.data_ptr(), tokens.order.data_ptr(), num_tiles, len(outputs), slot_tiles.data_ptr())
    matrices = (x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), a.data_ptr(), a.stride(1), a.stride(0))
    rest = (b.data_ptr(), b.stride(0), b.stride(1), *outputs)
    own = (*plan, scratch.data_ptr(), x.shape[1], b.shape[1] // len(outputs), *matrices, *rest)
    block = array("q", own + (0,) * (_BLOCK - len(own)))
    kernel()(block, min(torch.get_num_threads(), num_tiles))


def _supported(x: Tensor, y: Tensor, a: Tensor, b: Tensor, tokens: TokenTiles, outputs: tuple[int, ...]) -> bool:
    """Whether the sizes are whole vectors and everything lies as the kernel reads it."""
    rows = all(t.dtype == torch.float32 and t.stride(-1) == 1 for t in (x, y, a, b))
    sizes = x.shape[1] % _CHAINS == 0 and b.shape[1] % (TILE * len(outputs)) == 0
    return rows and sizes and tokens.block_rows <= ROWS_TOGETHER and all(width % WIDTH == 0 for width in outputs)
