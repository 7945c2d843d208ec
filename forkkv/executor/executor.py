"""What the engine core asks of an executor. The scheduler never sees it; they meet only in `engine.core`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forkkv.kvcache.spec import CacheSpec
from forkkv.types import AdapterMeta, AdapterReport, Divergence, StepPlan, StepResult


class Executor(Protocol):
    """Owns the device: weights, adapters, cache tensors. Knows nothing of trees, leases or policies."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    quantization: str
    cache_spec: CacheSpec
    adapters: tuple[AdapterMeta, ...]
    """Loaded adapters with final ids (1, 2, ...) in the order of the configuration."""
    reports: tuple[AdapterReport, ...]

    def cache_memory_bytes(self) -> int:
        """Bytes that the two pools may take on this device, after weights and a working reserve."""
        ...

    def compare(
        self, plan: StepPlan, pairs: Sequence[tuple[str, str]], num_kv_blocks: int, num_residual_units: int
    ) -> list[Divergence]:
        """Run `plan` on a cache of its own, of that many blocks and units, and compare sequences in pairs (reference,
        other): the distributions after every token of their segments that sample, which must be as many. Called before
        `allocate_cache`; of what `execute` sees only the adapter slots change. Runs the whole plan in one pass."""
        ...

    def allocate_cache(self, num_kv_blocks: int, num_residual_units: int) -> None:
        """Create the cache tensors; called once, before the first `execute`. Id 0 of each pool is the null id."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: forget dropped sequences, take new ones and table updates, copies, adapter loads, then the
        forward pass and sampling. Mutates the cache tensors and the executor's tables. An exception means the whole
        step failed; sequences of a failed step come back as `NewSequence`."""
        ...
