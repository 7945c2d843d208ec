"""Model shape from `config.json` or GGUF metadata, refusing what the decoder would compute wrongly. No torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from forkkv.errors import ModelLoadError
from forkkv.models.gguf import GGUFFile, StringArray
from forkkv.models.resolve import ResolvedModel
from forkkv.models.spec import ModelSpec

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DEFAULT_CONTEXT = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_spec(resolved: ResolvedModel) -> ModelSpec:
    """Shape of the model at `resolved`. Raises `ModelLoadError` naming the file and what is not served."""
    try:
        return _spec_from_gguf(resolved.path) if resolved.format == "gguf" else _spec_from_config(resolved.path)
    except (KeyError, TypeError, ValueError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelLoadError(f"{resolved.path}: unusable model configuration: {detail}") from error


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ModelLoadError(f"{path}: {reason}")


# ---- config.json ------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: unreadable ({error})") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return content


def _spec_from_config(folder: Path) -> ModelSpec:
    path = folder / "config.json"
    config = _read_json(path)
    family = _family(path, config)
    _refuse_unserved(path, config, family)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    context = int(config.get("max_position_embeddings") or _DEFAULT_CONTEXT[family])
    theta, scaling = _rope(path, config, context)
    return ModelSpec(
        architecture=_ARCHITECTURES[family],
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        vocab_size=int(config["vocab_size"]),
        max_position_embeddings=context,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_token_ids=_eos_ids(folder, config),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _family(path: Path, config: dict[str, Any]) -> str:
    declared = config.get("architectures") or [_ARCHITECTURES.get(config.get("model_type", ""), "")]
    for family, architecture in _ARCHITECTURES.items():
        if declared == [architecture]:
            return family
    named = ", ".join(map(str, declared)) or config.get("model_type") or "no architecture"
    _refuse(path, f"architecture {named} is not served; served are {', '.join(_ARCHITECTURES.values())}")


def _refuse_unserved(path: Path, config: dict[str, Any], family: str) -> None:
    """Refuse settings that change the computation and that the decoder does not know."""
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        _refuse(path, f"hidden_act {act!r} is not served, only silu")
    if config.get("mlp_bias"):
        _refuse(path, "mlp_bias is not served")
    if config.get("attention_bias") and family != "qwen2":
        _refuse(path, f"attention_bias is not served for {_ARCHITECTURES[family]}")
    if config.get("quantization_config"):
        _refuse(path, "quantized checkpoints (quantization_config) are not served, GGUF excepted")
    layer_types = config.get("layer_types") or []
    sliding = any(kind != "full_attention" for kind in layer_types)
    if not layer_types and config.get("use_sliding_window") and config.get("sliding_window"):
        sliding = int(config.get("max_window_layers", 0)) < int(config["num_hidden_layers"])
    if sliding:
        _refuse(path, "sliding-window attention is not served")


def _rope(path: Path, config: dict[str, Any], context: int) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from `rope_parameters`, or from the older pair `rope_theta` and `rope_scaling`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        _refuse(path, f"partial_rotary_factor {partial} is not served")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"rope_type": "linear", "factor": float(rope["factor"])}
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", context)
        return theta, {"rope_type": "llama3"} | {key: float(rope[key]) for key in _LLAMA3_KEYS[:3]} | {
            _LLAMA3_KEYS[3]: int(rope[_LLAMA3_KEYS[3]])
        }
    _refuse(path, f"RoPE scaling {kind!r} is not served; served are llama3 and linear")


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End tokens of `generation_config.json` (chat models list several there), then of `config.json`."""
    sources = [config]
    if (folder / "generation_config.json").is_file():
        sources.insert(0, _read_json(folder / "generation_config.json"))
    found: dict[int, None] = {}
    for source in sources:
        declared = source.get("eos_token_id")
        for token in declared if isinstance(declared, list) else [declared]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)


# ---- GGUF -------------------------------------------------------------------------------------------------------


def _spec_from_gguf(path: Path) -> ModelSpec:
    file = GGUFFile(path)
    meta = file.metadata
    family = meta.get("general.architecture")
    if family not in _ARCHITECTURES:
        _refuse(path, f"architecture {family} is not served; served are {', '.join(_ARCHITECTURES)}")
    if meta.get(f"{family}.expert_count", 0):
        _refuse(path, "mixture-of-experts models are not served")
    heads, hidden = int(meta[f"{family}.attention.head_count"]), int(meta[f"{family}.embedding_length"])
    head_dim = int(meta.get(f"{family}.attention.key_length") or hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(meta.get(f"{family}.{key}", head_dim)) != head_dim:
            _refuse(path, f"{family}.{key} {meta[f'{family}.{key}']} differs from the head dimension {head_dim}")
    theta = float(meta.get(f"{family}.rope.freq_base", 10000.0))
    tokens = meta.get("tokenizer.ggml.tokens", StringArray(0))
    embedding = file.tensors.get("token_embd.weight")
    return ModelSpec(
        architecture=_ARCHITECTURES[family],
        num_layers=int(meta[f"{family}.block_count"]),
        hidden_size=hidden,
        intermediate_size=int(meta[f"{family}.feed_forward_length"]),
        num_heads=heads,
        num_kv_heads=int(meta.get(f"{family}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab_size=embedding.shape[0] if embedding else int(meta.get(f"{family}.vocab_size") or tokens.count),
        max_position_embeddings=int(meta[f"{family}.context_length"]),
        rms_norm_eps=float(meta[f"{family}.attention.layer_norm_rms_epsilon"]),
        rope_theta=theta,
        rope_scaling=_gguf_rope_scaling(file, family, theta, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_token_ids=_gguf_eos_ids(meta),
        torch_dtype={0: "float32", 1: "float16"}.get(meta.get("general.file_type", 0), "bfloat16"),
    )


def _gguf_eos_ids(meta: dict[str, Any]) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(int(meta[key]) for key in keys if key in meta))


def _gguf_rope_scaling(file: GGUFFile, family: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    """GGUF keeps Llama-3 scaling only as the resulting divisor of each frequency (`rope_freqs.weight`). All published
    models use low 1, high 4 and 8192 original positions, so the factor is the largest divisor; the other divisors
    must then agree, else the file is refused."""
    if "rope_freqs.weight" in file.tensors:
        divisors = [float(value) for value in file.read("rope_freqs.weight").reshape(-1)]
        scaling = dict(zip(_LLAMA3_KEYS, (max(divisors), 1.0, 4.0, 8192), strict=True))
        expected = [_llama3_divisor(theta ** (-2 * i / head_dim), scaling) for i in range(head_dim // 2)]
        if len(divisors) != len(expected) or any(
            not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(divisors, expected, strict=True)
        ):
            _refuse(file.path, "rope_freqs.weight is not Llama-3's RoPE scaling")
        return {"rope_type": "llama3", **scaling}
    kind = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(file.metadata[f"{family}.rope.scaling.factor"])}
    _refuse(file.path, f"RoPE scaling {kind!r} is not served; served are llama3 and linear")


def _llama3_divisor(frequency: float, scaling: dict[str, Any]) -> float:
    """What Llama-3's scaling divides one RoPE frequency (radians per token) by."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(1 / ((1 - smooth) / scaling["factor"] + smooth))
