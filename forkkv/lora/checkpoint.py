"""PEFT LoRA folders into memory. Every tensor of the file is used, or the folder is refused with names and reason:
an adapter is never applied in part, so an answer under its name is never silently the base model's."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from forkkv.errors import AdapterLoadError
from forkkv.log import get_logger
from forkkv.lora.adapter import MODULES, LoadedAdapter
from forkkv.lora.peft_config import PeftSettings, read_settings
from forkkv.models.spec import ModelSpec
from forkkv.models.tensors import MODULE_PARENT, module_shape
from forkkv.types import AdapterMeta, AdapterReport

logger = get_logger(__name__)

Key = tuple[int, str]
Pair = tuple[torch.Tensor, torch.Tensor]

_NAMES_SHOWN = 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NAME = re.compile(
    r"(?:base_model\.model\.model\.|base_model\.model\.|model\.)layers\.(\d+)"
    r"\.(self_attn|mlp)\.(\w+)\.lora_(A|B)(?:\.default)?\.weight"
)
_KNOWN_REASONS = (
    ("lora_magnitude_vector", "DoRA magnitudes are not served"),
    ("lora_embedding_", "LoRA on the embedding is not served"),
    ("trainable_tokens", "trained token rows (trainable_token_indices) are not served"),
    ("modules_to_save", "full copies of modules (modules_to_save) are not served"),
    ("embed_tokens", "weights of the embedding (modules_to_save) are not served"),
    ("lm_head", "weights of the head (modules_to_save, or LoRA on lm_head) are not served"),
    (".bias", "biases (lora_bias, bias) are not served"),
)


def load_adapter(
    path: Path | str,
    *,
    name: str,
    adapter_id: int,
    spec: ModelSpec,
    max_lora_rank: int,
    team: str | None = None,
) -> LoadedAdapter:
    """Read the PEFT folder `path` for a model of shape `spec`; tensors stay in the file's dtype, on the CPU.

    Raises `AdapterLoadError` naming up to 20 tensors, their count and the reason for everything that could not be
    served exactly: unknown or partly known names, A without B, shapes or ranks that disagree with the model or the
    config, a rank above `max_lora_rank`, NaN or infinity, other methods than LoRA.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise AdapterLoadError(f"{folder}: no such folder")
    settings = read_settings(folder, spec.vocab_size)
    tensors = _read_tensors(folder)
    weights = _pair(folder, tensors, spec)
    _check_shapes(folder, weights, spec)
    _check_ranks(folder, weights, settings, max_lora_rank)
    _check_finite(folder, weights)
    scaling = {key: settings.scaling(_path(key), a.shape[0]) for key, (a, _) in weights.items()}
    _warn_untouched(folder, weights, settings, spec)
    meta = AdapterMeta(
        adapter_id=adapter_id,
        name=name,
        digest=_digest(weights, scaling, settings),
        kind=settings.kind,
        rank_k=_max_rank(weights, "k_proj"),
        rank_v=_max_rank(weights, "v_proj"),
        invocation_tokens=settings.invocation_tokens,
        team=team,
        a_digest=_a_digest(weights, scaling, qk_norm=spec.qk_norm),
    )
    report = AdapterReport(
        name=name,
        path=str(folder),
        adapter_id=adapter_id,
        digest=meta.digest,
        kind=meta.kind,
        matched=len(tensors),
        modules=tuple((_path(key), weights[key][0].shape[0], scaling[key]) for key in weights),
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )
    return LoadedAdapter(meta, report, weights, scaling)


def _path(key: Key) -> str:
    """PEFT's path of a module, which its patterns are matched against."""
    return f"model.layers.{key[0]}.{MODULE_PARENT[key[1]]}.{key[1]}"


