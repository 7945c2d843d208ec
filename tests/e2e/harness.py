"""Requests through a real `EngineCore`, and what the oracle says of their answers. Shared by tests and benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forkkv.engine.core import EngineCore
from forkkv.types import CacheUsage, EngineRequest, SamplingParams, TokenLogprob
from tests.oracle import Adapter, Kind, oracle_logprobs, read_adapter

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, by the adapter's name."""

    name: str
    prompt: tuple[int, ...]
    adapter: str | None = None
    fork_at: int | None = None
    kv_sharing: Literal["none"] | None = None
    n: int = 1
    max_tokens: int = 24
    temperature: float = 0.0
    top_logprobs: int | None = 3


@dataclass(slots=True)
class Completion:
    """One of the `n` answers to an `Ask`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: CacheUsage | None = None
    finish_reason: str | None = None
    error: str | None = None

    def is_whole(self, ask: Ask) -> bool:
        """Whether it has all tokens that were asked for, with log-probs."""
        return len(self.token_ids) == len(self.logprobs) == ask.max_tokens

    def differences(self, rows: Tensor) -> list[float]:
        """Largest difference of a reported log-prob (chosen and most likely tokens) to `rows` [len(token_ids), vocab],
        for every token; inf where the log-prob is another token's."""
        found = []
        for row, token, entry in zip(rows, self.token_ids, self.logprobs, strict=True):
            pairs = [(token, entry.logprob), *entry.top]
            ids = torch.tensor([pair[0] for pair in pairs])
            reported = torch.tensor([pair[1] for pair in pairs])
            own = entry.token_id == token
            found.append(float((row[ids] - reported).abs().max()) if own else float("inf"))
        return found

    def difference(self, rows: Tensor) -> float:
        """Largest of `differences`."""
        return max(self.differences(rows))


