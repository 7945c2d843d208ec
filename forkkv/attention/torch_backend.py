"""Attention with PyTorch operations: one fused call pair per prefill row, clusters for decode rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forkkv.attention.backend import AttentionBackend, AttentionShape, LayerCache, ResidualExpansion
from forkkv.attention.batch import ForwardBatch
from forkkv.attention.clusters import DecodeCluster, plan_clusters
from forkkv.attention.decode import run_cluster
from forkkv.attention.prefill import PrefillRow, plan_prefill_row, run_prefill_row


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    """Work of one step."""

    block_size: int
    prefill: tuple[PrefillRow, ...]
    clusters: tuple[DecodeCluster, ...]


class TorchBackend(AttentionBackend):
    """The server's backend on CPUs; correct, not fast, elsewhere."""

    name: ClassVar[str] = "torch"

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> str | None:
        if not dtype.is_floating_point:
            return f"{dtype} is not a floating point type"
        if shape.head_dim % 2:
            return f"head_dim {shape.head_dim} is odd"
        return None

    def plan(self, batch: ForwardBatch) -> TorchMetadata:
        host, device = batch.host, batch.input_ids.device
        decode: list[int] = []
        prefill: list[PrefillRow] = []
        for row in range(host.num_rows):
            # Clusters read residuals in whole blocks; a partial one, as agents in a mixed tree have, goes row by row.
            if host.query_len(row) == 1 and host.residual_len[row] % batch.block_size == 0:
                decode.append(row)
            else:
                prefill.append(plan_prefill_row(host, row, batch.block_size, device))
        kv_size = self.shape.num_kv_heads * self.shape.head_dim
        clusters = plan_clusters(batch, decode, kv_size, self.cos, self.sin, self.shape.qk_norm)
        return TorchMetadata(batch.block_size, tuple(prefill), clusters)

    def run(self, q: Tensor, cache: LayerCache, expansion: ResidualExpansion | None, metadata: TorchMetadata) -> Tensor:
        out = torch.empty_like(q)
        for row in metadata.prefill:
            queries = q[row.begin : row.end]
            out[row.begin : row.end] = run_prefill_row(queries, row, cache, expansion, self.shape, self.cos, self.sin)
        size = metadata.block_size
        for cluster in metadata.clusters:
            queries = q.index_select(0, cluster.tokens)
            result = run_cluster(queries, cluster, cache, expansion, self.shape, self.cos[:size], self.sin[:size])
            out.index_copy_(0, cluster.tokens, result)
        return out
