"""Both CPU backends against the reference operation, on random caches and tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from forkkv.attention import clusters, registry
from forkkv.attention.backend import AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch, HostRows
from forkkv.attention.cpu_backend import CpuBackend
from forkkv.attention.paged import block_runs, read_tokens
from forkkv.attention.prefill import attend_math
from forkkv.attention.reference_backend import ReferenceBackend
from forkkv.attention.torch_backend import TorchBackend
from forkkv.errors import ConfigError
from forkkv.types import SharedPrefix

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
BLOCK, SLOTS, RANK, POSITIONS = 8, 3, 48, 4096
CPU = torch.device("cpu")


@dataclass
class Row:
    """q_len queries at the end of seq_len tokens; the first `shared` blocks are those of every other sharing row."""

    q_len: int
    seq_len: int
    slot: int = -1
    residual_len: int = 0
    k_tiles: int = 0
    v_tiles: int = 0
    shared: int = 0
    consecutive: bool = False


@dataclass
class Case:
    rows: list[Row]
    groups: tuple[SharedPrefix, ...] = ()
    qk_norm: bool = False
    seed: int = 0
    shape: AttentionShape = field(default=SHAPE)


def build(case: Case) -> tuple[ForwardBatch, LayerCache, ResidualExpansion, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(case.seed)
    rng = np.random.default_rng(case.seed)
    blocks = [-(-row.seq_len // BLOCK) for row in case.rows]
    width = max(blocks)
    num_blocks = 1 + sum(blocks) + width
    free = list(rng.permutation(np.arange(width + 1, num_blocks)))
    straight = list(range(1, width + 1))
    scattered = [free.pop() for _ in range(max(row.shared for row in case.rows))]
    table = np.zeros((len(blocks), width), dtype=np.int32)
    for i, (row, count) in enumerate(zip(case.rows, blocks, strict=True)):
        own = (
            straight[:count]
            if row.consecutive
            else scattered[: row.shared] + [free.pop() for _ in range(count - row.shared)]
        )
        table[i, :count] = own
    num_units = 1 + sum((row.k_tiles + row.v_tiles) * -(-row.residual_len // BLOCK) for row in case.rows)
    units = list(rng.permutation(np.arange(1, num_units)))
    tables = []
    for half in ("k_tiles", "v_tiles"):
        tiles = max(getattr(row, half) for row in case.rows)
        out = np.zeros((len(blocks), width, tiles), dtype=np.int32)
        for i, row in enumerate(case.rows):
            for b in range(-(-row.residual_len // BLOCK)):
                out[i, b, : getattr(row, half)] = [units.pop() for _ in range(getattr(row, half))]
        tables.append(out.reshape(len(blocks), -1))
    cache = LayerCache(
        torch.randn(num_blocks, BLOCK, 2, 16, generator=g),
        torch.randn(num_blocks, BLOCK, 2, 16, generator=g),
        torch.randn(num_units, BLOCK, 16, generator=g),
        torch.rand(num_blocks, BLOCK, 2, generator=g) + 0.5 if case.qk_norm else None,
        torch.rand(num_units, BLOCK, 2, generator=g) + 0.5 if case.qk_norm else None,
    )
    for null in (cache.k, cache.v, cache.residual):
        null[0] = 0
    for null in (cache.k_rms, cache.residual_rms):
        if null is not None:
            null[0] = 1
    expansion = ResidualExpansion(*(torch.randn(SLOTS, RANK, 32, generator=g) * 0.1 for _ in range(2)))
    batch = make_batch(case, table, *tables)
    q = torch.randn(batch.num_tokens, 6, 16, generator=g)
    angles = torch.outer(torch.arange(float(POSITIONS)), 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16))
    return batch, cache, expansion, q, angles.cos(), angles.sin()


def make_batch(case: Case, table: np.ndarray, k_table: np.ndarray, v_table: np.ndarray) -> ForwardBatch:
    def column(name: str) -> np.ndarray:
        return np.array([getattr(row, name) for row in case.rows], dtype=np.int32)

    q_lens = column("q_len")
    cu_seqlens = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
    host = HostRows(
        cu_seqlens,
        column("seq_len"),
        np.full(len(q_lens), -1, dtype=np.int32),
        column("slot"),
        column("residual_len"),
        table,
        k_table,
        v_table,
        column("k_tiles"),
        column("v_tiles"),
    )
    tensors = {
        name: torch.from_numpy(getattr(host, name))
        for name in ("cu_seqlens_q", "seq_lens", "read_slot", "residual_len", "kv_block_table")
    }
    none = torch.zeros(int(cu_seqlens[-1]), dtype=torch.int64)
    return ForwardBatch(
        input_ids=none,
        positions=none,
        weights_slot=none,
        residual_k_table=torch.from_numpy(k_table),
        residual_v_table=torch.from_numpy(v_table),
        kv_tokens=None,
        kv_slots=none,
        sample_tokens=none,
        block_size=BLOCK,
        host=host,
        groups=case.groups,
        **tensors,
    )


def check(case: Case, tolerance: float = 3e-5) -> None:
    batch, cache, expansion, q, cos, sin = build(case)
    shape = replace(SHAPE, qk_norm=case.qk_norm)
    before = [tensor.clone() for tensor in (cache.k, cache.v, cache.residual, q)]
    expected = ReferenceBackend(shape, cos, sin).run(q, cache, expansion, batch)
    packed = replace(expansion, b_k_packed=CpuBackend.pack_b_k(expansion.b_k, 2))
    for kind in (TorchBackend, CpuBackend):
        backend = kind(shape, cos, sin)
        got = backend.run(q, cache, packed, backend.plan(batch))
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    for tensor, old in zip((cache.k, cache.v, cache.residual, q), before, strict=True):
        assert torch.equal(tensor, old), "attention mutates nothing"


PREFILL = [Row(5, 5), Row(13, 40), Row(8, 8), Row(2, 33, slot=1, residual_len=24, k_tiles=2, v_tiles=1)]
MIXED = [
    Row(1, 9),
    Row(1, 33, slot=0, residual_len=24, k_tiles=1, v_tiles=3),
    Row(7, 30, slot=2, residual_len=16, k_tiles=3, v_tiles=0),
    Row(1, 50, slot=2, residual_len=48, k_tiles=0, v_tiles=2),
    Row(1, 8, slot=1, residual_len=0, k_tiles=1, v_tiles=1),
    Row(1, 41, slot=1, residual_len=32, k_tiles=3, v_tiles=0),
]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rows", [PREFILL, MIXED], ids=["prefill", "mixed"])
def test_rows(rows: list[Row], qk_norm: bool) -> None:
    check(Case(rows, qk_norm=qk_norm))


def test_residual_that_ends_inside_a_block_goes_row_by_row() -> None:
    check(Case([Row(1, 33, slot=0, residual_len=21, k_tiles=1, v_tiles=1), Row(3, 30, 1, 13, 2, 2)]))


def test_consecutive_blocks_are_read_in_place() -> None:
    check(Case([Row(9, 300, consecutive=True), Row(1, 1200, consecutive=True)]))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_long_contexts(qk_norm: bool) -> None:
    """Decode rows that are read on their own, and an expansion that is cut into several products."""
    rows = [Row(1, 1100), Row(1, 2000, slot=0, residual_len=1960, k_tiles=1, v_tiles=2), Row(1, 20)]
    check(Case(rows, qk_norm=qk_norm), tolerance=2e-4)


def test_expansion_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(1, 70 + i, slot=i % 3, residual_len=8 * (i % 9), k_tiles=1 + i % 2, v_tiles=1) for i in range(12)]
    for elements in (2 * 64 * 32, 24 * 32, 1):
        monkeypatch.setattr(clusters, "_EXPANSION_ELEMENTS", elements)
        check(Case(rows))
        check(Case(rows, qk_norm=True))


def test_shared_prefix() -> None:
    """Base and residual rows on one prefix, of which the group claims less than they share, more than one row has,
    or that some row of the group does not decode."""
    rows = [
        Row(1, 41, shared=5),
        Row(1, 50, slot=1, residual_len=40, k_tiles=1, v_tiles=1, shared=5),
        Row(1, 60, slot=2, residual_len=32, k_tiles=2, v_tiles=0, shared=5),
        Row(6, 46, shared=5),
        Row(1, 40, shared=5),
        Row(1, 17),
    ]
    for num_blocks in (2, 4, 5):
        check(Case(rows, groups=(SharedPrefix(num_blocks, (0, 1, 2, 3, 4)),)))


def test_one_decode_row_in_a_group_of_prefill_rows() -> None:
    """Its partners are computed elsewhere, and it must be computed nevertheless."""
    rows = [Row(6, 46, shared=3), Row(1, 41, shared=3), Row(9, 50, shared=3), Row(1, 17)]
    check(Case(rows, groups=(SharedPrefix(3, (0, 1, 2)),)))


def test_two_documents_behind_one_prefix_are_two_clusters() -> None:
    case = Case([Row(1, 1300, shared=3) for _ in range(4)], groups=(SharedPrefix(3, (0, 1, 2, 3)),))
    batch, cache, expansion, q, cos, sin = build(case)
    table = batch.host.kv_block_table
    table[1], table[3] = table[0], table[2]
    metadata = TorchBackend(SHAPE, cos, sin).plan(batch)
    assert [cluster.num_rows for cluster in metadata.clusters] == [2, 2]
    assert [cluster.num_shared for cluster in metadata.clusters] == [1296, 1296]
    expected = ReferenceBackend(SHAPE, cos, sin).run(q, cache, expansion, batch)
    got = TorchBackend(SHAPE, cos, sin).run(q, cache, expansion, metadata)
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_math_path_equals_fused_kernel(causal: bool) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 300, 16, generator=g) for _ in range(3))
    out, lse = attend_math(q, k, v, causal, 0.3)
    fused, fused_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=0.3)
    torch.testing.assert_close(out, fused, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, fused_lse, rtol=1e-4, atol=1e-5)


def test_runs_are_views_and_scattered_blocks_one_gather() -> None:
    cache = torch.arange(100.0).view(50, 2)
    (run,) = block_runs(np.arange(4, 9), CPU)
    assert run.ids is None and run.tokens(cache).data_ptr() == cache[4].data_ptr()
    (gather,) = block_runs(np.array([9, 3, 5, 1]), CPU)
    assert gather.ids is not None and gather.num_blocks == 4
    two = block_runs(np.array([3, 4, 5, 9, 10]), CPU)
    assert read_tokens(cache, two, 7).tolist() == [6, 7, 8, 9, 10, 11, 18]
    assert block_runs(np.array([], dtype=np.int64), CPU) == ()


def test_registry() -> None:
    assert registry.select_backend(CPU, torch.float32, SHAPE) is CpuBackend
    assert registry.select_backend(CPU, torch.bfloat16, SHAPE) is TorchBackend
    assert registry.select_backend(CPU, torch.float32, replace(SHAPE, head_dim=8)) is TorchBackend
    with pytest.raises(ConfigError, match="reads float32 caches"):
        registry.select_backend(CPU, torch.bfloat16, SHAPE, "cpu")
    assert registry.select_backend(CPU, torch.float32, SHAPE, "reference") is ReferenceBackend
    with pytest.raises(ConfigError, match="known: cpu, reference, torch, triton"):
        registry.select_backend(CPU, torch.float32, SHAPE, "magic")
    with pytest.raises(ConfigError, match="not a floating point type"):
        registry.select_backend(CPU, torch.int32, SHAPE)
    with pytest.raises(ConfigError, match="head_dim 15 is odd"):
        registry.select_backend(CPU, torch.float32, replace(SHAPE, head_dim=15))
