"""The whole engine with the Triton attention backend, interpreted, against the PyTorch backend."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig, SchedulerConfig
from forkkv.engine.core import EngineCore
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import KVSharing
from tests.e2e.harness import Ask, Completions, run_all
from tests.models.factory import make_adapter, make_model

BLOCK = 16
DOCUMENT = tuple(torch.randint(3, 250, (53,), generator=torch.Generator().manual_seed(1)).tolist())
FORK = len(DOCUMENT) // BLOCK * BLOCK
ASKS = (
    Ask("base", (*DOCUMENT, 7, 8), max_tokens=4),
    Ask("fork8", (*DOCUMENT, 9, 10, 11), "fork8", fork_at=FORK, max_tokens=4),
    Ask("fork20", (*DOCUMENT, 12), "fork20", fork_at=FORK, max_tokens=4, n=2),
    Ask("private", (*DOCUMENT[:20], 13), "fork8", kv_sharing="none", max_tokens=3),
)


def run_engine(folder: Path, backend: Literal["torch", "triton"], mode: KVSharing) -> tuple[Completions, str]:
    """Completions of all requests at once, and the name of the backend that served them."""
    names = ("fork8", "fork20")
    config = EngineConfig(
        model=ModelConfig(str(folder / "model"), dtype="float32", device="cpu", attention_backend=backend),
        cache=CacheConfig(block_size=BLOCK, memory_bytes=2 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, kv_sharing=mode),
        lora=LoRAConfig(modules=tuple(LoRAModule(name, str(folder / name)) for name in names)),
    )
    executor = UniprocExecutor(config, progress=False, poison=True)
    core = EngineCore(config, executor, debug_checks=True)
    return run_all(core, ASKS), executor.backend.name


@pytest.mark.parametrize(("arch", "mode"), [("llama", "auto"), ("qwen3", "auto"), ("qwen3", "first-writer")])
def test_same_log_probs(arch: str, mode: KVSharing, tmp_path: Path) -> None:
    """Prefill and decode of base, sharing and private requests, several in one step, ranks 8 and 20; under
    first-writer with residuals that end inside a block."""
    torch.set_num_threads(1)
    model = make_model(tmp_path / "model", arch, hidden=32, heads=4, kv_heads=2, intermediate=48, vocab=256)
    make_adapter(tmp_path / "fork8", model, rank=8, kind="fork", seed=1, b_std=0.2)
    make_adapter(tmp_path / "fork20", model, rank=20, kind="fork", seed=2, targets=("q_proj", "k_proj", "v_proj"))
    expected, _ = run_engine(tmp_path, "torch", mode)
    got, name = run_engine(tmp_path, "triton", mode)
    assert name == "triton"
    for key, completion in expected.items():
        other = got[key]
        assert other.error is None and other.token_ids == completion.token_ids, key
        assert other.usage == completion.usage
        for a, b in zip(completion.logprobs, other.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-3, key
            assert {t for t, _ in a.top} == {t for t, _ in b.top}
            assert max(abs(dict(b.top)[t] - value) for t, value in a.top) < 1e-3
