"""Bytes of the two paged pools, and how one memory budget is split between them."""

from __future__ import annotations

from dataclasses import dataclass

from forkkv.types import RESIDUAL_TILE


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Shape of the cache of one model. `*_itemsize` are bytes per element.

    A K/V block holds K and V of `block_size` tokens of all layers and KV heads. A residual unit holds one half (K or
    V), `RESIDUAL_TILE` columns, `block_size` tokens, all layers. With QK-norm both carry one rms per token and KV head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_itemsize: int
    residual_itemsize: int
    qk_norm: bool = False

    @property
    def kv_block_bytes(self) -> int:
        elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.kv_itemsize + self._rms_bytes

    @property
    def residual_unit_bytes(self) -> int:
        return self.num_layers * self.block_size * RESIDUAL_TILE * self.residual_itemsize + self._rms_bytes

    @property
    def _rms_bytes(self) -> int:
        return self.num_layers * self.block_size * self.num_kv_heads * 4 if self.qk_norm else 0

    def residual_share(self, fanout: int, rank: int) -> float:
        """Share of the budget for residuals: F·2r / (2·d_kv + F·2r), the bytes of F residuals of rank r beside the
        one bCache that they complete, so that both pools run full together. `rank` is rounded up to whole tiles."""
        columns = fanout * 2 * (-(-rank // RESIDUAL_TILE) * RESIDUAL_TILE) * self.residual_itemsize
        return columns / (2 * self.num_kv_heads * self.head_dim * self.kv_itemsize + columns)

    def split(self, memory_bytes: int, share: float) -> tuple[int, int]:
        """(K/V blocks, residual units) that fit in `memory_bytes`, each at least 2 (one null, one usable)."""
        residual = int(memory_bytes * share)
        return (
            max(2, (memory_bytes - residual) // self.kv_block_bytes),
            max(2, residual // self.residual_unit_bytes),
        )
