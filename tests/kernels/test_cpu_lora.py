"""The CPU's kernel for adapters on few tokens against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from forkkv_kernels.lora_plan import ROWS_TOGETHER, TokenTiles, plan_token_tiles
from forkkv_kernels.reference_ops import lora_rows_reference

pytest.importorskip("numba")
from forkkv_kernels.cpu.lora import lora_rows

SLOTS, RANK = 5, 32
OUTPUTS = {1: (96,), 2: (64, 48), 3: (96, 32, 32)}


@dataclass
class Problem:
    """Adapters of `modules` fused modules in every slot; slot 3 touches none, slot 4 only the first with one tile."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    slot_tiles: Tensor
    outputs: tuple[int, ...]

    @classmethod
    def make(cls, tokens: int, modules: int, ins: int = 64, outputs: tuple[int, ...] | None = None) -> Problem:
        generator = torch.Generator().manual_seed(tokens * 10 + modules)
        outputs = outputs or OUTPUTS[modules]
        wide = torch.randn(tokens, ins + 8, generator=generator)
        tiles = torch.full((SLOTS, modules), 2, dtype=torch.int32)
        tiles[1:, 0], tiles[3], tiles[4, 1:] = 1, 0, 0
        a = torch.randn(SLOTS, ins, modules * RANK, generator=generator).transpose(0, 1)
        b = torch.zeros(SLOTS, modules * RANK, sum(outputs))
        for module, width in enumerate(outputs):
            column = sum(outputs[:module])
            own = torch.randn(SLOTS, RANK, width, generator=generator)
            b[:, module * RANK : (module + 1) * RANK, column : column + width] = own
        y = torch.randn(tokens, sum(outputs) + 16, generator=generator)
        return cls(wide[:, :ins], y[:, : sum(outputs)], a, b, tiles, outputs)

    def arguments(self, slots: list[int]) -> tuple[TokenTiles, Tensor, tuple[int, ...]]:
        order, tiles = plan_token_tiles(np.array(slots), SLOTS, ROWS_TOGETHER)
        return (
            TokenTiles(torch.from_numpy(order), torch.from_numpy(tiles), ROWS_TOGETHER),
            self.slot_tiles,
            self.outputs,
        )


@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.parametrize("slots", [[0], [2, -1, 2], [1, 1, 1, 1, 1, 1, 0], [4, 3, 0, 4, -1, 2, 0, 0, 3, 0, 0, 4, 1]])
def test_equals_the_reference(modules: int, slots: list[int]):
    problem = Problem.make(len(slots), modules)
    arguments = problem.arguments(slots)
    expected, actual = problem.y.clone(), problem.y
    before = actual.clone()
    lora_rows_reference(problem.x, expected, problem.a, problem.b, *arguments)
    lora_rows(problem.x, actual, problem.a, problem.b, *arguments)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-5)
    untouched = [i for i, slot in enumerate(slots) if slot in (-1, 3)]
    assert torch.equal(actual[untouched], before[untouched])
    touched = [i for i, slot in enumerate(slots) if slot not in (-1, 3)]
    assert (actual[touched] - before[touched]).abs().max() > 1


def test_a_token_does_not_depend_on_who_shares_its_adapter():
    problem = Problem.make(7, 3)
    together, alone = problem.y.clone(), problem.y.clone()
    lora_rows(problem.x, together, problem.a, problem.b, *problem.arguments([2] * 7))
    for token in range(7):
        slots = [2 if i == token else -1 for i in range(7)]
        lora_rows(problem.x, alone, problem.a, problem.b, *problem.arguments(slots))
    assert torch.equal(together, alone)


@pytest.mark.parametrize(("ins", "outputs"), [(62, (96,)), (64, (40,))])
def test_odd_sizes_are_computed_too(ins: int, outputs: tuple[int, ...]):
    problem = Problem.make(3, 1, ins, outputs)
    expected = problem.y.clone()
    arguments = problem.arguments([0, 1, 0])
    lora_rows_reference(problem.x, expected, problem.a, problem.b, *arguments)
    lora_rows(problem.x, problem.y, problem.a, problem.b, *arguments)
    torch.testing.assert_close(problem.y, expected, atol=1e-4, rtol=0)
