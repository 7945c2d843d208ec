"""`make bench`: every number that this project claims, measured on this machine, against what it must be.

    python benchmarks/run.py [--short] [--only equality,speed] [--json FILE] [--anyway] [--quick]

With `--workload` instead: one workload over HTTP against this server and its peers, one after another.

    python benchmarks/run.py --workload fanout --agents 8 --tokens 4000 --peers all [--out FOLDER]

Exit status: 0 all lines pass, 1 a line fails or a section broke, 2 something else uses the CPU or wrong arguments.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)

from benchmarks.lib import machine, report  # noqa: E402
from benchmarks.lib import workload_options as options  # noqa: E402
from benchmarks.lib.common import Line, Workspace  # noqa: E402

SECTIONS = ("equality", "sharing", "memory", "speed", "server")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="NAME,...", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    parser.add_argument("--anyway", action="store_true", help="measure although something else uses the CPU")
    parser.add_argument("--short", action="store_true", help="of two sizes only the smaller one, under 10 minutes")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the benchmark; claims nothing")
    options.add_arguments(parser)
    args = parser.parse_args()
    chosen = [name.strip() for name in args.only.split(",")]
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"--only: no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    workload = options.parse(parser, args)
    load, busiest = machine.other_load()
    if load > machine.BUSY_PERCENT and not args.anyway:
        print(
            f"Other processes use {load:.0f} % of a core, most of it {busiest}; timings would mean nothing. "
            "Stop them, or measure with --anyway.",
            file=sys.stderr,
        )
        return 2
    rates = machine.measure_rates()
    print(report.describe(rates), flush=True)
    if workload is not None:
        from benchmarks.lib.workload import run

        return 0 if run(workload, rates) else 1
    # The engine warns of plain adapters that share; here that is what is measured.
    logging.getLogger("forkkv").setLevel(logging.ERROR)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forkkv-bench-") as folder:
        lines, loads = run_sections(chosen, Workspace(Path(folder), quick=args.quick, short=args.short))
    print("\n" + report.table(lines))
    if args.json is not None:
        seconds = round(time.monotonic() - began, 1)
        notes = {"quick": args.quick, "short": args.short, "seconds": seconds, "other_load_percent": loads}
        report.write_json(args.json, rates, lines, {**notes, "load_at_start_percent": round(load, 1)})
    if args.quick:
        print("\n--quick: the sizes are not those of the requirements, so neither pass nor FAIL means anything.")
    return 0 if all(line.passed for line in lines) else 1


def run_sections(chosen: list[str], work: Workspace) -> tuple[list[Line], dict[str, float]]:
    """Lines of the sections in `chosen`, and the load by others in front of each. A section that raises becomes a
    failed line, and the others still run."""
    lines: list[Line] = []
    loads: dict[str, float] = {}
    for name in (section for section in SECTIONS if section in chosen):
        loads[name], busiest = machine.other_load()
        if loads[name] > machine.BUSY_PERCENT:
            print(f"warning: other processes use {loads[name]:.0f} % of a core, most of it {busiest}", file=sys.stderr)
        began = time.monotonic()
        try:
            found: list[Line] = importlib.import_module(f"benchmarks.lib.{name}").run(work)
        except Exception as error:
            traceback.print_exc()
            found = [Line(name, "the section broke", f"{type(error).__name__}: {error}"[:80], "", False, float("nan"))]
        lines += found
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        gc.collect()
    return lines, loads


if __name__ == "__main__":
    sys.exit(main())
