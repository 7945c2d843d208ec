"""Small `residual_attention` problems: shuffled pages, mixed rows and ranks, NaN wherever nothing was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forkkv_kernels.reference import residual_attention_reference

PARAMETERS: dict[str, Sequence[Any]] = {
    "length": ("1", "bs-1", "bs", "bs+1", "2bs+3", "300"),
    "block_size": (8, 16, 32),
    "rank": (1, 5, 8, 16, 33, 64, 128),
    "adapters": ("k", "v", "both", "none", "absent"),
    "popularity": ("same", "distinct", "zipf"),
    "group": (1, 2, 3, 4, 5, 6, 7, 8),
    "head_dim": (64, 96, 128, 256),
    "qk_norm": (False, True),
    "mode": ("prefill", "chunk", "decode", "mixed"),
    "coverage": ("prefix", "ragged", "whole"),
    "dtype": (torch.float32, torch.float16),
}
"""Values of `make_case` for a covering array."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of an output over the largest output, and of a log-sum-exp over max(1, largest).

float32: sums of a few hundred terms, each rounded by 6e-8, in another order than the reference, and a rotation made of
two. float16: K after the residual was added, P and the result are each rounded by 2^-11 = 5e-4; scores of size 1 to 4
carry the first into P as 1e-3 to 2e-3. bfloat16 rounds eight times as coarsely."""

_ROWS = 4
_KV_HEADS = 2
_BASE_ROW = 1
_SPARE = 6
"""Blocks and units that nobody owns and that hold NaN."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`arguments` are keyword arguments of `residual_attention`, `return_lse` apart. `k_tiles`, `v_tiles` [B]: tiles of
    each row's halves, at most those of the tables."""

    arguments: dict[str, Any]
    k_tiles: tuple[int, ...]
    v_tiles: tuple[int, ...]
    tolerance: float

    @property
    def base_row(self) -> int:
        """A row without an adapter."""
        return _BASE_ROW

    def expected(self) -> tuple[Tensor, Tensor]:
        """out [T, H, D] and lse [T, H] of the reference in float32 on the same, rounded, inputs."""
        wide = {
            name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.arguments.items()
        }
        out, lse = residual_attention_reference(**wide, return_lse=True)
        assert isinstance(out, Tensor) and isinstance(lse, Tensor)
        return out, lse

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Raise AssertionError unless `out` and `lse` are finite and within the tolerance."""
        expected, expected_lse = self.expected()
        assert out.dtype == self.arguments["q"].dtype and out.shape == expected.shape
        limit = self.tolerance * max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=limit)
        if lse is not None:
            limit = self.tolerance * max(float(expected_lse.abs().max()), 1.0)
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=limit)


def make_case(
    *,
    length: str | int = "2bs+3",
    block_size: int = 16,
    rank: int = 16,
    adapters: str = "both",
    popularity: str = "distinct",
    group: int = 2,
    head_dim: int = 64,
    qk_norm: bool = False,
    mode: str = "mixed",
    coverage: str = "prefix",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionCase:
    """Four rows over `length`, block_size + 1, 2 * block_size + 3 and length / 2 tokens; the second is a base row.

    length: tokens of the first row, as a number or in terms of `bs`. adapters: halves that adapters have ("none": no
    row has one, "absent": their units hold zeros in this layer). popularity: which slots the rows share. mode: queries
    are all tokens, the last third, one, or a mixture. coverage: the residual ends at the last block boundary before
    the queries, inside a block, or with the row. The last residual row has rank 5 at most, others `rank`.
    """
    g = torch.Generator().manual_seed(seed)
    first = _tokens(length, block_size)
    seq_lens = [first, block_size + 1, 2 * block_size + 3, first // 2 + 1]
    q_lens = [_query_len(mode, row, n) for row, n in enumerate(seq_lens)]
    read_slot = [-1] * _ROWS if adapters == "none" else _slots(popularity)
    residual_len = [
        _residual_len(coverage, n, q, block_size) if slot >= 0 else 0
        for n, q, slot in zip(seq_lens, q_lens, read_slot, strict=True)
    ]
    ranks = [rank, 0, rank, min(rank, 5)]
    tiles = [-(-r // 16) if slot >= 0 else 0 for r, slot in zip(ranks, read_slot, strict=True)]
    table_tiles = -(-rank // 16)
    has_k, has_v = adapters in ("k", "both", "absent"), adapters in ("v", "both", "absent")
    width = max(-(-n // block_size) for n in seq_lens) + 1

    pages = _Pages(g, block_size, count=_ROWS * width)
    kv_table = pages.tables([-(-n // block_size) for n in seq_lens], width, [1] * _ROWS, 1)
    units = _Pages(g, block_size, count=2 * _ROWS * width * table_tiles)
    used = [-(-n // block_size) for n in residual_len]
    # Where no row has a half its table may also have no columns at all.
    narrow = popularity == "same"
    k_table = units.tables(used, width, tiles if has_k else [0] * _ROWS, 0 if narrow and not has_k else table_tiles)
    v_table = units.tables(used, width, tiles if has_v else [0] * _ROWS, 0 if narrow and not has_v else table_tiles)

    def cache(source: _Pages, shape: tuple[int, ...], table: Tensor, lengths: list[int]) -> Tensor:
        return source.written(torch.randn((source.size, block_size, *shape), generator=g), [(table, lengths)])

    k_cache = cache(pages, (_KV_HEADS, head_dim), kv_table, seq_lens)
    v_cache = cache(pages, (_KV_HEADS, head_dim), kv_table, seq_lens)
    columns = torch.randn(units.size, block_size, 16, generator=g) * (0.0 if adapters == "absent" else 1.0)
    residual = units.written(columns, [(k_table, residual_len), (v_table, residual_len)])
    slots = max(read_slot) + 1 or 1
    b_k, b_v = (_expansion(g, slots, table_tiles * 16, rank, _KV_HEADS * head_dim) for _ in range(2))
    positions = torch.arange(max(seq_lens) + 1, dtype=torch.float64)
    angles = torch.outer(positions, 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))
    values: dict[str, Tensor] = {
        "q": torch.randn(sum(q_lens), group * _KV_HEADS, head_dim, generator=g),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "residual_cache": residual,
        "b_k": b_k,
        "b_v": b_v,
    }
    arguments: dict[str, Any] = {name: value.to(device, dtype) for name, value in values.items()}
    if qk_norm:
        rms = torch.rand(pages.size, block_size, _KV_HEADS, generator=g) + 0.5
        arguments["k_rms"] = pages.written(rms, [(kv_table, seq_lens)], null=1.0).to(device)
        rms = torch.rand(units.size, block_size, _KV_HEADS, generator=g) + 0.75
        arguments["residual_rms"] = units.written(rms, [(k_table, residual_len)], null=1.0).to(device)
    bounds = [sum(q_lens[:row]) for row in range(_ROWS + 1)]
    integers = {"cu_seqlens_q": bounds, "seq_lens": seq_lens, "residual_len": residual_len, "read_slot": read_slot}
    arguments |= {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in integers.items()}
    tables = {"kv_block_table": kv_table, "residual_k_table": k_table, "residual_v_table": v_table}
    arguments |= {name: table.flatten(1).to(device) for name, table in tables.items()}
    arguments |= {"cos": angles.cos().float().to(device), "sin": angles.sin().float().to(device)}
    arguments["scale"] = head_dim**-0.5
    return AttentionCase(
        arguments,
        k_tiles=tuple(tiles if has_k else [0] * _ROWS),
        v_tiles=tuple(tiles if has_v else [0] * _ROWS),
        tolerance=TOLERANCE[dtype],
    )


class _Pages:
    """Blocks (or units) 1 .. `count` in random order, then some that nobody gets. Number 0 is the null block."""

    def __init__(self, g: torch.Generator, block_size: int, count: int) -> None:
        self.size = 1 + count + _SPARE
        self.block_size = block_size
        self._free = (torch.randperm(count, generator=g) + 1).tolist()

    def tables(self, blocks: list[int], width: int, tiles: list[int], table_tiles: int) -> Tensor:
        """int32 [B, width, table_tiles]: `blocks` and `tiles` say how much of each row is allocated. Behind a row's
        last block stand pages full of NaN; absent tiles in front of it are null."""
        table = torch.zeros(len(blocks), width, table_tiles, dtype=torch.int32)
        for row, (count, own) in enumerate(zip(blocks, tiles, strict=True)):
            table[row, count:] = self.size - 1
            for block in range(count):
                for tile in range(own):
                    table[row, block, tile] = self._free.pop()
        return table

    def written(self, data: Tensor, rows: list[tuple[Tensor, list[int]]], null: float = 0.0) -> Tensor:
        """`data` [size, block_size, ...] with NaN in all cells that no row below its length owns; `null` in page 0.

        `rows`: tables [B, width, tiles] with the lengths of their rows."""
        keep = torch.zeros(data.shape[:2], dtype=torch.bool)
        for table, lengths in rows:
            for row, length in enumerate(lengths):
                tokens = torch.arange(length)
                keep[table[row, tokens // self.block_size].long(), (tokens % self.block_size)[:, None]] = True
        data = torch.where(keep.view(*keep.shape, *[1] * (data.dim() - 2)), data, float("nan"))
        data[0] = null
        return data


def _tokens(length: str | int, block_size: int) -> int:
    """A length such as "bs-1" or "300" in tokens."""
    if isinstance(length, int):
        return length
    named = {"bs-1": block_size - 1, "bs": block_size, "bs+1": block_size + 1, "2bs+3": 2 * block_size + 3}
    return named[length] if length in named else int(length)


def _query_len(mode: str, row: int, length: int) -> int:
    """Queries of a row with `length` tokens."""
    if mode == "mixed":
        mode = ("chunk", "prefill", "decode", "prefill")[row]
    return {"prefill": length, "chunk": -(-length // 3), "decode": 1}[mode]


def _slots(popularity: str) -> list[int]:
    """Adapter slot by row."""
    return {"same": [1, -1, 1, 1], "distinct": [2, -1, 0, 1], "zipf": [1, -1, 1, 0]}[popularity]


def _residual_len(coverage: str, length: int, q_len: int, block_size: int) -> int:
    """Tokens of a row that have a residual."""
    before = length - q_len
    if coverage == "whole":
        return length
    return before // block_size * block_size if coverage == "prefix" else before * 2 // 3


def _expansion(g: torch.Generator, slots: int, size: int, rank: int, columns: int) -> Tensor:
    """B [slots, size + 16, columns]: zeros from `rank` on, NaN behind the last column of the tables."""
    b = torch.randn(slots, size + 16, columns, generator=g) * (0.7 * rank**-0.5)
    b[:, rank:] = 0.0
    b[:, size:] = float("nan")
    return b
