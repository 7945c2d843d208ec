"""LLVM code of the int8 products, as Numba intrinsics.

Written down instruction by instruction because Numba has neither vectors nor matrix tiles, and its vectoriser does
not find 4-byte dot products. Arguments are a tuple of int64:
addresses, strides in bytes, counts. Which instructions are
emitted depends on the CPU that Numba compiles for, which is part of the key of its cache on disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from forkkv_kernels.cpu.int8_format import DEPTH_STEP, DIGITS, LANES, LIMIT, OFFSET, QUAD, TINY

TILE_ROWS = 16
"""Rows of a matrix tile."""

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F32 = ir.FloatType()
_PANEL = LANES * QUAD
_AHEAD = 2048
"""Bytes ahead of those in work that a panel is asked for: loads alone keep too few lines under way."""
_BYTES, _INTS, _FLOATS = ir.VectorType(_I8, _PANEL), ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_MASK = ir.VectorType(_I1, LANES)
_NOT_FINITE = 0x7F800000


def make_intrinsic(emit: Callable[..., None], arguments: int) -> Any:
    """A function for jitted code that takes one tuple of int64; `emit(Code, *values)` writes its body."""

    def call(typingctx: Any, values: Any) -> Any:
        return types.void(UniTuple(types.int64, arguments)), generate

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        emit(Code(context, builder), *cgutils.unpack_tuple(builder, args[0], arguments))
        return context.get_dummy_value()

    return intrinsic(call)


class Code:
    """llvmlite's builder with the few operations that the kernels need."""

    def __init__(self, context: Any, builder: ir.IRBuilder) -> None:
        self.builder = builder
        triple, _, features = context.codegen().magic_tuple()
        self.features = set(features.split(",")) if triple.startswith("x86_64") else set()

    def has(self, *features: str) -> bool:
        return all(f"+{feature}" in self.features for feature in features)

    def at(self, address: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        """address + the sum of `offsets`."""
        for offset in offsets:
            if not isinstance(offset, int):
                address = self.builder.add(address, offset)
            elif offset:
                address = self.builder.add(address, ir.Constant(_I64, offset))
        return address

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        return self.builder.mul(value, ir.Constant(_I64, factor))

    def load(self, kind: ir.Type, address: ir.Value, *offsets: ir.Value | int, align: int = 1) -> ir.Value:
        return self.builder.load(self._pointer(kind, self.at(address, *offsets)), align=align)

    def store(self, value: ir.Value, address: ir.Value, *offsets: ir.Value | int, align: int = 1) -> None:
        self.builder.store(value, self._pointer(value.type, self.at(address, *offsets)), align=align)

    def _pointer(self, kind: ir.Type, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, kind.as_pointer())

    def prefetch(self, address: ir.Value, *offsets: ir.Value | int) -> None:
        """Ask for the cache line at `address` + offsets, into the second-level cache."""
        where = self._pointer(_I8, self.at(address, *offsets))
        self.call("llvm.prefetch.p0", ir.VoidType(), where, *(ir.Constant(_I32, value) for value in (0, 2, 1)))

    def splat(self, value: ir.Value) -> ir.Value:
        """`value` in all lanes."""
        kind = ir.VectorType(value.type, LANES)
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, undefined, fixed(_INTS, 0))

    def call(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def first_lanes(self, count: ir.Value) -> ir.Value:
        """Mask of the lanes below `count` (int64, any value)."""
        lanes = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
        return self.builder.icmp_signed("<", lanes, self.splat(count))

    def load_lanes(self, address: ir.Value, mask: ir.Value) -> ir.Value:
        """Floats at `address`, 0 where the mask is off; memory there is not touched."""
        pointer = self._pointer(_FLOATS, address)
        name = f"llvm.masked.load.v{LANES}f32.p0"
        return self.call(name, _FLOATS, pointer, ir.Constant(_I32, 4), mask, fixed(_FLOATS, 0.0))

    def store_lanes(self, value: ir.Value, address: ir.Value, mask: ir.Value) -> None:
        pointer = self._pointer(_FLOATS, address)
        self.call(f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), value, pointer, ir.Constant(_I32, 4), mask)

    def dot(self, sums: ir.Value, quads: ir.Value, codes: ir.Value) -> ir.Value:
        """sums [16] int32 + unsigned bytes `quads` (four, as one int32) . signed bytes `codes` [16, 4]."""
        if self.has("avx512vnni"):
            operands = (sums, self.splat(quads), self.builder.bitcast(codes, _INTS))
            return self.call("llvm.x86.avx512.vpdpbusd.512", _INTS, *operands)
        if self.has("avxvnni"):
            return self._dot_halves(sums, quads, codes)
        return self._dot_plain(sums, quads, codes)

    def _dot_halves(self, sums: ir.Value, quads: ir.Value, codes: ir.Value) -> ir.Value:
        """The same with two 256-bit instructions."""
        half, build = LANES // 2, self.builder
        kind = ir.VectorType(_I32, half)
        parts = []
        operands = (sums, self.splat(quads), build.bitcast(codes, _INTS))
        for first in (0, half):
            lanes = ir.Constant(kind, list(range(first, first + half)))
            cut = [build.shuffle_vector(operand, operand, lanes) for operand in operands]
            parts.append(self.call("llvm.x86.avx512.vpdpbusd.256", kind, *cut))
        return build.shuffle_vector(*parts, ir.Constant(_INTS, list(range(LANES))))

    def _dot_plain(self, sums: ir.Value, quads: ir.Value, codes: ir.Value) -> ir.Value:
        """The same in general operations; 255 * 127 fits into 16 bits."""
        build, wide = self.builder, ir.VectorType(_I16, _PANEL)
        products = build.mul(build.zext(build.bitcast(self.splat(quads), _BYTES), wide), build.sext(codes, wide))
        for place in range(QUAD):
            lanes = ir.Constant(_INTS, [QUAD * lane + place for lane in range(LANES)])
            sums = build.add(sums, build.sext(build.shuffle_vector(products, products, lanes), _INTS))
        return sums

    def finish(
        self, sums: Sequence[ir.Value], row: ir.Value, columns: ir.Value, width: ir.Value, out: ir.Value,
        channels: ir.Value,
    ) -> None:  # fmt: skip
        """The digits' sums of 16 channels to floats at `out`; the same operations in the same order for every kernel.

        `columns`: address of the channels' scales; biases and corrections lie `width` and twice `width` bytes on. Of
        the channels `channels` are stored (all, if it is more than 16).
        """
        build = self.builder
        correction = self.load(_INTS, columns, width, width)
        value = None
        for digit in sums:
            exact = build.sitofp(build.sub(digit, correction), _FLOATS)
            value = exact if value is None else build.fadd(build.fmul(value, fixed(_FLOATS, 256.0)), exact)
        value = build.fmul(build.fmul(value, self.splat(row)), self.load(_FLOATS, columns))
        self.store_lanes(build.fadd(value, self.load(_FLOATS, columns, width)), out, self.first_lanes(channels))


