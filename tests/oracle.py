"""The independent definition of right: what base, plain LoRA, fork-LoRA and aLoRA compute, in the simplest form.

Imports torch and transformers only (and safetensors), nothing of the server. One layer loop in fp32 over the weights
of a Hugging Face model, with its own attention; no cache, no blocks, no batching, no speed.

With f_w the first token that runs with adapter weights, s·B·A the adapter's part of a projection, and h the input of
the projection:

* tokens below f_w run the base model: K = RoPE(norm(h·Wk)), V = h·Wv, no adapter anywhere;
* tokens from f_w on run the adapted model, and what they read of the tokens below f_w is
  `fork`: K = RoPE(norm(h·Wk + s·h·Ak·Bk)), V = h·Wv + s·h·Av·Bv, h being the *base* model's states;
  `alora`: the base model's K and V as they are;
* `plain` is f_w = 0, `base` is f_w = n.

`sharing_logprobs` is what an agent computes over K and V that other agents left, as in the published systems.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

Adapter = dict[tuple[int, str], tuple[Tensor, Tensor, float]]
"""(layer, module) -> A [r, in], B [out, r], scaling."""
Kind = Literal["base", "plain", "fork", "alora"]
Stretch = tuple[Adapter, list[Tensor]]
"""The agent that processed some consecutive tokens, and its inputs h of the attention projections, [tokens, hidden] of
each layer."""


@torch.no_grad()
def oracle_logprobs(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    adapter: Adapter | None = None,
    kind: Kind = "base",
    f_w: int | None = None,
) -> Tensor:
    """Log-softmax [n, vocab] (fp32) after each of the n teacher-forced tokens; row i predicts token i + 1.

    `f_w` is needed for "fork" and "alora" and must lie in [0, n]; rows below it are the base model's. Raises
    `ValueError` for contradictory arguments. Mutates nothing.
    """
    first = _first_adapter_token(len(token_ids), adapter, kind, f_w)
    states, rope = _embed(model, token_ids)
    rope_prefix, rope_suffix = _cut(rope, 0, first), _cut(rope, first)
    prefix, suffix = states[:first], states[first:]
    for index, layer in enumerate(_layers(model)):
        lora = _of_layer(adapter or {}, index)
        h = _rms_norm(layer.input_layernorm, prefix)
        query, key, value = _project(layer.self_attn, h, rope_prefix, {})
        prefix = _finish_layer(layer, prefix, _attend(query, key, value), {})
        if kind == "fork":
            _, key, value = _project(layer.self_attn, h, rope_prefix, lora)
        h = _rms_norm(layer.input_layernorm, suffix)
        query, own_key, own_value = _project(layer.self_attn, h, rope_suffix, lora)
        key, value = torch.cat([key, own_key], dim=1), torch.cat([value, own_value], dim=1)
        suffix = _finish_layer(layer, suffix, _attend(query, key, value), lora)
    return _log_softmax(model, torch.cat([prefix, suffix]))


@torch.no_grad()
def sharing_logprobs(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    adapter: Adapter,
    found: Sequence[Stretch] = (),
    start: int = 0,
    *,
    merged: bool = False,
) -> tuple[Tensor, Stretch]:
    """Log-softmax [n - start, vocab] after each of the tokens from `start` on, which the agent `adapter` processes, and
    what it leaves of them. `found`: what others left of the first tokens. With h' a writer's states and h the agent's
    own, it reads of a found token

    `merged`: K and V as the writer's adapter made them;
    else, below `start`: K = RoPE(norm(h'·Wk + s·h'·Ak·Bk)), V alike;
    else, from `start` on: K = RoPE(norm(h'·Wk + s·h·Ak·Bk)), V alike. With QK-norm an adapted K is divided by the rms
    of the agent's own, h·Wk + s·h·Ak·Bk.
    """
    stored = sum(len(states[0]) for _, states in found)
    states, rope = _embed(model, token_ids)
    x, left = states[start:], []
    for index, layer in enumerate(_layers(model)):
        attn, lora = layer.self_attn, _of_layer(adapter, index)
        h = _rms_norm(layer.input_layernorm, x)
        left.append(h)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        at = 0
        query, own_key, own_value = _project(attn, h, _cut(rope, start), lora)
        for writer, written in found:
            end = at + len(written[index])
            below, behind = max(0, min(start, end) - at), slice(max(0, at - start), max(0, end - start))
            low_rank = None if merged else torch.cat([written[index][:below], h[behind]])
            used = _of_layer(writer, index) if merged else lora
            _, key, value = _project(attn, written[index], _cut(rope, at, end), used, low_rank)
            keys, values, at = [*keys, key], [*values, value], end
        key = torch.cat([*keys, own_key[:, stored - start :]], dim=1)
        value = torch.cat([*values, own_value[:, stored - start :]], dim=1)
        x = _finish_layer(layer, x, _attend(query, key, value), lora)
    return _log_softmax(model, x), (adapter, left)


def read_adapter(folder: Path | str) -> Adapter:
    """A PEFT folder as the dictionary above, with PEFT's scaling: alpha / r, or alpha / sqrt(r) with rsLoRA; the
    first pattern that matches the end of the module's path replaces alpha."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    adapter: Adapter = {}
    for name, a in tensors.items():
        if found := re.search(r"(layers\.(\d+)\.\w+\.(\w+))\.lora_A\.weight$", name):
            alpha = config["lora_alpha"]
            for pattern, value in (config.get("alpha_pattern") or {}).items():
                if re.match(rf"(.*\.)?({pattern})$", "model." + found[1]):
                    alpha = value
                    break
            rank = a.shape[0]
            scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
            adapter[int(found[2]), found[3]] = (a, tensors[name.replace("lora_A", "lora_B")], scaling)
    return adapter


def _first_adapter_token(n: int, adapter: Adapter | None, kind: Kind, f_w: int | None) -> int:
    if kind not in ("base", "plain", "fork", "alora"):
        raise ValueError(f"unknown kind {kind!r}")
    if (adapter is None) != (kind == "base"):
        raise ValueError("an adapter belongs to every kind but base")
    if kind in ("base", "plain"):
        return n if kind == "base" else 0
    if f_w is None or not 0 <= f_w <= n:
        raise ValueError(f"{kind} needs f_w in [0, {n}], got {f_w}")
    return f_w


def _layers(model: Any) -> Any:
    return model.model.layers


def _of_layer(adapter: Adapter, index: int) -> dict[str, tuple[Tensor, Tensor, float]]:
    return {module: weights for (layer, module), weights in adapter.items() if layer == index}


def _embed(model: Any, token_ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Embeddings [n, hidden] and the cosines and sines [n, d] of their positions."""
    weight = model.model.embed_tokens.weight
    states = weight.float()[torch.tensor(list(token_ids), device=weight.device)]
    positions = torch.arange(len(states), device=weight.device)
    return states, [part[0].float() for part in model.model.rotary_emb(states[None], positions[None])]


def _cut(rope: list[Tensor], start: int, end: int | None = None) -> list[Tensor]:
    return [part[start:end] for part in rope]


def _log_softmax(model: Any, x: Tensor) -> Tensor:
    """[n, hidden] behind the last layer -> [n, vocab]."""
    hidden = _rms_norm(model.model.norm, x)
    return torch.log_softmax(hidden @ model.get_output_embeddings().weight.float().T, dim=-1)


def _linear(
    parent: Any,
    module: str,
    x: Tensor,
    lora: dict[str, tuple[Tensor, Tensor, float]],
    low_rank: Tensor | None = None,
) -> Tensor:
    """x·W + bias, plus s·(x·A)·B where the adapter has this module; [n, in] -> [n, out]. `low_rank`: x of the second
    summand, if it is another."""
    linear = getattr(parent, module)
    out = x @ linear.weight.float().T
    if linear.bias is not None:
        out = out + linear.bias.float()
    if module in lora:
        a, b, scaling = lora[module]
        out = out + scaling * ((x if low_rank is None else low_rank) @ a.float().T) @ b.float().T
    return out


def _rms_norm(norm: Any, x: Tensor, of: Tensor | None = None) -> Tensor:
    """x normed by its own rms, or by that of `of`."""
    scale = (x if of is None else of).pow(2).mean(-1, keepdim=True) + norm.variance_epsilon
    return x * torch.rsqrt(scale) * norm.weight.float()


def _project(
    attn: Any,
    h: Tensor,
    rope: list[Tensor],
    lora: dict[str, tuple[Tensor, Tensor, float]],
    low_rank: Tensor | None = None,
) -> list[Tensor]:
    """Query [heads, n, d], key and value [kv_heads, n, d] of normed states h [n, hidden], rotated; `low_rank` as in
    `_linear`."""
    out = []
    for module, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm"), ("v_proj", None)):
        x = _linear(attn, module, h, lora, low_rank).unflatten(-1, (-1, attn.head_dim))
        if norm is not None:
            own = None
            if low_rank is not None and module in lora:
                own = _linear(attn, module, low_rank, lora).unflatten(-1, (-1, attn.head_dim))
            x = _rotate(_rms_norm(getattr(attn, norm), x, own) if hasattr(attn, norm) else x, rope)
        out.append(x.transpose(0, 1))
    return out


def _rotate(x: Tensor, rope: list[Tensor]) -> Tensor:
    """Rotary embedding of x [n, heads, d]: elements i and i + d/2 turn together by the token's angle i."""
    cos, sin = (part[:, None, :] for part in rope)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last q of k tokens: [heads, q, d], [kv_heads, k, d] twice -> [q, heads * d]."""
    heads, q, head_dim = query.shape
    k = key.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (key, value))
    scores = query @ key.transpose(1, 2) / math.sqrt(head_dim)
    visible = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return (weights @ value).transpose(0, 1).reshape(q, heads * head_dim)


def _finish_layer(layer: Any, x: Tensor, attended: Tensor, lora: dict[str, tuple[Tensor, Tensor, float]]) -> Tensor:
    """Output projection and MLP with their residual connections; x [n, hidden] is the layer's input."""
    x = x + _linear(layer.self_attn, "o_proj", attended, lora)
    h = _rms_norm(layer.post_attention_layernorm, x)
    gate, up = (_linear(layer.mlp, module, h, lora) for module in ("gate_proj", "up_proj"))
    return x + _linear(layer.mlp, "down_proj", torch.nn.functional.silu(gate) * up, lora)
