"""Counts of `benchmarks.lib.roofline` against numbers worked out by hand, and what must hold between them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.cards import CARDS, Rates
from benchmarks.lib.gpu_engine import engine_config, fan_out, sizes_for
from benchmarks.lib.gpu_setup import Setup
from benchmarks.lib.roofline import (
    Work,
    attention_work,
    count_layer,
    decode_rows,
    dense_work,
    head_work,
    lora_work,
    residual_write_work,
    rope_write_work,
)
from benchmarks.lib.steps import Step, decode_step, llama_spec, prefill_step, private_step
from forkkv.attention.batch import ForwardBatch
from forkkv.engine.core import EngineCore
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import Segment, SharedPrefix

SPEC = llama_spec(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=100, positions=256)
"""q is 32 wide, K and V of a token 2 * 16 elements."""
HALF = 2
"""Bytes of an element."""


def decode(step: Step, *, grouped: bool = True) -> Work:
    batch = step.batch()
    return attention_work(batch, SPEC, decode_rows(batch.host), HALF, grouped=grouped)


def test_grouped_decode_reads_the_base_once() -> None:
    """3 agents, 32 shared tokens in blocks of 8, 5 private ones, rank 16: two units of 16 columns a token."""
    work = decode(decode_step(3, 32, 5, rank=16, block_size=8))
    assert work.bytes == {
        "base K, V": 32 * 32 * 2,
        "own K, V": 3 * 5 * 32 * 2,
        "residual": 3 * 32 * 32 * 2,
        "queries, output": 3 * 2 * 32 * 2,
        "B": 3 * 32 * 16 * 2,
        "rotation": 32 * 8 * 2,
        "tables": 3 * 4 * (5 + 4 * 2),
    }
    assert work.flops == {
        "K expansion": 3 * 32 * 2 * 16 * 16,
        "q·K, P·V": 3 * 37 * 4 * 32,
        "P·rV": 3 * 32 * 2 * 4 * 16,
        "V expansion": 3 * 2 * 16 * 32,
    }


def test_ungrouped_decode_reads_the_base_for_every_row() -> None:
    grouped, alone = decode_step(3, 32, 5, block_size=8), decode_step(3, 32, 5, block_size=8, grouped=False)
    once, thrice = decode(grouped), decode(alone)
    assert thrice.bytes["base K, V"] == 3 * 32 * 32 * 2
    assert thrice.bytes["own K, V"] == once.bytes["own K, V"] == 3 * 5 * 32 * 2
    assert thrice.total_bytes - once.total_bytes == 2 * 32 * 32 * 2
    assert thrice.flops == once.flops
    assert decode(grouped, grouped=False) == thrice


def test_groups_come_from_the_plan() -> None:
    """Rows 0 and 2 share four blocks, row 1 is not told to share them and reads them again."""
    step = decode_step(3, 32, 5, block_size=8, grouped=False)
    step.groups.append(SharedPrefix(4, (0, 2)))
    work = decode(step)
    assert work.bytes["base K, V"] == 2 * 32 * 32 * 2
    assert work.bytes["own K, V"] == 3 * 5 * 32 * 2


def test_rows_of_one_adapter_share_its_residual() -> None:
    """Two conversations of one agent read the same units: loaded and expanded once, multiplied twice."""
    step = Step(8, max_blocks=6)
    prefix, k_units, v_units = step.blocks(32), step.units(32, 16), step.units(32, 16)
    for name in ("a", "b"):
        segment = Segment(name, 36, 1, 3, "merged", 0, read_slot=3, residual_len=32)
        step.add(segment, prefix + step.blocks(5), k_units, v_units, 16, 16)
    step.groups.append(SharedPrefix(4, (0, 1)))
    work = decode(step)
    assert work.bytes["residual"] == 32 * 32 * 2
    assert work.bytes["B"] == 32 * 16 * 2
    assert work.flops["K expansion"] == 32 * 2 * 16 * 16
    assert work.flops["q·K, P·V"] == 2 * 37 * 4 * 32


def test_private_caches_have_neither_shared_nor_residual() -> None:
    work = decode(private_step(3, 37, block_size=8))
    assert work.bytes["own K, V"] == 3 * 37 * 32 * 2
    assert work.bytes["base K, V"] == work.bytes["residual"] == work.bytes["B"] == 0
    assert work.total_flops == 3 * 37 * 4 * 32


@pytest.mark.parametrize(("k", "v"), [(True, False), (False, True)])
def test_half_adapters(k: bool, v: bool) -> None:
    work = decode(decode_step(2, 32, 1, rank=33, k=k, v=v, block_size=8))
    assert work.bytes["residual"] == 2 * 32 * 48 * 2, "rank 33 takes three tiles"
    assert bool(work.flops["K expansion"]) == k
    assert bool(work.flops["P·rV"]) == v
    assert bool(work.bytes["rotation"]) == k


def test_prefill_counts_what_each_query_sees() -> None:
    """3 queries behind 8 tokens see 9, 10 and 11 of them; all 8 with a residual."""
    batch = prefill_step(3, 8, rank=16, suffix=True, block_size=8).batch()
    work = attention_work(batch, SPEC, [0], HALF)
    assert work.bytes["base K, V"] == 8 * 32 * 2
    assert work.bytes["own K, V"] == 3 * 32 * 2
    assert work.bytes["residual"] == 8 * 32 * 2
    assert work.flops == {
        "K expansion": 8 * 2 * 16 * 16,
        "q·K, P·V": 30 * 4 * 32,
        "P·rV": 24 * 2 * 4 * 16,
        "V expansion": 3 * 2 * 16 * 32,
    }


def test_a_residual_that_ends_inside_the_queries() -> None:
    """A suffix may begin before its residual ends: later queries see more of the residual than earlier ones."""
    step = Step(8, max_blocks=4)
    blocks, k_units, v_units = step.blocks(11), step.units(8, 16), step.units(8, 16)
    step.add(Segment("a", 6, 5, 0, "merged", 0, read_slot=0, residual_len=8), blocks, k_units, v_units, 16, 16)
    work = attention_work(step.batch(), SPEC, [0], HALF)
    assert work.flops["q·K, P·V"] == (7 + 8 + 9 + 10 + 11) * 4 * 32
    assert work.flops["P·rV"] == (7 + 8 + 8 + 8 + 8) * 2 * 4 * 16


def test_residual_write_of_a_fan_out() -> None:
    """16 tokens, two adapters of rank 16: h once, four matrices A of 16 columns, four tiles a token."""
    work = residual_write_work(prefill_step(16, 8, rank=16, fanout=2, block_size=8).batch(), SPEC, HALF)
    assert work.bytes == {"A": 4 * 16 * 32 * 2, "residual": 4 * 16 * 16 * 2, "h": 16 * 32 * 2}
    assert work.flops == {"h·A": 2 * 16 * 32 * 64}


def test_shrink_and_expand_skip_base_rows() -> None:
    """Two agents of one token each: 20 columns of q and v take 32 and 16; no k."""
    step = decode_step(2, 0, 4, rank=1, k=False, block_size=8)
    step.segments[1] = replace(step.segments[1], weights_slot=-1)
    shrink, expand = lora_work(step.batch(), SPEC, {0: {"q_proj": 20, "v_proj": 16, "down_proj": 16}}, HALF)
    assert shrink.flops == {"qkv": 2 * 32 * 48, "down": 2 * 48 * 16}
    assert shrink.bytes == {
        "qkv x": 32 * 2,
        "A": (32 * 48 + 48 * 16) * 2,
        "x·A": (48 + 16) * 2,
        "down x": 48 * 2,
    }
    assert expand.flops == {"qkv": 2 * (32 * 32 + 16 * 16), "down": 2 * 16 * 32}
    assert expand.bytes["B"] == (32 * 32 + 16 * 16 + 16 * 32) * 2
    assert expand.bytes["y"] == 2 * (32 + 16 + 32) * 2


def test_dense_head_and_cache_write() -> None:
    batch = prefill_step(5, 8, block_size=8).batch()
    dense = dense_work(batch, SPEC, HALF)
    weights = 32 * (32 + 16 + 16) + 32 * 32 + 32 * 96 + 48 * 32
    assert dense.bytes["weights"] == weights * 2
    assert dense.total_flops == 2 * 5 * weights
    assert head_work(batch, SPEC, HALF).total_flops == 2 * 32 * 100, "one row samples"
    assert rope_write_work(batch, SPEC, HALF).bytes == {
        "q, k": 5 * (2 * 32 + 16) * 2,
        "v": 5 * 16 * 2,
        "rotation": 5 * 8 * 2,
        "cache": 5 * 2 * 16 * 2,
    }


def test_a_layer_names_only_kernels_with_work() -> None:
    found = count_layer(prefill_step(16, 8, fanout=1, block_size=8).batch(), SPEC, {}, HALF)
    assert set(found) == {"dense layers", "residual write", "rope, cache write", "attention, prefill"}
    found = count_layer(decode_step(2, 32, 1, block_size=8).batch(), SPEC, {0: {"k_proj": 16}, 1: {}}, HALF)
    assert set(found) == {"dense layers", "shrink", "expand", "rope, cache write", "attention, decode"}


def test_floor_is_the_slower_of_memory_and_products() -> None:
    work = Work({"a": 600, "b": 400}, {"c": 50})
    assert work.floor(Rates("slow memory", 100.0, 1000.0)) == 10.0
    assert work.floor(Rates("slow products", 1e6, 10.0)) == 5.0
    assert (work + work).total_bytes == work.times(2).total_bytes == 2000


def test_counts_of_a_plan_that_the_scheduler_made(tmp_path: Path) -> None:
    """Three agents on one document through the engine: in every decode step of all of them the document's K and V are
    counted once, and each residual once."""
    setup = Setup.make(argparse.Namespace(device="cpu", shape="tiny", tiny=True, backend="torch"))
    sizes = sizes_for(setup)
    config = engine_config(setup, sizes, tmp_path)
    config = replace(config, model=replace(config.model, enforce_eager=True))
    executor = UniprocExecutor(config, progress=False)
    works: list[Work] = []
    plan = executor.backend.plan

    def counting(batch: ForwardBatch) -> Any:
        rows = decode_rows(batch.host)
        if len(rows) == batch.host.num_rows == sizes.adapters:
            works.append(attention_work(batch, setup.spec, rows, 4))
        return plan(batch)

    executor.backend.plan = counting  # type: ignore[method-assign]
    found = fan_out(EngineCore(config, executor), sizes, seed=2)
    assert found["finished"] == sizes.adapters and len(works) >= sizes.generated - 1
    for step, work in enumerate(works, start=1):
        assert work.bytes["base K, V"] == sizes.document * 2 * setup.spec.kv_size * 4
        assert work.bytes["residual"] == sizes.adapters * sizes.document * 32 * 4
        own = sizes.adapters * (sizes.question + step)
        assert work.bytes["own K, V"] == own * 2 * setup.spec.kv_size * 4


def test_cards_are_told_in_bytes_and_flops_a_second() -> None:
    assert CARDS["h200"].bytes_per_s == 4.8e12
    assert all(1e11 < card.bytes_per_s < 1e13 and 1e14 < card.flop_per_s < 1e16 for card in CARDS.values())
