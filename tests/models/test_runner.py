"""The runner against the oracle: every kind of adapter, every way to cut the same tokens into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig
from forkkv.errors import ConfigError
from forkkv.executor.device import available_cache_bytes, choose_device, choose_dtype
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import BlockCopy, SamplingParams, SharedPrefix
from tests.models.factory import ALL_MODULES, load_model, make_adapter, make_model
from tests.models.plans import Driver, Seq, make_runner
from tests.oracle import oracle_logprobs, read_adapter

TOLERANCE = 1e-3
LENGTH, DECODED = 60, 6
TOKENS = torch.randint(3, 512, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
CHUNKED = (8, 24, 32, 45, *range(LENGTH - DECODED, LENGTH + 1))
"""Ends of steps; behind the last chunk one token a step."""
WHOLE = (LENGTH - DECODED, *range(LENGTH - DECODED + 1, LENGTH + 1))

ADAPTERS: dict[str, dict[str, Any]] = {
    "qkvo": {"rank": 8},
    "one": {"rank": 1, "alpha": 4, "targets": ("k_proj", "v_proj"), "b_std": 0.2},
    "five": {"rank": 5, "targets": ALL_MODULES},
    "wide": {"rank": 33, "targets": ALL_MODULES, "b_std": 0.02},
    "k_only": {"rank": 8, "targets": ("k_proj",), "b_std": 0.2},
    "v_only": {"rank": 20, "targets": ("v_proj",)},
    "mlp": {"rank": 4, "targets": ("gate_proj", "up_proj", "down_proj")},
    "second_layer": {"rank": 8, "layers": (1,)},
}
IDS = {name: i for i, name in enumerate(ADAPTERS, start=1)}


class World:
    """One model with all adapters on disk, and the oracle's answers."""

    def __init__(self, folder: Path, arch: str, **model: Any) -> None:
        self.model_folder = make_model(folder / "model", arch, **model)
        self.hf = load_model(self.model_folder)
        self.adapters = [
            make_adapter(folder / name, self.hf.config, seed=i, **settings)
            for i, (name, settings) in enumerate(ADAPTERS.items(), start=10)
        ]
        self._expected: dict[tuple[object, ...], Tensor] = {}

    def driver(self, backend: str = "torch", slots: Sequence[str] = tuple(ADAPTERS), **options: Any) -> Driver:
        driver = Driver(make_runner(self.model_folder, self.adapters, backend=backend, **options))
        for slot, name in enumerate(slots):
            driver.load(slot, IDS[name])
        return driver

    def expected(self, kind: str, name: str | None = None, f_w: int | None = None) -> Tensor:
        key = (kind, name, f_w)
        if key not in self._expected:
            adapter = read_adapter(self.adapters[IDS[name] - 1]) if name else None
            self._expected[key] = oracle_logprobs(self.hf, TOKENS, adapter, kind, f_w)  # type: ignore[arg-type]
        return self._expected[key]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("untied"), "llama", tied=False, heads=6, kv_heads=2, head_dim=16, hidden=96)


def make_seq(kind: str, name: str | None, fork: int = 24, label: str = "s", tokens: Sequence[int] = TOKENS) -> Seq:
    """Sequence of `kind` with its fork point; aLoRA's weights start 3 tokens into the private block."""
    adapter = IDS[name] if name else 0
    if kind == "base":
        return Seq(label, list(tokens))
    if kind == "plain":
        return Seq(label, list(tokens), adapter, fork=0)
    if kind == "fork":
        return Seq(label, list(tokens), adapter, fork=fork)
    return Seq(label, list(tokens), adapter, fork=fork, weights_from=fork + 3, reads=False)


def expected_for(world: World, kind: str, name: str | None, fork: int = 24) -> Tensor:
    return world.expected(kind, name, {"fork": fork, "alora": fork + 3}.get(kind))


def assert_close(got: dict[int, Tensor], expected: Tensor) -> None:
    for position, row in got.items():
        worst = (row - expected[position]).abs().max().item()
        assert worst < TOLERANCE, f"log-probs after token {position} differ by {worst}"


