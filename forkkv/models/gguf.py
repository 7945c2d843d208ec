"""Reader for GGUF files: header, metadata, and dequantisation of the types that are served.

Layout (GGUF 2 and 3, little endian): magic, version, counts, key/value pairs, tensor descriptions, then tensor data at
an aligned offset. Quantised types store blocks of 32 values; the formulas stand at each function. Needs numpy only.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forkkv.errors import ModelLoadError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_BLOCK = 32
_CHUNK_BLOCKS = 8192
"""Blocks dequantised at a time: the temporaries of one chunk stay in the CPU's cache."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StringArray:
    """Stands for an array of strings (tokens, merges), of which only the length is kept."""

    count: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. `shape` is row major (the file lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _nibbles(packed: Bytes) -> Bytes:
    """[n, 16] bytes -> [n, 32] values of 4 bits: all low nibbles of a block, then all high ones."""
    packed = np.ascontiguousarray(packed)
    out = np.empty((len(packed), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])
    return out.reshape(-1, _BLOCK)


def _halves(blocks: Bytes, count: int) -> Floats:
    """The `count` fp16 numbers that each block begins with, [n, count]."""
    return blocks[:, : 2 * count].copy().view(np.float16).astype(np.float32)


def _dequantise_q4_0(blocks: Bytes, out: Floats) -> None:
    """w = d · (q - 8). Block: fp16 d, 16 bytes of nibbles."""
    out[:] = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _halves(blocks, 1)


def _dequantise_q4_1(blocks: Bytes, out: Floats) -> None:
    """w = d · q + m. Block: fp16 d, fp16 m, 16 bytes of nibbles."""
    scale_min = _halves(blocks, 2)
    out[:] = _nibbles(blocks[:, 4:])
    out *= scale_min[:, :1]
    out += scale_min[:, 1:]


def _dequantise_q8_0(blocks: Bytes, out: Floats) -> None:
    """w = d · q. Block: fp16 d, 32 signed bytes."""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _halves(blocks, 1)


_PLAIN = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
_QUANTISED: dict[int, tuple[str, int, Callable[[Bytes, Floats], None]]] = {
    2: ("Q4_0", 18, _dequantise_q4_0),
    3: ("Q4_1", 20, _dequantise_q4_1),
    8: ("Q8_0", 34, _dequantise_q8_0),
}


class GGUFFile:
    """An open GGUF file: `metadata` (key -> value) and `tensors` (name -> `TensorInfo`); data is read on demand.

    Raises `ModelLoadError` for anything that is not a complete, single GGUF file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._cursor = 0
            self._parse()
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise ModelLoadError(f"{path}: not a readable GGUF file ({error})") from error

    def read(self, name: str) -> Floats:
        """The tensor as float32 of its row-major shape. Raises `ModelLoadError` for a type that is not served or a
        file that ends too early."""
        info = self.tensors[name]
        size = int(np.prod(info.shape, dtype=np.int64))
        if info.type in _PLAIN:
            kind, itemsize = _PLAIN[info.type]
            raw = self._bytes(info, size * itemsize)
            if kind == "F32":
                return raw.view(np.float32).reshape(info.shape).copy()
            if kind == "F16":
                return raw.view(np.float16).astype(np.float32).reshape(info.shape)
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
        if info.type not in _QUANTISED:
            served = ", ".join([kind for kind, _ in _PLAIN.values()] + [kind for kind, _, _ in _QUANTISED.values()])
            raise ModelLoadError(f"{self.path}: {name} has GGUF type {info.type}; served are {served}")
        _, block_bytes, dequantise = _QUANTISED[info.type]
        if info.shape[-1] % _BLOCK:
            raise ModelLoadError(f"{self.path}: rows of {name} {info.shape} are no multiple of {_BLOCK}")
        blocks = self._bytes(info, size // _BLOCK * block_bytes).reshape(-1, block_bytes)
        out = np.empty((len(blocks), _BLOCK), np.float32)
        for start in range(0, len(blocks), _CHUNK_BLOCKS):
            dequantise(blocks[start : start + _CHUNK_BLOCKS], out[start : start + _CHUNK_BLOCKS])
        return out.reshape(info.shape)

    def _bytes(self, info: TensorInfo, num_bytes: int) -> Bytes:
        if info.offset + num_bytes > len(self._data):
            raise ModelLoadError(f"{self.path}: the file ends inside {info.name}; it is incomplete")
        return np.frombuffer(self._data, np.uint8, num_bytes, info.offset)

    def _parse(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("no GGUF magic")
        self._cursor = 4
        version = self._unpack("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        num_tensors, num_pairs = self._unpack("Q"), self._unpack("Q")
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError("split over several files; merge them first")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._cursor // alignment) * alignment
        self.tensors = {info.name: TensorInfo(info.name, info.shape, info.type, start + info.offset) for info in infos}

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        dims = [self._unpack("Q") for _ in range(self._unpack("I"))]
        return TensorInfo(name, tuple(reversed(dims)), self._unpack("I"), self._unpack("Q"))

    def _unpack(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._data, self._cursor)[0]
        self._cursor += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._unpack("Q")
        start, self._cursor = self._cursor, self._cursor + length
        return self._data[start : start + length].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])
        element, count = self._unpack("I"), self._unpack("Q")
        if element == _STRING:
            for _ in range(count):
                self._cursor += 8 + struct.unpack_from("<Q", self._data, self._cursor)[0]
            return StringArray(count)
        if element == _ARRAY:
            return [self._value(element) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[element]}", self._data, self._cursor)
        self._cursor += struct.calcsize(f"<{count}{_SCALARS[element]}")
        return list(values)
