"""Settings that contradict each other are refused with the flag's name; bytes and shares of the two pools."""

from __future__ import annotations

import pytest

from forkkv.config import CacheConfig, EngineConfig, LoRAConfig, LoRAModule, ModelConfig, SchedulerConfig
from forkkv.errors import ConfigError
from forkkv.kvcache.spec import CacheSpec

MODEL = ModelConfig("smollm2")
SMOLLM2 = CacheSpec(30, 3, 64, 16, kv_itemsize=4, residual_itemsize=4)


@pytest.mark.parametrize(
    ("named", "sections"),
    [
        ("--block-size", {"cache": CacheConfig(block_size=24)}),
        ("--max-num-seqs", {"scheduler": SchedulerConfig(max_num_seqs=0)}),
        ("--max-num-batched-tokens", {"scheduler": SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=79)}),
        ("--chunked-prefill-size", {"scheduler": SchedulerConfig(chunked_prefill_size=8)}),
        ("--fork-tail", {"scheduler": SchedulerConfig(fork_tail=0)}),
        ("--residual-fanout", {"scheduler": SchedulerConfig(residual_fanout=-1)}),
        ("--max-loras", {"lora": LoRAConfig(max_loras=0)}),
        ("--lora-modules", {"lora": LoRAConfig(modules=(LoRAModule("a", "x"), LoRAModule("a", "y")))}),
        ("team 't'", {"lora": LoRAConfig(modules=(LoRAModule("a", "x"),), teams=(("t", ("a", "b")),))}),
    ],
)
def test_contradictions_name_the_flag(named, sections):
    with pytest.raises(ConfigError, match=named):
        EngineConfig(MODEL, **sections)


def test_bytes_of_blocks_and_units():
    assert SMOLLM2.kv_block_bytes == 2 * 30 * 16 * 192 * 4
    assert SMOLLM2.residual_unit_bytes == 30 * 16 * 16 * 4
    qk_norm = CacheSpec(30, 3, 64, 16, 4, 4, qk_norm=True)
    assert qk_norm.kv_block_bytes - SMOLLM2.kv_block_bytes == 30 * 16 * 3 * 4


@pytest.mark.parametrize("fanout", [1, 3, 8])
@pytest.mark.parametrize("rank", [8, 16, 40])
def test_both_pools_run_full_together(fanout, rank):
    share = SMOLLM2.residual_share(fanout, rank)
    blocks, units = SMOLLM2.split(1 << 30, share)
    tiles = 2 * -(-rank // 16)
    assert units / tiles / fanout == pytest.approx(blocks, rel=0.01)


def test_a_pool_is_never_empty():
    assert SMOLLM2.split(0, 0.0) == (2, 2)
    assert SMOLLM2.residual_share(8, 0) == 0.0