CASES = [("base", None), *((kind, "qkvo") for kind in ("plain", "fork", "alora"))]
CASES += [(kind, name) for name in ADAPTERS if name != "qkvo" for kind in ("plain", "fork")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_equals_oracle(world: World, kind: str, name: str | None) -> None:
    got = world.driver().run(make_seq(kind, name), CHUNKED)
    assert_close(got, expected_for(world, kind, name))


@pytest.mark.parametrize("kind", ["base", "plain", "fork", "alora"])
def test_unchunked_equals_oracle(world: World, kind: str) -> None:
    name = None if kind == "base" else "qkvo"
    assert_close(world.driver().run(make_seq(kind, name), WHOLE), expected_for(world, kind, name))


@pytest.mark.parametrize("kind", ["base", "plain", "fork", "alora"])
def test_reference_backend_equals_oracle(world: World, kind: str) -> None:
    name = None if kind == "base" else "five"
    got = world.driver("reference").run(make_seq(kind, name), CHUNKED)
    assert_close(got, expected_for(world, kind, name))


@pytest.mark.parametrize("fork", [8, 32, 48])
def test_fork_points(llama: World, fork: int) -> None:
    got = llama.driver().run(make_seq("fork", "wide", fork), (8, 40, 50, 56, 57, 58))
    assert_close(got, expected_for(llama, "fork", "wide", fork))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_block_sizes(llama: World, block_size: int) -> None:
    driver = llama.driver(block_size=block_size, num_units=2000)
    assert_close(
        driver.run(make_seq("fork", "five", 32), (16, 32, 50, 58, 59, 60)), expected_for(llama, "fork", "five", 32)
    )


def test_adapters_change_the_answer(world: World) -> None:
    """The bound of the other tests means something only if the kinds differ by more."""
    base, plain = world.expected("base"), world.expected("plain", "qkvo")
    fork = world.expected("fork", "qkvo", 24)
    assert (base - plain)[30:].abs().max() > 0.1
    assert (fork - plain)[30:].abs().max() > 0.05
    assert (fork - world.expected("alora", "qkvo", 24))[30:].abs().max() > 0.05


def test_mixed_batch_equals_alone(world: World) -> None:
    """Ranks 1, 5, 8, 33, base rows, all kinds, prefill and decode in the same steps."""
    driver = world.driver()
    cases = [*CASES, ("base", None)]
    seqs = [make_seq(kind, name, label=f"s{i}") for i, (kind, name) in enumerate(cases)]
    for step, ends in enumerate(((24, 16), (40, 54), (54, 55), (55, 56), (56, 57), (57, 60))):
        got = driver.together([(seq, ends[i % 2]) for i, seq in enumerate(seqs)])
        for i, (seq, (kind, name)) in enumerate(zip(seqs, cases, strict=True)):
            assert_close({ends[i % 2] - 1: got[seq.name]}, expected_for(world, kind, name))
        assert driver.step_id == step + 1


def test_cached_prefix_equals_uncached(world: World) -> None:
    """A second sequence on the first one's base blocks and residual: computes its suffix only, and nothing is NaN."""
    driver = world.driver()
    first = make_seq("fork", "qkvo", label="first")
    driver.run(first, (24, 40))
    second = make_seq("fork", "qkvo", label="second")
    second.kv_blocks, second.computed, second.stored = first.kv_blocks[:3], 24, 24
    second.k_units, second.v_units, second.residual_stored = list(first.k_units), list(first.v_units), 24
    assert_close(driver.run(second, (50, 51, 52)), expected_for(world, "fork", "qkvo"))


def test_backfill_suppresses_writes(world: World) -> None:
    """A late adapter: base weights run again for its residual only, K and V stay as they were."""
    driver = world.driver()
    first = make_seq("base", None, label="first")
    driver.run(first, (24, 40))
    before = driver.runner.cache.k[:, first.kv_blocks[:3]].clone()
    late = make_seq("fork", "five", label="late")
    late.kv_blocks, late.stored = first.kv_blocks[:3], 24
    assert_close(driver.run(late, (24,)), world.expected("base"))
    assert_close(driver.run(late, (54, 55)), expected_for(world, "fork", "five"))
    assert torch.equal(driver.runner.cache.k[:, first.kv_blocks[:3]], before)


def test_fanout_equals_own_writes(world: World) -> None:
    """Residuals written beside another request's prefill are the same bytes as an adapter's own, by chunks or not."""
    driver = world.driver()
    fanout = {name: driver.write_for(IDS[name], 0, 24) for name in ("one", "five", "wide", "v_only", "second_layer")}
    seq = make_seq("fork", "qkvo", label="writer")
    driver.execute(driver.segments(seq, 24, list(fanout.values())))
    for name, write in fanout.items():
        own = world.driver()
        alone = make_seq("fork", name, label="alone")
        own.run(alone, (16, 24))
        for ours, theirs in ((write.k_units, alone.k_units), (write.v_units, alone.v_units)):
            cache, other = driver.runner.cache, own.runner.cache
            torch.testing.assert_close(cache.residual[:, list(ours)], other.residual[:, theirs], rtol=0, atol=1e-4)
            assert not cache.residual[:, list(ours)].isnan().any()
        if write.k_units and cache.residual_rms is not None:
            heads = [unit for i, unit in enumerate(write.k_units) if i % driver.adapter(IDS[name]).meta.k_tiles == 0]
            assert not cache.residual_rms[:, heads].isnan().any()
        reader = make_seq("fork", name, label=f"reader-{name}")
        reader.kv_blocks, reader.computed, reader.stored = seq.kv_blocks[:3], 24, 24
        reader.k_units, reader.v_units = list(write.k_units), list(write.v_units)
        assert_close(driver.run(reader, (54, 55)), expected_for(world, "fork", name))


@pytest.mark.parametrize(("write_from", "units", "filled"), [(8, 3, (8, 5, 0)), (11, 3, (5, 5, 0)), (8, 1, (8,))])
def test_residual_write_covers_what_units_and_segment_have(
    llama: World, write_from: int, units: int, filled: tuple[int, ...]
) -> None:
    """Units begin with the block of `write_from`; the segment ends at token 21 and may end inside a block."""
    driver = llama.driver()
    write = driver.write_for(IDS["qkvo"], 0, 8 * units)
    driver.execute(driver.segments(Seq("s", TOKENS), 21, [replace(write, write_from=write_from)]))
    written = ~driver.runner.cache.residual[0, list(write.k_units)].isnan().any(-1)
    assert tuple(written.sum(-1).tolist()) == filled
    assert bool(written[0, write_from % 8 :].all()), "written from `write_from` on"


def test_shared_prefix_groups(world: World) -> None:
    """Rows on one base prefix, with and without residuals, decode in one cluster as they do alone."""
    driver = world.driver()
    names = ("qkvo", "five", "wide", "k_only", "v_only", "mlp")
    writes = {name: driver.write_for(IDS[name], 0, 32) for name in names}
    first = make_seq("base", None, label="base")
    driver.execute(driver.segments(first, 32, list(writes.values())))
    seqs = [first]
    for name in names:
        seq = make_seq("fork", name, 32 if name != "five" else 24, label=name)
        blocks = (seq.fork or 0) // 8
        meta = driver.adapter(IDS[name]).meta
        seq.kv_blocks, seq.computed, seq.stored = first.kv_blocks[:blocks], seq.fork or 0, seq.fork or 0
        seq.k_units = list(writes[name].k_units[: blocks * meta.k_tiles])
        seq.v_units = list(writes[name].v_units[: blocks * meta.v_tiles])
        seqs.append(seq)
    ends = [50 + i for i in range(len(seqs))]
    group = (SharedPrefix(3, tuple(range(len(seqs)))),)
    for _ in range(4):
        got = driver.together(list(zip(seqs, ends, strict=True)), group)
        for seq, end in zip(seqs, ends, strict=True):
            kind, name = ("base", None) if seq is first else ("fork", seq.name)
            assert_close({end - 1: got[seq.name]}, expected_for(world, kind, name, seq.fork or 0))
        ends = [end + 1 for end in ends]


def test_full_hit_recomputes_the_last_token(world: World) -> None:
    driver = world.driver()
    seq = make_seq("plain", "five", label="first")
    driver.run(seq, (LENGTH,))
    again = make_seq("plain", "five", label="again")
    again.kv_blocks, again.computed, again.stored = seq.kv_blocks, LENGTH - 1, LENGTH
    before = driver.runner.cache.v.clone()
    assert_close(driver.run(again, (LENGTH,)), expected_for(world, "plain", "five"))
    assert torch.equal(before.nan_to_num(7.0), driver.runner.cache.v.nan_to_num(7.0))


def test_copied_block(world: World) -> None:
    """n > 1: a child with its parent's full blocks and a copy of the partial one continues as the parent does."""
    driver = world.driver()
    parent = make_seq("base", None, label="parent")
    driver.run(parent, (20,))
    child = make_seq("base", None, label="child")
    copy = BlockCopy(parent.kv_blocks[2], driver.blocks(1)[0])
    child.kv_blocks, child.computed, child.stored = [*parent.kv_blocks[:2], copy.dst], 20, 20
    result = driver.execute(driver.segments(child, 23) + driver.segments(parent, 21), copies=[copy])
    assert_close({22: driver.logprobs(result, child), 20: driver.logprobs(result, parent)}, world.expected("base"))


def test_slots_are_replaced_and_grow(llama: World) -> None:
    """A slot is overwritten completely, and a larger rank reallocates the others without losing them."""
    driver = llama.driver(slots=("five", "wide"))
    wide = make_seq("plain", "wide", label="wide")
    assert_close(driver.run(wide, (40,)), expected_for(llama, "plain", "wide"))
    driver.load(1, IDS["one"])
    one, five = make_seq("plain", "one", label="one"), make_seq("plain", "five", label="five")
    assert_close(driver.run(one, (40,)), expected_for(llama, "plain", "one"))
    assert_close(driver.run(five, (40,)), expected_for(llama, "plain", "five"))
    small = llama.driver(slots=("one",))
    first = make_seq("plain", "one", label="one")
    small.run(first, (30,))
    assert small.runner.lora.rank == 16
    small.load(1, IDS["wide"])
    grown = small.together([(first, 31), (make_seq("plain", "wide", label="wide"), 40)])
    assert small.runner.lora.rank == 48
    assert_close({30: grown["one"]}, expected_for(llama, "plain", "one"))
    assert_close({39: grown["wide"]}, expected_for(llama, "plain", "wide"))


def test_greedy_generation_and_replacement(llama: World) -> None:
    """Sampled tokens are appended and run on; a dropped sequence comes back with its tokens and goes on equally."""
    driver = Driver(make_runner(llama.model_folder), SamplingParams(max_tokens=8, temperature=0.0))
    seq = Seq("s", TOKENS[:20])
    tokens = []
    for end in range(20, 26):
        tokens.append(driver.execute(driver.segments(seq, end)).tokens["s"])
    again = Seq("s", [*TOKENS[:20], *tokens[:3]])
    driver.known.clear()
    redone = [driver.execute(driver.segments(again, end)).tokens["s"] for end in range(23, 26)]
    assert redone == tokens[3:]
    assert driver.execute([], dropped=["s"]).tokens == {}
    assert len(driver.runner.table) == 0
    with pytest.raises(KeyError):
        driver.runner.table["s"]


def test_contradicting_plans_are_refused(llama: World) -> None:
    driver = llama.driver()
    seq = make_seq("fork", "qkvo")
    segments = driver.segments(seq, 40)
    driver.tables = [update for update in driver.tables if not update.kv_blocks]
    with pytest.raises(ValueError, match="gave no block"):
        driver.execute(segments)
    driver = llama.driver()
    segments = driver.segments(make_seq("fork", "qkvo"), 40)
    driver.tables = [update for update in driver.tables if not update.k_units]
    with pytest.raises(ValueError, match="residual blocks"):
        driver.execute(segments)
    with pytest.raises(IndexError, match="slot 9"):
        driver.runner.lora.load(9, 1)


def test_layers_can_be_hooked(llama: World) -> None:
    """Tokens that enter layer 0 with base weights are countable from outside."""
    driver, seen = llama.driver(), []
    layer = driver.runner.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: seen.append(int((args[1].batch.weights_slot < 0).sum())))
    driver.run(make_seq("fork", "qkvo"), (40, 41))
    assert seen == [24, 0]


