"""Building blocks of a decoder: normalisation, rotary positions, fused projections."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forkkv.errors import ModelLoadError
from forkkv.models.spec import ModelSpec
from forkkv_kernels.memory import empty_in_huge_pages
from forkkv_kernels.ops import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, rms in float32, after x += delta in place."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps, delta)


class FusedLinear(nn.Module):
    """Linear layers of one input as a single product: x [T, in] -> [T, sum of outs].

    The weight is kept as [in, out]: for a handful of rows (decode of several streams) MKL multiplies by it more than
    twice as fast as by the checkpoint's [out, in], and equally fast otherwise.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None = None) -> None:
        """`weights`: [out, in] each, as in the checkpoint; they are copied."""
        super().__init__()
        first, outputs = weights[0], sum(weight.shape[0] for weight in weights)
        fused = empty_in_huge_pages(first.shape[1], outputs, dtype=first.dtype, device=first.device)
        for part, weight in zip(fused.split([weight.shape[0] for weight in weights], dim=1), weights, strict=True):
            part.copy_(weight.t())
        self.weight = nn.Parameter(fused, requires_grad=False)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)


class TiedHead(nn.Module):
    """Logits from the embedding [vocab, hidden] itself, for embeddings too large to be copied."""

    def __init__(self, embedding: nn.Parameter) -> None:
        super().__init__()
        self.weight = embedding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RotaryTable(nn.Module):
    """cos and sin [positions, D / 2] in float32, rotation of halves as in Hugging Face's Llama."""

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: ModelSpec, num_positions: int, device: torch.device) -> None:
        super().__init__()
        frequencies = inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [T, D / 2] in `dtype` at `positions` [T]."""
        return tuple(table.index_select(0, positions).to(dtype) for table in (self.cos, self.sin))  # type: ignore[return-value]


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Radians per position [D / 2], float32. Raises `ModelLoadError` for scaling rules that are not implemented."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    kind = (scaling or {}).get("rope_type", "default")
    if scaling is None or kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ModelLoadError(f"RoPE scaling {kind!r} is not supported (default, linear and llama3 are)")


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's rule: long wavelengths are slowed by `factor`, short ones kept, those between interpolated.

    Source: the Llama 3 reference implementation; a wavelength is judged by how often it fits into the original
    context, between `low_freq_factor` and `high_freq_factor` times.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling["factor"] * (1.0 - kept)
