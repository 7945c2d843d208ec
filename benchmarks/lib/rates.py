"""What this machine moves and multiplies, measured: the ceilings of the same run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.lib.cards import Rates
from benchmarks.lib.timing import Step, seconds_of

_GPU_COPY_BYTES = 2 << 30
_GPU_MATMUL = 8192
_CPU_BYTES = 512 << 20
_CPU_MATMUL = 2048


def measure_here() -> tuple[str, Rates]:
    """("cuda" or "cpu", rates): of the GPU in bf16 where there is one, else of the CPU in fp32 with one thread per
    physical core."""
    if torch.cuda.is_available():
        return "cuda", gpu_rates(torch.bfloat16)
    from forkkv.executor.device import use_physical_cores

    use_physical_cores()
    return "cpu", cpu_rates()


def gpu_rates(dtype: torch.dtype, repeats: int = 10) -> Rates:
    """Best of `repeats`: copy of 2 GiB (bytes read and written), product of two 8192 x 8192 matrices."""
    size = min(_GPU_COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(_GPU_MATMUL, _GPU_MATMUL, dtype=dtype, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    copy = min(seconds_of(lambda: target.copy_(source), "cuda") for _ in range(repeats))
    matmul = min(seconds_of(lambda: torch.mm(a, b, out=product), "cuda") for _ in range(repeats))
    name = f"{torch.cuda.get_device_name()}, measured"
    return Rates(name, 2 * source.numel() * 2 / copy, 2 * _GPU_MATMUL**3 / matmul)


class CpuCeilings:
    """What the machine's rates are measured by, as steps that may take turns with what is measured against them: copy
    and sum of `num_bytes`, fp32 product of two `size` x `size` matrices, with torch's current number of threads."""

    def __init__(self, num_bytes: int = _CPU_BYTES, size: int = _CPU_MATMUL) -> None:
        self.num_bytes, self.size = num_bytes, size
        source = torch.ones(num_bytes // 4)
        target = torch.empty_like(source)
        a, b = torch.rand(2, size, size)
        product = torch.empty_like(a)
        self.steps: dict[str, Step] = {
            "copy": lambda: target.copy_(source),
            "read": source.sum,
            "product": lambda: torch.mm(a, b, out=product),
        }

    def rates(self, seconds: Mapping[str, float]) -> Rates:
        """Rates from the seconds of each step. Bandwidth: the faster of copy (bytes read and written) and sum."""
        name = f"this CPU, {torch.get_num_threads()} threads, measured"
        bandwidth = max(2 * self.num_bytes / seconds["copy"], self.num_bytes / seconds["read"])
        return Rates(name, bandwidth, 2 * self.size**3 / seconds["product"])


def cpu_rates(repeats: int = 5, num_bytes: int = _CPU_BYTES, size: int = _CPU_MATMUL) -> Rates:
    """Best of `repeats` of each step of `CpuCeilings`."""
    ceilings = CpuCeilings(num_bytes, size)
    return ceilings.rates(
        {name: min(seconds_of(step) for _ in range(repeats)) for name, step in ceilings.steps.items()}
    )
