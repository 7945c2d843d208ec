"""`residual_attention` against a dense computation that expands everything first, through every registered device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import forkkv_kernels
from forkkv_kernels import implementations
from forkkv_kernels.reference import residual_attention_reference

H, HKV, D, BLOCK, UNITS, BLOCKS, RANK = 6, 2, 8, 4, 80, 60, 32
Inputs = dict[str, Tensor]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * torch.cat((cos, cos), -1)[:, None] + turned * torch.cat((sin, sin), -1)[:, None]


def make_inputs(qk_norm: bool) -> Inputs:
    """Four rows: base prefill, residual decode, residual chunk with K and V tiles of two widths, base decode."""
    g = torch.Generator().manual_seed(3)
    q_lens, seq_lens = [7, 1, 5, 1], [7, 19, 21, 12]
    blocks = torch.randperm(BLOCKS - 1, generator=g) + 1
    units = torch.randperm(UNITS - 1, generator=g) + 1
    kv_table, k_table, v_table = torch.zeros(4, 6).int(), torch.zeros(4, 12).int(), torch.zeros(4, 6).int()
    for row, seq_len in enumerate(seq_lens):
        count = -(-seq_len // BLOCK)
        kv_table[row, :count] = blocks[row * 6 : row * 6 + count]
    k_table[1, :8:2] = units[:4]
    k_table[2, :6] = units[10:16]
    v_table[2, :3] = units[30:33]
    angles = torch.outer(torch.arange(32.0), 1.0 / 10 ** (torch.arange(0, D, 2) / D))
    caches = {
        "k_cache": torch.randn(BLOCKS, BLOCK, HKV, D, generator=g),
        "v_cache": torch.randn(BLOCKS, BLOCK, HKV, D, generator=g),
        "residual_cache": torch.randn(UNITS, BLOCK, 16, generator=g),
    }
    caches["residual_cache"][0] = 0
    inputs: Inputs = {
        "q": torch.randn(sum(q_lens), H, D, generator=g),
        **caches,
        "kv_block_table": kv_table,
        "cu_seqlens_q": torch.tensor([0, 7, 8, 13, 14]).int(),
        "seq_lens": torch.tensor(seq_lens).int(),
        "residual_k_table": k_table,
        "residual_v_table": v_table,
        "residual_len": torch.tensor([0, 16, 10, 0]).int(),
        "read_slot": torch.tensor([-1, 2, 0, -1]).int(),
        "b_k": torch.randn(3, RANK, HKV * D, generator=g) * 0.3,
        "b_v": torch.randn(3, RANK, HKV * D, generator=g) * 0.3,
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    if qk_norm:
        inputs["k_rms"] = torch.rand(BLOCKS, BLOCK, HKV, generator=g) + 0.5
        inputs["residual_rms"] = torch.rand(UNITS, BLOCK, HKV, generator=g) + 0.5
    return inputs


def dense(x: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Expand K and V of every row token by token, then softmax over an explicit mask."""
    out, lse = torch.empty_like(x["q"]), torch.empty(x["q"].shape[:2])
    for row in range(len(x["seq_lens"])):
        begin, end = x["cu_seqlens_q"][row : row + 2].tolist()
        n, limit, slot = (int(x[name][row]) for name in ("seq_lens", "residual_len", "read_slot"))
        keys, values = torch.empty(n, HKV, D), torch.empty(n, HKV, D)
        for t in range(n):
            block, offset = int(x["kv_block_table"][row, t // BLOCK]), t % BLOCK
            keys[t], values[t] = x["k_cache"][block, offset], x["v_cache"][block, offset]
            if slot >= 0 and t < limit:
                k_units = x["residual_k_table"][row].view(6, 2)[t // BLOCK].long()
                v_unit = int(x["residual_v_table"][row, t // BLOCK])
                extra = x["residual_cache"][k_units, offset].flatten() @ x["b_k"][slot]
                extra = rope(extra.view(1, HKV, D), x["cos"][t : t + 1], x["sin"][t : t + 1])[0]
                if "k_rms" in x:
                    adapted = x["residual_rms"][k_units[0], offset][:, None]
                    keys[t] *= x["k_rms"][block, offset][:, None] / adapted
                    extra = extra / adapted
                keys[t] += extra
                values[t] += (x["residual_cache"][v_unit, offset] @ x["b_v"][slot][:16]).view(HKV, D)
        group = H // HKV
        q = x["q"][begin:end]
        scores = torch.einsum("qhd,thd->hqt", q, keys.repeat_interleave(group, 1)) * scale
        mask = torch.ones(len(q), n, dtype=torch.bool).triu(n - len(q) + 1)
        scores = scores.masked_fill(mask, float("-inf"))
        out[begin:end] = torch.einsum("hqt,thd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))
        lse[begin:end] = scores.logsumexp(-1).T
    return out, lse


@pytest.mark.parametrize("qk_norm", [False, True])
def test_equals_dense(qk_norm: bool) -> None:
    inputs = make_inputs(qk_norm)
    expected, expected_lse = dense(inputs, 0.4)
    out, lse = forkkv_kernels.residual_attention(**inputs, scale=0.4, return_lse=True)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    alone = forkkv_kernels.residual_attention(**inputs, scale=0.4)  # type: ignore[arg-type]
    assert isinstance(alone, Tensor) and torch.equal(alone, out)


def test_base_rows_need_no_residual_arguments() -> None:
    inputs = make_inputs(False)
    expected, _ = dense(inputs | {"read_slot": torch.full((4,), -1)}, 0.4)
    names = ("q", "k_cache", "v_cache", "kv_block_table", "cu_seqlens_q", "seq_lens")
    out = forkkv_kernels.residual_attention(*(inputs[name] for name in names), scale=0.4)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_reads_nothing_that_is_not_its_own() -> None:
    """NaN in every block, unit and token that no row owns does not reach the result."""
    inputs = make_inputs(False)
    expected = forkkv_kernels.residual_attention(**inputs, scale=0.4)  # type: ignore[arg-type]
    poisoned = dict(inputs)
    for name in ("k_cache", "v_cache", "residual_cache"):
        cache = torch.full_like(inputs[name], float("nan"))
        cache[0] = 0
        poisoned[name] = cache
    for row in range(4):
        for t in range(int(inputs["seq_lens"][row])):
            block = int(inputs["kv_block_table"][row, t // BLOCK])
            for name in ("k_cache", "v_cache"):
                poisoned[name][block, t % BLOCK] = inputs[name][block, t % BLOCK]
        for t in range(int(inputs["residual_len"][row])):
            for table in ("residual_k_table", "residual_v_table"):
                for unit in inputs[table][row].view(6, -1)[t // BLOCK].tolist():
                    poisoned["residual_cache"][unit, t % BLOCK] = inputs["residual_cache"][unit, t % BLOCK]
    out = forkkv_kernels.residual_attention(**poisoned, scale=0.4)  # type: ignore[arg-type]
    assert torch.equal(out, expected)


def test_dispatch_goes_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "REGISTERED", {})
    calls = []

    def other(*args: object, **options: object) -> Tensor:
        calls.append(options["scale"])
        return residual_attention_reference(*args, **options)  # type: ignore[arg-type, return-value]

    inputs = make_inputs(False)
    forkkv_kernels.register("residual_attention", "meta", other)
    forkkv_kernels.residual_attention(**inputs, scale=0.1)  # type: ignore[arg-type]
    assert not calls
    forkkv_kernels.register("residual_attention", "cpu", other)
    forkkv_kernels.residual_attention(**inputs, scale=0.1)  # type: ignore[arg-type]
    assert calls == [0.1]
