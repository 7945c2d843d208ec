"""Outcomes of a trace as a handful of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.workloads.client import Outcome


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN for no values."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds, tokens, tokens a second. `seconds`: from the first request sent to the last token of all. Only answered
    requests count in anything but `failed`, which counts the others, sent or not. `cached_tokens` None: at least one
    answer did not tell. `retold`: answers whose token ids are their text, encoded again."""

    requests: int
    failed: int
    seconds: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_sum_s: float
    itl_p50_s: float
    itl_p95_s: float
    output_tokens: int
    output_per_s: float
    prompt_tokens: int
    cached_tokens: int | None
    retold: int
    errors: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(outcomes: Sequence[Outcome], requests: int) -> Summary:
    """`requests`: how many the trace has."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    waits = [outcome.ttft_s for outcome in good]
    gaps = [gap for outcome in good for gap in outcome.gaps_s]
    seconds = max((x.last_s for x in good), default=0.0) - min((x.sent_s for x in good), default=0.0)
    output = sum(outcome.output_tokens for outcome in good)
    told = [outcome.cached_tokens for outcome in good if outcome.cached_tokens is not None]
    return Summary(
        requests=requests,
        failed=requests - len(good),
        seconds=seconds,
        ttft_p50_s=percentile(waits, 50),
        ttft_p95_s=percentile(waits, 95),
        ttft_sum_s=sum(waits),
        itl_p50_s=percentile(gaps, 50),
        itl_p95_s=percentile(gaps, 95),
        output_tokens=output,
        output_per_s=output / seconds if seconds else float("nan"),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=sum(told) if len(told) == len(good) else None,
        retold=sum(outcome.retold for outcome in good),
        errors=tuple(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None)),
    )
