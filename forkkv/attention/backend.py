"""What the model asks of an attention implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forkkv.attention.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of a model's attention. `scale` multiplies the scores (1 / sqrt(head_dim))."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qk_norm: bool = False

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LayerCache:
    """Cache of one layer: k, v [num_blocks, block_size, Hkv, D]; residual [num_units, block_size, 16]; k_rms
    [num_blocks, block_size, Hkv] and residual_rms [num_units, block_size, Hkv] float32 for models with QK-norm.
    Block 0 and unit 0 hold zeros (rms: ones) and are never written."""

    k: Tensor
    v: Tensor
    residual: Tensor
    k_rms: Tensor | None = None
    residual_rms: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ResidualExpansion:
    """B matrices of one layer by adapter slot, [slots, R, Hkv * D], scaling (and K-norm gain) folded in.

    `b_k_rotated` [block_size, slots, R, Hkv * D], if kept: B_k rotated to every offset inside a block; `b_k_packed`
    [slots, Hkv, D / 8, R, 8], if kept: the layout of `forkkv_kernels.cpu.runtime.pack_b_k`.
    """

    b_k: Tensor
    b_v: Tensor
    b_k_rotated: Tensor | None = None
    b_k_packed: Tensor | None = None


class AttentionBackend(ABC):
    """Causal attention of the rows of a step over the paged cache.

    Contract: in each layer all K, V and residual writes of the step happen before `run`. A row sees everything that
    its block table holds up to its own position, so two rows of one sequence may stand in one step.
    """

    name: ClassVar[str]
    reads_packed_b_k: ClassVar[bool] = False
    """Whether `run` reads `ResidualExpansion.b_k_packed`."""

    def __init__(self, shape: AttentionShape, cos: Tensor, sin: Tensor) -> None:
        """`cos`, `sin` [positions, D / 2]: the model's rotation table, for residuals that are rotated when read."""
        self.shape = shape
        self.cos = cos
        self.sin = sin

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> str | None:
        """None if this backend can serve, else the reason why not."""

    @staticmethod
    def pack_b_k(b_k: Tensor, num_kv_heads: int) -> Tensor:
        """`ResidualExpansion.b_k_packed` of `b_k` [slots, R, Hkv * D], for backends that read it."""
        raise NotImplementedError

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> Any:
        """Metadata of one step, made once and passed to `run` of every layer. Mutates nothing."""

    @abstractmethod
    def run(self, q: Tensor, cache: LayerCache, expansion: ResidualExpansion | None, metadata: Any) -> Tensor:
        """q [T, H, D], rotated -> attention output [T, H, D] in q's dtype. Mutates nothing."""
