"""Shapes of OpenAI's answers: chat and legacy completions, whole and streamed. Pure functions of a `Generation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from forkkv.frontend.output import Delta, Generation, Token, chat_logprobs, completion_logprobs

Object = dict[str, Any]


class AnswerFormat(Protocol):
    """One endpoint's answer objects."""

    def __init__(self, generation: Generation): ...
    def opening(self) -> Iterator[Object]:
        """Chunks before the first token."""
        ...

    def chunks(self, delta: Delta) -> Iterator[Object]:
        """Chunks of one delta, the finish chunk last."""
        ...

    def usage_chunk(self) -> Object: ...
    def whole(self, deltas: Sequence[Delta]) -> Object:
        """The answer without streaming, from all deltas in order."""
        ...


class _Format:
    object_name = ""
    chunk_name = ""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.job = generation.job

    def envelope(self, name: str, choices: list[Object]) -> Object:
        job = self.job
        return {
            "id": job.job_id,
            "object": name,
            "created": job.created,
            "model": job.model.name,
            "system_fingerprint": job.model.fingerprint,
            "choices": choices,
        }

    def chunk(self, choices: list[Object]) -> Object:
        chunk = self.envelope(self.chunk_name, choices)
        if self.job.include_usage:
            # OpenAI's clients expect the key in every chunk once usage was asked for.
            chunk["usage"] = None
        return chunk

    def usage_chunk(self) -> Object:
        return {**self.envelope(self.chunk_name, []), "usage": self.generation.usage()}

    def answer(self, choices: list[Object]) -> Object:
        return {**self.envelope(self.object_name, choices), "usage": self.generation.usage()}

    def gathered(self, deltas: Sequence[Delta]) -> Iterator[tuple[int, str, list[Token], Delta]]:
        """(index, text, tokens, last delta) of every completion."""
        by_index: dict[int, list[Delta]] = {index: [] for index in range(len(self.generation.completions))}
        for delta in deltas:
            by_index[delta.index].append(delta)
        for index, parts in by_index.items():
            text = "".join(part.text for part in parts)
            yield index, text, [token for part in parts for token in part.tokens], parts[-1]

    def token_ids(self, tokens: Sequence[Token]) -> Object:
        return {"token_ids": [token.token_id for token in tokens]} if self.job.return_token_ids else {}


class ChatFormat(_Format):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> Iterator[Object]:
        for completion in self.generation.completions:
            chunk = self.chunk([self._choice(completion.index, {"role": "assistant", "content": ""})])
            if self.job.return_token_ids:
                chunk["prompt_token_ids"] = self.job.prompts[0]
            yield chunk

    def chunks(self, delta: Delta) -> Iterator[Object]:
        wants_tokens = self.job.return_token_ids or self.job.logprobs is not None
        if delta.text or (delta.tokens and wants_tokens):
            content = {"content": delta.text} if delta.text else {}
            yield self.chunk([self._choice(delta.index, content, delta.tokens)])
        if delta.finish_reason is not None:
            choice = self._choice(delta.index, {}, finish_reason=delta.finish_reason)
            yield self.chunk([{**choice, "stop_reason": delta.stop_reason}])

    def whole(self, deltas: Sequence[Delta]) -> Object:
        choices = []
        for index, text, tokens, last in self.gathered(deltas):
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": last.finish_reason,
                    "stop_reason": last.stop_reason,
                    **self.token_ids(tokens),
                }
            )
        answer = self.answer(choices)
        if self.job.return_token_ids:
            answer["prompt_token_ids"] = self.job.prompts[0]
        return answer

    def _choice(
        self, index: int, delta: Object, tokens: Sequence[Token] = (), finish_reason: str | None = None
    ) -> Object:
        choice: Object = {"index": index, "delta": delta, "finish_reason": finish_reason}
        choice["logprobs"] = self._logprobs(tokens) if tokens else None
        return {**choice, **(self.token_ids(tokens) if tokens else {})}

    def _logprobs(self, tokens: Sequence[Token]) -> Object | None:
        return None if self.job.logprobs is None else chat_logprobs(tokens, self.generation.tokenizer)


class CompletionFormat(_Format):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, generation: Generation):
        super().__init__(generation)
        self._prompt_sent: set[int] = set()

    def opening(self) -> Iterator[Object]:
        return iter(())

    def chunks(self, delta: Delta) -> Iterator[Object]:
        wants_tokens = self.job.return_token_ids or self.job.logprobs is not None
        if not (delta.text or delta.finish_reason or (delta.tokens and wants_tokens)):
            return
        choice = self._choice(delta.index, delta.text, delta.tokens, delta)
        if self.job.return_token_ids and delta.index not in self._prompt_sent:
            self._prompt_sent.add(delta.index)
            choice["prompt_token_ids"] = self.job.prompts[delta.index // self.job.n]
        yield self.chunk([choice])

    def whole(self, deltas: Sequence[Delta]) -> Object:
        choices = []
        for index, text, tokens, last in self.gathered(deltas):
            choice = self._choice(index, text, tokens, last)
            if self.job.return_token_ids:
                choice["prompt_token_ids"] = self.job.prompts[index // self.job.n]
            choices.append(choice)
        return self.answer(choices)

    def _choice(self, index: int, text: str, tokens: Sequence[Token], last: Delta) -> Object:
        wanted = self.job.logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(tokens, self.generation.tokenizer) if wanted else None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            **self.token_ids(tokens),
        }
