"""Multi-LoRA shrink, expand and residual write: the Triton kernels, interpreted, against the PyTorch reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forkkv_kernels.lora_plan import TILE, ResidualTable, TokenTiles, block_rows, plan_token_tiles, tile_capacity
from forkkv_kernels.reference_ops import (
    lora_expand_reference,
    lora_shrink_reference,
    residual_shrink_write_reference,
)
from forkkv_kernels.triton import lora
from tests.kernels.covering import case_id, covering_array

TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float16: {"rtol": 1e-2, "atol": 1e-2}}
LORA_CASES = covering_array(
    {
        "tokens": (1, 15, 16, 17, 35, 300),
        "rank": (1, 5, 8, 16, 33, 64, 128),
        "popularity": ("same", "distinct", "zipf", "none"),
        "modules": ("q", "qk", "qkv", "kv of qkv", "v of qkv"),
        "base_rows": (False, True),
        "inner": (24, 64, 1100),
        "inner_contiguous": (False, True),
        "dtype": (torch.float32, torch.float16),
    }
)
RESIDUAL_CASES = covering_array(
    {
        "tokens": (1, 15, 16, 17, 35, 300),
        "tiles": ((1,), (2, 2), (5, 3), (1, 1, 1, 4)),
        "block_size": (4, 16),
        "jobs": (1, 2),
        "skipped": ("nothing", "first blocks", "some adapters"),
        "inner": (24, 64, 200),
        "rows": (16, 64),
        "dtype": (torch.float32, torch.float16),
    }
)
WIDTHS = {1: (40,), 2: (72, 136), 3: (130, 32, 48)}


@dataclass
class Problem:
    x: Tensor
    a: Tensor
    b: Tensor
    y: Tensor
    tokens: TokenTiles
    slot_tiles: Tensor
    outputs: tuple[int, ...]
    slots: np.ndarray


def pick_slots(popularity: str, tokens: int, num_slots: int, base_rows: bool, rng: np.random.Generator) -> np.ndarray:
    """Slot of every token."""
    if popularity == "none":
        return np.full(tokens, -1)
    weights = 1.0 / np.arange(1, num_slots + 1) ** 1.5
    slots = {
        "same": np.full(tokens, 1),
        "distinct": np.arange(tokens) % num_slots,
        "zipf": rng.choice(num_slots, tokens, p=weights / weights.sum()),
    }[popularity]
    return np.where(rng.random(tokens) < 0.4, -1, slots) if base_rows else slots


def make_problem(case: dict[str, Any], seed: int) -> Problem:
    """Mixed ranks: slots of the case's rank, of 8, of none. What no token may read is NaN."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    present, _, fused = case["modules"].partition(" of ")
    names = fused or present
    ranks = [8, case["rank"], 0, case["rank"], 16]
    width = -(-max(ranks) // TILE) * TILE
    outputs = WIDTHS[len(names)]
    a = torch.full((len(ranks), len(names) * width, case["inner"]), float("nan"))
    b = torch.full((len(ranks), len(names) * width, sum(outputs)), float("nan"))
    slot_tiles = torch.zeros(len(ranks), len(names), dtype=torch.int32)
    for slot, rank in enumerate(ranks):
        for module, name in enumerate(names):
            if name not in present:
                continue
            count = -(-rank // TILE)
            slot_tiles[slot, module] = count
            first, column = module * width, sum(outputs[:module])
            a[slot, first : first + count * TILE] = 0.0
            a[slot, first : first + rank] = torch.randn(rank, case["inner"], generator=generator) / case["inner"] ** 0.5
            own = b[slot, first : first + count * TILE]
            own[:] = 0.0
            span = slice(column, column + outputs[module])
            own[:rank, span] = torch.randn(rank, outputs[module], generator=generator) / max(rank, 1) ** 0.5
    slots = pick_slots(case["popularity"], case["tokens"], len(ranks), case["base_rows"], rng)
    x = torch.randn(case["tokens"], case["inner"] + 8, generator=generator)[:, : case["inner"]]
    x[torch.from_numpy(slots < 0)] = float("nan")
    y = torch.randn(case["tokens"], sum(outputs) + 8, generator=generator)
    a = a.to(case["dtype"])
    stacked = a.permute(2, 0, 1) if case["inner_contiguous"] else a.permute(2, 0, 1).contiguous()
    return Problem(
        x.to(case["dtype"]),
        stacked,
        b.to(case["dtype"]),
        y.to(case["dtype"])[:, : sum(outputs)],
        token_tiles(slots, len(ranks)),
        slot_tiles,
        outputs,
        slots,
    )


def token_tiles(slots: np.ndarray, num_slots: int) -> TokenTiles:
    rows = block_rows(len(slots))
    order, tiles = plan_token_tiles(slots, num_slots, rows)
    return TokenTiles(torch.from_numpy(order), torch.from_numpy(tiles), rows)


def check_lora(problem: Problem) -> None:
    """Shrink and expand against the reference; rows without adapter keep their bits."""
    args = (problem.tokens, problem.slot_tiles)
    expected, actual = problem.y.clone(), problem.y.clone()
    reference = lora_shrink_reference(problem.x, problem.a, *args)
    parts = lora.lora_shrink(problem.x, problem.a, *args)
    rank = problem.a.shape[2] // len(problem.outputs)
    tolerance = TOLERANCE[problem.x.dtype]
    for token, slot in enumerate(problem.slots):
        for module, count in enumerate(problem.slot_tiles[slot].tolist() if slot >= 0 else ()):
            span = slice(module * rank, module * rank + count * TILE)
            torch.testing.assert_close(parts[:, token, span].sum(0), reference[0, token, span], **tolerance)
    lora_expand_reference(expected, reference, problem.b, *args, problem.outputs)
    lora.lora_expand(actual, parts, problem.b, *args, problem.outputs)
    torch.testing.assert_close(actual, expected, **tolerance)
    base = torch.from_numpy(problem.slots < 0)
    assert torch.equal(actual[base], problem.y[base])


@pytest.mark.parametrize("case", LORA_CASES, ids=case_id)
def test_shrink_and_expand(case: dict[str, Any]) -> None:
    check_lora(make_problem(case, seed=LORA_CASES.index(case)))


def test_reference_is_the_plain_product() -> None:
    """The oracle against the textbook formula on dense B, token by token."""
    case = {**LORA_CASES[0], "tokens": 20, "rank": 16, "popularity": "distinct", "modules": "qkv", "base_rows": False}
    problem = make_problem({**case, "dtype": torch.float32}, seed=1)
    args = (problem.tokens, problem.slot_tiles)
    y = problem.y.clone()
    lora_expand_reference(y, lora_shrink_reference(problem.x, problem.a, *args), problem.b, *args, problem.outputs)
    for token, slot in enumerate(problem.slots):
        a, b = problem.a[:, slot].nan_to_num(), problem.b[slot].nan_to_num()
        torch.testing.assert_close(y[token], problem.y[token] + problem.x[token] @ a @ b, rtol=1e-4, atol=1e-4)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.integers(1, 40),
    rank=st.integers(1, 48),
    popularity=st.sampled_from(("same", "distinct", "zipf", "none")),
    modules=st.sampled_from(("q", "qk", "qkv", "k of qkv", "k of kv")),
    base_rows=st.booleans(),
    inner=st.integers(1, 150),
    inner_contiguous=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float16)),
    seed=st.integers(0, 1000),
)
def test_shrink_and_expand_anywhere(seed: int, **case: Any) -> None:
    check_lora(make_problem(case, seed))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(slots=st.lists(st.integers(-1, 6), max_size=200), rows=st.sampled_from((16, 64)))
