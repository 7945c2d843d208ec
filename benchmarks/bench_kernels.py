"""`make bench-kernels`: attention on this CPU against what the machine can do, on caches of 30 layers in rotation.

    python benchmarks/bench_kernels.py [--backend NAME] [--only-claims] [--json FILE] [--anyway] [--quick]

Floors are max(bytes / bandwidth, flops / matmul rate), bytes and flops counted from the plan (`lib/roofline.py`), both
rates measured in every round. Exit status: 0 all lines pass, 1 a line fails, 2 something else uses the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from forkkv.engine.proc import THREAD_ENVIRONMENT  # noqa: E402

os.environ.update({name: value for name, value in THREAD_ENVIRONMENT.items() if name not in os.environ})

import torch  # noqa: E402

from benchmarks.lib import kernels, machine, report  # noqa: E402
from benchmarks.lib.rates import CpuCeilings  # noqa: E402
from forkkv.executor.device import use_physical_cores  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", metavar="NAME", help="attention backend, the engine's own choice by default")
    parser.add_argument("--beside", default="torch", metavar="NAME", help="backend that runs beside it (default torch)")
    parser.add_argument("--only-claims", action="store_true", help="only the lines with a requirement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    parser.add_argument("--anyway", action="store_true", help="measure although something else uses the CPU")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the benchmark; claims nothing")
    args = parser.parse_args()
    load, busiest = machine.other_load()
    if load > machine.BUSY_PERCENT and not args.anyway:
        print(
            f"Other processes use {load:.0f} % of a core, most of it {busiest}; timings would mean nothing. "
            "Stop them, or measure with --anyway.",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    with torch.inference_mode():
        measured = machine.measure_rates(use_physical_cores())
        print(report.describe(measured), flush=True)
        sizes = kernels.QUICK if args.quick else kernels.Sizes()
        bench = kernels.Bench(sizes, CpuCeilings(), args.backend, args.beside)
        lines, cases = kernels.run(bench, only_claims=args.only_claims)
    after, busiest = machine.other_load()
    if after > machine.BUSY_PERCENT:
        print(
            f"warning: at the end other processes used {after:.0f} % of a core, most of it {busiest}", file=sys.stderr
        )
    print("\n" + kernels.table(cases, bench.name, bench.beside))
    print("\n" + report.table(lines))
    if args.json is not None:
        notes = {
            "backend": bench.name,
            "quick": args.quick,
            "seconds": round(time.monotonic() - began, 1),
            "other_load_percent": [round(load, 1), round(after, 1)],
            "cases": [kernels.as_dict(case) for case in cases],
        }
        report.write_json(args.json, measured, lines, notes)
    if args.quick:
        print("\n--quick: the sizes are not those of the requirements, so neither pass nor FAIL means anything.")
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
