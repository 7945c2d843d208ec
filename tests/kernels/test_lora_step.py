"""Steps whose adapters, rotation and cache writes run through the kernels, interpreted, against the matrix products of
the CPU path on the same plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forkkv.lora.tensors import KernelLoRAStep, LoRATensors, module_tiles, static_lora_step
from forkkv.lora.weights import AdapterWeights
from forkkv_kernels import implementations, ops
from forkkv_kernels.triton import lora, rope
from tests.models.factory import ALL_MODULES, load_model, make_adapter, make_model
from tests.models.plans import Driver, Seq, make_runner

TOKENS = torch.randint(3, 512, (44,), generator=torch.Generator().manual_seed(3)).tolist()
ADAPTERS = (
    {"rank": 8},
    {"rank": 5, "targets": ALL_MODULES},
    {"rank": 33, "targets": ALL_MODULES, "b_std": 0.02},
    {"rank": 8, "targets": ("k_proj",), "b_std": 0.2},
    {"rank": 20, "targets": ("v_proj",), "layers": (1,)},
)
KERNELS: dict[str, Callable[..., object]] = {
    "lora_shrink": lora.lora_shrink,
    "lora_expand": lora.lora_expand,
    "residual_shrink_write": lora.residual_shrink_write,
    "rope_cache_write": rope.rope_cache_write,
}
Folders = tuple[Path, list[Path]]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", request.param)
    config = load_model(model).config
    return model, [make_adapter(folder / str(i), config, seed=i, **settings) for i, settings in enumerate(ADAPTERS)]


@pytest.fixture(params=["kernels", "reference"])
def fast_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and CPU tensors go through the kernels, or through their references by the same tables."""
    chosen = KERNELS if request.param == "kernels" else implementations.REFERENCE
    yield (
        lambda: (
            [monkeypatch.setitem(implementations.REGISTERED, (name, "cpu"), op) for name, op in chosen.items()] and None
        )
    )


def run_steps(folders: Folders) -> tuple[list[Tensor], list[Tensor], AdapterWeights]:
    """Log-probs after every row, the cache, and the adapters: a base prefill with fan-out, then adapters prefill their
    suffixes and decode together with a base row."""
    driver = Driver(make_runner(*folders))
    for slot in range(len(ADAPTERS)):
        driver.load(slot, slot + 1)
    first = Seq("base", TOKENS)
    writes = [driver.write_for(i + 1, 0, 24) for i in range(len(ADAPTERS))]
    results = [driver.logprobs(driver.execute(driver.segments(first, 26, writes)), first)]
    seqs = [first]
    for i, write in enumerate(writes):
        seq = Seq(f"a{i}", TOKENS, i + 1, fork=24)
        seq.kv_blocks, seq.computed, seq.stored, seq.residual_stored = first.kv_blocks[:3], 24, 24, 24
        seq.k_units, seq.v_units = list(write.k_units), list(write.v_units)
        seqs.append(seq)
    late = Seq("late", TOKENS, 2, fork=16)
    late.kv_blocks, late.stored = first.kv_blocks[:2], 16
    for end in (38, 39, 40):
        rows = [(seq, end) for seq in seqs] + ([(late, end)] if end > 38 else [])
        results.extend(driver.together(rows).values())
    cache = driver.runner.cache
    written = [cache.k, cache.v, cache.residual, cache.k_rms, cache.residual_rms]
    return results, [tensor for tensor in written if tensor is not None], driver.runner.lora


def test_step_equals_the_cpu_path(folders: Folders, fast_ops: Callable[[], None]) -> None:
    expected, expected_cache, _ = run_steps(folders)
    fast_ops()
    assert ops.has_lora_kernels("cpu")
    actual, cache, _ = run_steps(folders)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> AdapterWeights:
    folder = tmp_path_factory.mktemp("weights")
    model = make_model(folder / "model", "llama")
    config = load_model(model).config
    adapters = [make_adapter(folder / str(i), config, seed=i, **settings) for i, settings in enumerate(ADAPTERS)]
    loaded = make_runner(model, adapters).lora
    for slot in range(len(ADAPTERS)):
        loaded.load(slot, slot + 1)
    return loaded


def test_static_step_runs_any_distribution_in_the_same_tensors(weights: AdapterWeights) -> None:
    """What a captured graph sees: the same addresses and shapes, with other contents."""
    tensors = LoRATensors(weights, 6, torch.device("cpu"))
    step: KernelLoRAStep = static_lora_step(weights, tensors)
    before = [tensors.packed.data_ptr(), *(part.data_ptr() for part in tensors.slot_tiles.values())]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, weights.spec.hidden_size, generator=generator)
    for slots in ([0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, -1], [-1] * 6, [2, -1, 2, 1, -1, -1]):
        tensors.fill(np.array(slots))
        y = torch.zeros(6, sum(tensors.outputs["qkv"]))
        step.apply(1, "qkv", x, y)
        for token, slot in enumerate(slots):
            a, b = weights.a["qkv"][1][:, slot], weights.b["qkv"][1][slot]
            expected = x[token] @ a @ b if slot >= 0 else torch.zeros_like(y[token])
            torch.testing.assert_close(y[token], expected, rtol=1e-4, atol=1e-5)
    assert before == [tensors.packed.data_ptr(), *(part.data_ptr() for part in tensors.slot_tiles.values())]


def test_parts_of_the_packed_tensor_are_aligned(weights: AdapterWeights) -> None:
    """Kernels are compiled for pointers that are multiples of 16 bytes."""
    for num_tokens in (1, 3, 17, 300):
        tensors = LoRATensors(weights, num_tokens, torch.device("cpu"))
        parts = [tensors.tokens.order, tensors.tokens.tiles, *tensors.slot_tiles.values()]
        assert all((part.data_ptr() - tensors.packed.data_ptr()) % 16 == 0 for part in parts)


def test_tiles_of_modules(weights: AdapterWeights) -> None:
    assert module_tiles(weights, 3) == {"qkv": (3, 3, 3), "o": (3,), "gate_up": (3, 3), "down": (3,)}
    assert module_tiles(weights, 4) == {"qkv": (0, 1, 0), "o": (0,), "gate_up": (0, 0), "down": (0,)}


def test_fill_refuses_empty_slots_and_other_lengths(weights: AdapterWeights) -> None:
    tensors = LoRATensors(weights, 3, torch.device("cpu"))
    with pytest.raises(KeyError, match="no adapter in slot 7"):
        tensors.fill(np.array([0, 7, -1]))
    with pytest.raises(ValueError, match="4 tokens"):
        tensors.fill(np.array([0, 0, 0, 0]))
