"""What stands between the matrix products of a layer, each in one pass: norm with the residual connection before it,
SwiGLU, rotation with the cache write.

In PyTorch each is three to eight operations. For the few rows of a decode step their calls cost more than the products
of a small model, and for many rows each reads and writes memory once more.
"""

from __future__ import annotations

import functools
import logging
import struct
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
from forkkv_kernels.cpu.codegen import F32, FLOATS, I32, INT64S, WIDTH, Emitter, Variable, pointer_to
from forkkv_kernels.cpu.team import TeamKernel, address_of, parameter, take

logger = logging.getLogger(__name__)

_TASK_FLOATS = 1 << 14
"""Numbers of a row piece that a thread takes at a time; waking a second thread for less costs more than it saves."""
_ROWS, _STEP, _NEXT = range(3)
_FIRST = 8
"""Where an operation's own parameters begin; the counter before them has a cache line of its own."""
_Q, _K, _V, _OUT, _COS, _SIN, _SLOTS, _K_CACHE, _V_CACHE, _RMS, _RMS_CACHE = range(_FIRST, _FIRST + 11)
_Q_STRIDE, _K_STRIDE, _V_STRIDE, _OUT_STRIDE, _HEADS, _KV_HEADS, _DIM = range(_FIRST + 11, _FIRST + 18)
_X, _DELTA, _WEIGHT, _NORMED, _COLUMNS, _EPS = range(_FIRST, _FIRST + 6)
_BOTH, _INNER, _WIDTH = range(_FIRST, _FIRST + 3)


_floats, _int64s = pointer_to(FLOATS), pointer_to(INT64S)


@intrinsic
def _norm_row(typingctx: Any, x: Any, delta: Any, weight: Any, out: Any, columns: Any, eps: Any) -> Any:
    """x += delta unless its address is 0, out = x / rms(x) * weight, rows of `columns` floats; eps: bits of a float."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        x, delta, weight, out, columns, eps = args
        squares = Variable(builder, emit.fixed(0.0))
        added = builder.icmp_signed("!=", builder.ptrtoint(delta, ir.IntType(64)), emit.const(0))
        with builder.if_then(added), emit.loop(columns, WIDTH) as i:
            emit.store(builder.fadd(emit.load(x, i), emit.load(delta, i)), x, i)
        with emit.loop(columns, WIDTH) as i:
            value = emit.load(x, i)
            squares.set(emit.fma(value, value, squares.get()))
        mean = builder.fdiv(emit.reduce(squares.get()), builder.sitofp(columns, F32))
        mean = builder.fadd(mean, builder.bitcast(builder.trunc(eps, I32), F32))
        root = builder.call(builder.module.declare_intrinsic("llvm.sqrt", [F32]), [mean])
        scale = emit.splat(builder.fdiv(ir.Constant(F32, 1.0), root))
        with emit.loop(columns, WIDTH) as i:
            emit.store(builder.fmul(builder.fmul(emit.load(x, i), scale), emit.load(weight, i)), out, i)
        return context.get_dummy_value()

    return types.void(FLOATS, FLOATS, FLOATS, FLOATS, types.int64, types.int64), generate


@intrinsic
def _swiglu_row(typingctx: Any, both: Any, out: Any, width: Any) -> Any:
    """out = silu(both[:width]) * both[width:]."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        both, out, width = args
        one = emit.fixed(1.0)
        with emit.loop(width, WIDTH) as i:
            gate = emit.load(both, i)
            negative = builder.fcmp_ordered("<", gate, emit.fixed(0.0))
            # The exponential is made for arguments below zero: sigmoid(x) = 1 / (1 + e), e / (1 + e) for x < 0.
            e = emit.exp(builder.select(negative, gate, builder.fneg(gate)))
            sigmoid = builder.fdiv(builder.select(negative, e, one), builder.fadd(e, one))
            emit.store(builder.fmul(builder.fmul(gate, sigmoid), emit.load(both, width, i)), out, i)
        return context.get_dummy_value()

    return types.void(FLOATS, FLOATS, types.int64), generate


