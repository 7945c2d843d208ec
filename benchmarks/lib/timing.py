"""Timing of steps in turns: medians of rounds, ratios of pairs. Needs torch alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

_HEAD_START_CYCLES = 4_000_000
"""Cycles that a GPU is kept busy before a measurement (about 2 ms), so that launches are queued ahead of it."""

Step = Callable[[], object]


@dataclass(slots=True)
class Times:
    """Seconds per layer of each contender, one entry a round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """Median over the rounds of the time of `name` over that of `other`."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return statistics.median([a / b for a, b in pairs])


def seconds_of(action: Step, device: torch.device | str = "cpu") -> float:
    """Time of `action`: on CPUs by the clock; on GPUs between two events, with launches queued ahead, so that what is
    measured is the device's time as long as the action does not wait for the device."""
    if torch.device(device).type != "cuda":
        began = time.perf_counter()
        action()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def take_turns(
    contenders: Mapping[str, tuple[Step, int]], rounds: int, device: torch.device | str = "cpu", warm_up: int = 1
) -> Times:
    """Run every contender (step, layers in it) `warm_up` times and then once a round."""
    for step, _ in contenders.values():
        for _ in range(warm_up):
            step()
    times = Times({name: [] for name in contenders})
    for _ in range(rounds):
        for name, (step, layers) in contenders.items():
            times.seconds[name].append(seconds_of(step, device) / layers)
    return times