def _refuse(folder: Path, names: Iterable[str], total: int, reason: str) -> None:
    """Raise `AdapterLoadError` if there is any name; `total` is the number of tensors in the file."""
    listed = list(names)
    if listed:
        more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
        shown = "; ".join(listed[:_NAMES_SHOWN])
        raise AdapterLoadError(f"{folder}: {reason} ({len(listed)} of {total}): {shown}{more}")


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise AdapterLoadError(
                f"{folder}: adapter_model.bin is refused because unpickling runs code; save as safetensors"
            )
        raise AdapterLoadError(f"{folder}: no adapter_model.safetensors")
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterLoadError(f"{file}: unreadable safetensors file ({error})") from error
    if not tensors:
        raise AdapterLoadError(f"{file}: holds no tensor")
    odd = [f"{name} {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in _DTYPES]
    _refuse(folder, odd, len(tensors), "only float32, float16 and bfloat16 tensors are served")
    return tensors


def _pair(folder: Path, tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[Key, Pair]:
    """Match every tensor name, then put A and B of each module together, ordered by layer and module."""
    halves: dict[tuple[int, str, str], str] = {}
    unknown: list[str] = []
    duplicates: list[str] = []
    for name in sorted(tensors):
        match = _NAME.fullmatch(name)
        if match is None or MODULE_PARENT.get(match[3]) != match[2]:
            unknown.append(name)
        elif (key := (int(match[1]), match[3], match[4])) in halves:
            duplicates.append(name)
        else:
            halves[key] = name
    total = len(tensors)
    for marker, reason in _KNOWN_REASONS:
        _refuse(folder, [name for name in unknown if marker in name], total, reason)
    reason = f"tensor names that this model does not have, {len(halves)} of {total} matched; unmatched"
    _refuse(folder, unknown, total, reason)
    _refuse(folder, duplicates, total, "the same module under two names")
    outside = [name for (layer, _, _), name in halves.items() if layer >= spec.num_layers]
    _refuse(folder, outside, total, f"layer index out of range, the model has {spec.num_layers} layers")
    other = {"A": "B", "B": "A"}
    lonely = [name for (layer, module, half), name in halves.items() if (layer, module, other[half]) not in halves]
    _refuse(folder, lonely, total, "A without B or B without A")
    keys = sorted({(layer, module) for layer, module, _ in halves}, key=lambda key: (key[0], MODULES.index(key[1])))
    return {key: (tensors[halves[(*key, "A")]], tensors[halves[(*key, "B")]]) for key in keys}


def _check_shapes(folder: Path, weights: Mapping[Key, Pair], spec: ModelSpec) -> None:
    wrong = []
    for key, (a, b) in weights.items():
        out_features, in_features = module_shape(spec, key[1])
        fits = a.dim() == 2 and b.dim() == 2 and a.shape[0] == b.shape[1] and a.shape[0] >= 1
        if not fits or (b.shape[0], a.shape[1]) != (out_features, in_features):
            expected = f"expected [r, {in_features}] and [{out_features}, r]"
            wrong.append(f"{_path(key)} A {list(a.shape)}, B {list(b.shape)}, {expected}")
    _refuse(folder, wrong, len(weights), "shapes that do not fit the model, modules")


def _check_ranks(folder: Path, weights: Mapping[Key, Pair], settings: PeftSettings, max_lora_rank: int) -> None:
    ranks = {key: a.shape[0] for key, (a, _) in weights.items()}
    above = [f"{_path(key)} rank {rank}" for key, rank in ranks.items() if rank > max_lora_rank]
    largest = max(ranks.values())
    _refuse(folder, above, len(ranks), f"rank {largest} is above --max-lora-rank {max_lora_rank}, modules")
    wrong = []
    for key, rank in ranks.items():
        expected = settings.expected_rank(_path(key))
        if expected is not None and expected != rank:
            wrong.append(f"{_path(key)} rank {rank}, config {expected}")
    _refuse(folder, wrong, len(ranks), "ranks of tensors and adapter_config.json (r, rank_pattern) disagree, modules")
    untargeted = [_path(key) for key in weights if not settings.targets(_path(key))]
    _refuse(folder, untargeted, len(ranks), "modules that target_modules of adapter_config.json does not name")


def _check_finite(folder: Path, weights: Mapping[Key, Pair]) -> None:
    bad = [
        f"{_path(key)}.lora_{half}"
        for key, pair in weights.items()
        for half, tensor in zip("AB", pair, strict=True)
        if not bool(torch.isfinite(tensor).all())
    ]
    _refuse(folder, bad, 2 * len(weights), "NaN or infinite values")


def _warn_untouched(folder: Path, weights: Mapping[Key, Pair], settings: PeftSettings, spec: ModelSpec) -> None:
    """PEFT leaves a targeted module without tensors as it is; so do we, but the file may be incomplete."""
    if settings.target_modules is None:
        return
    keys = ((layer, module) for layer in range(spec.num_layers) for module in MODULES)
    absent = [_path(key) for key in keys if key not in weights and settings.targets(_path(key))]
    if absent:
        shown = ", ".join(absent[:5])
        logger.warning("%s: %d targeted modules have no tensors and stay unadapted: %s", folder, len(absent), shown)


def _max_rank(weights: Mapping[Key, Pair], module: str) -> int:
    return max((a.shape[0] for (_, found), (a, _) in weights.items() if found == module), default=0)


def _digest(weights: Mapping[Key, Pair], scaling: Mapping[Key, float], settings: PeftSettings) -> str:
    """SHA-256 of everything that the adapter's function depends on: tensors under their normalised names, effective
    scalings, kind, invocation tokens. Two folders of equal digest may share caches."""
    named = {
        f"{_path(key)}.lora_{half}": tensor
        for key, pair in weights.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    digest = _hash(named, scaling)
    digest.update(f"{settings.kind} {settings.invocation_tokens}".encode())
    return digest.hexdigest()


def _a_digest(weights: Mapping[Key, Pair], scaling: Mapping[Key, float], *, qk_norm: bool) -> str:
    """SHA-256 of what a residual depends on besides the hidden states: A of k_proj and v_proj in every layer. With
    QK-norm a residual also holds the rms of the adapted K, so B of k_proj belongs to it."""
    named = {f"{_path(key)}.lora_A": a for key, (a, _) in weights.items() if key[1] in ("k_proj", "v_proj")}
    adapted = [key for key in weights if key[1] == "k_proj"] if qk_norm else []
    named |= {f"{_path(key)}.lora_B": weights[key][1] for key in adapted}
    return _hash(named, {key: scaling[key] for key in adapted}).hexdigest()


def _hash(named: Mapping[str, torch.Tensor], scaling: Mapping[Key, float]) -> hashlib._Hash:
    """SHA-256 of tensors (name, dtype, shape, bytes) and scalings, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named.items(), key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    for key in sorted(scaling):
        digest.update(f"{_path(key)} {scaling[key]!r}\n".encode())
    return digest
