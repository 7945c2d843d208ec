"""What the sections of `gpu_check.py` share: device, sizes, measured rates, time limits."""

from __future__ import annotations

import argparse
import functools
import importlib
import platform
import signal
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from benchmarks.lib.cards import Rates
from benchmarks.lib.rates import cpu_rates, gpu_rates
from benchmarks.lib.steps import SHAPES
from forkkv.models.spec import ModelSpec


class SectionTimeoutError(Exception):
    """A section used up its time although it should have stopped by itself."""


@dataclass(frozen=True)
class Setup:
    """Device, model shape and sizes of one run. `agents` x `prefixes` are the cells of the decode section."""

    device: torch.device
    tiny: bool
    spec: ModelSpec
    backend: str
    agents: tuple[int, ...]
    prefixes: tuple[int, ...]
    private: int
    rounds: int
    warm_up: int
    max_layers: int
    """Most layers in rotation."""

    @classmethod
    def make(cls, args: argparse.Namespace) -> Setup:
        """From the command line; on a GPU the default sizes, with `--tiny` such that the interpreter is quick."""
        device, spec = torch.device(args.device), SHAPES[args.shape]
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SystemExit("PyTorch finds no CUDA device; --device cpu --tiny tries the program without one")
        backend = args.backend or "triton"
        if args.tiny:
            return cls(device, True, spec, backend, (1, 3), (32, 64), 16, rounds=1, warm_up=1, max_layers=1)
        return cls(
            device, False, spec, backend, (1, 8, 32), (4096, 16384, 32768), 256, rounds=9, warm_up=2, max_layers=8
        )

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU; float32 on CPUs, where the interpreter is wrong in bf16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @functools.cached_property
    def rates(self) -> Rates:
        """Copy bandwidth and matrix rate, measured once in this process."""
        if self.device.type == "cuda":
            return gpu_rates(self.dtype)
        return cpu_rates(repeats=2, num_bytes=32 << 20, size=512)

    def environment(self) -> dict[str, Any]:
        """Versions and the card."""
        found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
        try:
            import triton

            found["triton"] = triton.__version__
        except ImportError as error:
            found["triton"] = f"not importable: {error}"
        found["card"] = f"cpu {platform.machine()}"
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            found |= {
                "card": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
            }
        return found


class Clock:
    """Time left to a section."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def over(self, needed: float = 0.0) -> bool:
        """Whether less than `needed` seconds are left."""
        return self.left < needed


def run_section(name: str, setup: Setup, seconds: float) -> dict[str, Any]:
    """Result of `benchmarks.lib.gpu_<name>.run`, at least `ok` and `seconds`; `error` with a traceback if it raised.

    Sections watch the clock themselves; one that overruns by half is interrupted.
    """
    began = time.monotonic()

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SectionTimeoutError(f"interrupted after {time.monotonic() - began:.0f} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, 1.5 * seconds))
    try:
        with torch.inference_mode():
            module = importlib.import_module(f"benchmarks.lib.gpu_{name}")
            result: dict[str, Any] = {"ok": True, **module.run(setup, Clock(seconds))}
    except Exception as error:
        traceback.print_exc()
        result = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    result["seconds"] = round(time.monotonic() - began, 2)
    free_memory(setup)
    return result


def free_memory(setup: Setup) -> None:
    """Give cached device memory back, if the device still answers."""
    if setup.device.type == "cuda" and device_is_usable(setup):
        torch.cuda.empty_cache()


def device_is_usable(setup: Setup) -> bool:
    """Whether the device still answers: after an illegal access a CUDA context never does."""
    if setup.device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device=setup.device).item() == 1)
    except RuntimeError:
        return False
