"""The CPU kernel against the reference: every row by itself, rows in groups, and the plan that both run on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forkkv_kernels.cpu.op import residual_attention_cpu
from forkkv_kernels.cpu.plan import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_ENTRIES,
    ITEM_FIRST_ENTRY,
    ITEM_ROW,
    MAX_ENTRIES,
    Rows,
    make_plan,
)
from forkkv_kernels.cpu.runtime import pack_b_k
from tests.kernels.attention_cases import PARAMETERS, AttentionCase, make_case
from tests.kernels.covering import case_id, covering_array
from tests.kernels.decode_cases import LAYOUTS, make_shared_case

FLOAT32 = {name: values for name, values in PARAMETERS.items() if name != "dtype"}
SHARED = {name: values for name, values in FLOAT32.items() if name != "mode"} | {"layout": LAYOUTS}


def check(case: AttentionCase, **options: Any) -> None:
    out = residual_attention_cpu(**case.arguments, **options, return_lse=True)
    assert isinstance(out, tuple)
    case.check(*out)


@pytest.mark.parametrize("parameters", covering_array(FLOAT32), ids=case_id)
def test_equals_reference(parameters: dict[str, Any]) -> None:
    check(make_case(**parameters))


@pytest.mark.parametrize("parameters", covering_array(SHARED), ids=case_id)
def test_equals_reference_in_groups(parameters: dict[str, Any]) -> None:
    case = make_shared_case(**parameters)
    check(case, groups=groups_of(case))


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(
    length=st.integers(1, 300),
    parameters=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in FLOAT32.items() if k != "length"}),
    threads=st.sampled_from((1, 2, 5)),
    seed=st.integers(0, 1000),
)
def test_any_problem(length: int, parameters: dict[str, Any], threads: int, seed: int) -> None:
    check(make_case(length=length, seed=seed, **parameters), threads=threads)


def test_a_base_row_does_not_see_its_neighbours() -> None:
    """A group computes the base row's scores from the same turned keys, in the same order, as the row alone."""
    case = make_case(length="300", mode="decode")
    together = residual_attention_cpu(**case.arguments)
    without = make_case(length="300", mode="decode")
    without.arguments["read_slot"] = torch.full_like(case.arguments["read_slot"], -1)
    alone = residual_attention_cpu(**without.arguments)
    assert torch.equal(together[case.base_row], alone[case.base_row])  # type: ignore[index]


def test_other_dtypes_are_refused() -> None:
    case = make_case(dtype=torch.float16)
    with pytest.raises(TypeError, match="float32"):
        residual_attention_cpu(**case.arguments)


def test_pack_b_k_places_partners_together() -> None:
    b_k = torch.arange(2 * 3 * 2 * 16.0).view(2, 3, 32)
    packed = pack_b_k(b_k, 2)
    assert packed.shape == (2, 2, 2, 3, 8)
    by_head = b_k.view(2, 3, 2, 16)
    assert torch.equal(packed[1, 1, 1, 2], torch.cat((by_head[1, 2, 1, 4:8], by_head[1, 2, 1, 12:16])))


def groups_of(case: AttentionCase) -> list[tuple[int, list[int]]]:
    """Rows by their first block, with the leading blocks that all of them have in common and that hold no query."""
    table, size = case.arguments["kv_block_table"].numpy(), case.arguments["k_cache"].shape[1]
    seq_lens = case.arguments["seq_lens"].numpy()
    by_document: dict[int, list[int]] = {}
    for row in range(len(table)):
        by_document.setdefault(int(table[row, 0]), []).append(row)
    groups = []
    for members in by_document.values():
        differs = (table[members] != table[members[0]]).any(axis=0)
        common = int(differs.argmax()) if differs.any() else table.shape[1]
        groups.append((min(common, int(seq_lens[members].min() - 1) // size) * size, members))
    return groups


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(data=st.data(), threads=st.integers(1, 8))
def test_plan_covers_every_token_once(data: st.DataObject, threads: int) -> None:
    """Every query token sees each position of its context in exactly one item, whose block table holds it."""
    shared = data.draw(st.integers(0, 40)) * 16
    queries = st.one_of(st.integers(1, 9), st.integers(10, 3 * MAX_ENTRIES))
    rows = [(shared + data.draw(st.integers(1, 700)), data.draw(queries)) for _ in range(3)]
    lengths = [(max(n, shared + q), q) for n, q in rows]
    plan = make_plan(_rows(lengths), [(shared, [2, 0]), (0, [1])], 3, threads)
    seen = {(row, q): np.zeros(n, int) for row, (n, count) in enumerate(lengths) for q in range(count)}
    owners = [(row, q) for row, (_, count) in enumerate(lengths) for q in range(count)]
    for item in plan.tables.items:
        assert item[ITEM_ENTRIES] <= MAX_ENTRIES
        for entry in plan.tables.entries[item[ITEM_FIRST_ENTRY] :][: item[ITEM_ENTRIES]]:
            row, q = owners[entry[0]]
            n, count = lengths[row]
            assert entry[1] == n - count + q + 1, "sees up to itself"
            assert item[ITEM_ROW] == row or item[ITEM_END] <= shared
            seen[row, q][item[ITEM_BEGIN] : item[ITEM_END]] += 1
    for (row, q), counts in seen.items():
        visible = lengths[row][0] - lengths[row][1] + q + 1
        assert (counts[:visible] == 1).all(), (row, q)


def _rows(lengths: list[tuple[int, int]]) -> Rows:
    count = len(lengths)
    none, units = np.zeros(count, dtype=np.int64), np.zeros((count, 0), dtype=np.int32)
    bounds = np.cumsum([0, *(q for _, q in lengths)])
    seq_lens = np.array([n for n, _ in lengths])
    return Rows(bounds, seq_lens, none - 1, none, none, none, units, units)