def test_plan_covers_every_adapter_token_once(slots: list[int], rows: int) -> None:
    order, tiles = plan_token_tiles(np.array(slots, dtype=np.int64), 7, rows)
    assert len(tiles) == tile_capacity(len(slots), 7, rows)
    seen: list[int] = []
    for slot, first, end in tiles.tolist():
        if slot >= 0:
            assert 0 < end - first <= rows
            assert all(slots[token] == slot for token in order[first:end])
            seen.extend(order[first:end].tolist())
    assert sorted(seen) == [token for token, slot in enumerate(slots) if slot >= 0]


def test_plan_rejects_unknown_slots() -> None:
    with pytest.raises(ValueError, match="outside"):
        plan_token_tiles(np.array([0, 3]), 3, 16)


def make_residual(case: dict[str, Any], seed: int) -> tuple[Tensor, Tensor, ResidualTable, Tensor]:
    """h, stacked A, table and cache: `jobs` base rows whose tokens leave residuals of some adapters."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    tokens, size, jobs, rows = case["tokens"], case["block_size"], case["jobs"], case["rows"]
    stacked = sum(case["tiles"]) + 2
    h = torch.randn(tokens, case["inner"], generator=generator)
    a = torch.randn(stacked, TILE, case["inner"], generator=generator) / case["inner"] ** 0.5
    columns = sum(case["tiles"])
    tile_ids = np.full((jobs, columns), -1, dtype=np.int32)
    bounds = np.linspace(0, tokens, jobs + 1).astype(int)
    blocks = -(-tokens // size)
    units = rng.permutation(np.arange(1, jobs * blocks * columns + 2))
    targets = np.full((tokens, columns), -1, dtype=np.int64)
    tiles = [(-1, 0, 0)]
    used = 0
    for job in range(jobs):
        # The second job has fewer adapters, so its row of the table is padded.
        width = columns if job == 0 else case["tiles"][0]
        tile_ids[job, :width] = rng.permutation(stacked)[:width]
        begin, end = int(bounds[job]), int(bounds[job + 1])
        tiles += [(job, first, min(first + rows, end)) for first in range(begin, end, rows)]
        for token in range(begin, end):
            block, offset = divmod(token - begin, size)
            for column in range(width):
                targets[token, column] = units[(job * blocks + block) * columns + column] * size + offset
        used += blocks * width
    if case["skipped"] == "first blocks":
        targets[: tokens // 2] = rng.choice((-1, 0, size - 1))
    elif case["skipped"] == "some adapters":
        targets[:, : case["tiles"][0]] = rng.integers(0, size)
    cache = torch.full((len(units) + 1, size, TILE), float("nan"), dtype=case["dtype"])
    cache[0] = 0.0
    table = ResidualTable(
        torch.tensor(tiles, dtype=torch.int32), torch.from_numpy(tile_ids), torch.from_numpy(targets), rows
    )
    return h.to(case["dtype"]), a.to(case["dtype"]), table, cache


def check_residual(case: dict[str, Any], seed: int) -> None:
    h, a, table, cache = make_residual(case, seed)
    expected, actual = cache.clone(), cache.clone()
    residual_shrink_write_reference(h, a, table, expected)
    lora.residual_shrink_write(h, a, table, actual)
    torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE[case["dtype"]])
    assert torch.equal(actual[0], torch.zeros_like(actual[0]))
    written = (table.targets >= case["block_size"]).sum()
    assert int((~actual[1:].isnan()).all(-1).sum()) == int(written)


@pytest.mark.parametrize("case", RESIDUAL_CASES, ids=case_id)
def test_residual_write(case: dict[str, Any]) -> None:
    check_residual(case, seed=RESIDUAL_CASES.index(case))


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.integers(1, 40),
    tiles=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    block_size=st.sampled_from((1, 4, 16)),
    jobs=st.integers(1, 2),
    skipped=st.sampled_from(("nothing", "first blocks", "some adapters")),
    inner=st.integers(1, 150),
    rows=st.sampled_from((16, 64)),
    dtype=st.sampled_from((torch.float32, torch.float16)),
    seed=st.integers(0, 1000),
)
def test_residual_write_anywhere(seed: int, **case: Any) -> None:
    check_residual(case, seed)
