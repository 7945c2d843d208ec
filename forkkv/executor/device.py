"""Facts about the machine: device, dtype, threads, free memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from forkkv.config import GIB
from forkkv.errors import ConfigError

_CPU_CACHE_LIMIT = 4 * GIB


def choose_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is a device. Raises `ConfigError` if CUDA is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but PyTorch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device, checkpoint: str) -> torch.dtype:
    """ "auto" is float32 on CPUs and the checkpoint's own type elsewhere, bfloat16 if that is float32."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        name = "bfloat16" if checkpoint == "float32" else checkpoint
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"unknown dtype {name!r}")
    return dtype


def use_physical_cores() -> int:
    """Give PyTorch one thread per physical core that this process may use, unless OMP_NUM_THREADS says otherwise.
    Returns the number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_physical_cores())
    return torch.get_num_threads()


def _physical_cores() -> int:
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, len(cores))


def available_cache_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes for the cache: on CUDA what is left of the allowed share of the memory, on CPUs a quarter of the
    available memory, at most 4 GiB. Raises `ConfigError` if a GPU has nothing left."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        left = int(total * gpu_memory_utilization) - (total - free)
        if left <= 0:
            raise ConfigError("the weights leave no GPU memory for the cache; raise --gpu-memory-utilization")
        return left
    return min(_CPU_CACHE_LIMIT, _available_memory() // 4)


def _available_memory() -> int:
    """MemAvailable of the kernel, which counts what page cache can give back; free pages where it is not told."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