def test_half_precision(llama: World) -> None:
    """bfloat16 runs through every path and stays near the float32 answer."""
    driver = llama.driver(dtype=torch.bfloat16)
    got = driver.run(make_seq("fork", "qkvo"), CHUNKED)
    expected = expected_for(llama, "fork", "qkvo")
    for position, row in got.items():
        assert (row.exp() - expected[position].exp()).abs().sum() < 0.25


def test_uniproc_executor(llama: World) -> None:
    """Model and adapters from an `EngineConfig`, a poisoned cache, one prompt and one decode step."""
    modules = tuple(LoRAModule(name, str(folder)) for name, folder in zip(ADAPTERS, llama.adapters, strict=True))
    config = EngineConfig(
        ModelConfig(str(llama.model_folder), max_model_len=256),
        CacheConfig(block_size=8, memory_bytes=1 << 20),
        lora=LoRAConfig(modules, max_loras=2, teams=(("team", ("qkvo", "five")),)),
    )
    executor = UniprocExecutor(config, progress=False, poison=True)
    assert (executor.max_model_len, executor.vocab_size, executor.eos_token_ids) == (256, 512, (2,))
    assert (executor.device, executor.dtype) == ("cpu", "float32")
    assert [meta.adapter_id for meta in executor.adapters] == list(IDS.values())
    assert [meta.team for meta in executor.adapters][:3] == ["team", None, "team"]
    assert executor.cache_memory_bytes() == 1 << 20
    executor.allocate_cache(*executor.cache_spec.split(1 << 20, 0.2))
    assert executor.runner.cache.num_bytes <= 1 << 20
    driver = Driver(executor.runner)
    driver.load(0, IDS["five"])
    assert_close(driver.run(make_seq("fork", "five"), (40, 41)), expected_for(llama, "fork", "five"))


def test_uniproc_refuses_more_context_than_the_model_has(llama: World) -> None:
    config = EngineConfig(ModelConfig(str(llama.model_folder), max_model_len=4096))
    with pytest.raises(ConfigError, match="2048 positions"):
        UniprocExecutor(config, progress=False)


def test_device_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = choose_device("cpu")
    assert choose_dtype("auto", cpu, "bfloat16") == torch.float32
    assert choose_dtype("bfloat16", cpu, "float32") == torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda"), "float32") == torch.bfloat16
    assert 0 < available_cache_bytes(cpu, 0.9) <= 4 << 30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == cpu
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda")