Completions = dict[tuple[str, int], Completion]
"""By (name of the `Ask`, index of the completion)."""


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter as the oracle reads it from its folder, with the kind that the test gave it."""

    weights: Adapter
    kind: Literal["plain", "fork", "alora"]
    invocation_tokens: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, folder: Path, kind: Literal["plain", "fork", "alora"], invocation: Sequence[int] = ()
    ) -> KnownAdapter:
        return cls(read_adapter(folder), kind, tuple(invocation))


def adapter_id(core: EngineCore, name: str | None) -> int:
    """Id of a loaded adapter; 0 for None, the base model. Raises `KeyError`."""
    if name is None:
        return 0
    return {meta.name: meta.adapter_id for meta in core.info.adapters}[name]


def engine_request(core: EngineCore, ask: Ask, request_id: str) -> EngineRequest:
    """`ask` as the engine takes it; EOS does not end it, so it generates exactly `max_tokens`."""
    sampling = SamplingParams(
        max_tokens=ask.max_tokens, temperature=ask.temperature, seed=7, ignore_eos=True, logprobs=ask.top_logprobs
    )
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(ask.prompt),
        sampling=sampling,
        adapter_id=adapter_id(core, ask.adapter),
        n=ask.n,
        kv_sharing=ask.kv_sharing,
        fork_at=ask.fork_at,
    )


def run_all(core: EngineCore, asks: Iterable[Ask]) -> Completions:
    """Add all requests at once and step until nothing is left. Raises `RuntimeError` if the engine gets stuck."""
    results: Completions = {}
    names: dict[str, str] = {}
    for ask in asks:
        request_id = f"{ask.name}/{next(_serial)}"
        names[request_id] = ask.name
        results |= {(ask.name, index): Completion() for index in range(ask.n)}
        core.add_request(engine_request(core, ask, request_id))
    idle = 0
    while core.has_work():
        outputs, _ = core.step()
        idle = 0 if outputs else idle + 1
        if idle > 1000:
            raise RuntimeError("1000 steps without a token")
        for output in outputs:
            done = results[names[output.request_id], output.index]
            done.token_ids += output.new_token_ids
            done.logprobs += output.logprobs
            done.usage = output.usage or done.usage
            done.finish_reason = output.finish_reason or done.finish_reason
            done.error = output.error or done.error
    return results


class Reference:
    """What base, plain, fork-LoRA and aLoRA requests must answer under one `--kv-sharing` mode, by the oracle.

    Written again from the definitions, and not with the server's own fork point function. Log-probs are cached, since
    one sequence is asked for under many settings.
    """

    def __init__(
        self,
        model: Any,
        adapters: dict[str, KnownAdapter],
        *,
        mode: str,
        block_size: int = 16,
        fork_tail: int = 64,
        rows: dict[tuple[Any, ...], Tensor] | None = None,
    ) -> None:
        """`rows`: a cache of log-probs to use, for several references over one model and the same adapters."""
        self.model, self.adapters, self.mode = model, adapters, mode
        self.block_size, self.fork_tail = block_size, fork_tail
        self._rows = {} if rows is None else rows

    def meaning(self, ask: Ask) -> tuple[Kind, int]:
        """(kind of computation, f_w) of a request; f_w is the prompt's length for a base request."""
        n, size = len(ask.prompt), self.block_size
        if ask.adapter is None:
            return "base", n
        adapter = self.adapters[ask.adapter]
        if adapter.kind == "alora":
            pattern = adapter.invocation_tokens
            starts = [i for i in range(n) if ask.prompt[i : i + len(pattern)] == pattern]
            return ("alora", starts[-1]) if starts else ("base", n)
        private = self.mode == "none" or ask.kv_sharing == "none" or (adapter.kind == "plain" and self.mode == "auto")
        if private:
            return "plain", 0
        wanted = n - self.fork_tail if ask.fork_at is None else ask.fork_at
        return "fork", max(0, min(wanted // size * size, (n - 1) // size * size))

    def logprobs(self, ask: Ask, generated: Sequence[int]) -> Tensor:
        """Log-probs [len(generated), vocab]: row i is the distribution that `generated[i]` was chosen from."""
        kind, f_w = self.meaning(ask)
        tokens = (*ask.prompt, *generated[:-1])
        key = (tokens, None if kind == "base" else ask.adapter, kind, f_w)
        if key not in self._rows:
            weights = None if kind == "base" or ask.adapter is None else self.adapters[ask.adapter].weights
            rows = oracle_logprobs(self.model, tokens, weights, kind, f_w if kind in ("fork", "alora") else None)
            self._rows[key] = rows[len(ask.prompt) - 1 :].clone()
        return self._rows[key]

    def difference(self, ask: Ask, completion: Completion) -> float:
        """Largest difference of a reported log-prob (chosen and most likely tokens); inf for an answer that is not
        `max_tokens` long or was computed at another fork point."""
        usage = completion.usage
        if not completion.is_whole(ask) or usage is None or usage.fork_point != self.meaning(ask)[1]:
            return float("inf")
        return completion.difference(self.logprobs(ask, completion.token_ids))

    def worst(self, asks: Iterable[Ask], completions: Completions) -> tuple[float, str]:
        """(largest difference, name of its request) over all completions of `asks`."""
        found = [
            (self.difference(ask, completions[ask.name, index]), f"{ask.name}#{index}")
            for ask in asks
            for index in range(ask.n)
        ]
        return max(found)


class LayerTokens:
    """Counts the tokens that enter layer 0, by whose weights run there, with a forward pre-hook of the model. Decode
    steps run eagerly meanwhile, since a captured one does not come by here."""

    def __init__(self, core: EngineCore) -> None:
        executor: Any = core.executor
        self.base = 0
        self.adapter = 0
        self._runner = executor.runner
        self._graphs, self._runner.graphs = self._runner.graphs, None
        self._handle = executor.model.layers[0].register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden, step = arguments[:2]
        on_base = int((step.batch.weights_slot < 0).sum())
        self.base += on_base
        self.adapter += hidden.shape[0] - on_base

    def reset(self) -> None:
        self.base = self.adapter = 0

    def close(self) -> None:
        self._handle.remove()
        self._runner.graphs = self._graphs
