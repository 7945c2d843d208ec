"""Decode steps in fixed buffers, replayed: the same logits as the plain path, one capture per padded size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forkkv.attention.batch import ForwardBatch
from forkkv.executor.batch_builder import build_batch
from forkkv.executor.graphs import CaptureStrategy, CudaCapture, DecodeGraphs, EagerReplay, padded_sizes
from forkkv.executor.runner import ModelRunner
from forkkv.models.quantization import quantize_linears
from forkkv.types import SharedPrefix, StepPlan
from tests.models.factory import ALL_MODULES, make_adapter, make_model
from tests.models.plans import Driver, Seq, make_runner

BLOCK, FORK, PROMPT = 8, 16, 19
TOKENS = torch.randint(3, 500, (8, 40), generator=torch.Generator().manual_seed(3)).tolist()
"""Rows of prompts; the first `FORK` tokens of all are those of row 0."""


class Compared:
    """A runner whose decode steps run twice, plainly and by graphs, with the largest difference of their logits."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        backend: str = "triton",
        strategy: CaptureStrategy | None = None,
        quantize: bool = False,
    ) -> None:
        """The graphs are those of GPUs, run eagerly, unless another `strategy` is given."""
        adapters = [folder / name for name in ("qkvo", "all", "wide")]
        self.runner = make_runner(folder / "model", adapters, block_size=BLOCK, backend=backend, max_model_len=64)
        if quantize:
            quantize_linears(self.runner.model)
        self.graphs = DecodeGraphs(
            self.runner.model,
            self.runner.cache,
            self.runner.backend,
            self.runner.lora,
            max_num_seqs=6,
            max_model_len=64,
            strategy=strategy or EagerReplay(),
        )
        self.driver = Driver(self.runner)
        self.worst = 0.0
        self.replayed: list[int] = []
        monkeypatch.setattr(self.runner, "_forward", self._forward)

    def _forward(self, plan: StepPlan) -> Tensor:
        runner = self.runner
        batch = build_batch(plan.segments, plan.groups, runner.table, runner.block_size, runner.model.device)
        logits = runner.model(batch, runner.cache, runner.backend, runner.lora)
        if self.graphs.accepts(batch):
            before = stored(runner, batch)
            erase(runner, batch)
            replayed = self.graphs.run(batch)
            self.worst = max(self.worst, float((replayed - logits).abs().max()))
            torch.testing.assert_close(stored(runner, batch), before, rtol=1e-5, atol=1e-5)
            self.replayed.append(batch.num_tokens)
        return logits


def stored(runner: ModelRunner, batch: ForwardBatch) -> Tensor:
    """K and V [L, 2, tokens, Hkv, D] that the step stored."""
    return torch.stack([pool.flatten(1, 2)[:, batch.kv_slots] for pool in (runner.cache.k, runner.cache.v)], dim=1)


def erase(runner: ModelRunner, batch: ForwardBatch) -> None:
    for pool in (runner.cache.k, runner.cache.v):
        pool.flatten(1, 2)[:, batch.kv_slots] = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("graphs")
    model = make_model(root / "model", hidden=32, heads=4, kv_heads=2, intermediate=48, max_position=128)
    make_adapter(root / "qkvo", model, rank=8, seed=1, b_std=0.2)
    make_adapter(root / "all", model, rank=5, targets=ALL_MODULES, seed=2, b_std=0.2)
    make_adapter(root / "wide", model, rank=33, seed=3)
    return root


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Compared]:
    return lambda: Compared(folder, monkeypatch)


