"""Makers of tiny random models (Hugging Face folders, GGUF files) and PEFT adapters, seeded, with visible effects."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL_MODULES = ATTENTION + MLP
PEFT_PREFIX = "base_model.model.model."


def make_model(
    folder: Path | str,
    arch: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 128,
    vocab: int = 512,
    tied: bool = True,
    seed: int = 0,
    max_position: int = 2048,
    rope_parameters: dict[str, Any] | None = None,
    eos_token_id: int | list[int] = 2,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write `config.json`, `generation_config.json` and safetensors of a random model; returns the folder.

    `arch` is "llama", "qwen2" (q, k, v biases) or "qwen3" (QK-norm). Weights are large enough that attention is not
    uniform and logits spread over several nats. `max_shard_size` such as "50KB" writes a sharded checkpoint.
    """
    import transformers

    config_class = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[arch]
    config = getattr(transformers, config_class)(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=max_position,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=eos_token_id,
        bos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    _randomise(model, seed)
    folder = Path(folder)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1 + 0.2 * noise
            elif name.endswith("bias"):
                value = 0.5 * noise
            elif "embed_tokens" in name or "lm_head" in name:
                value = 0.3 * noise
            else:
                value = noise * 1.5 / weight.shape[-1] ** 0.5
            weight.copy_(value)


def load_model(folder: Path | str) -> Any:
    """The folder as a transformers model for the oracle: fp32, eager attention, no gradients."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def make_adapter(
    folder: Path | str,
    model: Any,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = ATTENTION,
    layers: Sequence[int] | None = None,
    seed: int = 1,
    a_seed: int | None = None,
    b_std: float = 0.05,
    kind: str = "plain",
    invocation_tokens: Sequence[int] = (),
    rslora: bool = False,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
    prefix: str = PEFT_PREFIX,
    config_extra: dict[str, Any] | None = None,
) -> Path:
    """Write a PEFT folder with random A ~ N(0, 1/sqrt(r)) and B ~ N(0, b_std); returns the folder.

    `model`: a `ModelSpec`, a transformers config, or a model folder. `layers` None means all. `kind` "fork" and "alora"
    are declared as the server reads them; "alora" needs `invocation_tokens`. Adapters of equal `a_seed`, ranks and
    targets share A. `config_extra` overrides config keys.
    """
    shapes, num_layers = _shapes(model)
    generator = torch.Generator().manual_seed(seed)
    a_generator = generator if a_seed is None else torch.Generator().manual_seed(a_seed)
    tensors = {}
    for layer in range(num_layers) if layers is None else layers:
        for module in targets:
            out_features, in_features = shapes[module]
            path = f"layers.{layer}.{'mlp' if module in MLP else 'self_attn'}.{module}"
            r = _pattern_value(rank_pattern, "model." + path, rank)
            a = torch.randn(r, in_features, generator=a_generator) / r**0.5
            b = torch.randn(out_features, r, generator=generator) * b_std
            tensors[f"{prefix}{path}.lora_A.weight"] = a.to(dtype).contiguous()
            tensors[f"{prefix}{path}.lora_B.weight"] = b.to(dtype).contiguous()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "layers_to_transform": None if layers is None else list(layers),
        "bias": "none",
        "use_rslora": rslora,
        "rank_pattern": rank_pattern or {},
        "alpha_pattern": alpha_pattern or {},
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if kind == "fork":
        config["forkkv"] = {"kind": "fork"}
    if kind == "alora":
        config["alora_invocation_tokens"] = list(invocation_tokens)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | (config_extra or {}), indent=2))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def _pattern_value(pattern: dict[str, int] | None, path: str, default: int) -> int:
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


def _shapes(model: Any) -> tuple[dict[str, tuple[int, int]], int]:
    """((out, in) of each projection, number of layers) of a spec, a transformers config or a model folder."""
    if isinstance(model, str | Path):
        import transformers

        model = transformers.AutoConfig.from_pretrained(model)
    heads = getattr(model, "num_attention_heads", None) or model.num_heads
    kv_heads = getattr(model, "num_key_value_heads", None) or model.num_kv_heads
    layers = getattr(model, "num_hidden_layers", None) or model.num_layers
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = heads * model.head_dim, kv_heads * model.head_dim
    shapes = {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return shapes, layers


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_gguf(
    folder: Path | str,
    file: Path,
    kind: str = "F32",
    *,
    rope_freqs: Any = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Convert a model folder to one GGUF file as llama.cpp's converter does: matrices in type `kind`, vectors in F32,
    rows of q and k reordered for Llama. `rope_freqs` is written as `rope_freqs.weight`; `metadata` is added to, or
    replaces, what the file says of itself. Returns the file.
    """
    import gguf

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(file, arch)
    for key, value in (_gguf_metadata(config) | (metadata or {})).items():
        writer.kv_data[0].pop(key, None)
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    for name, tensor in load_tensors(folder).items():
        if arch == "llama" and (found := re.search(r"self_attn\.([qk])_proj", name)):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        quant = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        stored = gguf.quants.quantize(tensor.float().contiguous().numpy(), quant)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=quant)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a single-file safetensors folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, suffix = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{suffix}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{suffix}"


def _gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    own = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    entries: dict[str, Any] = {f"{config['model_type']}.{key}": value for key, value in own.items()}
    entries |= {"general.architecture": config["model_type"], "tokenizer.ggml.model": "gpt2"}
    entries["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    return entries