def fixed(kind: ir.Type, value: float) -> ir.Constant:
    """A vector constant with the same value in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def _split_row(code: Code, x: ir.Value, count: ir.Value, digits: ir.Value, plane: ir.Value, scale: ir.Value) -> None:
    """split_row((x, count, digits, plane, scale)): `split_rows` of one row.

    Writes the digits of `count` floats, each plus 128, a plane of them `plane` bytes after the one before, and the
    row's scale to `scale`. Up to 15 bytes after the digits are overwritten.
    """
    build = code.builder
    zero, step = ir.Constant(_I64, 0), ir.Constant(_I64, LANES)
    largest = cgutils.alloca_once_value(build, fixed(_INTS, 0))
    with cgutils.for_range_slice(build, zero, count, step) as (index, _):
        values = code.load_lanes(code.at(x, code.times(index, 4)), code.first_lanes(build.sub(count, index)))
        bits = build.and_(build.bitcast(values, _INTS), fixed(_INTS, 0x7FFFFFFF))
        seen = build.load(largest)
        build.store(build.select(build.icmp_signed(">", bits, seen), bits, seen), largest)
    # Magnitudes compare as the integers that their bits are; inf and NaN are the largest.
    bits = code.call(f"llvm.vector.reduce.umax.v{LANES}i32", _I32, build.load(largest))
    finite = build.icmp_unsigned("<", bits, ir.Constant(_I32, _NOT_FINITE))
    magnitude = build.bitcast(bits, _F32)
    used = build.and_(finite, build.fcmp_ordered(">=", magnitude, ir.Constant(_F32, TINY)))
    safe = build.select(used, magnitude, ir.Constant(_F32, 1.0))
    inverse = code.splat(build.fdiv(ir.Constant(_F32, float(LIMIT)), safe))
    all_used = code.splat(used)
    with cgutils.for_range_slice(build, zero, count, step) as (index, _):
        values = code.load_lanes(code.at(x, code.times(index, 4)), code.first_lanes(build.sub(count, index)))
        scaled = build.select(all_used, build.fmul(values, inverse), fixed(_FLOATS, 0.0))
        rounded = build.fptosi(code.call(f"llvm.nearbyint.v{LANES}f32", _FLOATS, scaled), _INTS)
        shifted = build.add(rounded, fixed(_INTS, OFFSET))
        place = code.at(digits, index)
        for digit in reversed(range(DIGITS)):
            byte = build.lshr(shifted, fixed(_INTS, 8 * digit))
            code.store(build.trunc(byte, ir.VectorType(_I8, LANES)), place)
            place = code.at(place, plane)
    other = build.select(finite, ir.Constant(_F32, 0.0), ir.Constant(_F32, float("nan")))
    code.store(build.select(used, build.fdiv(magnitude, ir.Constant(_F32, float(LIMIT))), other), scale, align=4)


split_row = make_intrinsic(_split_row, 5)


def make_row_tile(rows: int, panels: int) -> Any:
    """row_tile((digits, plane, stride, weight, depth, columns, width, scales, out, out_stride, channels)).

    `rows` rows times `panels` panels; all sums stay in registers over the whole depth, and a panel is read once for
    all rows. digits: the first row's, the next row `stride` bytes on, the next plane `plane` bytes on; depth: inputs;
    scales: float32 of the rows; out: where the first row's channels go; `channels` from there exist.
    """

    def row_tile(
        code: Code, digits: ir.Value, plane: ir.Value, stride: ir.Value, weight: ir.Value, depth: ir.Value,
        columns: ir.Value, width: ir.Value, scales: ir.Value, out: ir.Value, out_stride: ir.Value, channels: ir.Value,
    ) -> None:  # fmt: skip
        build = code.builder
        panel_bytes = code.times(depth, LANES)
        starts = [code.at(weight, code.times(panel_bytes, panel)) for panel in range(panels)]
        planes = [code.at(digits, code.times(plane, digit)) for digit in range(DIGITS)]
        lines = [[code.at(first, code.times(stride, row)) for first in planes] for row in range(rows)]
        keys = itertools.product(range(rows), range(DIGITS), range(panels))
        sums = {key: cgutils.alloca_once_value(build, fixed(_INTS, 0)) for key in keys}
        with cgutils.for_range_slice(build, ir.Constant(_I64, 0), depth, ir.Constant(_I64, QUAD)) as (index, _):
            for start in starts:
                code.prefetch(start, code.times(index, LANES), _AHEAD)
            codes = [code.load(_BYTES, start, code.times(index, LANES), align=64) for start in starts]
            for row, digit in itertools.product(range(rows), range(DIGITS)):
                quads = code.load(_I32, lines[row][digit], index, align=4)
                for panel in range(panels):
                    where = sums[row, digit, panel]
                    build.store(code.dot(build.load(where), quads, codes[panel]), where)
        for row in range(rows):
            scale = code.load(_F32, scales, 4 * row, align=4)
            for panel in range(panels):
                target = code.at(out, code.times(out_stride, row), 4 * LANES * panel)
                left = build.sub(channels, ir.Constant(_I64, LANES * panel))
                finished = [build.load(sums[row, digit, panel]) for digit in range(DIGITS)]
                code.finish(finished, scale, code.at(columns, 4 * LANES * panel), width, target, left)

    return make_intrinsic(row_tile, 11)


# ---- matrix tiles (AMX) -----------------------------------------------------------------------------------------

_TILE_BYTES = TILE_ROWS * DEPTH_STEP
_PANELS = 2
_SUM_TILES = DIGITS * _PANELS
_DIGIT_TILE, _CODE_TILE = _SUM_TILES, _SUM_TILES + 1
"""The last two of the eight registers; the others hold the sums of each digit with each panel."""


def _tiles_begin(code: Code, _unused: ir.Value) -> None:
    """tiles_begin((0,)): give this thread eight tiles of 16 rows of 64 bytes."""
    if not code.has("amx-int8"):
        code.call("llvm.trap", ir.VoidType())
        return
    config = bytearray(64)
    config[0] = 1
    for tile in range(8):
        config[16 + 2 * tile], config[48 + tile] = DEPTH_STEP, TILE_ROWS
    place = cgutils.alloca_once_value(code.builder, ir.Constant(ir.ArrayType(_I8, 64), config))
    code.call("llvm.x86.ldtilecfg", ir.VoidType(), code.builder.bitcast(place, _I8.as_pointer()))


def _tiles_end(code: Code, _unused: ir.Value) -> None:
    """tiles_end((0,)): release them."""
    code.call("llvm.x86.tilerelease" if code.has("amx-int8") else "llvm.trap", ir.VoidType())


def _tile_block(
    code: Code, digits: ir.Value, plane: ir.Value, stride: ir.Value, rows: ir.Value, weight: ir.Value, depth: ir.Value,
    columns: ir.Value, width: ir.Value, scales: ir.Value, out: ir.Value, out_stride: ir.Value, channels: ir.Value,
) -> None:  # fmt: skip
    """tile_block((...)): 16 rows times two panels, of which `rows` rows are stored; else as `make_row_tile`.

    All 16 rows of digits must be readable. Between `tiles_begin` and `tiles_end` only.
    """
    if not code.has("amx-int8"):
        code.call("llvm.trap", ir.VoidType())
        return
    build = code.builder
    panel_bytes = code.times(depth, LANES)
    for tile in range(_SUM_TILES):
        code.call("llvm.x86.tilezero", ir.VoidType(), ir.Constant(_I8, tile))
    with cgutils.for_range_slice(build, ir.Constant(_I64, 0), depth, ir.Constant(_I64, DEPTH_STEP)) as (index, _):
        loaded = None
        for digit in range(DIGITS):
            _load_tile(code, _DIGIT_TILE, code.at(digits, index, code.times(plane, digit)), stride)
            # To and fro, so that the panel of the digit before need not be loaded again.
            for panel in range(_PANELS) if digit % 2 == 0 else reversed(range(_PANELS)):
                if panel != loaded:
                    source = code.at(weight, code.times(index, LANES), code.times(panel_bytes, panel))
                    _load_tile(code, _CODE_TILE, source, ir.Constant(_I64, DEPTH_STEP))
                loaded = panel
                numbers = [ir.Constant(_I8, tile) for tile in (digit * _PANELS + panel, _DIGIT_TILE, _CODE_TILE)]
                code.call("llvm.x86.tdpbusd", ir.VoidType(), *numbers)
    sums = cgutils.alloca_once(build, ir.ArrayType(_I8, _SUM_TILES * _TILE_BYTES))
    sums.align = 64
    base = build.ptrtoint(sums, _I64)
    for tile in range(_SUM_TILES):
        place = build.inttoptr(code.at(base, tile * _TILE_BYTES), _I8.as_pointer())
        code.call("llvm.x86.tilestored64", ir.VoidType(), ir.Constant(_I8, tile), place, ir.Constant(_I64, DEPTH_STEP))
    with cgutils.for_range(build, rows) as loop:
        scale = code.load(_F32, scales, code.times(loop.index, 4), align=4)
        for panel in range(_PANELS):
            line = code.at(base, code.times(loop.index, DEPTH_STEP), panel * _TILE_BYTES)
            finished = [code.load(_INTS, line, d * _PANELS * _TILE_BYTES, align=64) for d in range(DIGITS)]
            target = code.at(out, build.mul(out_stride, loop.index), 4 * LANES * panel)
            left = build.sub(channels, ir.Constant(_I64, LANES * panel))
            code.finish(finished, scale, code.at(columns, 4 * LANES * panel), width, target, left)


def _load_tile(code: Code, tile: int, address: ir.Value, stride: ir.Value) -> None:
    pointer = code.builder.inttoptr(address, _I8.as_pointer())
    code.call("llvm.x86.tileloadd64", ir.VoidType(), ir.Constant(_I8, tile), pointer, stride)


tiles_begin = make_intrinsic(_tiles_begin, 1)
tiles_end = make_intrinsic(_tiles_end, 1)
tile_block = make_intrinsic(_tile_block, 12)
