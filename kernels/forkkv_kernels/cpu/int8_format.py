"""Products with int8 weights: the format, its arithmetic, and the reference. Depends on torch alone.

Weights are symmetric per output channel: `w[n, k] = scale[n] * code[n, k]`, codes in [-127, 127].

Activations stay 24-bit numbers, one scale per row: `x[t, k] ~ row[t] * (65536 * a + 256 * b + c)`, the three digits
int8. A product of a digit and a code, summed over k, is an exact int32, so the sums are the same whatever instruction,
blocking, thread or row count makes them: a row's result depends on nothing but that row, bit for bit. The step,
`max|x[t]| / 8323072`, is that of a float32 of the row's largest size. Two digits would be as close (KL 1e-6),
but a last bit that attention rounds otherwise in another batch would then move logits by 0.02 instead of 0.0001.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16
"""Output channels of a panel: the int32 lanes of a 512-bit register, the columns of a matrix tile."""
QUAD = 4
"""Consecutive inputs that one instruction sums into a lane."""
DEPTH_STEP = 64
"""Inputs are padded to a multiple of this: one row of a matrix tile."""
CHANNEL_STEP = 2 * LANES
"""Output channels are padded to a multiple of this: the matrix kernel takes two panels at a time."""
DIGITS = 3
"""Digits of an activation, the most significant first."""
OFFSET = 128 * (1 + 256 + 65536)
"""128 in every digit: makes them unsigned bytes, which is what the instructions take."""
LIMIT = 127 * 65536
"""Largest magnitude of a row's 24-bit numbers."""
TINY = 1e-30
"""A row whose largest magnitude is below this counts as zeros."""
MAX_DEPTH = (2**31 - 1) // (255 * 127)
"""Inputs up to which the int32 sums cannot overflow."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A packed matrix [out_features, in_features]. `codes` int8 [panels, depth / 4, 16, 4]; `columns` float32
    [3, panels * 16]: scale, bias, and as int32 bits 128 times the sum of the channel's codes. Padding is zeros."""

    codes: Tensor
    columns: Tensor
    in_features: int
    out_features: int

    @property
    def depth(self) -> int:
        """Inputs with padding."""
        return self.codes.shape[1] * QUAD

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.columns.nbytes


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> (codes int8 [out, in], scales float32 [out]); rounded to the nearest, halves to even."""
    scales = weight.abs().amax(dim=1).float() / 127
    codes = weight.float() / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return codes.round_().clamp_(-127, 127).to(torch.int8), scales


def pack(weight: Tensor, bias: Tensor | None = None) -> Int8Weight:
    """Quantize weight [out, in] and bring it into the kernels' layout. Raises `ValueError` if `in` is too large."""
    outs, ins = weight.shape
    if ins > MAX_DEPTH:
        raise ValueError(f"{ins} inputs: the int32 sums of int8 products hold {MAX_DEPTH} at most")
    padded = torch.zeros(_up(outs, CHANNEL_STEP), _up(ins, DEPTH_STEP), dtype=torch.int8)
    codes, scales = quantize_channels(weight)
    padded[:outs, :ins] = codes
    columns = torch.zeros(3, padded.shape[0])
    columns[0, :outs] = scales
    if bias is not None:
        columns[1, :outs] = bias
    columns[2].view(torch.int32).copy_(padded.sum(dim=1, dtype=torch.int32).mul_(128))
    panels = padded.view(-1, LANES, padded.shape[1] // QUAD, QUAD).transpose(1, 2).contiguous()
    return Int8Weight(panels, columns, ins, outs)


def code_bytes(outs: int, ins: int) -> int:
    """Bytes of the packed codes of a matrix [outs, ins]."""
    return _up(outs, CHANNEL_STEP) * _up(ins, DEPTH_STEP)


def unpack(weight: Int8Weight) -> Tensor:
    """The codes as int8 [out, in]."""
    codes = weight.codes.transpose(1, 2).reshape(-1, weight.depth)
    return codes[: weight.out_features, : weight.in_features]


def dequantize(weight: Int8Weight) -> Tensor:
    """The matrix that the codes stand for, float32 [out, in]."""
    return unpack(weight).float() * weight.columns[0, : weight.out_features, None]


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] float32 -> (digits int64 in [-128, 127] [3, T, in], row scale [T]).

    A row that is zero (below `TINY`) gets scale 0; one with inf or NaN gets scale NaN and zeros.
    """
    largest = x.abs().amax(dim=1)
    finite = x.isfinite().all(dim=1)
    used = finite & (largest >= TINY)
    # Between tensors, since PyTorch divides a number by a tensor through the reciprocal, which rounds twice.
    limit = torch.full_like(largest, LIMIT)
    inverse = torch.where(used, limit / largest, 0.0)
    scale = torch.where(used, largest / limit, torch.where(finite, 0.0, torch.nan))
    shifted = torch.where(used[:, None], x * inverse[:, None], 0.0).round().to(torch.int64) + OFFSET
    digits = [(shifted >> 8 * place & 255) - 128 for place in reversed(range(DIGITS))]
    return torch.stack(digits), scale


def int8_linear_reference(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [T, in] float32 -> x @ w.T + bias, float32 [T, out]; every implementation equals this bit for bit."""
    digits, scale = split_rows(x)
    codes = unpack(weight).to(torch.int64).t()
    total = torch.zeros(len(x), weight.out_features)
    for digit in digits:
        total = total * 256 + (digit @ codes).float()
    columns = weight.columns[:, : weight.out_features]
    return total * scale[:, None] * columns[0] + columns[1]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
