"""int8 weights on this machine's CPU: gates and speeds, as one table.

    python -m benchmarks.int8 [--quick] [--anyway]

Exit status: 0 all lines pass, 1 a line fails, 2 something else uses the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks.lib import int8, machine, report
from benchmarks.lib.common import Workspace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anyway", action="store_true", help="measure although something else uses the CPU")
    parser.add_argument("--quick", action="store_true", help="few tokens, to try the benchmark; claims nothing")
    args = parser.parse_args()
    load, busiest = machine.other_load()
    if load > machine.BUSY_PERCENT and not args.anyway:
        print(f"Other processes use {load:.0f} % of a core, most of it {busiest}; see --anyway.", file=sys.stderr)
        return 2
    print(report.describe(machine.measure_rates()), flush=True)
    with tempfile.TemporaryDirectory(prefix="forkkv-bench-") as folder:
        lines = int8.run(Workspace(Path(folder), quick=args.quick))
    print("\n" + report.table(lines))
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
