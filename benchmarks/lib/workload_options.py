"""The options of `run.py --workload`."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lib.common import ROOT
from benchmarks.peers.given_server import GivenServer
from benchmarks.peers.registry import PEERS, chosen
from benchmarks.peers.site import Peer
from benchmarks.workloads.scenarios import DEFAULTS, LEAST_TOKENS, QUICK, Sizes

_SIZES = ("agents", "tokens", "max_tokens", "requests", "requests_per_s", "seed")


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """`limit_s`: seconds that one trace may take on one server. `rounds`: times that every server runs its traces, in
    turns. `out`: folder of the results. `anyway`: judge although others used the CPU."""

    workload: str
    peers: dict[str, Peer]
    sizes: Sizes
    limit_s: float
    out: Path
    quick: bool
    anyway: bool
    rounds: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workloads", "sizes that are not given are those of benchmarks/README.md")
    group.add_argument("--workload", choices=tuple(DEFAULTS), help="measure this one instead of the sections")
    group.add_argument("--peers", default="ours", metavar="NAME,...", help=f"all, ours, or of {', '.join(PEERS)}")
    group.add_argument("--url", help="measure the server that answers there instead, e.g. http://127.0.0.1:8000")
    group.add_argument("--names", metavar="BASE,ADAPTER,...", help="its base model and adapters (with --url)")
    group.add_argument("--choose-by", choices=("model", "lora_name"), default="model", help="field (with --url)")
    group.add_argument("--agents", type=int, help="adapters")
    group.add_argument("--tokens", type=int, help="document, trajectory or prompt")
    group.add_argument("--max-tokens", type=int, help="length of each answer (fanout, open, plain)")
    group.add_argument("--requests", type=int, help="how many (open)")
    group.add_argument("--requests-per-s", type=float, help="mean rate of arrivals (open)")
    group.add_argument("--seed", type=int)
    group.add_argument("--rounds", type=int, default=1, help="run the servers this often, in turns; medians count")
    group.add_argument("--limit-s", type=float, default=1800, help="most seconds of one trace on one server")
    group.add_argument("--out", type=Path, help="folder of table.md, plot.svg, results.json")


def parse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> WorkloadOptions | None:
    """What to run; None without `--workload`. Wrong ones end the program as `parser` does."""
    if args.workload is None:
        return None
    given = {name: value for name in _SIZES if (value := getattr(args, name)) is not None}
    if args.url is not None:
        if not args.names:
            parser.error("--url needs --names")
        given.setdefault("agents", 0 if args.workload == "plain" else args.names.count(","))
    sizes = replace((QUICK if args.quick else DEFAULTS)[args.workload], **given)
    if sizes.tokens < (least := LEAST_TOKENS[args.workload]):
        parser.error(f"--tokens: at least {least}")
    if args.workload == "lragent" and sizes.agents != 3:
        parser.error("--agents: the LRAgent trace has three")
    if args.workload == "plain" and sizes.agents:
        parser.error("--agents: the plain user has no adapters")
    if args.workload != "plain" and sizes.agents < 1:
        parser.error("--agents: at least one")
    if args.url is not None and sizes.agents > args.names.count(","):
        parser.error(f"--names: {sizes.agents} adapters are needed behind the base model")
    if args.rounds < 1:
        parser.error("--rounds: at least one")
    try:
        peers = chosen(args.peers, adapters=sizes.agents > 0)
    except ValueError as error:
        parser.error(f"--peers: {error}")
    if args.url is not None:
        peers = {"given": GivenServer(args.url, tuple(args.names.split(",")), args.choose_by)}
    out = args.out or ROOT / "benchmarks/results" / f"{time.strftime('%Y-%m-%d')}-{args.workload}"
    return WorkloadOptions(args.workload, peers, sizes, args.limit_s, out, args.quick, args.anyway, args.rounds)
