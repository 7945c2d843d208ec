"""What this machine can do right now, and who else is using it."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from benchmarks.lib.rates import CpuCeilings
from benchmarks.lib.timing import seconds_of

BUSY_PERCENT = 10.0


@dataclass(frozen=True, slots=True)
class MachineRates:
    """`copy_gb_per_s` counts bytes read and bytes written."""

    copy_gb_per_s: float
    matmul_gflop_per_s: float
    threads: int
    processor: str
    torch_version: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_rates(threads: int = 2, repeats: int = 5) -> MachineRates:
    """Best of `repeats`: copy of 512 MiB, and an fp32 product of two 2048 x 2048 matrices, with `threads` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ceilings = CpuCeilings()
        copy, product = (min(seconds_of(ceilings.steps[name]) for _ in range(repeats)) for name in ("copy", "product"))
    finally:
        torch.set_num_threads(before)
    copied, multiplied = 2 * ceilings.num_bytes / copy, 2 * ceilings.size**3 / product
    return MachineRates(copied / 1e9, multiplied / 1e9, threads, processor(), torch.__version__)


def processor() -> str:
    """Name of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def other_load(seconds: float = 1.0) -> tuple[float, str]:
    """CPU used over `seconds` by processes that are not this one and its children: (percent of one core, the busiest
    of them by name and id)."""
    own = {os.getpid()} | {child.pid for child in psutil.Process().children(recursive=True)}
    watched = [process for process in psutil.process_iter() if process.pid not in own]
    before = {process: used for process in watched if (used := _cpu_seconds(process)) is not None}
    time.sleep(seconds)
    shares: dict[str, float] = {}
    for process, used in before.items():
        now = _cpu_seconds(process)
        if now is not None and now > used:
            shares[f"{_name(process)} ({process.pid})"] = 100 * (now - used) / seconds
    busiest = max(shares, key=lambda name: shares[name], default="")
    return sum(shares.values()), busiest


def _cpu_seconds(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "a process that ended"
