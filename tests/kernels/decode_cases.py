"""Decode problems whose rows share documents, and how to run them through the work list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkkv_kernels.triton.decode import decode_attention
from forkkv_kernels.triton.decode_work import DecodeWork, capacity_launches, exact_launches, make_partials
from forkkv_kernels.triton.worklist import Capacity, RowTables, WorkList, plan_work, tile_heads
from tests.kernels.attention_cases import TOLERANCE, AttentionCase

KV_HEADS = 2
SLOTS = {"same": (1, 1, 1, -1, 1), "distinct": (2, 0, 1, -1, 3), "zipf": (1, 1, 0, -1, 1)}
"""Adapter slot of five rows; the fourth runs base weights."""
LAYOUTS = ("one document", "two documents", "one row alone")


def make_shared_case(
    *,
    length: str | int = "2bs+3",
    block_size: int = 16,
    rank: int = 16,
    adapters: str = "both",
    popularity: str = "distinct",
    group: int = 2,
    head_dim: int = 64,
    qk_norm: bool = False,
    coverage: str = "prefix",
    layout: str = "one document",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionCase:
    """Five rows with one query each on documents of `length` tokens, of which they share the whole blocks; tails of
    their own behind. "two documents": rows 0, 2, 4 and 1, 3 part after a system prompt of two blocks; "one row
    alone": the last row shares nothing. The other parameters are those of `attention_cases.make_case`."""
    g = torch.Generator().manual_seed(seed)
    named = {"bs-1": block_size - 1, "bs": block_size, "bs+1": block_size + 1, "2bs+3": 2 * block_size + 3}
    tokens = length if isinstance(length, int) else named.get(length) or int(length)
    slots = SLOTS[popularity] if adapters != "none" else (-1,) * 5
    ids = iter((torch.randperm(600, generator=g) + 1).tolist())
    documents = _documents(layout, tokens // block_size, ids)
    tails = [1 + (7 * row + tokens) % (block_size + 5) for row in range(5)]
    blocks = [
        [*document, *(next(ids) for _ in range(-(-tail // block_size)))]
        for document, tail in zip(documents, tails, strict=True)
    ]
    seq_lens = [len(d) * block_size + tail for d, tail in zip(documents, tails, strict=True)]
    prefixes = [len(d) * block_size for d in documents]
    reach = {"prefix": prefixes, "ragged": [n * 2 // 3 for n in prefixes], "whole": seq_lens}[coverage]
    residual_len = [n if slot >= 0 else 0 for n, slot in zip(reach, slots, strict=True)]
    table_tiles = -(-rank // 16)
    ranks = [min(rank, 5) if slot == 0 else rank for slot in slots]
    tiles = [-(-r // 16) if n > 0 else 0 for r, n in zip(ranks, residual_len, strict=True)]
    width = max(len(row) for row in blocks) + 1
    has_k, has_v = adapters in ("k", "both", "absent"), adapters in ("v", "both", "absent")
    kv_table = np.full((5, width), 601, dtype=np.int32)
    for row, own in enumerate(blocks):
        kv_table[row, : len(own)] = own
    units: dict[tuple[Any, ...], int] = {}
    k_table, v_table = (
        _unit_table(
            half, units, blocks, slots, residual_len, tiles if wanted else [0] * 5, (5, width, table_tiles), block_size
        )
        for half, wanted in (("k", has_k), ("v", has_v))
    )
    num_units = len(units) + 2

    def written(shape: tuple[int, ...], table: np.ndarray, lengths: Sequence[int], fill: Tensor, null: float) -> Tensor:
        """`fill` in the cells that some row owns, NaN in others, `null` in page 0."""
        keep = torch.zeros(shape[:2], dtype=torch.bool)
        for row, count in enumerate(lengths):
            t = torch.arange(count)
            pages = torch.from_numpy(table[row])[t // block_size].long()
            keep[pages, t % block_size if pages.dim() == 1 else (t % block_size)[:, None]] = True
        out = torch.where(keep.view(*shape[:2], *[1] * (len(shape) - 2)), fill, float("nan"))
        out[0] = null
        return out

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    kv_shape, unit_shape = (602, block_size, KV_HEADS, head_dim), (num_units, block_size, 16)
    both = np.concatenate((k_table, v_table), axis=2)
    strength = 0.0 if adapters == "absent" else 1.0
    width_b = table_tiles * 16
    values = {
        "q": normal(5, group * KV_HEADS, head_dim),
        "k_cache": written(kv_shape, kv_table, seq_lens, normal(*kv_shape), 0.0),
        "v_cache": written(kv_shape, kv_table, seq_lens, normal(*kv_shape), 0.0),
        "residual_cache": written(unit_shape, both, residual_len, normal(*unit_shape) * strength, 0.0),
        **{name: _expansion(normal(4, width_b + 16, KV_HEADS * head_dim), ranks, slots) for name in ("b_k", "b_v")},
    }
    arguments: dict[str, Any] = {name: value.to(device, dtype) for name, value in values.items()}
    if qk_norm:
        shape = (602, block_size, KV_HEADS)
        rms = torch.rand(shape, generator=g) + 0.5
        arguments["k_rms"] = written(shape, kv_table, seq_lens, rms, 1.0).to(device)
        shape = (num_units, block_size, KV_HEADS)
        rms = torch.rand(shape, generator=g) + 0.75
        arguments["residual_rms"] = written(shape, k_table, residual_len, rms, 1.0).to(device)
    angles = torch.outer(
        torch.arange(max(seq_lens) + 1).double(), 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    )
    integers = {"cu_seqlens_q": range(6), "seq_lens": seq_lens, "residual_len": residual_len, "read_slot": slots}
    arguments |= {name: torch.tensor(list(v), dtype=torch.int32, device=device) for name, v in integers.items()}
    tables = {"kv_block_table": kv_table, "residual_k_table": k_table, "residual_v_table": v_table}
    arguments |= {name: torch.from_numpy(table.reshape(5, -1)).to(device) for name, table in tables.items()}
    arguments |= {"cos": angles.cos().float().to(device), "sin": angles.sin().float().to(device)}
    arguments["scale"] = head_dim**-0.5
    halves = (tuple(tiles if wanted else [0] * 5) for wanted in (has_k, has_v))
    return AttentionCase(arguments, *halves, tolerance=TOLERANCE[dtype])


def _documents(layout: str, blocks: int, ids: Any) -> list[list[int]]:
    """Shared blocks of each row."""
    if layout == "two documents":
        system = [next(ids) for _ in range(2)]
        pair = [system + [next(ids) for _ in range(blocks)] for _ in range(2)]
        return [pair[row % 2] for row in range(5)]
    document = [next(ids) for _ in range(blocks)]
    alone = [next(ids) for _ in range(blocks)] if layout == "one row alone" else document
    return [document] * 4 + [alone]


def _unit_table(
    half: str,
    units: dict[tuple[Any, ...], int],
    blocks: list[list[int]],
    slots: Sequence[int],
    residual_len: list[int],
    tiles: Sequence[int],
    shape: tuple[int, int, int],
    block_size: int,
) -> np.ndarray:
    """One unit per (slot, block, tile), so that rows of one adapter on one document read the same."""
    table = np.zeros(shape, dtype=np.int32)
    for row, own in enumerate(blocks):
        for block in range(-(-residual_len[row] // block_size)):
            for tile in range(tiles[row]):
                key = (half, slots[row], own[block], tile)
                table[row, block, tile] = units.setdefault(key, len(units) + 1)
    return table


def _expansion(b: Tensor, ranks: list[int], slots: Sequence[int]) -> Tensor:
    """B with zeros behind each slot's rank and NaN behind the columns of the tables."""
    widest = max(ranks)
    for rank, slot in zip(ranks, slots, strict=True):
        if slot >= 0:
            b[slot, rank:] = 0.0
    b[:, -16:] = float("nan")
    return b * (0.7 * widest**-0.5)


def run_decode(
    case: AttentionCase,
    groups: Sequence[Sequence[int]] = (),
    *,
    programs: int = 4,
    wide: int | None = None,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, WorkList]:
    """out, lse and the work list. Everything that is not written is NaN. `fixed`: launches over the whole capacity."""
    arguments = dict(case.arguments)
    q, k_cache, v_cache = (arguments.pop(name) for name in ("q", "k_cache", "v_cache"))
    host = {name: value.cpu().numpy() for name, value in arguments.items() if _is_int(value)}
    rows, heads = len(host["seq_lens"]), q.shape[1] // k_cache.shape[2]
    tables = RowTables(
        host["cu_seqlens_q"][:-1],
        host["seq_lens"],
        host["read_slot"],
        host["residual_len"],
        np.array(case.k_tiles, dtype=np.int32),
        np.array(case.v_tiles, dtype=np.int32),
        host["kv_block_table"],
        host["residual_k_table"],
        host["residual_v_table"],
    )
    largest = max((len(group) for group in groups), default=1)
    wide = wide or tile_heads(largest, heads, q.shape[2])
    capacity = Capacity.for_limits(rows, heads, k_cache.shape[2], wide, programs)
    work = plan_work(
        tables, range(rows), groups, capacity, block_size=k_cache.shape[1], programs=programs, min_shared_tokens=1
    )
    words = np.zeros(capacity.words, dtype=np.int32)
    work.write(words)
    partials = make_partials(capacity.partials, q.shape[1], q.shape[2], q.device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for tensor in (*partials, out, lse):
        tensor.fill_(float("nan"))
    launches = capacity_launches(capacity, rows, True) if fixed else exact_launches(work)
    planned = DecodeWork(torch.from_numpy(words).to(q.device), capacity, launches, capacity.rows, *partials)
    for name in ("cu_seqlens_q", "seq_lens", "read_slot", "residual_len"):
        del arguments[name]
    decode_attention(q, k_cache, v_cache, arguments.pop("kv_block_table"), planned, out, lse=lse, **arguments)
    return out, lse, work


def _is_int(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int32
