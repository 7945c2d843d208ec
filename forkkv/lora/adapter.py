"""A LoRA adapter in memory, as the checkpoint reader hands it to the executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkkv.types import AdapterMeta, AdapterReport

if TYPE_CHECKING:
    import torch

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """`weights[layer, module]` is (A [rank, in_features], B [out_features, rank]) as stored in the file, on the CPU;
    `scaling[layer, module]` is the factor of B·A (alpha / r, or alpha / sqrt(r) for rsLoRA)."""

    meta: AdapterMeta
    report: AdapterReport
    weights: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
    scaling: dict[tuple[int, str], float]
