"""What sharing costs in quality: right answers, KL and top-1 agreement of every adapter kind in every sharing mode.

    python benchmarks/fidelity.py --quick                          # the pass line on the demo team, under 8 minutes
    python benchmarks/fidelity.py                                  # the full grid, hours; --resume goes on with it
    python benchmarks/fidelity.py --model MODEL --prompts FILE.jsonl --team NAME AGENT=FOLDER AGENT=FOLDER

`docs/fidelity.md` says what the numbers mean. Exit status: 0, 1 if the pass line is missed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file: `python benchmarks/fidelity.py`

from forkkv.engine.proc import thread_environment  # noqa: E402

os.environ.update(thread_environment(os.environ))  # before torch is imported: OpenMP reads it once

from benchmarks.lib import fidelity_report as report  # noqa: E402
from benchmarks.lib import machine, text  # noqa: E402
from benchmarks.lib.fidelity_data import Item, Team, demo_items, demo_teams, read_items  # noqa: E402
from benchmarks.lib.fidelity_grid import (  # noqa: E402
    PAIR,
    QUICK_MODES,
    Block,
    Work,
    full_grid,
    measure_rates,
    quick_grid,
    work_of,
)
from benchmarks.lib.fidelity_run import TeamRunner  # noqa: E402
from benchmarks.lib.fidelity_stats import by_cell, verdicts  # noqa: E402
from benchmarks.lib.fidelity_store import RecordFile  # noqa: E402
from forkkv.config import GIB, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig  # noqa: E402
from forkkv.errors import ForkKVError  # noqa: E402
from forkkv.frontend.tokenizer import Tokenizer  # noqa: E402
from forkkv.types import KVSharing  # noqa: E402

MODES: tuple[KVSharing, ...] = tuple(mode for mode in get_args(KVSharing) if mode != "auto")
"""`auto` computes nothing of its own: it is `none` or `fork`, adapter by adapter."""


@dataclass
class Run:
    """One run of the command. `items` are the prompts of each block."""

    args: argparse.Namespace
    teams: list[Team]
    blocks: list[Block]
    items: dict[Block, list[Item]]
    store: RecordFile
    config: EngineConfig
    refused: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def todo(self, team: Team, block: Block) -> dict[KVSharing, list[Item]]:
        """Prompts without a record, by mode."""
        done = self.store.done
        return {
            mode: [i for i in self.items[block] if (block.label, team.label, mode, i.question, i.agent) not in done]
            for mode in block.modes
        }

    def work(self, team: Team) -> Work:
        """Work that is left for `team`."""
        total = Work(0, 0)
        for block in self.blocks:
            for mode, items in self.todo(team, block).items() if block.has(team.label) else ():
                total += work_of(items, mode, fork_tail=self.config.scheduler.fork_tail)
        return total

    def execute(self) -> None:
        """All cells that are left, team by team."""
        for index, team in enumerate(self.teams):
            runner = TeamRunner(team, self.config)
            if index == 0:
                self.estimate(runner)
            if self.args.estimate:
                return
            refused = {mode: reason for mode in self.modes if (reason := runner.refusal(mode)) is not None}
            self.refused |= {f"{team.label} under {mode}": reason for mode, reason in refused.items()}
            for block in self.blocks:
                if block.has(team.label):
                    self.run_block(runner, block, refused)

    @property
    def modes(self) -> list[KVSharing]:
        return list(dict.fromkeys(mode for block in self.blocks for mode in block.modes))

    def estimate(self, runner: TeamRunner) -> None:
        """Print what is left and how long it takes at the rates of one batch of the first block, measured now."""
        rates = measure_rates(runner, next(runner.batches(self.items[self.blocks[0]])))
        print(f"measured: prefill {rates.prefill:,.0f} tokens/s, decode of a batch {rates.decode:,.0f} tokens/s")
        total = 0.0
        for team in self.teams:
            work = self.work(team)
            total += rates.seconds(work)
            print(
                f"  {team.label}: {work.prefill:,} prompt and {work.decode:,} answer tokens, "
                f"{duration(rates.seconds(work))}"
            )
        print(f"estimate: {duration(total)} for what is left", flush=True)

    def run_block(self, runner: TeamRunner, block: Block, refused: dict[KVSharing, str]) -> None:
        """The cells of one team in one block, batch after batch, and the files behind the last one."""
        todo = {mode: {(i.question, i.agent) for i in items} for mode, items in self.todo(runner.team, block).items()}
        began, done = time.monotonic(), 0
        for batch in runner.batches(self.items[block]):
            modes = [m for m in todo if m not in refused and any((i.question, i.agent) in todo[m] for i in batch)]
            done += len(batch)
            if not modes:
                continue
            self.store.add(runner.score(batch, modes, block.label))
            progress = f"{runner.team.label}, {block.label}: {done} of {len(self.items[block])} prompts"
            print(f"{progress}, {duration(time.monotonic() - began)}", file=sys.stderr, flush=True)
        self.write()

    def notes(self) -> dict[str, Any]:
        """How the run was made."""
        seconds = time.monotonic() - self.began
        return {
            "command": "python benchmarks/fidelity.py " + " ".join(sys.argv[1:]),
            "model": f"{self.config.model.path}, quantization {self.config.model.quantization}",
            "prompts": ", ".join(f"{block.label}: {len(self.items[block])}" for block in self.blocks),
            "fork tail": self.config.scheduler.fork_tail,
            "machine": machine.processor(),
            "seconds of the last run": round(seconds),
            **({"refused": self.refused} if self.refused else {}),
        }

    def write(self) -> None:
        report.write(self.args.out, self.store.records, self.notes())


def duration(seconds: float) -> str:
    """90 as "1.5 min"."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few documents, the cells of the pass line")
    parser.add_argument("--documents", type=int, help="documents a cell (200; 16 with --quick)")
    parser.add_argument("--lengths", type=names, help="of the demo's documents, in tokens: a part of the grid")
    parser.add_argument("--modes", type=names, help=f"of {', '.join(MODES)}; all")
    parser.add_argument("--kinds", type=names, help="labels of the teams to run; all")
    parser.add_argument("--model", default="smollm2", help="as the server's --model")
    parser.add_argument("--quantization", choices=("auto", "none", "int8"), default="auto", help="as the server's")
    parser.add_argument("--fork-tail", type=int, default=64, help="as the server's")
    parser.add_argument("--cache-gib", type=float, default=2.5, help="memory for the caches")
    parser.add_argument("--adapters", type=Path, default=ROOT / "configs/demo/adapters", help="the demo's adapters")
    parser.add_argument(
        "--team", nargs="+", action="append", metavar=("LABEL", "AGENT=FOLDER"), help="a team of one's own; repeatable"
    )
    parser.add_argument("--prompts", type=Path, help="JSON Lines file of one's own prompts, see docs/fidelity.md")
    parser.add_argument("--out", type=Path, help="stem of the files (benchmarks/results/fidelity, -quick, -own)")
    parser.add_argument("--resume", action="store_true", help="keep the records that are there")
    parser.add_argument("--estimate", action="store_true", help="print how long the rest would take, and stop")
    args = parser.parse_args(argv)
    if (args.team is None) != (args.prompts is None):
        parser.error("--team and --prompts belong together: the demo's prompts are for the demo's agents")
    if unknown := sorted(set(args.modes or ()) - set(MODES)):
        parser.error(f"--modes: {', '.join(unknown)} cannot be measured; choose of {', '.join(MODES)}")
    if args.out is None:
        suffix = "-own" if args.prompts else "-quick" if args.quick else ""
        args.out = ROOT / f"benchmarks/results/fidelity{suffix}"
    return args


