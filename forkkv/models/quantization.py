"""int8 weights for CPUs: `--quantization int8`.

Only the base model's matrices are quantized, per output channel. Activations, embedding lookup, norms, LoRA, residuals
and the K/V cache keep their type. A token's result never depends on what else is in the batch: see
`forkkv_kernels.cpu.int8_format` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from forkkv.errors import ConfigError
from forkkv.log import get_logger
from forkkv.models.layers import FusedLinear, TiedHead
from forkkv_kernels.cpu.int8_format import Int8Weight, code_bytes, pack
from forkkv_kernels.memory import empty_in_huge_pages

logger = get_logger(__name__)


class Int8Linear(nn.Module):
    """Linear layers of one input as a single product with int8 weights: x [T, in] -> [T, sum of outs] in x's dtype."""

    def __init__(self, weight: Int8Weight) -> None:
        super().__init__()
        # Numba is imported only where this is used: on a GPU it need not be installed.
        from forkkv_kernels.cpu.int8 import int8_linear, kernels

        kernels()  # compiled now, not in the first request
        self.packed = weight
        self._multiply = int8_linear

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.packed).to(x.dtype)


def choose_quantization(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """ "auto" is int8 for float32 on a CPU that has 8-bit dot products, and none elsewhere."""
    if name != "auto":
        return name
    if device.type != "cpu" or dtype != torch.float32:
        return "none"
    try:
        from forkkv_kernels.cpu.int8 import have_dot_products
    except ImportError:  # no Numba
        return "none"
    return "int8" if have_dot_products() else "none"


def quantize_linears(model: nn.Module) -> int:
    """Replace every `FusedLinear` and `TiedHead` of `model` by an `Int8Linear`, in place, freeing the old matrices one
    at a time; a tied embedding stays as it is for the lookup. Returns the bytes of the new matrices.

    Raises `ConfigError` if the model is not on a CPU or has layers too wide for int32 sums.
    """
    from forkkv_kernels.cpu.int8 import have_dot_products

    if not have_dot_products():
        logger.warning("this CPU has no 8-bit dot products (VNNI): --quantization int8 saves memory, not time")
    linears = list(_linears(model))
    # One piece of memory for all: the matrices of a small model are smaller than a large page.
    arena = empty_in_huge_pages(sum(code_bytes(*_shape(old)) for _, _, old in linears), dtype=torch.int8)
    num_bytes = used = 0
    for parent, name, old in linears:
        if old.weight.device.type != "cpu":
            raise ConfigError("--quantization int8 is for CPUs")
        try:
            packed = _pack(old)
        except ValueError as error:
            raise ConfigError(f"--quantization int8: {error}") from error
        place = arena[used : used + packed.codes.numel()].view_as(packed.codes)
        setattr(parent, name, Int8Linear(replace(packed, codes=place.copy_(packed.codes))))
        num_bytes, used = num_bytes + packed.nbytes, used + place.numel()
    return num_bytes


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, FusedLinear | TiedHead]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, FusedLinear | TiedHead):
                yield parent, name, child


def _shape(linear: FusedLinear | TiedHead) -> tuple[int, int]:
    """(outputs, inputs)."""
    rows, columns = linear.weight.shape
    return (rows, columns) if isinstance(linear, TiedHead) else (columns, rows)


@torch.no_grad()
def _pack(linear: FusedLinear | TiedHead) -> Int8Weight:
    if isinstance(linear, TiedHead):
        return pack(linear.weight)
    return pack(linear.weight.t(), linear.bias)
