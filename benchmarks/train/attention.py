"""Attention of training: rows that share their distant keys and differ in their near ones, with its own backward.

Plain matrix products, since the CPU's fused attention has a slow backward; one softmax over both kinds of keys without
ever putting them side by side, and few passes over the scores, which are most of the memory that a step touches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor, far_k: Tensor, far_v: Tensor, near_k: Tensor, near_v: Tensor, hidden: Tensor | None = None
) -> Tensor:
    """Softmax attention of Q sequences of T rows: each sees the S far keys and causally its own T near ones.

    q [kv_heads, Q, group, T, d], already scaled; far_k, far_v [kv_heads, S, d], S may be 0; near_k, near_v
    [kv_heads, Q, T, d]; `hidden` [Q, S] is added to the far scores, 0 or -inf, None where all are seen. Differentiable
    in all but `hidden`. Returns [kv_heads, Q, group, T, d].
    """
    out: Tensor = _Attention.apply(q, far_k, far_v, near_k, near_v, hidden)
    return out


class _Attention(torch.autograd.Function):
    """P = exp(s - max) / sum; dS = P * (dO V^T - rowsum(dO * O)), as for any softmax attention."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, far_k: Tensor, far_v: Tensor, near_k: Tensor, near_v: Tensor, hidden: Tensor | None
    ) -> Tensor:
        heads, sequences, group, width, size = q.shape
        rows = q.reshape(heads, -1, size)
        causal = torch.full((width, width), -torch.inf, dtype=q.dtype).triu(1).repeat(group, 1)
        near = _by_sequence(rows, near_k) @ near_k.flatten(0, 1).transpose(1, 2)
        near = near.add_(causal).view(heads, -1, width)
        far = rows @ far_k.transpose(1, 2)
        if hidden is not None:
            far.view(heads, sequences, group * width, -1).add_(hidden[:, None])
        top = near.amax(-1, keepdim=True)
        if far.shape[-1]:
            top = torch.maximum(top, far.amax(-1, keepdim=True))
        far.sub_(top).exp_()
        near.sub_(top).exp_()
        wide = torch.promote_types(q.dtype, torch.float32)
        total = far.sum(-1, True, dtype=wide) + near.sum(-1, True, dtype=wide)
        inverse = total.reciprocal().to(q.dtype)
        own = _by_sequence(near, near_k) @ near_v.flatten(0, 1)
        out = (torch.bmm(far, far_v) + own.view_as(rows)) * inverse
        ctx.save_for_backward(rows, far_k, far_v, near_k, near_v, far, near, inverse, out)
        return out.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, far_k, far_v, near_k, near_v, far, near, inverse, out = ctx.saved_tensors
        grad = grads[0].reshape(rows.shape)
        shift = (grad * out).sum(-1, True) * inverse
        grad = grad * inverse
        d_far = torch.bmm(grad, far_v.transpose(1, 2)).sub_(shift).mul_(far)
        d_near = (_by_sequence(grad, near_k) @ near_v.flatten(0, 1).transpose(1, 2)).view_as(near)
        d_near.sub_(shift).mul_(near)
        d_rows = torch.bmm(d_far, far_k) + (_by_sequence(d_near, near_k) @ near_k.flatten(0, 1)).view_as(rows)
        # (x^T s)^T rather than s^T x: the scores are large, and transposing them would copy them.
        d_far_k, d_far_v = (
            torch.bmm(x.transpose(1, 2), scores).transpose(1, 2) for x, scores in ((rows, d_far), (grad, far))
        )
        d_near_k, d_near_v = (
            torch.bmm(_by_sequence(scores, near_k).transpose(1, 2), _by_sequence(x, near_k)).view_as(near_k)
            for x, scores in ((rows, d_near), (grad, near))
        )
        return d_rows.view_as(grads[0]), d_far_k, d_far_v, d_near_k, d_near_v, None


def _by_sequence(rows: Tensor, near: Tensor) -> Tensor:
    """[kv_heads, Q * R, n] as [kv_heads * Q, R, n], Q being the near keys'."""
    return rows.view(near.shape[0] * near.shape[1], -1, rows.shape[-1])
