"""Tiny random models with adapters, and the checked engine that runs them. Shared by the end-to-end tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig, SchedulerConfig
from forkkv.engine.core import EngineCore
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import KVSharing
from tests.e2e.harness import KnownAdapter, Reference
from tests.models.factory import load_model, make_adapter, make_model

ARCHS = ("llama", "qwen2", "qwen3")
INVOCATION = (501, 502)
BLOCK = 16
TOLERANCE = 1e-3
FORK_TAIL = 32


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(token) for token in torch.randint(3, 500, (count,), generator=generator))


@dataclass
class TinyWorld:
    """A tiny model, its adapters, and the oracle's view of both."""

    model_folder: Path
    adapter_folders: dict[str, Path]
    model: Any
    known: dict[str, KnownAdapter]
    rows: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, root: Path, arch: str, adapters: Mapping[str, dict[str, Any]]) -> Self:
        """Write model and adapters (options of `make_adapter`) below `root`."""
        model = make_model(root / "model", arch, head_dim=32)
        folders = {
            name: make_adapter(root / name, model, seed=seed, **options)
            for seed, (name, options) in enumerate(adapters.items(), start=1)
        }
        known = {
            name: KnownAdapter.read(folders[name], options.get("kind", "plain"), options.get("invocation_tokens", ()))
            for name, options in adapters.items()
        }
        return cls(model, folders, load_model(model), known)

    def reference(self, mode: str) -> Reference:
        """What requests must answer under `mode`."""
        return Reference(self.model, self.known, mode=mode, block_size=BLOCK, fork_tail=FORK_TAIL, rows=self.rows)

    def core(
        self,
        mode: KVSharing,
        *,
        budget: int = 512,
        max_loras: int = 8,
        seqs: int = 16,
        reuse: bool = True,
        backend: str = "auto",
        **pools: int,
    ) -> EngineCore:
        """A checked engine whose cache is NaN until written. `pools`: num_kv_blocks, num_residual_units."""
        modules = tuple(LoRAModule(name, str(folder)) for name, folder in self.adapter_folders.items())
        config = EngineConfig(
            model=ModelConfig(str(self.model_folder), dtype="float32", device="cpu", attention_backend=backend),  # type: ignore[arg-type]
            cache=CacheConfig(block_size=BLOCK, memory_bytes=64 << 20, enable_dual_radix_tree=reuse, **pools),
            scheduler=SchedulerConfig(
                max_num_seqs=seqs, max_num_batched_tokens=budget, kv_sharing=mode, fork_tail=FORK_TAIL
            ),
            lora=LoRAConfig(modules=modules, max_loras=max_loras),
        )
        return EngineCore(config, UniprocExecutor(config, progress=False, poison=True), debug_checks=True)


def assert_clean(core: EngineCore, failed_steps: int = 0) -> None:
    """After a flush nothing is leased or lost, and no other steps failed than were meant to."""
    assert core.flush_cache()
    stats = core.stats()
    assert stats.leases == 0 and stats.failed_steps_total == failed_steps
    assert stats.kv_pool.free == stats.kv_pool.total and stats.residual_pool.free == stats.residual_pool.total
