"""Published limits of accelerator cards: what a floor on a card that is not here is computed from.

Memory bandwidth and dense bf16 matrix rate (no structured sparsity, where a sheet gives only that figure half of it),
from the makers' data sheets: NVIDIA H200, H100 (SXM5, PCIe), A100 80GB and 40GB (SXM4), L40S, L4, A10, the Blackwell
architecture brief for B200, the Ada architecture white paper for RTX 4090 (fp32 accumulation); AMD Instinct MI300X and
MI325X. Peaks: real copies reach about 85 to 93 % of the bandwidth, real products less of the matrix rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine moves and multiplies: `bytes_per_s` to and from its main memory, `flop_per_s` of dense matrix
    products. `launch_s`: time that one kernel takes at least, 0 where that is not known."""

    name: str
    bytes_per_s: float
    flop_per_s: float
    launch_s: float = 0.0

    def floor(self, num_bytes: float, num_flops: float) -> float:
        """Seconds below which nothing that moves `num_bytes` and multiplies `num_flops` can finish."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flop_per_s, self.launch_s)


def _card(name: str, terabytes_per_s: float, teraflop_per_s: float) -> Rates:
    return Rates(name, terabytes_per_s * 1e12, teraflop_per_s * 1e12)


CARDS: dict[str, Rates] = {
    "h200": _card("NVIDIA H200 SXM", 4.8, 989.5),
    "h100": _card("NVIDIA H100 SXM", 3.35, 989.5),
    "h100-pcie": _card("NVIDIA H100 PCIe", 2.0, 756.5),
    "a100": _card("NVIDIA A100 80GB SXM", 2.039, 312.0),
    "a100-40gb": _card("NVIDIA A100 40GB SXM", 1.555, 312.0),
    "b200": _card("NVIDIA B200", 8.0, 2250.0),
    "l40s": _card("NVIDIA L40S", 0.864, 362.05),
    "l4": _card("NVIDIA L4", 0.3, 121.0),
    "a10": _card("NVIDIA A10", 0.6, 125.0),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", 1.008, 165.2),
    "mi300x": _card("AMD Instinct MI300X", 5.3, 1307.4),
    "mi325x": _card("AMD Instinct MI325X", 6.0, 1307.4),
}
