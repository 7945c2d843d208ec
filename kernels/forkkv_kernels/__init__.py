"""Attention over paged base K/V plus low-rank residuals. Depends on torch alone; knows nothing of the server."""

from __future__ import annotations

from forkkv_kernels.dispatch import register, residual_attention

__all__ = ["register", "residual_attention"]
