"""Compile every Triton kernel in every default configuration for sm_80, sm_90 and gfx942, without a GPU.

    python benchmarks/compile_kernels.py [--target sm_90] [--kernel prefill] [--quick] [--json FILE]

Prints a table of registers per thread, spilled bytes, shared memory and matrix instructions. Exits 1 if a kernel does
not compile or misses a requirement: no spills up to head_dim 128 and rank 64 and at most 256 bytes elsewhere, shared
memory within the chip's limit, matrix instructions where the kernel multiplies matrices.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels")]

if TYPE_CHECKING:
    from forkkv_kernels.triton.aot import CompileReport

MAX_PROCESSES = 2


def main() -> int:
    args = parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    from forkkv_kernels.triton import aot

    targets = [aot.TARGETS[name] for name in args.target or aot.TARGETS]
    jobs = [
        (module, spec.name, target.name)
        for module in aot.kernel_modules()
        for target in targets
        for spec in aot.module_specs(module, target, args.quick)
        if not args.kernel or args.kernel in (module, spec.fn.__name__) or args.kernel in spec.name
    ]
    if not jobs:
        print(f"no kernel is called {args.kernel!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="forkkv-aot-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        reports, errors = run(jobs, args.processes)
    print_table(reports)
    failed = [report for report in reports if report.violations]
    for report in failed:
        print(f"MISSED {report.target} {report.name}: {'; '.join(report.violations)}")
    for job, error in sorted(errors.items()):
        print(f"ERROR {job[2]} {job[1]}: {error}")
    spilled = sum(report.spill_bytes > 0 for report in reports)
    print(f"{len(jobs)} configurations, {len(failed)} missed, {len(errors)} did not compile, {spilled} spill")
    if args.json:
        failures = [{"module": m, "name": name, "target": t, "error": e} for (m, name, t), e in sorted(errors.items())]
        args.json.write_text(json.dumps({"reports": [asdict(r) for r in reports], "errors": failures}, indent=1) + "\n")
    return 1 if failed or errors else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=("sm_80", "sm_90", "gfx942"), help="default: all")
    parser.add_argument("--kernel", help="a module, a kernel's name or part of a configuration's name")
    parser.add_argument("--quick", action="store_true", help="a representative subset")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--processes", type=int, default=MAX_PROCESSES)
    return parser.parse_args()


def run(jobs: list[tuple[str, str, str]], processes: int) -> tuple[list[CompileReport], dict[tuple[str, ...], str]]:
    """Reports in the order of the jobs (module, name, target), and the errors of those that did not compile."""
    reports: dict[tuple[str, ...], CompileReport] = {}
    errors: dict[tuple[str, ...], str] = {}
    # spawn: a forked process would inherit LLVM's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(processes, len(jobs))), mp_context=context) as pool:
        running = {pool.submit(compile_one, *job): job for job in jobs}
        for count, future in enumerate(as_completed(running), start=1):
            job = running[future]
            try:
                reports[job] = future.result()
            except Exception as error:
                errors[job] = f"{type(error).__name__}: {str(error)[:300]}"
            if sys.stderr.isatty():
                print(f"\r{count}/{len(jobs)} {job[2]} {job[1]:<60}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r" + " " * 80 + "\r", end="", file=sys.stderr)
    return [reports[job] for job in jobs if job in reports], errors


def compile_one(module: str, name: str, target_name: str) -> CompileReport:
    """Compile one configuration, named rather than passed: kernels cannot be pickled."""
    from forkkv_kernels.triton import aot

    target = aot.TARGETS[target_name]
    spec = next(spec for spec in aot.module_specs(module, target) if spec.name == name)
    return aot.check(module, spec, target)


def print_table(reports: list[CompileReport]) -> None:
    print(f"{'configuration':<48} {'target':<7} {'regs':>4} {'spill B':>7} {'shared B':>8} {'matrix':<6} {'s':>6}")
    for r in reports:
        print(
            f"{r.name:<48} {r.target:<7} {r.registers:>4} {r.spill_bytes:>7} {r.shared_bytes:>8} {r.matrix or '-':<6} "
            f"{r.seconds:>6.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
