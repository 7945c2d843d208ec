"""Decode kernels against the reference: rows alone and rows on shared documents, every kind of adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.kernels.attention_cases import PARAMETERS, make_case
from tests.kernels.covering import case_id, covering_array
from tests.kernels.decode_cases import LAYOUTS, make_shared_case, run_decode

ALONE = "no sharing"
_DECODE = {name: values for name, values in PARAMETERS.items() if name != "mode"} | {"layout": (ALONE, *LAYOUTS)}
CASES = covering_array(_DECODE, seed=3)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def check(case: dict[str, Any], **options: Any) -> None:
    """One case with everything grouped that may be, against the reference."""
    if case["layout"] == ALONE:
        made = make_case(mode="decode", **{name: value for name, value in case.items() if name != "layout"})
        groups: list[list[int]] = []
    else:
        made, groups = make_shared_case(**case), [[0, 1, 2, 3, 4]]
    out, lse, _ = run_decode(made, groups, **options)
    made.check(out, lse)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_reference(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.parametrize("part", range(5))
def test_random_problems(part: int) -> None:
    """Fifty examples in five parts, each within the time limit of a test on a busy machine."""

    @seed(part)
    @settings(max_examples=10, deadline=None, database=None, phases=(Phase.generate,))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = {name: data.draw(st.sampled_from(list(values)), label=name) for name, values in _DECODE.items()}
        case["length"] = data.draw(st.integers(1, 70), label="tokens")
        case["head_dim"] = data.draw(st.sampled_from((16, 48, 64)), label="head_dim")
        case["seed"] = data.draw(st.integers(0, 1000), label="seed")
        check(case, programs=data.draw(st.sampled_from((1, 4, 16)), label="programs"))

    run()


@pytest.mark.parametrize(
    ("layout", "popularity"),
    [("one document", "distinct"), ("one document", "same"), ("two documents", "zipf"), ("one row alone", "distinct")],
)
def test_grouped_equals_ungrouped(layout: str, popularity: str) -> None:
    case = make_shared_case(popularity=popularity, layout=layout, length=70, group=3, coverage="whole")
    grouped, lse, shared = run_decode(case, [[0, 1, 2, 3, 4]], programs=24)
    alone, lse_alone, separate = run_decode(case, programs=24)
    torch.testing.assert_close(grouped, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, lse_alone, rtol=1e-5, atol=1e-5)
    tokens = [int((work.items[:, 2] - work.items[:, 1]).sum()) for work in (shared, separate)]
    assert tokens[0] < 0.6 * tokens[1], "grouped items read the shared tokens once"


@pytest.mark.parametrize("wide", [32, 128])
def test_wide_tiles(wide: int) -> None:
    """Rows of a group in several chunks of one tile, with gaps: seven heads, two rows a chunk."""
    case = make_shared_case(group=7, length=50, coverage="whole", qk_norm=True)
    out, lse, work = run_decode(case, [[0, 1, 2, 3, 4]], wide=wide)
    assert work.bounds[3] > work.bounds[2] or work.bounds[4] > work.bounds[3], "there are wide items"
    case.check(out, lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_launch_over_the_capacity(layout: str) -> None:
    """As in a CUDA graph: base items in the residual's kernel, programs without an item, the same result."""
    case = make_shared_case(layout=layout, length=50, head_dim=16, group=4)
    exact = run_decode(case, [[0, 1, 2, 3, 4]])
    fixed = run_decode(case, [[0, 1, 2, 3, 4]], fixed=True)
    torch.testing.assert_close(fixed[0], exact[0], rtol=1e-6, atol=1e-6)
    case.check(fixed[0], fixed[1])


def test_splits_do_not_change_the_result() -> None:
    case = make_shared_case(length=200, head_dim=16, popularity="zipf")
    results = [run_decode(case, [[0, 1, 2, 3, 4]], programs=programs) for programs in (1, 64)]
    assert len(results[0][2].items) < len(results[1][2].items), "more programs, more items"
    for out, lse, _ in results:
        case.check(out, lse)


def test_strided_queries() -> None:
    """Queries as the model has them: the first heads of a fused tensor."""
    case = make_shared_case(length=20, head_dim=16)
    q = case.arguments["q"]
    fused = torch.full((5, q.shape[1] + 3, 16), float("nan"))
    fused[:, : q.shape[1]] = q
    case.arguments["q"] = fused[:, : q.shape[1]]
    out, lse, _ = run_decode(case, [[0, 1, 2, 3, 4]])
    case.check(out, lse)
    case.arguments["k_cache"] = case.arguments["k_cache"].transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        run_decode(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[::3], ids=case_id)
def test_on_a_gpu(case: dict[str, Any]) -> None:
    check({**case, "dtype": torch.bfloat16, "device": "cuda"}, programs=64)
