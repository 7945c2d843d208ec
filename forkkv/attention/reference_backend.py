"""Attention by the reference operation, on any device: what every other backend is compared with."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forkkv.attention.backend import AttentionBackend, AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch
from forkkv_kernels.reference import residual_attention_reference


class ReferenceBackend(AttentionBackend):
    """Hands the batch to the operation unchanged."""

    name: ClassVar[str] = "reference"

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> str | None:
        return None if dtype.is_floating_point else f"{dtype} is not a floating point type"

    def plan(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def run(self, q: Tensor, cache: LayerCache, expansion: ResidualExpansion | None, metadata: ForwardBatch) -> Tensor:
        out = residual_attention_reference(
            q,
            cache.k,
            cache.v,
            metadata.kv_block_table,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            scale=self.shape.scale,
            residual_cache=cache.residual,
            residual_k_table=metadata.residual_k_table,
            residual_v_table=metadata.residual_v_table,
            residual_len=metadata.residual_len if expansion is not None else None,
            read_slot=metadata.read_slot,
            b_k=expansion.b_k if expansion is not None else None,
            b_v=expansion.b_v if expansion is not None else None,
            cos=self.cos,
            sin=self.sin,
            k_rms=cache.k_rms,
            residual_rms=cache.residual_rms,
        )
        assert isinstance(out, Tensor)
        return out