def sequence(name: str, row: int, adapter: int, shared: Seq | None = None) -> Seq:
    """A prompt of `PROMPT` tokens, further tokens being teacher-forced; on the base blocks of `shared`."""
    seq = Seq(name, TOKENS[0][:FORK] + TOKENS[row][FORK:], adapter, fork=FORK if adapter else None)
    if shared is not None:
        seq.kv_blocks = shared.kv_blocks[: FORK // BLOCK]
        seq.stored = FORK
    return seq


def a_document_and_its_agents(driver: Driver) -> list[Seq]:
    """A base row and four on its document, with the adapters 3, 1, 1 and none, in slots 0 and 1; prompts are run."""
    driver.load(0, 3)
    driver.load(1, 1)
    first = sequence("first", 0, 0)
    driver.run(first, (PROMPT,))
    agents = [sequence(f"agent{i}", i + 1, adapter, first) for i, adapter in enumerate((3, 1, 1, 0))]
    for agent in agents:
        driver.run(agent, (PROMPT,))
    return [first, *agents]


def test_padded_sizes() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(6) == (1, 2, 4, 6)
    assert padded_sizes(64) == (1, 2, 4, 8, 16, 32, 64)


def test_replay_equals_the_plain_path(make: Callable[[], Compared]) -> None:
    """Sizes with and without padding, base and adapter rows, other adapters in the slots, rows that share a document
    and rows that do not: logits and what was stored agree, and every size is captured once."""
    world = make()
    driver = world.driver
    everyone = first, *agents = a_document_and_its_agents(driver)
    shared = FORK // BLOCK
    end = PROMPT + 1
    for count, groups in (
        (5, (SharedPrefix(shared, (0, 1, 2, 3, 4)),)),
        (4, (SharedPrefix(shared, (1, 3)), SharedPrefix(shared, (0, 2)))),
        (1, ()),
        (3, ()),
        (2, (SharedPrefix(shared, (0, 1)),)),
    ):
        driver.together([(seq, seq.computed + 1) for seq in everyone[:count]], groups)
    assert end == PROMPT + 1 and world.replayed == [5, 4, 1, 3, 2]
    assert world.graphs.captures == len(world.graphs.sizes) == 4
    # Another adapter in a slot, and rows in another order.
    driver.load(1, 2)
    late = sequence("late", 6, 2, first)
    driver.run(late, (PROMPT,))
    driver.together([(late, PROMPT + 1), (agents[0], agents[0].computed + 1), (first, first.computed + 1)])
    assert world.graphs.captures == 4, "adapters and groups are data"
    assert world.worst < 1e-4


def test_larger_ranks_capture_again(make: Callable[[], Compared]) -> None:
    """A larger rank replaces the tensors of all slots, which a graph has fixed."""
    world = make()
    driver = world.driver
    base = sequence("base", 0, 0)
    driver.run(base, (PROMPT, PROMPT + 1))
    assert world.graphs.captures == 1
    driver.load(0, 1)
    agent = sequence("agent", 1, 1, base)
    driver.run(agent, (PROMPT, PROMPT + 1))
    assert world.graphs.captures == 2
    driver.load(1, 3)
    driver.together([(agent, PROMPT + 2), (base, PROMPT + 2)])
    driver.run(agent, (PROMPT + 3,))
    assert world.graphs.captures == 4
    assert world.worst < 1e-4 and world.replayed == [1, 1, 2, 1]


def test_capture_all_writes_nothing(make: Callable[[], Compared]) -> None:
    world = make()
    before = [pool.clone() for pool in (world.runner.cache.k, world.runner.cache.v)]
    world.graphs.capture_all()
    assert world.graphs.captures == len(world.graphs.sizes)
    for old, new in zip(before, (world.runner.cache.k, world.runner.cache.v), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    driver = world.driver
    base = sequence("base", 0, 0)
    driver.run(base, (PROMPT, PROMPT + 1))
    assert world.graphs.captures == len(world.graphs.sizes) and world.worst < 1e-4


def test_prefill_steps_are_not_taken(make: Callable[[], Compared]) -> None:
    world = make()
    base, other = sequence("base", 0, 0), sequence("other", 1, 0)
    world.driver.run(base, (PROMPT,))
    world.driver.together([(base, PROMPT + 1), (other, PROMPT)])
    assert world.replayed == [] and world.graphs.captures == 0


@pytest.mark.gpu
def test_cuda_graph_of_a_function() -> None:
    """The capture strategy by itself: the graph reads what is in the memory when it is replayed."""
    x = torch.ones(4, device="cuda")
    replay = CudaCapture().capture(lambda: x * 2 + 1)
    x.copy_(torch.arange(4.0))
    assert replay().tolist() == [1.0, 3.0, 5.0, 7.0]
