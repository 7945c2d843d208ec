"""Attention over paged base K/V plus low-rank residuals. Depends on torch alone; knows nothing of the server."""

from __future__ import annotations

from forkkv_kernels.dispatch import residual_attention
from forkkv_kernels.implementations import register

__all__ = ["register", "residual_attention"]
