"""Programs: what a function did to fixed memory, as a list of calls that does it again. CUDA graphs for CPUs.

A decode step of a small model is some hundred calls of a few microseconds' work, and getting to each of them through
Python costs as much again. `record` runs a function once and notes every operation of PyTorch and every call of a
`TeamKernel`; the program makes the same calls with the same operands. Results stay in the memory of the first run, so
views need not be made again, and nothing is allocated.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forkkv_kernels.cpu import team
from forkkv_kernels.cpu.team import LiveBlock, TeamKernel

Call = Callable[[], object]

_WITHOUT_CONTENT = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_BY_CONTENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class Program:
    """A recorded function. What it works on stays alive and in place as long as it does."""

    def __init__(self, recording: _Recording, result: Any) -> None:
        self.result = result
        self._kept = recording.kept
        width = max((len(block) for block in recording.blocks), default=0)
        self._initial = np.zeros((len(recording.blocks), width), dtype=np.int64)
        for row, block in zip(self._initial, recording.blocks, strict=True):
            row[: len(block)] = block
        self._blocks = self._initial.copy()
        rows = self._blocks.ctypes.data + self._blocks.strides[0] * np.arange(len(self._blocks))
        self._calls = [entry(rows) for entry in recording.entries]

    def __len__(self) -> int:
        """Calls of one run."""
        return len(self._calls)

    def __call__(self) -> Any:
        """Do it again with what is in the memory now. Returns the first run's result, whose content is new."""
        np.copyto(self._blocks, self._initial)  # kernels count what they have done in their blocks
        for call in self._calls:
            call()
        return self.result


def record(function: Callable[[], Any]) -> Program:
    """Run `function` once and return it as a program.

    Raises `NotImplementedError` for operations that are not repeated alike: those whose result's shape, or anything
    that Python learns of it, depends on the content of tensors, and those that return several new tensors.
    """
    recording = _Recording()
    team.watchers.append(recording.kernel)
    try:
        with recording:
            result = function()
    finally:
        team.watchers.remove(recording.kernel)
    return Program(recording, result)


class _Recording(TorchDispatchMode):
    """`entries`: each makes its call, given the addresses of the copies of `blocks`. `kept`: operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[np.ndarray], Call]] = []
        self.blocks: list[array[int]] = []
        self.kept: list[Any] = []

    def kernel(self, kernel: TeamKernel, block: array[int], threads: int) -> None:
        """Note a call that is about to be made."""
        if isinstance(block, LiveBlock):
            self.kept.append(block)
            call = kernel.bind(block.buffer_info()[0], threads)
            self.entries.append(lambda rows: call)
        else:
            number = len(self.blocks)
            self.blocks.append(array("q", block))
            self.entries.append(lambda rows: kernel.bind(int(rows[number]), threads))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.kept.append((args, kwargs, result))
        if (call := _repetition(func, args, kwargs, result)) is not None:
            self.entries.append(lambda rows: call)
        return result


def _repetition(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Call | None:
    """What does to the memory again what an operation did; None if it did nothing."""
    if _BY_CONTENT.intersection(func.tags):
        raise NotImplementedError(f"{func} in a program: what it returns depends on the content of tensors")
    schema = func._schema
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return functools.partial(func, *args, **kwargs)
    is_view = any(returned.alias_info is not None for returned in schema.returns)
    if is_view or func.overloadpacket.__name__ in _WITHOUT_CONTENT:
        return None
    if not isinstance(result, Tensor):
        raise NotImplementedError(f"{func} in a program: it returns no tensor, or several")
    into = _out_variant(func)
    if into is not None:
        return functools.partial(into, *args, **kwargs, out=result)
    return lambda: result.copy_(func(*args, **kwargs))


@functools.cache
def _out_variant(func: Any) -> Any:
    """The overload of `func` with the same arguments and `out`; None if there is none."""
    packet = func.overloadpacket
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        given = [(argument.name, str(argument.type)) for argument in other._schema.arguments]
        if given[:-1] == wanted and given[-1][0] == "out":
            return other
    return None
