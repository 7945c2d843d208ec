"""Sampling: right distribution, reproducible draws that depend on nothing but (seed, index, logits)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forkkv.sampling.sampler import LOGPROB_FLOOR, SampleRow, sample, uniform
from forkkv.types import SamplingParams

VOCAB = 1000


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def row(seed: int = 0, index: int = 0, **params: object) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, index)  # type: ignore[arg-type]


def draws(logits: Tensor, count: int, **params: object) -> list[int]:
    """`count` tokens of one row of logits, one per output index."""
    return sample(logits.expand(count, -1), [row(3, i, **params) for i in range(count)])[0]


def test_greedy_is_argmax() -> None:
    logits = logits_of(4)
    tokens, logprobs = sample(
        logits, [row(temperature=0.0), row(top_k=1), row(temperature=0.0, top_p=0.1), row(top_k=1)]
    )
    assert tokens == logits.argmax(-1).tolist() and logprobs == [None] * 4
    assert sample(logits[:0], []) == ([], [])


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf")]])
    for temperature in (0.5, 1.0, 2.0):
        tokens = draws(logits, 4000, temperature=temperature)
        expected = torch.softmax(logits[0] / temperature, -1)
        found = torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)
        assert (found - expected).abs().max() < 0.03 and found[3] == 0


def test_draw_depends_on_seed_and_index_alone() -> None:
    logits = logits_of(6)
    rows = [
        row(1, 0),
        row(1, 5, top_k=7),
        row(2, 0, top_p=0.9),
        row(2, 1, top_p=0.3, top_k=40),
        row(9, 2, temperature=0.0),
        row(9, 3, temperature=3.0, top_p=0.9999),
    ]
    together = sample(logits, rows)[0]
    assert [sample(logits[i : i + 1], [r])[0][0] for i, r in enumerate(rows)] == together
    order = [4, 2, 0, 5, 1, 3]
    assert sample(logits[order], [rows[i] for i in order])[0] == [together[i] for i in order]
    assert len(set(draws(logits[:1], 50))) > 10


def test_uniform_numbers_are_spread() -> None:
    numbers = [uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(numbers)) == len(numbers) and all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(2**80 + 1, 3) == uniform((2**80 + 1) % 2**64, 3) and uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize("top_k", [2, 10, 300, 999, 5000])
def test_top_k(top_k: int) -> None:
    logits = logits_of(1, spread=0.3)
    allowed = set(logits[0].topk(min(top_k, VOCAB)).indices.tolist())
    tokens = draws(logits, 400, top_k=top_k)
    assert set(tokens) <= allowed and len(set(tokens)) > min(top_k, 100) / 2


@pytest.mark.parametrize(("top_p", "spread"), [(0.05, 2.0), (0.5, 2.0), (0.95, 2.0), (0.9, 0.1)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, spread: float) -> None:
    """The last case needs more than the first candidates and sorts the whole vocabulary."""
    logits = logits_of(1, spread=spread)
    probs, order = torch.softmax(logits[0].double(), -1).sort(descending=True)
    count = int((probs.cumsum(0) < top_p).sum()) + 1
    tokens = draws(logits, 1500, top_p=top_p)
    assert set(tokens) <= set(order[:count].tolist())
    assert int(order[0]) in tokens or spread < 1


def test_top_p_applies_to_what_top_k_leaves() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert set(draws(logits, 300, top_k=2, top_p=0.5)) == {0}
    assert set(draws(logits, 300, top_k=2, top_p=0.6)) == {0, 1}
    assert set(draws(logits, 300, top_p=1e-9)) == {0}


def test_logprobs() -> None:
    logits = logits_of(3)
    logits[1, 5] = float("-inf")
    rows = [row(temperature=0.7, logprobs=0), row(logprobs=VOCAB + 5), row(temperature=0.0, logprobs=3)]
    tokens, logprobs = sample(logits, rows)
    expected = torch.log_softmax(logits, -1)
    for i, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(expected[i, token].item(), abs=1e-5)
    assert logprobs[0] is not None and logprobs[0].top == ()
    assert logprobs[1] is not None and len(logprobs[1].top) == VOCAB
    assert logprobs[1].top[-1] == (5, LOGPROB_FLOOR) and all(math.isfinite(value) for _, value in logprobs[1].top)
    assert logprobs[2] is not None and [token for token, _ in logprobs[2].top] == logits[2].topk(3).indices.tolist()


def test_logits_that_are_not_finite_are_refused() -> None:
    logits = logits_of(2)
    logits[1, 3] = float("nan")
    with pytest.raises(FloatingPointError):
        sample(logits, [row(), row(temperature=0.0)])
