"""Pointers for Numba: what a parameter block leads to, steps along a buffer, shared counters, prefetching."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forkkv_kernels.cpu.codegen import FLOATS, INT32S, INT64S, Emitter


def _reader(kind: types.CPointer) -> Any:
    """Intrinsic (p, which) -> the address at place `which` of the block as a pointer of type `kind`."""

    def read(typingctx: Any, p: Any, which: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return builder.inttoptr(Emitter(builder).scalar(*args), context.get_value_type(kind))

        return kind(INT64S, types.int64), generate

    return intrinsic(read)


floats, int32s, int64s = _reader(FLOATS), _reader(INT32S), _reader(INT64S)


@intrinsic
def further(typingctx: Any, pointer: Any, count: Any) -> Any:
    """Pointer `count` elements further."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return Emitter(builder).at(*args)

    return pointer(pointer, types.int64), generate


@intrinsic
def next_of(typingctx: Any, counter: Any) -> Any:
    """Next number of a counter that several threads share."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", args[0], Emitter(builder).const(1), "monotonic")

    return types.int64(INT64S), generate


@intrinsic
def prefetch(typingctx: Any, pointer: Any, offset: Any) -> Any:
    """Ask for the cache line of element `offset` (of 4 bytes), into the second-level cache."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        Emitter(builder).prefetch(*args)
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64), generate


@intrinsic
def block_pointer(typingctx: Any, block: Any) -> Any:
    """The address of a parameter block as a pointer to int64."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], context.get_value_type(INT64S))

    return INT64S(types.voidptr), generate
