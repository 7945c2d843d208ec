"""Section "memory": bytes of both pools, eight adapters on one document, shared against private caches.

What is counted is what the eight sequences hold at their ends, each in its own last step: when a sequence finishes, its
full blocks stay cached and its last, partial one is freed, so the pools' figures afterwards lack up to one block a
sequence. They are compared too: full blocks must be all that is left.

A sequence with n prompt and g generated tokens holds K, V of n + g - 1 tokens, since the last token it generates never
runs through the model. The requirement's ceil((n - f + g) / block) is therefore one block more than what is held where
n - f + g - 1 happens to end a block, which the question lengths here avoid.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.lib.common import BLOCK, Engines, Line, Workspace
from forkkv.engine.core import EngineCore
from forkkv.types import StepPlan, StepResult
from tests.e2e.harness import Ask, run_all

SECTION = "memory"
NUM_ADAPTERS = 8
RANK = 16
GENERATED = 32
SHARES = {4000: 0.24, 2000: 0.26}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes at the end: shared and private K/V blocks, residual units, and the sum in bytes."""

    base_blocks: int
    private_blocks: int
    residual_units: int
    num_bytes: int


def run(work: Workspace) -> list[Line]:
    """Two lines for each length of the document."""
    adapters = {
        f"agent{i}": work.adapter(f"memory-{i}", rank=RANK, seed=40 + i, kind="fork") for i in range(NUM_ADAPTERS)
    }
    engines = Engines(adapters, quantization="auto")  # bytes of the caches do not depend on the weights
    lines: list[Line] = []
    for length in work.sizes(*SHARES):
        lines += _measure(work, engines, work.size(length), SHARES[length])
    return lines


def _measure(work: Workspace, engines: Engines, length: int, share: float) -> list[Line]:
    document = work.document(length, 3)
    shared = tuple(
        Ask(name, (*document, *work.question(index, 37 + index)), name, fork_at=length, max_tokens=GENERATED)
        for index, name in enumerate(engines.adapters)
    )
    private = tuple(Ask(ask.name, ask.prompt, ask.adapter, None, "none", max_tokens=GENERATED) for ask in shared)
    per_sequence = -(-max(len(ask.prompt) + GENERATED for ask in shared) // BLOCK)
    tiles = 2 * -(-RANK // 16)
    core = engines.core(
        "fork",
        num_kv_blocks=NUM_ADAPTERS * per_sequence + 2,
        num_residual_units=NUM_ADAPTERS * (length // BLOCK) * tiles + 2,
    )
    digests = {meta.digest for meta in core.info.adapters}
    assert len(digests) == NUM_ADAPTERS, "the adapters must be different"
    ours, alone = _held(core, shared), _held(core, private)
    formula = sum(-(-(len(ask.prompt) - length + GENERATED) // BLOCK) for ask in shared)
    ratio = ours.num_bytes / alone.num_bytes
    mib = (ours.num_bytes / 2**20, alone.num_bytes / 2**20)
    return [
        Line(
            SECTION,
            f"8 adapters, {length:,} shared tokens: pool bytes, fork over none",
            f"{ratio:.1%} ({mib[0]:.0f} of {mib[1]:.0f} MiB)",
            f"<= {share:.0%}",
            ratio <= share,
            ratio,
            {"base_blocks": ours.base_blocks, "residual_units": ours.residual_units},
        ),
        Line(
            SECTION,
            f"8 adapters, {length:,} shared tokens: private blocks",
            f"{ours.private_blocks}, shared {ours.base_blocks}",
            f"{formula}, shared {length // BLOCK}",
            ours.private_blocks == formula and ours.base_blocks == length // BLOCK,
            ours.private_blocks,
        ),
    ]


def _held(core: EngineCore, asks: tuple[Ask, ...]) -> Held:
    """Run `asks` together in an empty cache and add up what they hold. Raises `AssertionError` if the pools' own
    figures tell another story."""
    assert core.flush_cache()
    execute, last = core.executor.execute, {}

    def recorded(plan: StepPlan) -> StepResult:
        for sequence in core.scheduler.running:
            cache = sequence.cache
            last[sequence.request_id] = len(cache.kv_blocks) - cache.private_from // BLOCK
        return execute(plan)

    core.executor.execute = recorded  # type: ignore[method-assign]
    try:
        run_all(core, asks)
    finally:
        core.executor.execute = execute  # type: ignore[method-assign]
    stats = core.stats()
    assert stats.preemptions_total == 0 and stats.evicted_kv_blocks_total == 0, "the pools must hold everything"
    base, private = core.kv.tree.base.num_ids, sum(last.values())
    forks = {ask.name: ask.fork_at or 0 for ask in asks}
    full = sum((len(ask.prompt) - forks[ask.name] + ask.max_tokens - 1) // BLOCK for ask in asks)
    kv, residual = stats.kv_pool, stats.residual_pool
    assert kv.in_use + kv.cached == base + full, "K/V blocks outside the sequences' own and the shared ones"
    units = residual.in_use + residual.cached
    return Held(base, private, units, (base + private) * kv.block_bytes + units * residual.block_bytes)
