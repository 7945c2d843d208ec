"""Llama-family decoder over flattened batches: Llama, SmolLM2, Qwen2 (biases), Qwen3 (QK-norm).

`forward` takes everything it depends on as arguments; the module holds weights and the rotary table, no step state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forkkv.attention.backend import AttentionBackend, AttentionShape, LayerCache
from forkkv.attention.batch import ForwardBatch
from forkkv.errors import ModelLoadError
from forkkv.lora.layers import LoRAStep, plan_lora, rms_of_heads
from forkkv.lora.tensors import KernelLoRAStep
from forkkv.lora.weights import AdapterWeights
from forkkv.models.layers import FusedLinear, RMSNorm, RotaryTable, TiedHead
from forkkv.models.spec import ModelSpec
from forkkv_kernels.implementations import prepare
from forkkv_kernels.ops import rope_cache_write, swiglu

_HEAD_COPY_BYTES = 256 << 20
"""Tied embeddings up to this size get a transposed copy as head on CPUs, see `FusedLinear`."""


class Cache(Protocol):
    """Paged storage of all layers."""

    layers: Sequence[LayerCache]


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer of one forward pass shares."""

    batch: ForwardBatch
    backend: AttentionBackend
    attention: Any
    """Metadata of `AttentionBackend.plan`."""
    lora: LoRAStep | KernelLoRAStep
    cos: Tensor
    sin: Tensor
    kv_slots: Tensor
    """[T] flat slot of every token's K and V, -1: not stored."""


class Attention(nn.Module):
    """Projections, rotation, cache writes and attention of one layer."""

    def __init__(self, index: int, spec: ModelSpec, weights: LayerWeights) -> None:
        super().__init__()
        self.index = index
        self.shape = attention_shape(spec)
        self.eps = spec.rms_norm_eps
        names = ("q_proj", "k_proj", "v_proj")
        biases = [weights.take(f"self_attn.{name}.bias") for name in names] if spec.qkv_bias else None
        self.qkv = FusedLinear([weights.take(f"self_attn.{name}.weight") for name in names], biases)
        self.o = FusedLinear([weights.take("self_attn.o_proj.weight")])
        self.q_norm = RMSNorm(weights.take("self_attn.q_norm.weight"), self.eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(weights.take("self_attn.k_norm.weight"), self.eps) if spec.qk_norm else None

    def forward(self, hidden: Tensor, step: StepContext, cache: LayerCache) -> Tensor:
        """hidden [T, hidden], normed -> [T, hidden]. Writes K, V and residuals of the step into `cache`."""
        shape, lora, index = self.shape, step.lora, self.index
        q_heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        q_size, kv_size = q_heads * dim, kv_heads * dim
        qkv = self._project(hidden, step, q_size)
        if lora.jobs:
            lora.write_residuals(index, hidden, qkv[:, q_size : q_size + kv_size], cache, self.eps)
        values = qkv[:, q_size + kv_size :].view(-1, kv_heads, dim)
        rms = None
        heads = qkv[:, : q_size + kv_size].view(-1, q_heads + kv_heads, dim)
        if self.q_norm is not None and self.k_norm is not None:
            rms = rms_of_heads(heads[:, q_heads:], self.eps)
            heads = torch.cat((self.q_norm(heads[:, :q_heads]), self.k_norm(heads[:, q_heads:])), dim=1)
        queries = rope_cache_write(
            heads[:, :q_heads],
            heads[:, q_heads:],
            values,
            step.cos,
            step.sin,
            step.kv_slots,
            cache.k,
            cache.v,
            k_rms=rms,
            k_rms_cache=cache.k_rms,
        )
        attended = step.backend.run(queries, cache, lora.expansion(index), step.attention).reshape(-1, q_size)
        out = self.o(attended)
        lora.apply(index, "o", attended, out)
        return out

    def _project(self, hidden: Tensor, step: StepContext, q_size: int) -> Tensor:
        """Queries, K and V [T, (H + 2 Hkv) * D] with the adapters' part, which K, V of `base_kv_tokens` go without."""
        qkv = self.qkv(hidden)
        tokens, kv = step.batch.base_kv_tokens, qkv[:, q_size:]
        base = None if tokens is None else kv.index_select(0, tokens)
        step.lora.apply(self.index, "qkv", hidden, qkv)
        if tokens is not None and base is not None:
            kv.index_copy_(0, tokens, base)
        return qkv


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, index: int, weights: LayerWeights) -> None:
        super().__init__()
        self.index = index
        self.gate_up = FusedLinear([weights.take("mlp.gate_proj.weight"), weights.take("mlp.up_proj.weight")])
        self.down = FusedLinear([weights.take("mlp.down_proj.weight")])

    def forward(self, hidden: Tensor, lora: LoRAStep | KernelLoRAStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        both = self.gate_up(hidden)
        lora.apply(self.index, "gate_up", hidden, both)
        inner = swiglu(both)
        out = self.down(inner)
        lora.apply(self.index, "down", inner, out)
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, index: int, spec: ModelSpec, weights: LayerWeights) -> None:
        super().__init__()
        self.input_norm = RMSNorm(weights.take("input_layernorm.weight"), spec.rms_norm_eps)
        self.attention = Attention(index, spec, weights)
        self.post_attention_norm = RMSNorm(weights.take("post_attention_layernorm.weight"), spec.rms_norm_eps)
        self.mlp = MLP(index, weights)

    def forward(self, hidden: Tensor, step: StepContext, cache: LayerCache) -> Tensor:
        """hidden [T, hidden], changed in place and returned; `step.batch.weights_slot` tells which tokens run base
        weights."""
        attended = self.attention(self.input_norm(hidden), step, cache)
        return hidden.add_(self.mlp(self.post_attention_norm(hidden, attended), step.lora))


