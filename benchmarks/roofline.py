"""Floors of every kernel: bytes and flops counted from plans, on a named card or on this machine.

    python benchmarks/roofline.py --card h200
    python benchmarks/roofline.py --card here [--backend NAME]

`--card NAME` takes the makers' figures (sources in `lib/cards.py`); `--card here` measures copies and matrix products
first, on the GPU if there is one, and then also runs the attention of the small model's shape and prints its time over
the floor. Counting rules: `lib/roofline.py`. Floors on a named card use published peaks; nothing reaches those.

Tables: decode of N agents on S shared tokens (base once + N residuals + N private tails) beside the same rows without
grouping and beside N private caches; then every kernel of a decode step, of a base chunk with a fan-out and of an
agent's own prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "kernels"))

from benchmarks.lib.cards import CARDS, Rates  # noqa: E402
from benchmarks.lib.roofline import attention_work, count_layer, decode_rows, head_work, total  # noqa: E402
from benchmarks.lib.steps import SHAPES, Step, decode_step, prefill_step, private_step  # noqa: E402
from benchmarks.lib.text import columns, mega, tokens  # noqa: E402
from forkkv.attention.batch import ForwardBatch  # noqa: E402
from forkkv.models.spec import ModelSpec  # noqa: E402

_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CHUNK, _SUFFIX, _KERNEL_PREFIX, _KERNEL_AGENTS = 2048, 64, 16384, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="here", choices=("here", *CARDS), help="default: here, measured")
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES), help="default: 8b and smollm2-135m")
    parser.add_argument("--agents", type=_numbers, default=[1, 8, 32], metavar="N,...")
    parser.add_argument("--prefix", type=_numbers, default=[4096, 16384, 32768], metavar="TOKENS,...")
    parser.add_argument("--private", type=int, default=256, metavar="TOKENS", help="tokens of each agent's own")
    parser.add_argument("--rank", type=int, default=16, help="of K and V residuals and of all projections")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--itemsize", type=int, help="bytes of an element; default 2 on cards and GPUs, 4 on a CPU")
    parser.add_argument("--backend", metavar="NAME", help="with --card here: the attention backend to time")
    parser.add_argument("--no-timing", action="store_true", help="with --card here: measure the rates only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts here, too")
    args = parser.parse_args()
    device, itemsize, rates = "", args.itemsize or 2, CARDS.get(args.card)
    if rates is None:
        from benchmarks.lib.rates import measure_here

        device, rates = measure_here()
        itemsize = args.itemsize or (2 if device == "cuda" else 4)
    print(
        f"{rates.name}: {rates.bytes_per_s / 1e12:.4g} TB/s, {rates.flop_per_s / 1e12:.4g} TFLOP/s; "
        f"{itemsize} bytes an element, rank {args.rank}, blocks of {args.block_size}, {args.private} private tokens"
    )
    found: dict[str, Any] = {"rates": asdict(rates), "itemsize": itemsize, "shapes": {}}
    for name in args.shape or ("8b", "smollm2-135m"):
        found["shapes"][name] = show_shape(name, SHAPES[name], rates, itemsize, args)
    if device and not args.no_timing:
        from benchmarks.lib.timed import show_times

        found["times"] = show_times(rates, device, args.backend)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def show_shape(name: str, spec: ModelSpec, rates: Rates, itemsize: int, args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables of one shape; what they show, for JSON."""
    print(
        f"\n{name}: {spec.num_layers} layers, {spec.num_heads} heads, {spec.num_kv_heads} KV heads of "
        f"{spec.head_dim}, hidden {spec.hidden_size}\n\nAttention of one decode step, all layers, MB and floor in ms"
    )
    decode = [decode_row(spec, rates, itemsize, n, s, args) for s in args.prefix for n in args.agents]
    head = ("agents x prefix", "grouped MB", "base", "residuals", "private", "ms", "ungrouped MB", "ms")
    print(columns((*head, "N caches MB", "ms", "caches/grouped"), [_decode_cells(row) for row in decode]))
    kernels = {}
    for title, step in kernel_steps(args):
        kernels[title] = kernel_rows(step.batch(), spec, rates, itemsize, args.rank)
        print(f"\n{title}: one layer (head: once a step)\n")
        print(columns(("kernel", "MB", "GFLOP", "set by", "floor us"), [_kernel_cells(r) for r in kernels[title]]))
    return {"decode": decode, "kernels": kernels}


