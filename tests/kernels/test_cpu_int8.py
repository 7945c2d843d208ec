"""The int8 products against their reference: the same bits for every shape, row count and instruction."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forkkv_kernels.cpu import int8
from forkkv_kernels.cpu.int8_format import (
    LIMIT,
    MAX_DEPTH,
    Int8Weight,
    dequantize,
    int8_linear_reference,
    pack,
    quantize_channels,
    split_rows,
    unpack,
)

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(64, 48), (576, 960), (1536, 576), (60, 50), (1, 1), (130, 33)]
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 100)


def make_weight(ins: int, outs: int, bias: bool = True, seed: int = 0) -> Int8Weight:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(outs, ins, generator=generator) * torch.rand(outs, 1, generator=generator)
    return pack(matrix, torch.randn(outs, generator=generator) if bias else None)


def make_rows(rows: int, ins: int, seed: int = 1) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, ins, generator=generator) * 10 ** (4 * torch.rand(rows, 1, generator=generator) - 2)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.fixture(params=["dot products", "tiles"])
def use_tiles(request: pytest.FixtureRequest) -> bool:
    if request.param == "tiles" and not int8.have_tiles():
        pytest.skip("this CPU has no AMX")
    return request.param == "tiles"


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_equals_the_reference(ins: int, outs: int, use_tiles: bool) -> None:
    weight = make_weight(ins, outs, bias=outs != 48)
    for rows in ROWS:
        x = make_rows(rows, ins)
        result = int8.int8_linear(x, weight, use_tiles)
        assert same_bits(result, int8_linear_reference(x, weight)), rows


def test_a_row_is_the_same_among_any_others(use_tiles: bool) -> None:
    """A neighbour 30 times as large, and any row count, on either side of every switch between kernels."""
    weight, x = make_weight(576, 320), make_rows(40, 576)
    alone = torch.cat([int8.int8_linear(x[i : i + 1], weight, use_tiles) for i in range(len(x))])
    for cuts in ([0, 40], [0, 1, 9, 17, 40], [0, 2, 3, 7, 15, 31, 40]):
        parts = [int8.int8_linear(x[a:b], weight, use_tiles) for a, b in itertools.pairwise(cuts)]
        assert same_bits(torch.cat(parts), alone)
    loud = torch.cat([x[:5], 30 * x.abs().max() * torch.ones(4, 576)])
    assert same_bits(int8.int8_linear(loud, weight, use_tiles)[:5], alone[:5])


def test_long_inputs_go_in_chunks(use_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_CHUNK_BYTES", 1)
    weight, x = make_weight(128, 70), make_rows(200, 128)
    assert same_bits(int8.int8_linear(x, weight, use_tiles), int8_linear_reference(x, weight))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads(threads: int) -> None:
    weight, before = make_weight(320, 200), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 2, 6, 100):
            x = make_rows(rows, 320)
            assert same_bits(int8.int8_linear(x, weight), int8_linear_reference(x, weight))
    finally:
        torch.set_num_threads(before)


def test_leaves_the_tiles_of_pytorch_alone() -> None:
    """oneDNN multiplies bfloat16 with the same tile registers, in the same threads."""
    weight, x = make_weight(576, 320), make_rows(64, 576)
    a, b = make_rows(96, 256).bfloat16(), make_rows(256, 200, seed=2).bfloat16()
    product, expected = torch.mm(a, b), int8_linear_reference(x, weight)
    for _ in range(5):
        assert same_bits(int8.int8_linear(x, weight), expected)
        assert torch.equal(torch.mm(a, b), product)


def test_works_without_an_openmp_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for kernel in int8.kernels():
        monkeypatch.setattr(kernel, "_fork", None)
    weight = make_weight(320, 200)
    for rows in (3, 50):
        x = make_rows(rows, 320)
        assert same_bits(int8.int8_linear(x, weight), int8_linear_reference(x, weight))


def test_is_as_good_as_weights_alone() -> None:
    """Against float64 with the dequantized weights: the 24-bit activations add next to nothing."""
    weight, x = make_weight(1536, 200, bias=False), make_rows(20, 1536)
    exact = x.double() @ dequantize(weight).double().t()
    error = (int8.int8_linear(x, weight).double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 2e-6


def test_extreme_sums_do_not_overflow() -> None:
    """All codes and digits at their limits, at a depth where int32 is nearly used up."""
    ins = 60_000
    weight = pack(torch.ones(20, ins) * torch.tensor([1.0, -1.0]).repeat(10)[:, None])
    x = torch.stack([torch.ones(ins), -torch.ones(ins), torch.ones(ins) * 0.999])
    expected = x.double() @ dequantize(weight).double().t()
    assert torch.allclose(int8.int8_linear(x, weight).double(), expected, rtol=1e-5)
    assert torch.allclose(int8.int8_linear(x.repeat(6, 1), weight)[:3].double(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=str(MAX_DEPTH)):
        pack(torch.ones(1, MAX_DEPTH + 1))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_zeros_and_what_is_not_finite(rows: int) -> None:
    """A zero row gives the bias, one with inf or NaN gives NaN; the rows beside it are not touched."""
    weight, x = make_weight(100, 40), make_rows(rows + 3, 100)
    x[0], x[1, 7], x[2, 99] = 0, float("inf"), float("nan")
    result = int8.int8_linear(x, weight)
    assert torch.equal(result[0], weight.columns[1, :40])
    assert result[1:3].isnan().all()
    assert same_bits(result[3:], int8.int8_linear(x[3:], weight))


def test_neither_writes_behind_its_output() -> None:
    """Outputs whose width is no multiple of a vector: the last lanes are masked."""
    weight, x = make_weight(64, 37), make_rows(11, 64)
    guarded = torch.full((12, 37), 7.0)
    expected = int8_linear_reference(x, weight)
    for rows in (8, 11):
        out = int8.int8_linear(x[:rows], weight, out=guarded[:rows])
        assert same_bits(out, expected[:rows]) and (guarded[rows] == 7.0).all()


def test_accepts_views_and_other_types() -> None:
    weight, x = make_weight(64, 48), make_rows(6, 128)
    assert same_bits(int8.int8_linear(x[:, ::2], weight), int8.int8_linear(x[:, ::2].clone(), weight))
    half = x[:, :64].bfloat16()
    assert same_bits(int8.int8_linear(half, weight), int8.int8_linear(half.float(), weight))
    assert int8.int8_linear(x[:0, :64], weight).shape == (0, 48)


def test_packing_is_lossless() -> None:
    matrix = torch.randn(50, 70, generator=torch.Generator().manual_seed(3))
    codes, scales = quantize_channels(matrix)
    weight = pack(matrix)
    assert torch.equal(unpack(weight), codes)
    assert torch.equal(weight.columns[0, :50], scales)
    assert (dequantize(weight) - matrix).abs().max() <= scales.max() / 2 * 1.001
    assert codes.abs().amax(dim=1).eq(127).all()


def test_digits_stand_for_the_row() -> None:
    x = make_rows(9, 33)
    (high, middle, low), scale = split_rows(x)
    numbers = 65536 * high + 256 * middle + low
    assert (numbers.abs().amax(dim=1) == LIMIT).all()
    assert (numbers * scale[:, None].double() - x).abs().le(scale[:, None] * 1.1).all()


@pytest.mark.parametrize(
    ("features", "name"),
    [("-avx512vnni,-amx-int8", "two 256-bit halves"), ("-avx512vnni,-avxvnni,-amx-int8", "general operations")],
)
def test_other_cpus_give_the_same_bits(features: str, name: str, tmp_path: Path) -> None:
    """Code as for CPUs without some instructions, compiled in a process of its own; and that PyTorch's pool of threads
    stays the only one."""
    from llvmlite import binding

    enabled = binding.get_host_cpu_features()
    if not enabled.get("avxvnni"):
        pytest.skip("this CPU has no 256-bit dot products; the other tests ran what it has")
    for feature in features.split(","):
        enabled[feature[1:]] = False
    script = (
        "import sys, torch; sys.path[:0] = ['kernels', '.']\n"
        "from forkkv_kernels.cpu import int8\n"
        "from forkkv_kernels.cpu.int8_format import int8_linear_reference\n"
        "from tests.kernels.test_cpu_int8 import make_rows, make_weight, same_bits\n"
        "weight = make_weight(130, 50)\n"
        "assert not int8.have_tiles()\n"
        f"assert int8.compiled_for('avxvnni') == ('-avxvnni' not in {features!r})\n"
        "for rows in (1, 2, 8, 21):\n"
        "    x = make_rows(rows, 130)\n"
        "    assert same_bits(int8.int8_linear(x, weight), int8_linear_reference(x, weight)), rows\n"
        "libraries = {line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}\n"
        "assert len(libraries) <= 1, libraries\n"
        "print('same')\n"
    )
    environment = {
        "NUMBA_CPU_FEATURES": enabled.flatten(),
        "NUMBA_CPU_NAME": binding.get_host_cpu_name(),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr
