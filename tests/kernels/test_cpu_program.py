"""Recorded programs do again what the function did, with what is then in the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")
from forkkv_kernels.cpu import elementwise, team
from forkkv_kernels.cpu.int8 import int8_linear
from forkkv_kernels.cpu.int8_format import pack
from forkkv_kernels.cpu.program import record


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_program_follows_its_inputs(rows: int, generator: torch.Generator):
    """Views, new results with and without an out variant, writes in place, kernels with few and many rows."""
    x, ids, table = torch.empty(rows, 64), torch.empty(rows, dtype=torch.int64), torch.randn(9, 64, generator=generator)
    weight = pack(torch.randn(96, 64, generator=generator), torch.randn(96, generator=generator))
    gain, other = torch.rand(64, generator=generator), torch.randn(48, 32, generator=generator)

    def step() -> Tensor:
        hidden = torch.nn.functional.embedding(ids, table)
        hidden.add_(x)
        both = int8_linear(elementwise.rms_norm(hidden, gain, 1e-5), weight)
        inner = elementwise.swiglu(both)
        out = torch.cat((torch.mm(inner, other), both[:, 80:].sigmoid()), dim=1)
        return out.view(-1).pow(2).view(rows, -1).index_select(0, torch.arange(rows))

    def fill() -> None:
        x.copy_(torch.randn(rows, 64, generator=generator))
        ids.copy_(torch.randint(0, 9, (rows,), generator=generator))

    with torch.inference_mode():
        fill()
        expected = step()
        program = record(step)
        assert torch.equal(program.result, expected)
        for _ in range(3):
            fill()
            expected = step()
            result = program()
            assert result is program.result
            assert torch.equal(result, expected)
    assert 8 <= len(program) <= 14, "views and empty tensors are no calls"


def test_nothing_is_recorded_afterwards(generator: torch.Generator):
    x = torch.randn(2, 64, generator=generator)
    program = record(lambda: elementwise.rms_norm(x, torch.ones(64), 1e-5))
    calls = len(program)
    elementwise.rms_norm(x, torch.ones(64), 1e-5)
    assert len(program) == calls and not team.watchers


def test_a_failing_function_leaves_no_watcher():
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        record(fail)
    assert not team.watchers


@pytest.mark.parametrize(
    "function", [lambda x: x[x > 0], lambda x: x.sum().item(), torch.nonzero, lambda x: x.unique()]
)
def test_what_depends_on_content_is_refused(function: Callable[[Tensor], object]):
    x = torch.randn(4, 4)
    with pytest.raises(NotImplementedError, match="content"):
        record(lambda: function(x))


def test_several_results_are_refused():
    x = torch.randn(4, 4)
    with pytest.raises(NotImplementedError, match="several"):
        record(lambda: torch.sort(x))