class LayerWeights:
    """Takes the tensors of one layer out of the checkpoint's dictionary, so that fusing never holds a copy of all."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype) -> None:
        self.weights, self.prefix, self.device, self.dtype = weights, prefix, device, dtype

    def take(self, name: str) -> Tensor:
        """Remove and return a tensor. Raises `ModelLoadError` if it is missing."""
        try:
            tensor = self.weights.pop(self.prefix + name)
        except KeyError:
            raise ModelLoadError(f"the checkpoint has no tensor {self.prefix + name!r}") from None
        return tensor.to(device=self.device, dtype=self.dtype)


class LlamaModel(nn.Module):
    """The whole decoder with its head."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        num_positions: int | None = None,
    ) -> None:
        """`weights`: Hugging Face names without the leading "model."; tensors are taken out of the dictionary.
        `num_positions`: length of the rotary table, the model's context by default.

        Raises `ModelLoadError` for missing tensors and for RoPE scaling that is not implemented.
        """
        super().__init__()
        prepare(device.type)
        self.spec, self.device, self.dtype = spec, device, dtype
        top = LayerWeights(weights, "", device, dtype)
        self.embedding = nn.Parameter(top.take("embed_tokens.weight"), requires_grad=False)
        self.layers = nn.ModuleList(
            DecoderLayer(i, spec, LayerWeights(weights, f"layers.{i}.", device, dtype)) for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(top.take("norm.weight"), spec.rms_norm_eps)
        self.head = self._make_head(top)
        self.rotary = RotaryTable(spec, num_positions or spec.max_position_embeddings, device)

    @property
    def k_gains(self) -> list[Tensor] | None:
        """Gains of the K norm per layer [D]; None without QK-norm."""
        if not self.spec.qk_norm:
            return None
        return [layer.attention.k_norm.weight for layer in self.layers]  # type: ignore[union-attr, misc]

    def offset_rotation(self, block_size: int) -> tuple[Tensor, Tensor]:
        """cos, sin [block_size, D / 2] of the positions inside a block."""
        return self.rotary.cos[:block_size], self.rotary.sin[:block_size]

    def make_backend(self, backend: type[AttentionBackend]) -> AttentionBackend:
        """An attention backend for this model's shape and rotation."""
        cos, sin = self.rotary.cos.to(self.dtype), self.rotary.sin.to(self.dtype)
        return backend(attention_shape(self.spec), cos, sin)

    def forward(self, batch: ForwardBatch, cache: Cache, backend: AttentionBackend, lora: AdapterWeights) -> Tensor:
        """Logits [S, vocab] of the batch's `sample_tokens`. Writes K, V and residuals of the step into `cache`."""
        cos, sin = self.rotary(batch.positions, self.dtype)
        lora_step = plan_lora(lora, batch)
        step = StepContext(batch, backend, backend.plan(batch), lora_step, cos, sin, token_kv_slots(batch))
        return self.logits(step, cache)

    def logits(self, step: StepContext, cache: Cache) -> Tensor:
        """`forward` of a step that is planned already: nothing here depends on the host's side of the batch, so that a
        CUDA graph may record it."""
        hidden = F.embedding(step.batch.input_ids, self.embedding)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, step, layer_cache)
        return self.head(self.norm(hidden.index_select(0, step.batch.sample_tokens)))

    def _make_head(self, weights: LayerWeights) -> nn.Module:
        if not self.spec.tie_word_embeddings:
            return FusedLinear([weights.take("lm_head.weight")])
        size = self.embedding.numel() * self.embedding.element_size()
        if self.device.type == "cpu" and size <= _HEAD_COPY_BYTES:
            return FusedLinear([self.embedding])
        return TiedHead(self.embedding)


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """Constants of the model's attention; scores are scaled by 1 / sqrt(head_dim)."""
    return AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, spec.qk_norm)


def token_kv_slots(batch: ForwardBatch) -> Tensor:
    """[T] int64: the flat cache slot of every token, -1 for tokens that are not stored."""
    if batch.kv_tokens is None and len(batch.kv_slots) == batch.num_tokens:
        return batch.kv_slots
    slots = torch.full_like(batch.positions, -1)
    return slots if batch.kv_tokens is None else slots.index_copy_(0, batch.kv_tokens, batch.kv_slots)
