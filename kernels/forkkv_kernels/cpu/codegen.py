"""Vector code for Numba: a few helpers over llvmlite's builder, from which `microkernels` are put together.

Numba offers no vector values. Its vectoriser would have to discover by itself that an accumulator may stay in
registers over a loop; here that is written down. All vectors have 16 floats: one register with AVX-512, and LLVM
splits them by itself on narrower machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
"""Floats in a vector."""

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, WIDTH)
INTS = ir.VectorType(I32, WIDTH)

FLOATS, INT32S, INT64S = (types.CPointer(kind) for kind in (types.float32, types.int32, types.int64))
"""Numba's types of buffers. Pointers, not arrays: what an array carries beside its address would be passed through
every call and make compiling ten times as long."""

# Minimax polynomial of exp(r) on [-ln 2 / 2, ln 2 / 2] (Cephes' expf), relative error about 2e-7.
_LOG2E, _LN2_HI, _LN2_LO = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_MIN = -87.0


def pointer_to(kind: types.CPointer) -> Any:
    """Intrinsic (address) -> a pointer of type `kind`."""

    def cast(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return intrinsic(cast)


class Emitter:
    """Emits into one function; every method adds instructions at the builder's place and returns their value."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def at(self, pointer: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        """Pointer `offsets` (summed) elements further."""
        return self.builder.gep(pointer, [self.sum(*offsets)])

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def sum(self, *terms: ir.Value | int) -> ir.Value:
        """int64 sum of values and constants."""
        fixed = sum(term for term in terms if isinstance(term, int))
        values = [term for term in terms if not isinstance(term, int)]
        total = values[0] if values else self.const(fixed)
        for term in values[1:]:
            total = self.builder.add(total, term)
        return self.builder.add(total, self.const(fixed)) if values and fixed else total

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        return self.builder.mul(value, self.const(factor))

    def load(self, pointer: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        """16 floats from `pointer` + offsets; no alignment is asked of it."""
        where = self.builder.bitcast(self.at(pointer, *offsets), VECTOR.as_pointer())
        return self.builder.load(where, align=4)

    def store(self, vector: ir.Value, pointer: ir.Value, *offsets: ir.Value | int) -> None:
        where = self.builder.bitcast(self.at(pointer, *offsets), VECTOR.as_pointer())
        self.builder.store(vector, where, align=4)

    def prefetch(self, pointer: ir.Value, *offsets: ir.Value | int) -> None:
        """Ask for the cache line at `pointer` + offsets, into the second-level cache."""
        byte, word = ir.IntType(8).as_pointer(), I32
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        where = self.builder.bitcast(self.at(pointer, *offsets), byte)
        self.builder.call(function, [where, *(ir.Constant(word, value) for value in (0, 2, 1))])

    def scalar(self, pointer: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        """One float or int64 from `pointer` + offsets."""
        return self.builder.load(self.at(pointer, *offsets))

    def splat(self, value: ir.Value) -> ir.Value:
        """A float in all 16 places."""
        one = self.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTS, [0] * WIDTH))

    def fixed(self, value: float) -> ir.Constant:
        """A constant in all 16 places."""
        return ir.Constant(VECTOR, [value] * WIDTH)

    def broadcast(self, pointer: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        return self.splat(self.scalar(pointer, *offsets))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c."""
        return self.builder.call(self._intrinsic("llvm.fma", 3), [a, b, c])

    def fnma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """c - a * b."""
        return self.fma(self.builder.fneg(a), b, c)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp(self, x: ir.Value) -> ir.Value:
        """exp of each element for x <= 0, and 0 below -87 (so also for -inf)."""
        build = self.builder
        tiny = build.fcmp_ordered("<", x, self.fixed(_EXP_MIN))
        x = build.select(tiny, self.fixed(_EXP_MIN), x)
        n = build.call(self._intrinsic("llvm.nearbyint", 1), [build.fmul(x, self.fixed(_LOG2E))])
        r = self.fnma(n, self.fixed(_LN2_LO), self.fnma(n, self.fixed(_LN2_HI), x))
        y = self.fixed(_EXP[0])
        for coefficient in _EXP[1:]:
            y = self.fma(y, r, self.fixed(coefficient))
        y = self.fma(build.fmul(y, r), r, build.fadd(r, self.fixed(1.0)))
        exponent = build.shl(build.add(build.fptosi(n, INTS), ir.Constant(INTS, [127] * WIDTH)), _ints(23))
        return build.select(tiny, self.fixed(0.0), build.fmul(y, build.bitcast(exponent, VECTOR)))

    def reduce(self, vector: ir.Value, largest: bool = False) -> ir.Value:
        """Sum of the elements, or the largest of them, by halves."""
        span = WIDTH // 2
        while span:
            other = self.permute(vector, vector, [(i + span) % WIDTH for i in range(WIDTH)])
            vector = self.maximum(vector, other) if largest else self.builder.fadd(vector, other)
            span //= 2
        return self.builder.extract_element(vector, ir.Constant(I32, 0))

    def fold(self, vectors: Sequence[ir.Value], span: int) -> ir.Value:
        """A power of two of vectors -> one: element i sums up vector number `i // span % len(vectors)`, over the
        elements that differ from i in these binary digits only. From span 1 on, 16 vectors in several calls, each
        element so becomes the sum of one vector."""
        row = list(vectors)
        while len(row) > 1:
            low = [i if not i & span else WIDTH + i - span for i in range(WIDTH)]
            high = [i + span if not i & span else WIDTH + i for i in range(WIDTH)]
            pairs = zip(row[::2], row[1::2], strict=True)
            row = [self.builder.fadd(self.permute(a, b, low), self.permute(a, b, high)) for a, b in pairs]
            span *= 2
        return row[0]

    def permute(self, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """Element i is element `lanes[i]` of a and b laid end to end."""
        return self.builder.shuffle_vector(a, b, ir.Constant(INTS, list(lanes)))

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """16 vectors as the rows of a matrix -> its columns, in four rounds that swap blocks of 1, 2, 4 and 8."""
        span = 1
        while span < WIDTH:
            low = [i if not i & span else WIDTH + i - span for i in range(WIDTH)]
            high = [i + span if not i & span else WIDTH + i for i in range(WIDTH)]
            swapped = list(rows)
            for i in range(WIDTH):
                if not i & span:
                    swapped[i] = self.permute(rows[i], rows[i + span], low)
                    swapped[i + span] = self.permute(rows[i], rows[i + span], high)
            rows, span = swapped, span * 2
        return rows

    @contextmanager
    def loop(self, count: ir.Value | int, step: int = 1) -> Iterator[ir.Value]:
        """Run the body with its index 0, step, 2 * step, ... below `count`."""
        stop = self.const(count) if isinstance(count, int) else count
        with cgutils.for_range_slice(self.builder, self.const(0), stop, self.const(step)) as (index, _):
            yield index

    def variables(self, values: Sequence[ir.Value]) -> list[Variable]:
        """Values that a loop changes; LLVM keeps them in registers."""
        return [Variable(self.builder, value) for value in values]

    def _intrinsic(self, name: str, arguments: int) -> ir.Function:
        kind = ir.FunctionType(VECTOR, [VECTOR] * arguments)
        return cgutils.get_or_insert_function(self.builder.module, kind, f"{name}.v{WIDTH}f32")


class Variable:
    """A value that is assigned more than once."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self._builder = builder
        self._place = cgutils.alloca_once_value(builder, value)

    def get(self) -> ir.Value:
        return self._builder.load(self._place)

    def set(self, value: ir.Value) -> None:
        self._builder.store(value, self._place)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * WIDTH)
