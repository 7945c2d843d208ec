"""Compiled functions on the OpenMP threads that PyTorch already has.

Numba's own `omp` layer may be linked to another file of libgomp than PyTorch (0.68 asks for `libgomp.so.1.0.0`, PyTorch
brings `libgomp.so.1`), and then each has a pool: twice the threads of the cores. Here PyTorch's library is called
itself. Nothing of Numba's parallel compiler is needed, which also compiles faster.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

_MAPS = Path("/proc/self/maps")


@functools.cache
def _fork() -> Callable[..., Any] | None:
    """GOMP_parallel(function, data, threads, flags) of PyTorch's OpenMP library; LLVM's and Intel's have it, too."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("lib[gi]omp*.so*"))
    loaded = {line.split()[-1] for line in _MAPS.read_text().splitlines()} if _MAPS.exists() else set()
    others = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    for path in [*(str(path) for path in bundled if str(path) in loaded), *others]:
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            function.restype = None
            return function
    return None


class LiveBlock(array):  # type: ignore[type-arg]
    """A block of parameters that its owner writes anew before every call, also before those of a `Program`."""


class TeamKernel:
    """A function void(voidptr) for `numba.cfunc`, compiled (or loaded from disk) at once."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._compiled = cfunc(types.void(types.voidptr), cache=True)(function)
        self._address = self._compiled.address
        self._alone = self._compiled.ctypes
        self._fork = _fork()

    @property
    def from_disk(self) -> bool:
        return bool(self._compiled.cache_hits)

    def __call__(self, block: array[int], threads: int) -> None:
        """Run it in `threads` threads with the address of `block`, and wait for all. It shares its work out by `take`,
        so that without an OpenMP library it can be called once."""
        if watchers:
            watchers[-1](self, block, threads)
        address, _ = block.buffer_info()
        if threads == 1 or self._fork is None:
            self._alone(address)
        else:
            self._fork(self._address, address, threads, 0)

    def bind(self, address: int, threads: int) -> Callable[[], object]:
        """The call with the block at `address`."""
        if threads == 1 or self._fork is None:
            return functools.partial(self._alone, address)
        return functools.partial(self._fork, self._address, address, threads, 0)


watchers: list[Callable[[TeamKernel, array[int], int], None]] = []
"""Told of every call, before it, as long as they are here; the last one alone."""


@intrinsic
def take(typingctx: Any, address: Any) -> Any:
    """take(address) -> the int64 there before 1 was added to it, atomically: the next piece of shared work."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def parameter(typingctx: Any, block: Any, index: Any) -> Any:
    """parameter(block, index) -> int64 number `index` of a block."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        base = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.load(cgutils.gep_inbounds(builder, base, args[1]))

    return types.int64(types.voidptr, types.int64), generate


@intrinsic
def address_of(typingctx: Any, block: Any) -> Any:
    """address_of(block) -> its address as int64."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(types.voidptr), generate