@intrinsic
def _rotate_heads(typingctx: Any, x: Any, cos: Any, sin: Any, out: Any, heads: Any, dim: Any) -> Any:
    """Rotate the halves of `heads` heads of one token; out may be x."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit = Emitter(builder)
        x, cos, sin, out, heads, dim = args
        half = builder.lshr(dim, emit.const(1))
        with emit.loop(heads) as head:
            first = builder.mul(head, dim)
            second = builder.add(first, half)
            with emit.loop(half, WIDTH) as i:
                a, b, c, s = emit.load(x, first, i), emit.load(x, second, i), emit.load(cos, i), emit.load(sin, i)
                emit.store(emit.fnma(b, s, builder.fmul(a, c)), out, first, i)
                emit.store(emit.fma(a, s, builder.fmul(b, c)), out, second, i)
        return context.get_dummy_value()

    return types.void(FLOATS, FLOATS, FLOATS, FLOATS, types.int64, types.int64), generate


@njit
def _copy(source, out, count):
    for i in range(count):
        out[i] = source[i]


def _norm(block):
    columns, delta = parameter(block, _COLUMNS), parameter(block, _DELTA)
    rows, step = parameter(block, _ROWS), parameter(block, _STEP)
    begin = step * take(address_of(block) + 8 * _NEXT)
    while begin < rows:
        for row in range(begin, min(begin + step, rows)):
            at = 4 * columns * row
            _norm_row(
                _floats(parameter(block, _X) + at),
                _floats(delta + at if delta else 0),
                _floats(parameter(block, _WEIGHT)),
                _floats(parameter(block, _NORMED) + at),
                columns,
                parameter(block, _EPS),
            )
        begin = step * take(address_of(block) + 8 * _NEXT)


def _swiglu(block):
    width = parameter(block, _WIDTH)
    rows, step = parameter(block, _ROWS), parameter(block, _STEP)
    begin = step * take(address_of(block) + 8 * _NEXT)
    while begin < rows:
        for row in range(begin, min(begin + step, rows)):
            both = _floats(parameter(block, _BOTH) + 8 * width * row)
            _swiglu_row(both, _floats(parameter(block, _INNER) + 4 * width * row), width)
        begin = step * take(address_of(block) + 8 * _NEXT)


def _rotate_and_store(block):
    dim, heads, kv_heads = parameter(block, _DIM), parameter(block, _HEADS), parameter(block, _KV_HEADS)
    rows, step = parameter(block, _ROWS), parameter(block, _STEP)
    begin = step * take(address_of(block) + 8 * _NEXT)
    while begin < rows:
        for row in range(begin, min(begin + step, rows)):
            cos = _floats(parameter(block, _COS) + 2 * dim * row)
            sin = _floats(parameter(block, _SIN) + 2 * dim * row)
            q = _floats(parameter(block, _Q) + 4 * parameter(block, _Q_STRIDE) * row)
            out = _floats(parameter(block, _OUT) + 4 * parameter(block, _OUT_STRIDE) * row)
            _rotate_heads(q, cos, sin, out, heads, dim)
            slot = _int64s(parameter(block, _SLOTS))[row]
            if slot < 0:
                continue
            size = kv_heads * dim
            k = _floats(parameter(block, _K) + 4 * parameter(block, _K_STRIDE) * row)
            v = _floats(parameter(block, _V) + 4 * parameter(block, _V_STRIDE) * row)
            _rotate_heads(k, cos, sin, _floats(parameter(block, _K_CACHE) + 4 * size * slot), kv_heads, dim)
            _copy(v, _floats(parameter(block, _V_CACHE) + 4 * size * slot), size)
            if parameter(block, _RMS):
                rms = _floats(parameter(block, _RMS) + 4 * kv_heads * row)
                _copy(rms, _floats(parameter(block, _RMS_CACHE) + 4 * kv_heads * slot), kv_heads)
        begin = step * take(address_of(block) + 8 * _NEXT)


@functools.cache
def kernels() -> tuple[TeamKernel, TeamKernel, TeamKernel]:
    """(norm, SwiGLU, rotation), compiled or from disk; says so in the log, since compiling takes seconds."""
    begin = time.perf_counter()
    compiled = TeamKernel(_norm), TeamKernel(_swiglu), TeamKernel(_rotate_and_store)
    how = "from disk" if compiled[-1].from_disk else "compiled"
    logger.info("CPU kernel ready: elementwise (%s, %.1f s)", how, time.perf_counter() - begin)
    return compiled


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """See `forkkv_kernels.ops.rms_norm`."""
    columns = x.shape[-1]
    if not _fits(columns, x, weight, *(() if delta is None else (delta,))):
        return reference_ops.rms_norm_reference(x, weight, eps, delta)
    out = torch.empty_like(x)
    added = 0 if delta is None else delta.data_ptr()
    own = (x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), columns, _bits(eps))
    _run(0, x.numel() // columns, columns, own)
    return out


def swiglu(both: Tensor) -> Tensor:
    """See `forkkv_kernels.ops.swiglu`."""
    width = both.shape[1] // 2
    if not _fits(width, both):
        return reference_ops.swiglu_reference(both)
    out = torch.empty(both.shape[0], width)
    _run(1, both.shape[0], width, (both.data_ptr(), out.data_ptr(), width))
    return out


def rope_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_rms: Tensor | None = None,
    k_rms_cache: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `forkkv_kernels.ops.rope_cache_write`."""
    rows, heads, dim = q.shape
    rms, rms_cache = (0, 0) if k_rms is None or k_rms_cache is None else (k_rms.data_ptr(), k_rms_cache.data_ptr())
    if dim % (2 * WIDTH) or not _fits(dim, cos, sin, k_cache):
        return reference_ops.rope_cache_write_reference(
            q, k, v, cos, sin, slots, k_cache, v_cache, k_rms=k_rms, k_rms_cache=k_rms_cache, out=out
        )
    if out is None:
        out = torch.empty(rows, heads, dim)
    tensors = (q, k, v, out, cos, sin, slots, k_cache, v_cache)
    strides = (q.stride(0), k.stride(0), v.stride(0), out.stride(0))
    own = (*[tensor.data_ptr() for tensor in tensors], rms, rms_cache, *strides, heads, k.shape[1], dim)
    _run(2, rows, (heads + 2 * k.shape[1]) * dim, own)
    return out


def _fits(width: int, *tensors: Tensor) -> bool:
    """Whether rows of `width` are whole vectors and the tensors contiguous float32."""
    return width % WIDTH == 0 and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def _run(kernel: int, rows: int, row_floats: int, own: tuple[int, ...]) -> None:
    """Run kernel number `kernel` over `rows` rows of `row_floats` numbers with its own parameters."""
    step = max(1, _TASK_FLOATS // row_floats)
    threads = min(torch.get_num_threads(), -(-rows // step))
    kernels()[kernel](array("q", (rows, step, 0, 0, 0, 0, 0, 0, *own)), max(threads, 1))


@functools.cache
def _bits(value: float) -> int:
    """The bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
