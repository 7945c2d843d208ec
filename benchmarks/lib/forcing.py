"""Answers scored token by token by the engine itself, under any sharing mode.

A request is *forced*: the engine decodes as always, through the scheduler, the caches and the kernels of its mode, but
each token that it takes is the next one of a given answer, whatever was most likely. So every position's distribution
is the one that the server has there, in modes whose answers are written into shared blocks, too, and needs no second
way of running the model.

* Right answers: all contexts are those of a greedy generation until its first mistake, so an answer is generated
  greedily to the last token if and only if each of its tokens, end token included, is the most likely one when forced.
  One run gives exactness and the scores.
* KL: sum over the whole vocabulary of p (log p - log q) with p of the reference and q of the cell, in nats, from the
  engine's own logits in float32: no truncation to the most likely tokens, which would leave out what lies in the tail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forkkv.config import EngineConfig
from forkkv.executor.compare import kl_divergence
from forkkv.executor.uniproc import UniprocExecutor
from forkkv.types import StepPlan, StepResult


@dataclass(slots=True)
class Track:
    """One request on its way along an answer.

    `answer` is what the engine has to take; empty: its own most likely tokens, which are added here. `reference`
    holds the log-probs [vocab] float32 of each position to compare with; None: this is the reference, and `logprobs`
    keeps its own.
    """

    num_prompt_tokens: int
    answer: list[int] = field(default_factory=list)
    reference: list[Tensor] | None = None
    best: list[int] = field(default_factory=list)
    """Most likely token at each position."""
    kl: list[float] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    fork_point: int = 0

    def take(self, position: int, row: Tensor, best: int) -> int:
        """Score position `position` of the answer with log-probs `row` [vocab]; the token to take. Mutates the track,
        and forgets what an earlier run of a step that failed left from that position on."""
        for scores in (self.best, self.kl, self.logprobs):
            del scores[position:]
        self.best.append(best)
        if self.reference is None:
            self.logprobs.append(row.clone())
        else:
            self.kl.append(float(kl_divergence(self.reference[position], row)))
        return self.answer[position] if position < len(self.answer) else best


class ForcingExecutor(UniprocExecutor):
    """The executor of one process, with a hook on the model's logits that scores and forces the requests in `tracks`
    (by request id). All others are sampled as they ask for.

    CUDA graphs do not run hooks: the configuration must have `enforce_eager`.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, progress=False)
        self.tracks: dict[str, Track] = {}
        self._sampled: list[tuple[str, int]] = []
        self.model.register_forward_hook(self._force)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor`."""
        self._sampled = [(segment.request_id, segment.end) for segment in plan.segments if segment.sample]
        return super().execute(plan)

    def _force(self, module: nn.Module, arguments: tuple[Any, ...], logits: Tensor) -> Tensor:
        """Logits [S, vocab] of the sampled rows, with the forced token made the most likely one."""
        tracked = [(row, name, end) for row, (name, end) in enumerate(self._sampled) if name in self.tracks]
        if not tracked:
            return logits
        best = logits.argmax(-1).tolist()
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        forced = logits.clone()
        for row, name, end in tracked:
            track = self.tracks[name]
            token = track.take(end - track.num_prompt_tokens, logprobs[row], best[row])
            forced[row, token] = forced[row, best[row]] + 1
        return forced
