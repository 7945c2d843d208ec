"""From engine outputs to text: the state of a request's completions, stop strings, log-probs, usage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forkkv.errors import RequestError
from forkkv.frontend.detokenizer import IncrementalDecoder, StopChecker
from forkkv.frontend.input import Job
from forkkv.frontend.tokenizer import Tokenizer
from forkkv.types import CacheUsage, EngineOutput, TokenLogprob

LOGPROB_FLOOR = -9999.0
"""Stands for "impossible": JSON has no infinity."""


class RequestObserver(Protocol):
    """Who counts what passes by; `forkkv.metrics.prometheus.ServerMetrics` does."""

    def on_prompt(self, num_prompt_tokens: int, usage: CacheUsage) -> None: ...
    def on_first_token(self, seconds: float) -> None: ...
    def on_tokens(self, count: int, seconds: float | None) -> None: ...
    def on_finish(self, reason: str, seconds: float) -> None: ...


@dataclass(slots=True)
class Token:
    """One generated token. `start` and `end` are its character range in the completion's text."""

    token_id: int
    logprob: TokenLogprob | None
    start: int
    end: int | None = None


@dataclass(slots=True)
class Delta:
    """What became known of one completion: text that no later token can change, and the tokens it came from."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Completion:
    """Text side of one sequence: decodes, watches for stop strings, holds back what is not certain yet."""

    def __init__(self, index: int, decoder: IncrementalDecoder, stop: Sequence[str]):
        self.index = index
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.last_time: float | None = None
        self._decoder = decoder
        self._stop = StopChecker(stop)
        self._unsent: deque[Token] = deque()
        self._sent = 0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, output: EngineOutput) -> Delta:
        """Take new tokens; after a stop string the rest of `output` is discarded. Mutates."""
        token_ids = output.new_token_ids
        hidden = -1
        if output.stop_token_id is not None and token_ids and token_ids[-1] == output.stop_token_id:
            hidden = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            logprob = output.logprobs[position] if position < len(output.logprobs) else None
            self._take(token_id, logprob, show=position != hidden)
            if self.is_finished:
                return self._release()
        if output.finish_reason is not None:
            self._grow(self._decoder.flush())
            if not self.is_finished:
                self.finish_reason, self.stop_reason = output.finish_reason, output.stop_token_id
        return self._release()

    def _take(self, token_id: int, logprob: TokenLogprob | None, *, show: bool) -> None:
        self.num_tokens += 1
        self._unsent.append(Token(token_id, logprob, start=len(self.text)))
        if show:
            self._grow(self._decoder.step(token_id))

    def _grow(self, piece: str) -> None:
        """Append decoded text and end the completion at a stop string."""
        if not piece:
            return
        before = len(self.text)
        self.text += piece
        if (match := self._stop.find(self.text, before)) is not None:
            self.text = self.text[: match[0]]
            self.finish_reason, self.stop_reason = "stop", match[1]
        for token in self._unsent:
            if token.end is None:
                # Tokens inside a character get their text together with the token that completes it.
                token.end = len(self.text)

    def _release(self) -> Delta:
        limit = len(self.text)
        if not self.is_finished:
            limit -= self._stop.held_back(self.text)
        delta = Delta(self.index, self.text[self._sent : limit], [], self.finish_reason, self.stop_reason)
        self._sent = max(self._sent, limit)
        while self._unsent and (self.is_finished or self._is_out(self._unsent[0], limit)):
            delta.tokens.append(self._unsent.popleft())
        return delta

    @staticmethod
    def _is_out(token: Token, limit: int) -> bool:
        return token.end is not None and token.end <= limit


class Generation:
    """All completions of one HTTP request, fed with engine outputs."""

    def __init__(self, job: Job, tokenizer: Tokenizer, observer: RequestObserver | None = None):
        self.job = job
        self.tokenizer = tokenizer
        self.usage_of: dict[int, CacheUsage] = {}
        """First completion's cache usage by prompt."""
        self._observer = observer
        self._first_choice: dict[str, int] = {}
        self.completions: list[Completion] = []
        for request in job.requests:
            self._first_choice[request.request_id] = len(self.completions)
            for _ in range(request.n):
                decoder = IncrementalDecoder(
                    tokenizer.backend, request.prompt_token_ids[-8:], skip_special_tokens=job.skip_special_tokens
                )
                self.completions.append(Completion(len(self.completions), decoder, job.stop))

    def feed(self, outputs: Sequence[EngineOutput]) -> tuple[list[Delta], list[str]]:
        """(deltas with something in them, ids of requests that a stop string ended). Mutates. Raises `RequestError`
        (500) if the engine failed on one of the sequences."""
        deltas: list[Delta] = []
        ended: list[str] = []
        for output in outputs:
            completion = self.completions[self._first_choice[output.request_id] + output.index]
            if completion.is_finished:
                continue
            if output.finish_reason in ("error", "abort"):
                self._observe_end(completion, output.finish_reason)
                completion.finish_reason = output.finish_reason
                message = output.error or "The engine ended the request."
                raise _engine_error(message)
            delta = self._feed_one(completion, output)
            if completion.is_finished and output.finish_reason is None:
                ended.append(output.request_id)
            if delta.text or delta.tokens or delta.finish_reason:
                deltas.append(delta)
        return deltas, ended

    def _feed_one(self, completion: Completion, output: EngineOutput) -> Delta:
        prompt = completion.index // self.job.n
        if output.usage is not None and completion.index % self.job.n == 0:
            self.usage_of[prompt] = output.usage
            if self._observer is not None:
                self._observer.on_prompt(len(self.job.prompts[prompt]), output.usage)
        before = completion.num_tokens
        delta = completion.feed(output)
        self._observe_tokens(completion, completion.num_tokens - before)
        if completion.finish_reason is not None:
            self._observe_end(completion, completion.finish_reason)
        return delta

    def _observe_tokens(self, completion: Completion, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        last, completion.last_time = completion.last_time, now
        if self._observer is not None:
            if last is None:
                self._observer.on_first_token(now - self.job.arrival)
            self._observer.on_tokens(count, None if last is None else now - last)

    def _observe_end(self, completion: Completion, reason: str) -> None:
        if self._observer is not None:
            self._observer.on_finish(reason, time.monotonic() - self.job.arrival)

    def close(self, reason: str = "abort") -> None:
        """Count completions that will not finish. Idempotent."""
        for completion in self.completions:
            if not completion.is_finished:
                completion.finish_reason = reason
                self._observe_end(completion, reason)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; each prompt counts once, whatever `n` is. `forkkv` says where prompt tokens came
        from, summed over prompts; `fork_point` is null where prompts differ in it."""
        prompt_tokens = sum(map(len, self.job.prompts))
        completion_tokens = sum(completion.num_tokens for completion in self.completions)
        usages = list(self.usage_of.values())
        cached = sum(usage.cached_tokens(len(self.job.prompts[prompt])) for prompt, usage in self.usage_of.items())
        points = {usage.fork_point for usage in usages}
        kinds = {usage.kind for usage in usages}
        totals = {name: sum(getattr(usage, name) for usage in usages) for name in _TIERS}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "forkkv": {
                "fork_point": points.pop() if len(points) == 1 else None,
                **totals,
                "kind": kinds.pop() if len(kinds) == 1 else None,
            },
        }


_TIERS = ("base", "residual", "private", "computed")


def _engine_error(message: str) -> RequestError:
    error = RequestError(message, code="engine_error", status=500)
    error.error_type = "server_error"
    return error


def finite(logprob: float) -> float:
    """`logprob` with a floor instead of -inf or NaN."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """OpenAI's `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {
            **entry(token.token_id, token.logprob.logprob),
            "top_logprobs": [entry(*candidate) for candidate in token.logprob.top],
        }
        for token in tokens
        if token.logprob is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` object of a legacy completion choice; offsets count characters of the completion's text. As in
    OpenAI's API the chosen token is always among `top_logprobs` when candidates were asked for."""
    known = [(token, token.logprob) for token in tokens if token.logprob is not None]
    top: list[dict[str, float]] = []
    for token, logprob in known:
        candidates = {tokenizer.token_text(candidate): finite(value) for candidate, value in logprob.top}
        if logprob.top:
            candidates.setdefault(tokenizer.token_text(token.token_id), finite(logprob.logprob))
        top.append(candidates)
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token, _ in known],
        "token_logprobs": [finite(logprob.logprob) for _, logprob in known],
        "top_logprobs": top,
        "text_offset": [token.start for token, _ in known],
    }
