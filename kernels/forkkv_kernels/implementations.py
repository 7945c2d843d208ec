"""Which implementation of an operation runs: chosen by the device of the tensors, never by what can be imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from forkkv_kernels import reference_ops
from forkkv_kernels.reference import residual_attention_reference

Implementation = Callable[..., Any]

REFERENCE: dict[str, Implementation] = {
    "residual_attention": residual_attention_reference,
    "lora_shrink": reference_ops.lora_shrink_reference,
    "lora_expand": reference_ops.lora_expand_reference,
    "lora_rows": reference_ops.lora_rows_reference,
    "residual_shrink_write": reference_ops.residual_shrink_write_reference,
    "rope_cache_write": reference_ops.rope_cache_write_reference,
    "rms_norm": reference_ops.rms_norm_reference,
    "swiglu": reference_ops.swiglu_reference,
}
"""Every operation, in plain PyTorch."""
REGISTERED: dict[tuple[str, str], Implementation] = {}
"""Faster ones by (operation, device type)."""


def register(name: str, device_type: str, implementation: Implementation) -> None:
    """Use `implementation` for the operation `name` on `device_type` from now on. Raises `KeyError` if there is no
    such operation."""
    if name not in REFERENCE:
        raise KeyError(f"no operation {name!r}")
    REGISTERED[name, device_type] = implementation


def implementation(name: str, tensor: Tensor) -> Implementation:
    """What runs the operation `name` on the device of `tensor`."""
    prepare(tensor.device.type)
    return REGISTERED.get((name, tensor.device.type), REFERENCE[name])


def has_fast(device_type: str, names: tuple[str, ...]) -> bool:
    """Whether all of these operations have an implementation of their own for the device, not the reference."""
    prepare(device_type)
    return all((name, device_type) in REGISTERED for name in names)


@functools.cache
def prepare(device_type: str) -> None:
    """Register the project's own kernels for a device. Called before the first operation on it at the latest; call it
    earlier where that is no time to compile. (ROCm devices are called "cuda" too.)"""
    own = {"cuda": _triton, "cpu": _numba}.get(device_type, dict)()
    for name, kernel in own.items():
        REGISTERED.setdefault((name, device_type), kernel)


def _triton() -> dict[str, Implementation]:
    from forkkv_kernels.triton import lora, prefill, rope

    return {
        "residual_attention": prefill.residual_attention_prefill,
        "lora_shrink": lora.lora_shrink,
        "lora_expand": lora.lora_expand,
        "residual_shrink_write": lora.residual_shrink_write,
        "rope_cache_write": rope.rope_cache_write,
    }


def _numba() -> dict[str, Implementation]:
    """Nothing without Numba: the references then do."""
    try:
        from forkkv_kernels.cpu import elementwise, lora
    except ImportError:
        return {}
    elementwise.kernels()
    lora.kernel()
    return {
        "lora_rows": lora.lora_rows,
        "rope_cache_write": elementwise.rope_cache_write,
        "rms_norm": elementwise.rms_norm,
        "swiglu": elementwise.swiglu,
    }
