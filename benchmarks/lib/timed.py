"""Time over floor of every kernel of the small model's shape on this machine, for `roofline.py --card here`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.lib.cards import Rates
from benchmarks.lib.layer_ops import LayerOps
from benchmarks.lib.steps import SHAPES, Step, decode_step, prefill_step
from benchmarks.lib.text import columns

_SHAPE = "smollm2-135m"
_PREFIX, _PRIVATE, _RANK = 4096, 64, 16


def timed_steps(prefix: int = _PREFIX, private: int = _PRIVATE) -> tuple[tuple[str, Step, int], ...]:
    """(title, step, adapters)."""
    return (
        (f"decode, 1 agent on {prefix} tokens", decode_step(1, prefix, private), 1),
        (f"decode, 8 agents on {prefix} tokens", decode_step(8, prefix, private), 8),
        (f"decode, 8 agents on {prefix} tokens, ungrouped", decode_step(8, prefix, private, grouped=False), 8),
        (f"decode, 32 agents on {prefix} tokens", decode_step(32, prefix, private), 32),
        (f"base chunk of 512 behind {prefix // 2}, 8 residuals", prefill_step(512, prefix // 2, fanout=8), 8),
        (f"an agent's own 64 tokens behind {prefix}", prefill_step(64, prefix, suffix=True), 1),
    )


@torch.inference_mode()
def show_times(rates: Rates, device: str, backend: str | None, layers: int = 16, rounds: int = 5) -> dict[str, Any]:
    """Print, and return, seconds and floor of every kernel per layer. Floors count K and V of an ungrouped step for
    every row."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found: dict[str, Any] = {}
    rows = []
    for title, step, adapters in timed_steps():
        ops = LayerOps(
            SHAPES[_SHAPE],
            step,
            layers=layers,
            rank=_RANK,
            num_adapters=adapters,
            dtype=dtype,
            device=device,
            backend=backend,
        )
        times = ops.measure(rounds)
        for name, work in ops.works().items():
            seconds, floor = times.median(name), work.floor(rates)
            found.setdefault(title, {})[name] = {"seconds": seconds, "floor_s": floor}
            rows.append((f"{title}: {name}", f"{1e6 * seconds:,.1f}", f"{1e6 * floor:,.1f}", f"{seconds / floor:.2f}x"))
    print(f"\nMeasured on {_SHAPE}, {str(dtype).removeprefix('torch.')}, {layers} layers in rotation, us a layer\n")
    print(columns(("step: kernel", "measured", "floor", "over floor"), rows))
    return found
