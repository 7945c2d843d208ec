"""The paged cache on the device: K/V blocks, residual units and, with QK-norm, their rms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forkkv.attention.backend import LayerCache
from forkkv.kvcache.spec import CacheSpec
from forkkv.types import RESIDUAL_TILE, BlockCopy
from forkkv_kernels.memory import empty_in_huge_pages


class PagedCache:
    """k, v [L, num_blocks, block_size, Hkv, D]; residual [L, num_units, block_size, 16]; with QK-norm k_rms
    [L, num_blocks, block_size, Hkv] and residual_rms [L, num_units, block_size, Hkv], float32.

    Block 0 and unit 0 are null: zeros (rms: ones), never written, safe to read as padding. Everything else is
    uninitialised until written; `poison` fills it with NaN, so that a test sees any read of it.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_kv_blocks: int,
        num_residual_units: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        """Allocate. Raises `ValueError` if a pool is smaller than the null id and one usable one."""
        if num_kv_blocks < 2 or num_residual_units < 2:
            raise ValueError(f"pools of {num_kv_blocks} blocks and {num_residual_units} units are too small")
        heads, size = spec.num_kv_heads, spec.block_size

        def pool(count: int, *tail: int, dtype: torch.dtype = dtype, null: float = 0.0) -> Tensor:
            tensor = empty_in_huge_pages(spec.num_layers, count, size, *tail, dtype=dtype, device=device)
            if poison:
                tensor.fill_(float("nan"))
            tensor[:, 0] = null
            return tensor

        self.spec, self.num_kv_blocks, self.num_residual_units = spec, num_kv_blocks, num_residual_units
        self.k = pool(num_kv_blocks, heads, spec.head_dim)
        self.v = pool(num_kv_blocks, heads, spec.head_dim)
        self.residual = pool(num_residual_units, RESIDUAL_TILE)
        self.k_rms: Tensor | None = None
        self.residual_rms: Tensor | None = None
        if spec.qk_norm:
            self.k_rms = pool(num_kv_blocks, heads, dtype=torch.float32, null=1.0)
            self.residual_rms = pool(num_residual_units, heads, dtype=torch.float32, null=1.0)
        self.layers: Sequence[LayerCache] = tuple(self._layer(index) for index in range(spec.num_layers))

    def _layer(self, index: int) -> LayerCache:
        k_rms, residual_rms = (None if side is None else side[index] for side in (self.k_rms, self.residual_rms))
        return LayerCache(self.k[index], self.v[index], self.residual[index], k_rms, residual_rms)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy K/V blocks of all layers; all sources are read before any destination is written."""
        if not copies:
            return
        src = torch.tensor([copy.src for copy in copies], device=self.k.device)
        dst = torch.tensor([copy.dst for copy in copies], device=self.k.device)
        for pool in (self.k, self.v, self.k_rms):
            if pool is not None:
                pool.index_copy_(1, dst, pool.index_select(1, src))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        pools = (self.k, self.v, self.residual, self.k_rms, self.residual_rms)
        return sum(pool.numel() * pool.element_size() for pool in pools if pool is not None)
