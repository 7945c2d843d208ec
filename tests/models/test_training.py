"""What adapters are trained with: its attention against a dense softmax, its tree against the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.train.attention import attend
from benchmarks.train.lora_model import IGNORE, TreeBatch, TreeModel
from benchmarks.train.train_lora import load_peft
from tests.models.factory import load_model, make_adapter, make_model
from tests.oracle import oracle_logprobs, read_adapter

HEADS, SEQUENCES, GROUP, WIDTH, SIZE = 2, 3, 2, 4, 8


def operands(num_far: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, SEQUENCES, GROUP, WIDTH, SIZE), *[(HEADS, num_far, SIZE)] * 2]
    shapes += [(HEADS, SEQUENCES, WIDTH, SIZE)] * 2
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def dense(q: Tensor, far_k: Tensor, far_v: Tensor, near_k: Tensor, near_v: Tensor, hidden: Tensor | None) -> Tensor:
    """One sequence and head at a time, all keys side by side."""
    out = torch.empty_like(q)
    for head in range(HEADS):
        for number in range(SEQUENCES):
            keys = torch.cat([far_k[head], near_k[head, number]])
            values = torch.cat([far_v[head], near_v[head, number]])
            seen = torch.ones(WIDTH, len(keys), dtype=torch.bool).tril(len(far_k[head]))
            bias = torch.zeros(WIDTH, len(keys), dtype=q.dtype).masked_fill(~seen, -torch.inf)
            if hidden is not None:
                bias[:, : hidden.shape[1]] += hidden[number]
            out[head, number] = (q[head, number] @ keys.T + bias).softmax(-1) @ values
    return out


@pytest.mark.parametrize("num_far", [0, 5])
@pytest.mark.parametrize("some_hidden", [False, True])
def test_attention_is_a_softmax_over_far_and_near_keys(num_far: int, some_hidden: bool):
    hidden = None
    if some_hidden:
        first_hidden = torch.tensor([[num_far], [1], [0]])
        hidden = torch.zeros(SEQUENCES, num_far).masked_fill(torch.arange(num_far) >= first_hidden, -torch.inf)
        hidden = hidden.double()
    inputs = operands(num_far)
    torch.testing.assert_close(attend(*inputs, hidden), dense(*inputs, hidden), atol=1e-12, rtol=0)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, hidden), leaves)


TOKENS = [int(x) for x in torch.randint(3, 500, (60,), generator=torch.Generator().manual_seed(5))]
ANSWER = 7


@pytest.mark.parametrize(("kind", "fork"), [("plain", 0), ("fork", 24), ("fork", 40), ("alora", 24)])
def test_a_leaf_of_the_tree_computes_what_the_oracle_does(tmp_path: Path, kind: str, fork: int):
    """Two questions on one document, in fp32: base below the fork point, a trunk behind it where both forked early."""
    model = load_model(make_model(tmp_path / "model"))
    declared = {"invocation_tokens": TOKENS[24:26]} if kind == "alora" else {}
    folder = make_adapter(tmp_path / "adapter", model.config, rank=8, alpha=16, kind=kind, **declared)
    tree = TreeModel(model, torch.float32)
    adapter = tree.new_adapter(8, 16)
    load_peft(adapter, folder)
    trunk_end = 40
    sequences = [TOKENS, [*TOKENS[:trunk_end], *reversed(TOKENS[trunk_end:])]]
    leaf_ids = torch.tensor([sequence[trunk_end:-1] for sequence in sequences])
    targets = torch.full(leaf_ids.shape, IGNORE)
    targets[:, -ANSWER:] = torch.tensor([sequence[-ANSWER:] for sequence in sequences])
    batch = TreeBatch(
        torch.tensor(TOKENS[:fork], dtype=torch.int64),
        torch.tensor(TOKENS[fork:trunk_end], dtype=torch.int64),
        leaf_ids,
        torch.tensor([trunk_end, trunk_end]),
        targets,
        residual=kind != "alora",
    )
    with torch.no_grad():
        logits, wanted = tree.answer_logits(batch, adapter)
    assert wanted.tolist() == [*sequences[0][-ANSWER:], *sequences[1][-ANSWER:]]
    for sequence, rows in zip(sequences, logits.log_softmax(-1).split(ANSWER), strict=True):
        expected = oracle_logprobs(model, sequence, read_adapter(folder), kind, None if kind == "plain" else fork)
        torch.testing.assert_close(rows, expected[-ANSWER - 1 : -1], atol=1e-4, rtol=0)
