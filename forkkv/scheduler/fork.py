"""The fork point: where a request stops reading shared base blocks and starts its own.

A pure function of the request, fixed at admission. It does not depend on what is cached, so the same request means
the same computation whoever came first, and it survives preemption, decode and `n` > 1. Training recipes import it,
so that an adapter sees in training exactly the fork points that the server uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forkkv.types import AdapterKind


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """`weights_from` (f_w): first token that runs with adapter weights. `private_from` (f): first token whose K/V
    lies in private blocks, `weights_from` rounded down to a block; None where nothing is private: in a base request,
    whose `weights_from` is None too, and where agents share all that they write (f_w is the prompt's length)."""

    weights_from: int | None
    private_from: int | None

    @property
    def is_base(self) -> bool:
        return self.weights_from is None


BASE_REQUEST = ForkPoint(None, None)


def last_occurrence(tokens: Sequence[int], pattern: Sequence[int]) -> int | None:
    """Start of the last occurrence of `pattern` in `tokens`, compared token by token; None if there is none."""
    size = len(pattern)
    if size == 0 or size > len(tokens):
        return None
    wanted = list(pattern)
    for start in range(len(tokens) - size, -1, -1):
        if tokens[start] == wanted[0] and list(tokens[start : start + size]) == wanted:
            return start
    return None


def fork_point(
    prompt: Sequence[int],
    block_size: int,
    *,
    kind: AdapterKind | None,
    shared: bool,
    fork_tail: int,
    invocation_tokens: Sequence[int] = (),
    everything: bool = False,
    fork_at: int | None = None,
    mark: int | None = None,
) -> ForkPoint:
    """Fork point of a request with prompt tokens `prompt`; `kind` None means the base model.

    Precedence: not shared -> 0; aLoRA -> start of the last occurrence of its invocation tokens (none: a base
    request); `everything` is shared -> the end of the prompt; `fork_at`; the last `cache_control` mark; else
    `fork_tail` tokens before the end. The last three are rounded down to a block and leave the adapter a token.
    """
    if kind is None:
        return BASE_REQUEST
    if kind == "alora":
        start = last_occurrence(prompt, invocation_tokens)
        if start is None:
            return BASE_REQUEST
        return ForkPoint(start, start // block_size * block_size if shared else 0)
    if not shared:
        return ForkPoint(0, 0)
    n = len(prompt)
    if everything:
        return ForkPoint(n, None)
    last = (n - 1) // block_size * block_size
    if fork_at is not None:
        wanted = fork_at
    elif mark is not None:
        wanted = mark
    else:
        wanted = n - fork_tail
    point = max(0, min(wanted // block_size * block_size, last))
    return ForkPoint(point, point)
