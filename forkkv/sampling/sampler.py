"""Choosing tokens from logits, all rows at once.

The draw for output token i of a sequence is a function of (seed, i) and of the row's own logits alone: no generator
state, so batch-mates, preemption and the order of rows do not change what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkkv.types import SamplingParams, TokenLogprob

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""
_CANDIDATES = 256
"""Most likely tokens that are sorted first; the whole vocabulary is sorted only for rows that need more."""
_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row to sample: `index` counts the sequence's output tokens from 0."""

    params: SamplingParams
    seed: int
    index: int


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[TokenLogprob | None]]:
    """Token and, where wanted, log-probs of every row of logits [S, vocab].

    Temperature, then top-k, then top-p on the distribution that top-k leaves. Log-probs are those of the raw
    logits. Raises `FloatingPointError` if a row has no finite maximum. Mutates nothing.
    """
    if not rows:
        return [], []
    best = logits.max(dim=-1)
    if not bool(torch.isfinite(best.values).all()):
        raise FloatingPointError("the model produced logits that are not finite")
    tokens = best.indices
    drawn = [i for i, row in enumerate(rows) if not is_greedy(row.params)]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        picked = _draw(logits.index_select(0, index), [rows[i] for i in drawn])
        tokens = tokens.index_copy(0, index, picked)
    return tokens.tolist(), _logprobs(logits, tokens, rows)


def is_greedy(params: SamplingParams) -> bool:
    """Whether the most likely token is taken whatever the seed."""
    return params.temperature == 0.0 or params.top_k == 1


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that draws output token `index` of a sequence with `seed`: the SplitMix64 finaliser
    (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) over both, 53 bits."""
    return (_mix(_mix(seed & _WORD) + index) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Tokens [R] of rows that are not greedy; logits [R, vocab]."""
    vocab = logits.shape[1]
    temperature = _column([max(row.params.temperature, 1e-5) for row in rows], logits.device)
    numbers = _column([uniform(row.seed, row.index) for row in rows], logits.device)
    probs = torch.softmax(logits.float() / temperature.float(), dim=-1)
    limits = [min(row.params.top_k, vocab) if row.params.top_k > 0 else vocab for row in rows]
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    whole = [i for i, row in enumerate(rows) if limits[i] == vocab and row.params.top_p >= 1.0]
    if whole:
        index = torch.tensor(whole, device=logits.device)
        out[index] = _invert(probs[index].double().cumsum(-1), numbers[index])
    truncated = [i for i in range(len(rows)) if i not in set(whole)]
    if truncated:
        index = torch.tensor(truncated, device=logits.device)
        top_p = _column([rows[i].params.top_p for i in truncated], logits.device)
        ranks = _column([limits[i] for i in truncated], logits.device)
        out[index] = _draw_truncated(probs[index], ranks, top_p, numbers[index])
    return out


def _draw_truncated(probs: Tensor, top_k: Tensor, top_p: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [R] within the most likely `top_k` and of those within mass `top_p`; arguments but probs are [R, 1]."""
    candidates = min(_CANDIDATES, probs.shape[1])
    values, indices = probs.topk(candidates, dim=-1)
    mass = values.double().cumsum(-1)
    # Enough candidates: top-k ends among them, or (without top-k) their mass already exceeds top-p.
    enough = (top_k <= candidates) | ((top_k >= probs.shape[1]) & (mass[:, -1:] >= top_p))
    rows = enough.squeeze(1)
    out = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    if bool(rows.any()):
        out[rows] = _pick(mass[rows], indices[rows], top_k[rows], top_p[rows], numbers[rows], probs.shape[1])
    if not bool(rows.all()):
        rest = ~rows
        values, indices = probs[rest].sort(dim=-1, descending=True, stable=True)
        mass = values.double().cumsum(-1)
        out[rest] = _pick(mass, indices, top_k[rest], top_p[rest], numbers[rest], probs.shape[1])
    return out


def _pick(mass: Tensor, indices: Tensor, top_k: Tensor, top_p: Tensor, numbers: Tensor, vocab: int) -> Tensor:
    """Invert the truncated distribution: `mass` [R, C] cumulates the sorted probabilities of `indices` [R, C]."""
    last = (top_k.long() - 1).clamp(max=mass.shape[1] - 1)
    total = torch.where(top_k >= vocab, 1.0, mass.gather(1, last))
    kept = torch.searchsorted(mass, top_p * total).minimum(last)
    position = torch.searchsorted(mass, numbers * mass.gather(1, kept), right=True).minimum(kept)
    return indices.gather(1, position).squeeze(1)


def _invert(mass: Tensor, numbers: Tensor) -> Tensor:
    """First position whose cumulated mass [R, V] exceeds numbers [R, 1] times the total."""
    position = torch.searchsorted(mass, numbers * mass[:, -1:], right=True)
    return position.clamp(max=mass.shape[1] - 1).squeeze(1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    """[R, 1] float64."""
    return torch.from_numpy(np.asarray(values, dtype=np.float64)[:, None]).to(device)


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[SampleRow]) -> list[TokenLogprob | None]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    out: list[TokenLogprob | None] = [None] * len(rows)
    if not wanted:
        return out
    index = torch.tensor(wanted, device=logits.device)
    scores = torch.log_softmax(logits.index_select(0, index).float(), dim=-1).clamp_(min=LOGPROB_FLOOR)
    chosen_ids = tokens[index].tolist()
    chosen = scores.gather(1, tokens[index, None]).squeeze(1).tolist()
    width = min(max(rows[i].params.logprobs or 0 for i in wanted), scores.shape[1])
    top = scores.topk(width, dim=-1)
    top_scores, top_ids = top.values.tolist(), top.indices.tolist()
    for at, i in enumerate(wanted):
        count = min(rows[i].params.logprobs or 0, width)
        best = tuple(zip(top_ids[at][:count], top_scores[at][:count], strict=True))
        out[i] = TokenLogprob(chosen_ids[at], chosen[at], best)
    return out
