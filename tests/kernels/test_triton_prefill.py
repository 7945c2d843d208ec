"""The Triton prefill kernel against the reference, in Triton's interpreter (and, marked `gpu`, on a card)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forkkv_kernels.triton.configs import PrefillConfig
from forkkv_kernels.triton.prefill import residual_attention_prefill
from forkkv_kernels.triton.prefill_plan import PrefillPlan, PrefillShape, plan_prefill
from tests.kernels.attention_cases import PARAMETERS, AttentionCase, make_case
from tests.kernels.covering import case_id, covering_array

CASES = covering_array(PARAMETERS)
SMALL = PrefillConfig(16, 16, 4, 1)
"""So small that every loop of the kernel runs several times in a short row."""
SHORT = {name: values for name, values in PARAMETERS.items() if name != "length"} | {
    "block_size": (4, 8, 16),
    "rank": (1, 16, 17, 40, 64),
    "group": (1, 2, 3, 5),
    "head_dim": (32, 64, 96),
}
"""Parameters of the random problems: the interpreter's time goes with the number of tiles."""
ROW_TENSORS = ("kv_block_table", "seq_lens", "residual_len", "read_slot", "residual_k_table", "residual_v_table")


def run(case: AttentionCase, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = residual_attention_prefill(**case.arguments, return_lse=True, **options)
    assert isinstance(out, Tensor) and isinstance(lse, Tensor)
    return out, lse


def planned(case: AttentionCase, config: PrefillConfig | None = None, rows: list[int] | None = None) -> PrefillPlan:
    """The plan that an engine would make, which knows the tiles of every row."""
    a = case.arguments
    heads, head_dim = a["q"].shape[1:]
    shape = PrefillShape(heads // a["k_cache"].shape[2], head_dim, a["q"].element_size(), "interpreter", config=config)
    host = [a[name].tolist() for name in ("cu_seqlens_q", "seq_lens", "read_slot", "residual_len")]
    device = a["q"].device
    return plan_prefill(*host, case.k_tiles, case.v_tiles, shape=shape, device=device, rows=rows)


def only_row(case: AttentionCase, row: int) -> dict[str, Any]:
    """Arguments of one row alone, in the same caches."""
    a = case.arguments
    begin, end = a["cu_seqlens_q"][row : row + 2].tolist()
    alone = {name: a[name][row : row + 1] for name in ROW_TENSORS}
    bounds = torch.tensor([0, end - begin], dtype=torch.int32)
    return a | alone | {"q": a["q"][begin:end], "cu_seqlens_q": bounds}


@pytest.mark.parametrize("parameters", CASES, ids=case_id)
def test_equals_reference(parameters: dict[str, Any]) -> None:
    case = make_case(**parameters)
    case.check(*run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("parameters", CASES, ids=case_id)
def test_equals_reference_on_a_card(parameters: dict[str, Any]) -> None:
    """Default configurations of the card; bfloat16 in place of float32."""
    dtype = torch.float16 if parameters["dtype"] == torch.float16 else torch.bfloat16
    case = make_case(**parameters | {"dtype": dtype, "device": "cuda"})
    case.check(*run(case))


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(
    length=st.integers(1, 40),
    parameters=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in SHORT.items()}),
    config=st.builds(
        PrefillConfig,
        block_m=st.sampled_from((32, 128)),
        block_n=st.sampled_from((32, 64)),
        num_warps=st.just(4),
        num_stages=st.just(1),
        chunk=st.sampled_from((16, 32, 64)),
        v_width=st.sampled_from((64, 128)),
        v_chunk=st.sampled_from((32, 64)),
        reload=st.booleans(),
        rolled=st.booleans(),
    ),
    seed=st.integers(0, 1000),
)
def test_any_problem(length: int, parameters: dict[str, Any], config: PrefillConfig, seed: int) -> None:
    case = make_case(length=length, seed=seed, **parameters)
    case.check(*run(case, config=config))


@pytest.mark.parametrize("coverage", ["prefix", "ragged", "whole"])
@pytest.mark.parametrize("rank", [16, 64])
def test_small_tiles(coverage: str, rank: int) -> None:
    """All four loops take several steps; rows of other ranks are launched apart."""
    case = make_case(length=75, coverage=coverage, rank=rank, mode="chunk", group=2, block_size=8, qk_norm=True)
    plan = planned(case, SMALL)
    assert len({(launch.k_tiles, launch.v_tiles) for launch in plan.launches}) == (3 if rank == 64 else 2)
    case.check(*run(case, plan=plan))


@pytest.mark.parametrize("adapters", ["k", "v", "both", "none", "absent"])
def test_plan_of_the_engine(adapters: str) -> None:
    """Launches by width give what one launch over all rows gives; every tile stands in exactly one of them."""
    case = make_case(adapters=adapters, rank=33, group=5, mode="mixed")
    plan = planned(case)
    case.check(*run(case, plan=plan))
    items = torch.cat([launch.work for launch in plan.launches]).tolist()
    assert len({tuple(item) for item in items}) == len(items)
    lengths = case.arguments["residual_len"].tolist()
    for launch in plan.launches:
        for row in launch.work[:, 0].tolist():
            own = (case.k_tiles[row], case.v_tiles[row]) if lengths[row] else (0, 0)
            assert own == (launch.k_tiles, launch.v_tiles)


@pytest.mark.parametrize("adapters", ["both", "none"])
def test_row_lengths_on_the_device_only(adapters: str) -> None:
    """Planned from the largest query length, which may be too large, the result has the same bits."""
    case = make_case(adapters=adapters, group=4)
    expected, expected_lse = run(case)
    longest = int(case.arguments["cu_seqlens_q"].diff().max())
    for bound in (longest, longest + 50):
        out, lse = run(case, max_query_len=bound)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """Each row, the base row among them, has the same bits alone and beside rows of other adapters."""
    case = make_case(length=40, rank=64, dtype=dtype, mode="mixed", coverage="ragged", group=3)
    out, lse = run(case)
    bounds = case.arguments["cu_seqlens_q"].tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone, alone_lse = residual_attention_prefill(**only_row(case, row), return_lse=True)
        assert torch.equal(alone, out[begin:end]) and torch.equal(alone_lse, lse[begin:end])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, about the NaN of the other rows
def test_base_rows_read_no_residual() -> None:
    """With NaN for every adapter the base row keeps its bits, and needs none of the arguments."""
    case = make_case(rank=16)
    begin, end = case.arguments["cu_seqlens_q"][case.base_row : case.base_row + 2].tolist()
    expected = run(case)[0][begin:end]
    nan = {name: torch.full_like(case.arguments[name], float("nan")) for name in ("residual_cache", "b_k", "b_v")}
    out = residual_attention_prefill(**case.arguments | nan)
    assert isinstance(out, Tensor) and torch.equal(out[begin:end], expected)
    assert out[:begin].isnan().all()
    alone = only_row(case, case.base_row)
    names = ("q", "k_cache", "v_cache", "kv_block_table", "cu_seqlens_q", "seq_lens")
    bare = residual_attention_prefill(*(alone[name] for name in names), scale=alone["scale"])
    assert isinstance(bare, Tensor) and torch.equal(bare, expected)


@pytest.mark.parametrize("garbage", [float("inf"), 1e4, 0.0])
def test_unwritten_cells_do_not_matter(garbage: float) -> None:
    """All caches of a case hold NaN where nothing was written; other contents there change no bit."""
    case = make_case(length=45, rank=33, mode="chunk", coverage="ragged", qk_norm=True)
    expected, expected_lse = run(case)
    assert expected.isfinite().all()
    names = ("k_cache", "v_cache", "residual_cache", "k_rms", "residual_rms")
    other = {name: case.arguments[name].nan_to_num(nan=garbage) for name in names}
    out, lse = residual_attention_prefill(**case.arguments | other, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_only_planned_rows_are_written() -> None:
    """Rows that another kernel does are left alone in a given output."""
    case = make_case(mode="mixed")
    bounds = case.arguments["cu_seqlens_q"].tolist()
    expected, expected_lse = run(case)
    out, lse = torch.full_like(expected, 7.0), torch.full_like(expected_lse, 7.0)
    result, _ = run(case, plan=planned(case, rows=[0, 3]), out=out, lse=lse)
    assert result is out
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if row in (0, 3):
            assert torch.equal(out[begin:end], expected[begin:end])
            assert torch.equal(lse[begin:end], expected_lse[begin:end])
        else:
            assert (out[begin:end] == 7.0).all() and (lse[begin:end] == 7.0).all()


def test_strided_queries_and_caches() -> None:
    """q as a slice of a fused projection, caches as one layer of a pool [blocks, layers, ...]."""
    case = make_case(rank=33, qk_norm=True)
    expected = run(case)[0]
    q = case.arguments["q"]
    fused = torch.cat((q, torch.full((len(q), 2, q.shape[2]), float("nan"))), dim=1)
    views = {"q": fused[:, : q.shape[1]]}
    for name in ("k_cache", "v_cache", "residual_cache", "b_k", "b_v", "k_rms", "residual_rms"):
        value = case.arguments[name]
        views[name] = torch.stack((torch.full_like(value, float("nan")), value), dim=1)[:, 1]
    out = residual_attention_prefill(**case.arguments | views)
    assert isinstance(out, Tensor) and torch.equal(out, expected)


def test_refuses_what_it_cannot_do() -> None:
    case = make_case(length=20)
    a = case.arguments
    with pytest.raises(ValueError, match="scale"):
        residual_attention_prefill(**a | {"scale": 0.0})
    with pytest.raises(ValueError, match="side by side"):
        residual_attention_prefill(**a | {"q": a["q"].transpose(1, 2).contiguous().transpose(1, 2)})
    with pytest.raises(ValueError, match="power of two"):
        residual_attention_prefill(**a | {"k_cache": a["k_cache"][:, :12], "v_cache": a["v_cache"][:, :12]})
    with pytest.raises(ValueError, match="odd"):
        residual_attention_prefill(**a | {name: a[name][..., :63] for name in ("q", "k_cache", "v_cache")})