def decode_row(
    spec: ModelSpec, rates: Rates, itemsize: int, agents: int, prefix: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Counts and floors of one decode step over all layers: grouped, ungrouped, and on private caches."""
    batch = decode_step(agents, prefix, args.private, rank=args.rank, block_size=args.block_size).batch()
    rows = decode_rows(batch.host)
    alone = private_step(agents, prefix + args.private, args.block_size).batch()
    works = {
        "grouped": attention_work(batch, spec, rows, itemsize).times(spec.num_layers),
        "ungrouped": attention_work(batch, spec, rows, itemsize, grouped=False).times(spec.num_layers),
        "caches": attention_work(alone, spec, rows, itemsize).times(spec.num_layers),
    }
    row: dict[str, Any] = {"agents": agents, "prefix": prefix}
    for name, work in works.items():
        row[name] = {"bytes": work.bytes, "flops": work.flops, "floor_s": work.floor(rates)}
    return row


def _decode_cells(row: dict[str, Any]) -> list[str]:
    grouped = row["grouped"]["bytes"]
    base, own = grouped["base K, V"], grouped["own K, V"]
    cells = [f"{row['agents']} x {tokens(row['prefix'])}", mega(sum(grouped.values()))]
    cells += [mega(base), mega(grouped["residual"]), mega(own)]
    cells.append(f"{1e3 * row['grouped']['floor_s']:.3f}")
    for name in ("ungrouped", "caches"):
        cells += [mega(sum(row[name]["bytes"].values())), f"{1e3 * row[name]['floor_s']:.3f}"]
    return [*cells, f"{row['caches']['floor_s'] / row['grouped']['floor_s']:.2f}x"]


def kernel_steps(args: argparse.Namespace) -> Sequence[tuple[str, Step]]:
    """The three kinds of step that a fan-out consists of."""
    n, s, size = _KERNEL_AGENTS, _KERNEL_PREFIX, args.block_size
    return (
        (
            f"Decode of {n} agents on {tokens(s)} tokens",
            decode_step(n, s, args.private, rank=args.rank, block_size=size),
        ),
        (
            f"Base chunk of {_CHUNK} tokens behind {tokens(s - _CHUNK)}, residuals of {n} adapters",
            prefill_step(_CHUNK, s - _CHUNK, rank=args.rank, fanout=n, block_size=size),
        ),
        (
            f"Prefill of an agent's own {_SUFFIX} tokens behind {tokens(s)}",
            prefill_step(_SUFFIX, s, rank=args.rank, suffix=True, block_size=size),
        ),
    )


def kernel_rows(batch: ForwardBatch, spec: ModelSpec, rates: Rates, itemsize: int, rank: int) -> list[dict[str, Any]]:
    """Every kernel of one layer, their sum over the layers with the head, and the step."""
    adapters = {slot: dict.fromkeys(_ALL, rank) for slot in range(_KERNEL_AGENTS)}
    works = count_layer(batch, spec, adapters, itemsize)
    head = head_work(batch, spec, itemsize)
    layer = total(works.values())
    floors = {name: work.floor(rates) for name, work in works.items()}
    rows = [_kernel(name, work.total_bytes, work.total_flops, floors[name], rates) for name, work in works.items()]
    rows.append(_kernel("sum of a layer", layer.total_bytes, layer.total_flops, sum(floors.values()), rates))
    rows.append(_kernel("head", head.total_bytes, head.total_flops, head.floor(rates), rates))
    step = layer.times(spec.num_layers) + head
    seconds = spec.num_layers * sum(floors.values()) + head.floor(rates)
    return [*rows, _kernel("whole step", step.total_bytes, step.total_flops, seconds, rates)]


def _kernel(name: str, num_bytes: int, flops: int, floor: float, rates: Rates) -> dict[str, Any]:
    memory = num_bytes / rates.bytes_per_s >= flops / rates.flop_per_s
    return {
        "kernel": name,
        "bytes": num_bytes,
        "flops": flops,
        "set by": "memory" if memory else "products",
        "floor_s": floor,
    }


def _kernel_cells(row: dict[str, Any]) -> list[str]:
    by = "" if row["kernel"] in ("sum of a layer", "whole step") else row["set by"]
    return [row["kernel"], mega(row["bytes"]), f"{row['flops'] / 1e9:,.3f}", by, f"{1e6 * row['floor_s']:,.1f}"]


if __name__ == "__main__":
    sys.exit(main())
