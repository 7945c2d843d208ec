"""int8 weights in a model: what is replaced, how close it stays to fp32, and that neighbours change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from forkkv.config import EngineConfig, ModelConfig
from forkkv.errors import ConfigError
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.models.layers import FusedLinear, TiedHead
from forkkv.models.quantization import Int8Linear, quantize_linears
from forkkv_kernels.cpu.int8_format import MAX_DEPTH, dequantize
from tests.models.factory import make_adapter, make_model
from tests.models.plans import Driver, Seq, make_runner

LENGTH = 70
TOLERANCE = 1e-3
"""Log-probs of the same int8 model in different batches: attention rounds differently, matrices do not."""
TOKENS = torch.randint(3, 512, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = 1
"""A token that is not among them."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with weights small enough that 8 bits are enough, and an adapter for it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", request.param, tied=request.param != "qwen3")
    return model, make_adapter(folder / "adapter", model, rank=8)


def driver(folders: tuple[Path, Path], quantized: bool = True) -> Driver:
    runner = make_runner(folders[0], [folders[1]])
    if quantized:
        quantize_linears(runner.model)
    made = Driver(runner)
    made.load(0, 1)
    return made


def kl(exact: Tensor, other: Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum())


def test_every_matrix_is_replaced_and_the_lookup_is_not(folders: tuple[Path, Path]) -> None:
    model = make_runner(folders[0]).model
    before = model.embedding.clone()
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, FusedLinear | TiedHead))
    num_bytes = quantize_linears(model)
    assert not [m for m in model.modules() if isinstance(m, FusedLinear | TiedHead)]
    assert len([m for m in model.modules() if isinstance(m, Int8Linear)]) == 4 * len(model.layers) + 1
    assert torch.equal(model.embedding, before)
    assert matrices <= num_bytes < 1.3 * matrices


def test_an_int8_linear_is_its_dequantized_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 64, generator=generator) for n in (48, 16)]
    biases = [torch.randn(n, generator=generator) for n in (48, 16)]
    box = torch.nn.ModuleDict({"x": FusedLinear(weights, biases), "head": TiedHead(torch.nn.Parameter(weights[0]))})
    quantize_linears(box)
    x = torch.randn(5, 64, generator=generator)
    for name, bias in (("x", torch.cat(biases)), ("head", torch.zeros(48))):
        linear = box[name]
        assert isinstance(linear, Int8Linear)
        expected = x @ dequantize(linear.packed).t() + bias
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=2e-3)
        assert linear(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("adapter_id", [0, 1])
def test_stays_close_to_fp32(folders: tuple[Path, Path], adapter_id: int) -> None:
    """Random matrices lose more than trained ones; what is held here is that nothing is wrong, such as a scale."""
    fork = 0 if adapter_id else None
    exact, close = (
        driver(folders, quantized).run(Seq("a", TOKENS, adapter_id, fork=fork), (LENGTH - 1, LENGTH))
        for quantized in (False, True)
    )
    for position, expected in exact.items():
        assert 0 < kl(expected, close[position]) < 0.05


def test_a_step_cut_into_chunks_gives_the_same(folders: tuple[Path, Path]) -> None:
    ends = (8, 24, 45, *range(LENGTH - 8, LENGTH + 1))
    chunked = driver(folders).run(Seq("a", TOKENS, 1, fork=40), ends)
    whole = driver(folders).run(Seq("a", TOKENS, 1, fork=40), (LENGTH,))
    torch.testing.assert_close(chunked[LENGTH - 1], whole[LENGTH - 1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("loudness", [1.0, 30.0])
def test_a_neighbour_changes_nothing(folders: tuple[Path, Path], loudness: float) -> None:
    """The neighbour's embeddings, and with them its residual stream, are `loudness` times as large."""
    alone = driver(folders).run(Seq("a", TOKENS, 1, fork=0), (LENGTH - 1, LENGTH))
    both = driver(folders)
    both.runner.model.embedding.data[OTHER] *= loudness
    a, b = Seq("a", TOKENS, 1, fork=0), Seq("b", [OTHER] * LENGTH)
    for position in (LENGTH - 1, LENGTH):
        result = both.together([(b, position), (a, position)])
        torch.testing.assert_close(result["a"], alone[position - 1], rtol=0, atol=TOLERANCE)


def test_the_flag_reaches_the_model(folders: tuple[Path, Path]) -> None:
    for quantization, kind in (("none", FusedLinear), ("int8", Int8Linear)):
        model = ModelConfig(str(folders[0]), quantization=quantization, max_model_len=64, device="cpu")
        executor = UniprocExecutor(EngineConfig(model), progress=False)
        assert isinstance(executor.model.head, kind)


def test_refuses_what_it_cannot_do() -> None:
    box = torch.nn.ModuleDict({"wide": FusedLinear([torch.zeros(2, MAX_DEPTH + 1)])})
    with pytest.raises(ConfigError, match=str(MAX_DEPTH)):
        quantize_linears(box)
    meta = torch.nn.ModuleDict({"x": FusedLinear([torch.zeros(2, 4, device="meta")])})
    with pytest.raises(ConfigError, match="CPU"):
        quantize_linears(meta)
