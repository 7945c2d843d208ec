"""Names and shapes of a model's weight tensors: what the checkpoint readers must find, no more and no less.

Names are Hugging Face's without the leading `model.`. Pure data, no torch.
"""

from __future__ import annotations

from forkkv.models.spec import ModelSpec

MODULE_PARENT = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""Projection -> submodule of a decoder layer that holds it."""


def module_shape(spec: ModelSpec, module: str) -> tuple[int, int]:
    """(out_features, in_features) of one projection, the shape of its weight. Raises `KeyError` for other names."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "q_proj": (spec.q_size, hidden),
        "k_proj": (spec.kv_size, hidden),
        "v_proj": (spec.kv_size, hidden),
        "o_proj": (hidden, spec.q_size),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }[module]


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, in layer order; `lm_head.weight` only where the head is not tied."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (spec.hidden_size,)
        for module, parent in MODULE_PARENT.items():
            shapes[f"{prefix}.{parent}.{module}.weight"] = module_shape(spec, module)
        if spec.qkv_bias:
            for module in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{prefix}.self_attn.{module}.bias"] = (module_shape(spec, module)[0],)
        if spec.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (spec.hidden_size,)
    shapes["norm.weight"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes
