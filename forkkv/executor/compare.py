"""How far the distributions of two teacher-forced runs over the same tokens are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forkkv.types import Divergence


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats of log-probs [..., vocab]: float64 [...], without what rounding takes below 0."""
    kl = (reference.exp() * (reference - other)).sum(dim=-1, dtype=torch.float64)
    return kl.clamp_min(0.0)


@torch.inference_mode()
def divergence(reference: Tensor, other: Tensor) -> Divergence:
    """Mean KL(reference || other) in nats and top-1 agreement of logits [T, vocab] of the same T tokens."""
    expected, found = (logits.float().log_softmax(dim=-1) for logits in (reference, other))
    kl = float(kl_divergence(expected, found).mean())
    agreement = float((reference.argmax(dim=-1) == other.argmax(dim=-1)).double().mean())
    return Divergence(kl if math.isfinite(kl) else math.inf, agreement)
