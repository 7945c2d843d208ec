"""Products with int8 weights on the CPU, format and arithmetic of `int8_format`.

Few rows: 4-byte dot products (VNNI), the matrix streamed once for all rows; that is bound by memory. Many rows: matrix
tiles (AMX) where the CPU has them, else the same dot products. All give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import time
from array import array

import torch
from torch import Tensor

from forkkv_kernels.cpu import jit  # noqa: F401  isort: skip  # configures Numba, so it comes before it
from numba import njit
from numba.core.registry import cpu_target

from forkkv_kernels.cpu.int8_codegen import TILE_ROWS, make_row_tile, split_row, tile_block, tiles_begin, tiles_end
from forkkv_kernels.cpu.int8_format import DIGITS, LANES, Int8Weight
from forkkv_kernels.cpu.team import TeamKernel, address_of, parameter, take

logger = logging.getLogger(__name__)

FEW_ROWS = 8
"""Rows up to which every thread splits all rows into digits for itself; beyond, that is shared out first."""
FEW_ROWS_BESIDE_TILES = 4
"""The same where there are matrix tiles, which compute 16 rows whether they are there or not."""
_CHUNK_BYTES = 1600 << 10
"""Digits of many rows that are worked on at a time, so that they stay in a core's second-level cache."""
_MIN_CHUNK = 64
_SCALE_BYTES = 64
"""Room for the scales of `FEW_ROWS` rows."""
_ROW_STEP = 4
"""Rows that a thread splits at a time."""
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


_X, _ROWS, _INS, _WEIGHT, _DEPTH, _COLUMNS, _PANELS, _OUT, _OUTS, _SCRATCH, _PLANE, _TILES = range(12)
_NEXT, _NEXT_BUFFER, _BLOCK = 16, 24, 32
"""A block: parameters, and on cache lines of their own the counters of work and of buffers."""

_one_row, _two_rows, _four_rows = (make_row_tile(rows, 2) for rows in (1, 2, 4))


@njit
def _dot_panels(block, panel, digits, plane, scales):
    """Panels `panel` and the next one of all rows by dot products."""
    rows, depth, stride = parameter(block, _ROWS), parameter(block, _DEPTH), 4 * parameter(block, _OUTS)
    width, left = 4 * LANES * parameter(block, _PANELS), parameter(block, _OUTS) - LANES * panel
    w = parameter(block, _WEIGHT) + panel * depth * LANES
    c, o = parameter(block, _COLUMNS) + 4 * LANES * panel, parameter(block, _OUT) + 4 * LANES * panel
    row = 0
    while row < rows:
        x, s, y = digits + row * depth, scales + 4 * row, o + row * stride
        if rows - row >= 4:
            _four_rows((x, plane, depth, w, depth, c, width, s, y, stride, left))
            row += 4
        elif rows - row >= 2:
            _two_rows((x, plane, depth, w, depth, c, width, s, y, stride, left))
            row += 2
        else:
            _one_row((x, plane, depth, w, depth, c, width, s, y, stride, left))
            row += 1


@njit
def _tile_panels(block, panel, digits, plane, scales):
    """The same by matrix tiles."""
    rows, depth, stride = parameter(block, _ROWS), parameter(block, _DEPTH), 4 * parameter(block, _OUTS)
    width, left = 4 * LANES * parameter(block, _PANELS), parameter(block, _OUTS) - LANES * panel
    w = parameter(block, _WEIGHT) + panel * depth * LANES
    c, o = parameter(block, _COLUMNS) + 4 * LANES * panel, parameter(block, _OUT) + 4 * LANES * panel
    for row in range(0, rows, TILE_ROWS):
        here = min(TILE_ROWS, rows - row)
        x, s, y = digits + row * depth, scales + 4 * row, o + row * stride
        tile_block((x, plane, depth, here, w, depth, c, width, s, y, stride, left))


def _few(block):
    """All of a product of few rows. `_SCRATCH` has a buffer for each thread: planes of `_PLANE` bytes, scales."""
    plane, depth, ins = parameter(block, _PLANE), parameter(block, _DEPTH), parameter(block, _INS)
    buffer = take(address_of(block) + 8 * _NEXT_BUFFER)
    digits = parameter(block, _SCRATCH) + buffer * (DIGITS * plane + _SCALE_BYTES)
    scales = digits + DIGITS * plane
    for row in range(parameter(block, _ROWS)):
        split_row((parameter(block, _X) + 4 * ins * row, ins, digits + row * depth, plane, scales + 4 * row))
    panel = 2 * take(address_of(block) + 8 * _NEXT)
    while panel < parameter(block, _PANELS):
        _dot_panels(block, panel, digits, plane, scales)
        panel = 2 * take(address_of(block) + 8 * _NEXT)


