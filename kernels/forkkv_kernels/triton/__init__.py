"""Triton kernels for CUDA and AMD devices. Importing this package imports no triton; its modules do."""

from __future__ import annotations


def register_triton() -> None:
    """From now on `forkkv_kernels.residual_attention` runs Triton kernels for tensors on "cuda" devices.

    Raises ImportError where triton is not installed."""
    from forkkv_kernels.dispatch import register
    from forkkv_kernels.triton.prefill import residual_attention_prefill

    register("cuda", residual_attention_prefill)
