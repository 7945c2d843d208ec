"""Base model weights from safetensors or GGUF into CPU tensors with one set of names.

Names are Hugging Face's without the leading `model.`; `forkkv.models.tensors.weight_shapes` lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from forkkv.errors import ModelLoadError
from forkkv.models.gguf import GGUFFile
from forkkv.models.resolve import ResolvedModel
from forkkv.models.spec import ModelSpec
from forkkv.models.tensors import weight_shapes

_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NAMES_SHOWN = 20

_GGUF_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def load_weights(
    resolved: ResolvedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    load_format: str = "auto",
    progress: bool | None = True,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """All weights of the model as CPU tensors of `dtype`, complete and of the shapes that `spec` demands.

    `load_format`: "auto" takes the format of `resolved`, "safetensors" or "gguf" insists on it, "dummy" draws random
    weights from `seed` and reads no file. `progress`: True shows a bar on stderr, None only on a terminal. Raises
    `ModelLoadError` naming missing, unexpected or misshapen tensors, or an unreadable file.
    """
    if load_format == "dummy":
        return _dummy_weights(spec, dtype, seed)
    if load_format not in ("auto", resolved.format):
        raise ModelLoadError(f"{resolved.path}: --load-format {load_format}, but the model is in {resolved.format}")
    shapes = weight_shapes(spec)
    source = _read_gguf(resolved.path, spec) if resolved.format == "gguf" else _read_safetensors(resolved.path)
    disable = None if progress is None else not progress
    weights: dict[str, torch.Tensor] = {}
    problems: dict[str, list[str]] = {"unexpected": [], "wrong shape": []}
    for name, tensor in tqdm(source, "loading weights", len(shapes), unit="tensor", disable=disable, leave=False):
        if (name == "lm_head.weight" and spec.tie_word_embeddings) or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in shapes:
            problems["unexpected"].append(name)
        elif tuple(tensor.shape) != shapes[name]:
            problems["wrong shape"].append(f"{name} {list(tensor.shape)}, expected {list(shapes[name])}")
        else:
            weights[name] = tensor.to(dtype).contiguous()
    misshapen = {entry.split(" ", 1)[0] for entry in problems["wrong shape"]}
    problems["missing"] = [name for name in shapes if name not in weights and name not in misshapen]
    _refuse_problems(resolved.path, problems)
    return weights


def _refuse_problems(path: Path, problems: dict[str, list[str]]) -> None:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            parts.append(f"{len(names)} {kind}: {'; '.join(names[:_NAMES_SHOWN])}{more}")
    if parts:
        raise ModelLoadError(f"{path}: the tensors are not those of the model. " + ". ".join(parts))


def _dummy_weights(spec: ModelSpec, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Matrices and biases ~ N(0, 0.02), norm weights 1; the same for the same seed and shapes."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype)
        else:
            weights[name] = torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
    return weights


# ---- safetensors ------------------------------------------------------------------------------------------------


def _read_safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _safetensors_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    tensor = handle.get_tensor(name)
                    if tensor.dtype not in _FLOAT_DTYPES:
                        raise ModelLoadError(f"{file}: {name} has dtype {tensor.dtype}, which is not served")
                    yield name.removeprefix("model."), tensor
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file}: unreadable safetensors file ({error})") from error


def _safetensors_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index}: not a safetensors index ({error})") from error
        if absent := [shard for shard in shards if not (folder / shard).is_file()]:
            raise ModelLoadError(f"{folder}: {len(absent)} shards of the index are missing: {', '.join(absent)}")
        return [folder / shard for shard in shards]
    if single.is_file():
        return [single]
    pickles = sorted(file.name for file in (*folder.glob("*.bin"), *folder.glob("*.pth")))
    hint = f"; {', '.join(pickles)} is refused because unpickling runs code" if pickles else ""
    raise ModelLoadError(f"{folder}: no model.safetensors or model.safetensors.index.json{hint}")


# ---- GGUF -------------------------------------------------------------------------------------------------------


def _read_gguf(path: Path, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    file = GGUFFile(path)
    permuted = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue
        tensor = torch.from_numpy(file.read(name))
        match = _GGUF_NAME.fullmatch(name)
        if match is None or match[2] not in _GGUF_LAYER:
            yield _GGUF_TOP.get(name, name), tensor
            continue
        if spec.architecture == "LlamaForCausalLM" and match[2] in permuted:
            tensor = _unpermute(tensor, permuted[match[2]])
        yield f"layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}", tensor


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k. Its RoPE turns neighbouring rows (2i, 2i+1) of a head; Hugging Face's
    turns rows (i, i + head_dim/2), so the pairs are taken apart again. [num_heads * head_dim, ...] -> the same."""
    if weight.shape[0] % (2 * num_heads):
        return weight  # a wrong shape is reported by the caller, with all the others
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
