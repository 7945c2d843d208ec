"""Compile every Triton kernel in every default configuration for sm_80, sm_90 and gfx942, without a GPU.

    python benchmarks/compile_kernels.py [--target sm_90] [--kernel prefill] [--quick] [--json FILE [--resume]]

Prints registers per thread, spilled bytes, shared memory and matrix instructions of each. Exits 1 if a kernel does not
compile or misses a requirement: no spills up to head_dim 128 and rank 64 and at most 256 bytes elsewhere, shared memory
within the chip's limit, matrix instructions where the kernel multiplies matrices.

Every head_dim, rank and tile is compiled in bfloat16. float16 stands for itself in one head_dim only: a configuration
depends on the size of the type, and the compiler gives both types the same layouts, loads and shapes of matrix
instructions; what differs are the conversions from and to float32. float32, which tests use, is compiled for a few
small shapes.

FILE is written after every configuration, and --resume leaves out what FILE has from the same source, configuration and
Triton, so that nothing is lost by an interruption and a changed configuration costs no more than itself. Without a load
beside it one configuration takes 1 to 15 seconds of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels")]

if TYPE_CHECKING:
    from forkkv_kernels.triton.aot import CompileReport

MAX_PROCESSES = 2


class Job(NamedTuple):
    """One configuration for one target, by name: kernels cannot be pickled."""

    module: str
    name: str
    target: str


def main() -> int:
    args = parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    jobs = select_jobs(args.target, args.kernel, args.quick)
    if not jobs:
        print(f"no kernel is called {args.kernel!r}", file=sys.stderr)
        return 2
    known = recorded(args.json) if args.resume else {}
    reports, errors = {job: known[job] for job in jobs if job in known}, {}
    print_header()
    for report in reports.values():
        print_row(report)
    with tempfile.TemporaryDirectory(prefix="forkkv-aot-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for job, result in compile_jobs([job for job in jobs if job not in reports], args.processes):
            if isinstance(result, str):
                errors[job] = result
                print(f"ERROR {job.target} {job.name}: {result}", flush=True)
            else:
                known[job] = reports[job] = result
                print_row(result)
            if args.json:
                write(args.json, known, errors)
    if args.json:
        write(args.json, known, errors)
    return summary(reports, errors)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=("sm_80", "sm_90", "gfx942"), help="default: all")
    parser.add_argument("--kernel", help="a module, a kernel's name or part of a configuration's name")
    parser.add_argument("--quick", action="store_true", help="a representative subset")
    parser.add_argument("--json", type=Path, help="also write the figures here, after every configuration")
    parser.add_argument("--resume", action="store_true", help="compile only what the file of --json does not have yet")
    parser.add_argument("--processes", type=int, default=MAX_PROCESSES)
    args = parser.parse_args()
    if args.resume and args.json is None:
        parser.error("--resume needs --json")
    return args


def select_jobs(targets: list[str] | None, kernel: str | None, quick: bool) -> list[Job]:
    """The configurations asked for, target by target."""
    from forkkv_kernels.triton import aot

    return [
        Job(module, spec.name, target)
        for target in targets or aot.TARGETS
        for module in aot.kernel_modules()
        for spec in aot.module_specs(module, aot.TARGETS[target], quick)
        if not kernel or kernel in (module, spec.fn.__name__) or kernel in spec.name
    ]


def recorded(path: Path) -> dict[Job, CompileReport]:
    """The reports in a file written earlier, of configurations that have not changed since. Empty without a file."""
    from forkkv_kernels.triton import aot

    if not path.exists():
        return {}
    current = {
        Job(module, spec.name, target.name): aot.fingerprint(spec, target)
        for target in aot.TARGETS.values()
        for module in aot.kernel_modules()
        for spec in aot.module_specs(module, target)
    }
    reports = [aot.CompileReport(**fields) for fields in json.loads(path.read_text())["reports"]]
    by_job = {Job(report.module, report.name, report.target): report for report in reports}
    return {job: report for job, report in by_job.items() if report.fingerprint == current.get(job)}


def compile_jobs(jobs: list[Job], processes: int) -> Iterator[tuple[Job, CompileReport | str]]:
    """Each job with its report, or with the error that kept it from compiling, as they finish."""
    if not jobs:
        return
    # spawn: a forked process would inherit LLVM's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(processes, len(jobs))), mp_context=context) as pool:
        running = {pool.submit(compile_one, job): job for job in jobs}
        for future in as_completed(running):
            try:
                yield running[future], future.result()
            except Exception as error:
                yield running[future], f"{type(error).__name__}: {str(error)[:300]}"


def compile_one(job: Job) -> CompileReport:
    from forkkv_kernels.triton import aot

    target = aot.TARGETS[job.target]
    spec = next(spec for spec in aot.module_specs(job.module, target) if spec.name == job.name)
    return aot.check(job.module, spec, target)


def print_header() -> None:
    print(f"{'configuration':<48} {'target':<7} {'regs':>4} {'spill B':>7} {'shared B':>8} {'matrix':<6} {'s':>6}")


def print_row(report: CompileReport) -> None:
    figures = f"{report.registers:>4} {report.spill_bytes:>7} {report.shared_bytes:>8} {report.matrix or '-':<6}"
    missed = f"  MISSED {'; '.join(report.violations)}" if report.violations else ""
    print(f"{report.name:<48} {report.target:<7} {figures} {report.seconds:>6.1f}{missed}", flush=True)


def write(path: Path, reports: dict[Job, CompileReport], errors: dict[Job, str]) -> None:
    """Replace the file as a whole: an interruption leaves the old one or the new one."""
    failures = [{**job._asdict(), "error": error} for job, error in sorted(errors.items())]
    figures = {"reports": [asdict(report) for _, report in sorted(reports.items())], "errors": failures}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(figures, indent=1) + "\n")
    partial.replace(path)


def summary(reports: dict[Job, CompileReport], errors: dict[Job, str]) -> int:
    """Print what missed, and totals per target; the exit status."""
    for job, report in reports.items():
        if report.violations:
            print(f"MISSED {job.target} {job.name}: {'; '.join(report.violations)}")
    for job, error in sorted(errors.items()):
        print(f"ERROR {job.target} {job.name}: {error}")
    for target in sorted({job.target for job in (*reports, *errors)}):
        own = [report for job, report in reports.items() if job.target == target]
        failed = sum(job.target == target for job in errors)
        print(
            f"{target}: {len(own) + failed} configurations, {sum(bool(r.violations) for r in own)} missed, "
            f"{failed} did not compile, {sum(r.spill_bytes > 0 for r in own)} spill, "
            f"at most {max((r.registers for r in own), default=0)} registers"
        )
    return 1 if errors or any(report.violations for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
