"""Decode steps as programs of the CPU's kernels: logits of the plain path, one recording per number of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forkkv.executor.graphs import CpuCapture
from forkkv.types import SharedPrefix
from tests.kernels.test_decode_graphs import BLOCK, FORK, PROMPT, Compared, a_document_and_its_agents, sequence
from tests.models.factory import ALL_MODULES, make_adapter, make_model

pytest.importorskip("numba")
Make = Callable[..., Compared]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    found = {}
    for arch in ("llama", "qwen2", "qwen3"):
        root = found[arch] = tmp_path_factory.mktemp(arch)
        model = make_model(root / "model", arch, head_dim=32, intermediate=96, max_position=128)
        make_adapter(root / "qkvo", model, rank=8, seed=1, b_std=0.2)
        make_adapter(root / "all", model, rank=5, targets=ALL_MODULES, seed=2, b_std=0.2)
        make_adapter(root / "wide", model, rank=33, seed=3)
    return found


@pytest.fixture
def make(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda arch, **options: Compared(folders[arch], monkeypatch, "cpu", CpuCapture(), **options)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_replay_equals_the_plain_path(make: Make, arch: str, quantize: bool) -> None:
    """Base and adapter rows, rows that share a document and rows that do not, longer contexts and other adapters in
    the slots in later runs of the same program."""
    world = make(arch, quantize=quantize)
    driver = world.driver
    everyone = first, *agents = a_document_and_its_agents(driver)
    shared = FORK // BLOCK
    for count, groups in (
        (5, (SharedPrefix(shared, (0, 1, 2, 3, 4)),)),
        (5, (SharedPrefix(shared, (1, 3)), SharedPrefix(shared, (0, 2)))),
        (1, ()),
        (5, ()),
        (1, ()),
        (3, (SharedPrefix(shared, (0, 1)),)),
    ):
        driver.together([(seq, seq.computed + 1) for seq in everyone[:count]], groups)
    assert world.replayed == [5, 5, 1, 5, 1, 3] and world.graphs.captures == 3
    driver.load(1, 2)
    late = sequence("late", 6, 2, first)
    driver.run(late, (PROMPT,))
    rows = [(late, PROMPT + 1), (agents[0], agents[0].computed + 1), (first, first.computed + 1)]
    driver.together(rows, (SharedPrefix(shared, (0, 1, 2)),))
    for _ in range(BLOCK + 1):  # into another block
        driver.run(agents[0], (agents[0].computed + 1,))
    assert world.graphs.captures == 3, "adapters, groups and lengths are data"
    assert world.worst < 1e-4


def test_larger_ranks_record_again(make: Make) -> None:
    world = make("llama")
    driver = world.driver
    base = sequence("base", 0, 0)
    driver.run(base, (PROMPT, PROMPT + 1, PROMPT + 2))
    assert world.graphs.captures == 1
    driver.load(0, 1)
    agent = sequence("agent", 1, 1, base)
    driver.run(agent, (PROMPT, PROMPT + 1, PROMPT + 2))
    assert world.graphs.captures == 2
    driver.load(1, 3)
    driver.together([(agent, PROMPT + 3), (base, PROMPT + 3)])
    driver.run(agent, (PROMPT + 4, PROMPT + 5))
    assert world.graphs.captures == 4
    assert world.worst < 1e-4 and len(world.replayed) == 7