def _split(block):
    """Digits and scales of many rows into `_SCRATCH`: planes of `_PLANE` bytes, then the scales."""
    plane, depth, ins = parameter(block, _PLANE), parameter(block, _DEPTH), parameter(block, _INS)
    digits, rows = parameter(block, _SCRATCH), parameter(block, _ROWS)
    begin = _ROW_STEP * take(address_of(block) + 8 * _NEXT)
    while begin < rows:
        for row in range(begin, min(begin + _ROW_STEP, rows)):
            scale = digits + DIGITS * plane + 4 * row
            split_row((parameter(block, _X) + 4 * ins * row, ins, digits + row * depth, plane, scale))
        begin = _ROW_STEP * take(address_of(block) + 8 * _NEXT)


def _multiply(block):
    """The product of what `_split` left."""
    digits, plane, tiles = parameter(block, _SCRATCH), parameter(block, _PLANE), parameter(block, _TILES)
    if tiles:
        tiles_begin((0,))
    panel = 2 * take(address_of(block) + 8 * _NEXT)
    while panel < parameter(block, _PANELS):
        if tiles:
            _tile_panels(block, panel, digits, plane, digits + DIGITS * plane)
        else:
            _dot_panels(block, panel, digits, plane, digits + DIGITS * plane)
        panel = 2 * take(address_of(block) + 8 * _NEXT)
    if tiles:
        tiles_end((0,))


@functools.cache
def kernels() -> tuple[TeamKernel, TeamKernel, TeamKernel]:
    """(`_few`, `_split`, `_multiply`), compiled or from disk; says so in the log, since compiling takes seconds."""
    begin = time.perf_counter()
    few, split, multiply = TeamKernel(_few), TeamKernel(_split), TeamKernel(_multiply)
    how = "from disk" if multiply.from_disk else "compiled"
    logger.info("CPU kernel ready: int8 products (%s, %.1f s)", how, time.perf_counter() - begin)
    return few, split, multiply


def int8_linear(x: Tensor, weight: Int8Weight, use_tiles: bool = True, out: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ w.T + bias, float32 [T, out]; equals `int8_linear_reference` bit for bit.

    `use_tiles`: many rows go through matrix tiles where the CPU has them. `out`: contiguous float32
    to write to, else it is made. Mutates nothing else.
    """
    x = x.float().contiguous()
    rows, depth = x.shape[0], weight.depth
    if out is None:
        out = torch.empty(rows, weight.out_features)
    if rows == 0:
        return out
    few, split, multiply = kernels()
    threads = torch.get_num_threads()
    tiles = use_tiles and have_tiles()
    if rows <= (FEW_ROWS_BESIDE_TILES if tiles else FEW_ROWS):
        plane = rows * depth
        scratch = torch.empty(threads * (DIGITS * plane + _SCALE_BYTES), dtype=torch.uint8)
        few(_block(x, weight, out, scratch, plane, False), threads)
        return out
    chunks = -(-rows // max(_CHUNK_BYTES // (DIGITS * depth), _MIN_CHUNK))
    chunk = -(-rows // (chunks * TILE_ROWS)) * TILE_ROWS
    plane = chunk * depth
    scratch = torch.empty(DIGITS * plane + 4 * chunk, dtype=torch.uint8)
    for part, target in zip(x.split(chunk), out.split(chunk), strict=True):
        block = _block(part, weight, target, scratch, plane, tiles)
        split(block, threads)
        block[_NEXT] = 0
        multiply(block, threads)
    return out


def _block(x: Tensor, weight: Int8Weight, out: Tensor, scratch: Tensor, plane: int, tiles: bool) -> array[int]:
    """Parameters of one product in the order of `_X` ... `_TILES`, counters at 0."""
    rows, ins = x.shape
    matrix = (weight.codes.data_ptr(), weight.depth, weight.columns.data_ptr(), weight.codes.shape[0])
    head = (x.data_ptr(), rows, ins, *matrix, out.data_ptr(), weight.out_features, scratch.data_ptr(), plane, tiles)
    return array("q", head + (0,) * (_BLOCK - len(head)))


@functools.cache
def have_tiles() -> bool:
    """Whether matrix tiles can be used: the CPU has them, the code is compiled for them, the kernel permits them."""
    if not compiled_for("amx-int8") or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    # Tile registers make a thread's context 8 KiB larger, so Linux wants to be asked once per process.
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def have_dot_products() -> bool:
    """Whether the CPU has 4-byte dot products; without them int8 weights are slower than float32."""
    return compiled_for("avx512vnni") or compiled_for("avxvnni")


def compiled_for(feature: str) -> bool:
    """Whether Numba compiles for a CPU with this feature (LLVM's name); NUMBA_CPU_FEATURES counts."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")