def names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def known_teams(args: argparse.Namespace) -> list[Team]:
    """The user's teams or the demo's. Raises `ValueError` if an agent is not given as AGENT=FOLDER."""
    return demo_teams(args.adapters) if args.team is None else [own_team(*words) for words in args.team]


def own_team(label: str, *agents: str) -> Team:
    pairs = [agent.partition("=") for agent in agents]
    if not pairs or not all(name and folder for name, _, folder in pairs):
        raise ValueError(f"--team {label}: adapters are given as AGENT=FOLDER")
    return Team(label, {name: Path(folder) for name, _, folder in pairs})


def chosen_blocks(args: argparse.Namespace, num_prompts: int) -> list[Block]:
    """The part of the grid that was asked for."""
    modes: tuple[KVSharing, ...] = tuple(args.modes or (QUICK_MODES if args.quick else MODES))
    if args.prompts is not None:
        return [Block(None, num_prompts, modes)]
    if args.quick:
        blocks = quick_grid(modes, args.documents or 16, args.kinds or PAIR)
    else:
        blocks = full_grid(modes, args.documents or 200)
    return [block for block in blocks if args.lengths is None or block.label in args.lengths]


def settings(args: argparse.Namespace, teams: Sequence[Team]) -> dict[str, Any]:
    """What records of one file have in common."""
    files = {
        f"{team.label}/{agent}": folder / "adapter_model.safetensors"
        for team in teams
        for agent, folder in team.adapters.items()
    }
    return {
        "model": args.model,
        "quantization": args.quantization,
        "fork_tail": args.fork_tail,
        "prompts": None if args.prompts is None else digest(args.prompts),
        "adapters": {name: digest(file) for name, file in files.items()},
    }


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def prepare(args: argparse.Namespace) -> Run:
    """Teams, prompts and the file of records. Raises `ValueError`, `OSError` or `ForkKVError` for what is not right."""
    known = known_teams(args)
    teams = [team for team in known if args.kinds is None or team.label in args.kinds]
    if not teams:
        raise ValueError(f"no team to run; there are {', '.join(team.label for team in known) or 'none'}")
    tokenizer = Tokenizer.load(args.model)
    own: list[Item] = []
    if args.prompts is not None:
        agents = list(teams[0].adapters)
        if any(list(team.adapters) != agents for team in teams):
            raise ValueError("all teams must have the same agents, in the same order")
        own = read_items(args.prompts, tokenizer, agents)
    blocks = chosen_blocks(args, len(own))
    if not any(block.has(team.label) for block in blocks for team in teams):
        raise ValueError("nothing to run: no length of the grid has these teams")
    items = {
        block: own if block.length is None else demo_items(tokenizer, block.documents, block.length) for block in blocks
    }
    config = EngineConfig(
        model=ModelConfig(args.model, quantization=args.quantization, enforce_eager=True),
        cache=CacheConfig(memory_bytes=int(args.cache_gib * GIB)),
        scheduler=SchedulerConfig(fork_tail=args.fork_tail),
    )
    store = RecordFile(args.out.with_name(args.out.name + ".jsonl"), settings(args, known), resume=args.resume)
    return Run(args, teams, blocks, items, store, config)


def main() -> int:
    args = parse_args()
    logging.getLogger("forkkv").setLevel(logging.ERROR)  # every batch makes engines, which would describe themselves
    try:
        run = prepare(args)
        run.execute()
    except (ValueError, OSError, ForkKVError) as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 2
    if args.estimate:
        return 0
    records = run.store.records
    print(text.columns(report.HEAD, report.rows(records)))
    print("\n".join(["", *report.pass_lines(records), *(f"{cell}: {why}" for cell, why in run.refused.items())]))
    print(f"\n{len(by_cell(records))} cells in {duration(time.monotonic() - run.began)}; files: {args.out}.*")
    missed = any(verdict.outcome == "FAIL" for verdict in verdicts(records))
    if missed and args.quick:
        print("So few documents make a wide interval: equally good teams can miss the line. The full grid decides.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
