"""`adapter_config.json` as PEFT means it, refusing every setting that changes the adapter's function and is not served.

Pure: no torch, no PEFT. Module paths are PEFT's, e.g. `model.layers.0.self_attn.q_proj`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forkkv.errors import AdapterLoadError
from forkkv.types import AdapterKind

_T = TypeVar("_T")

_REFUSED = {
    "use_dora": "DoRA rescales whole weight rows, which is no low-rank addition",
    "use_qalora": "QA-LoRA pools the input of A",
    "use_bdlora": "block-diagonal LoRA is not served",
    "lora_bias": "a bias beside B is not served",
    "fan_in_fan_out": "transposed weights are not served",
    "modules_to_save": "full copies of modules are not served",
    "trainable_token_indices": "trained token rows are not served",
    "layer_replication": "replicated layers are not served",
    "target_parameters": "LoRA on bare parameters is not served",
    "arrow_config": "Arrow routing is not served",
    "kasa_config": "KaSA is not served",
    "monteclora_config": "Monte-Carlo LoRA is not served",
}
"""Config key -> why a set value is refused. Keys that are not listed here nor read below do not change the function."""

_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""`init_lora_weights` that leave the base weights alone; the others subtract their start value from them, so that
the file is right only together with a changed base model."""


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """What an adapter's configuration says about the meaning of its tensors."""

    kind: AdapterKind
    invocation_tokens: tuple[int, ...]
    rank: int | None
    alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: tuple[int, ...] | None

    def expected_rank(self, path: str) -> int | None:
        """Rank that the config declares for a module; None if it declares none."""
        return _first_match(self.rank_pattern, path, self.rank)

    def scaling(self, path: str, rank: int) -> float:
        """Factor of B·A: alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023)."""
        alpha = _first_match(self.alpha_pattern, path, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, path: str) -> bool:
        """Whether PEFT would put an adapter on this module: a string is a regex for the whole path, a list holds
        names that end it, and only a list is narrowed to `layers_to_transform`."""
        if self.exclude_modules and _names(self.exclude_modules, path):
            return False
        targets = self.target_modules
        if targets is None or targets == "all-linear":
            return True
        if not _names(targets, path):
            return False
        if isinstance(targets, str) or not self.layers_to_transform:
            return True
        found = re.search(r"\.layers\.(\d+)\.", path)
        return found is not None and int(found[1]) in self.layers_to_transform


def _names(wanted: str | tuple[str, ...], path: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in wanted)


def _first_match(pattern: Mapping[str, _T], path: str, default: _T) -> _T:
    """Value of the first key that, as a regex, matches the path or its end after a dot; PEFT's rule."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


def read_settings(folder: Path, vocab_size: int) -> PeftSettings:
    """Read and check `adapter_config.json`. Raises `AdapterLoadError` naming the setting and the reason."""
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterLoadError(f"{path}: unreadable ({error})") from error
    if not isinstance(config, dict):
        raise AdapterLoadError(f"{path}: not a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterLoadError(f"{path}: peft_type {config.get('peft_type')!r} is not served, only 'LORA'")
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise AdapterLoadError(f"{path}: {key} = {config[key]!r} is not served: {reason}")
    if config.get("bias") not in (None, "none"):
        raise AdapterLoadError(f"{path}: bias = {config['bias']!r} is not served: trained biases are not in the base")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init not in _KEEPS_BASE:
        raise AdapterLoadError(
            f"{path}: init_lora_weights = {init!r} belongs to changed base weights; convert it first"
        )
    try:
        return _settings(path, config, vocab_size)
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise AdapterLoadError(f"{path}: unusable value ({error})") from error


def _settings(path: Path, config: dict[str, Any], vocab_size: int) -> PeftSettings:
    kind, tokens = _kind(path, config, vocab_size)
    if config.get("lora_alpha") is None:
        raise AdapterLoadError(f"{path}: lora_alpha is missing, the scaling cannot be known")
    layers = config.get("layers_to_transform")
    patterns = {key: dict(config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")}
    for key in (*patterns["rank_pattern"], *patterns["alpha_pattern"]):
        re.compile(key)
    settings = PeftSettings(
        kind=kind,
        invocation_tokens=tokens,
        rank=None if config.get("r") is None else int(config["r"]),
        alpha=float(config["lora_alpha"]),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern={key: int(value) for key, value in patterns["rank_pattern"].items()},
        alpha_pattern={key: float(value) for key, value in patterns["alpha_pattern"].items()},
        target_modules=_module_names(config.get("target_modules")),
        exclude_modules=_module_names(config.get("exclude_modules")),
        layers_to_transform=None if layers is None else (layers,) if isinstance(layers, int) else tuple(layers),
    )
    if not all(math.isfinite(alpha) for alpha in (settings.alpha, *settings.alpha_pattern.values())):
        raise AdapterLoadError(f"{path}: lora_alpha or alpha_pattern is not a finite number")
    return settings


def _module_names(value: Any) -> str | tuple[str, ...] | None:
    if isinstance(value, str):
        re.compile(value)
        return "all-linear" if value.lower() == "all-linear" else value
    return None if value is None else tuple(str(name) for name in value)


def _kind(path: Path, config: dict[str, Any], vocab_size: int) -> tuple[AdapterKind, tuple[int, ...]]:
    """Kind and invocation tokens, from `"forkkv": {"kind": ...}` and `alora_invocation_tokens`."""
    own = config.get("forkkv")
    if own is not None and not isinstance(own, dict):
        raise AdapterLoadError(f'{path}: "forkkv" must be an object such as {{"kind": "fork"}}, got {own!r}')
    declared = (own or {}).get("kind")
    if declared not in (None, "plain", "fork", "alora"):
        raise AdapterLoadError(f"{path}: forkkv kind {declared!r} is unknown; known are plain, fork, alora")
    tokens = config.get("alora_invocation_tokens")
    if tokens is None:
        if declared == "alora":
            raise AdapterLoadError(f"{path}: forkkv kind 'alora' needs alora_invocation_tokens")
        return declared or "plain", ()
    if declared not in (None, "alora"):
        raise AdapterLoadError(f"{path}: forkkv kind {declared!r} contradicts alora_invocation_tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise AdapterLoadError(f"{path}: alora_invocation_tokens must be a non-empty list of token ids, got {tokens!r}")
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise AdapterLoadError(f"{path}: alora_invocation_tokens {outside} lie outside the vocabulary of {vocab_size}")
    return "alora", tuple(tokens)
