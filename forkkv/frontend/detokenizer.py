"""Token ids to text as they come, without ever showing half a character or half a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import DecodeStream

PROMPT_CONTEXT = 6
"""Prompt tokens that the decoder sees first: some decoders drop a leading blank at the start of a text."""
MAX_HELD_TOKENS = 16
"""Tokens without text after which bytes are taken to be invalid rather than an unfinished character (4 bytes)."""


class IncrementalDecoder:
    """Text of one growing token sequence, in pieces that end on character boundaries."""

    def __init__(self, backend: BackendTokenizer, prompt_tail: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._backend = backend
        self._skip_special = skip_special_tokens
        self._held: list[int] = []
        self._restart(prompt_tail[-PROMPT_CONTEXT:])

    @property
    def is_holding(self) -> bool:
        """Whether tokens were taken whose text has not come out."""
        return bool(self._held)

    def step(self, token_id: int) -> str:
        """Take one token; returns the text that became certain, often "" within a character. Mutates."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:
            # The stream gives up on byte sequences that later turn out to be invalid; start afresh behind them.
            return self.flush()
        if piece is not None:
            self._held.clear()
            return str(piece)
        return self.flush() if len(self._held) > MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """Text of the held tokens, with U+FFFD for bytes that are no character. Mutates."""
        if not self._held:
            return ""
        held, self._held = self._held, []
        self._restart(())
        return str(self._backend.decode(held, skip_special_tokens=self._skip_special))

    def _restart(self, context: Sequence[int]) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        for token_id in context:
            try:
                self._stream.step(self._backend, token_id)
            except Exception:
                self._stream = DecodeStream(skip_special_tokens=self._skip_special)


class StopChecker:
    """Finds stop strings in a growing text and says how much of it is safe to show."""

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._longest = max((len(text) for text in self._stop), default=0)

    def find(self, text: str, new_from: int) -> tuple[int, str] | None:
        """(position, stop string) of the earliest match that ends in `text[new_from:]`; the longest if several start
        at one position."""
        start = max(0, new_from - self._longest + 1)
        hits = [(text.find(stop, start), -len(stop), stop) for stop in self._stop]
        found = min((hit for hit in hits if hit[0] >= 0), default=None)
        return None if found is None else (found[0], found[2])

    def held_back(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stop if len(stop) > size):
                return size
        return 0
