"""What all servers of a comparison get: the same fp32 weights, the same adapters, the same memory for their caches.

Everything lies under `$FORKKV_PEERS_DIR` (default `~/.cache/forkkv/peers`) and is made once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.lib.common import Workspace
from benchmarks.lib.process import Server
from benchmarks.workloads.client import Target
from tests.models.factory import ATTENTION, make_adapter

BASE = "base"
RANK = 16
KV_GIB = 4
CONTEXT = 32768
"""Positions that the copied model declares; beyond its trained 8k the answers are worse and the speed is the same."""


def peers_folder() -> Path:
    return Path(os.environ.get("FORKKV_PEERS_DIR", Path.home() / ".cache/forkkv/peers"))


@dataclass(frozen=True, slots=True)
class Site:
    """`model`: folder with config, fp32 safetensors and tokenizer. `adapters`: PEFT folders, by the agent's number.
    `longest`: most tokens of a prompt with its answer."""

    folder: Path
    model: Path
    adapters: tuple[Path, ...]
    longest: int
    encode: Callable[[str], Sequence[int]]

    @property
    def names(self) -> list[str]:
        return [folder.name for folder in self.adapters]


@dataclass(frozen=True, slots=True)
class Running:
    """A peer that answers. `server` None: its processes are not ours to watch. `kv_bytes`: bytes that its caches hold
    now, None if it does not tell."""

    server: Server | None
    target: Target
    kv_bytes: Callable[[], float | None]


class Peer(Protocol):
    @property
    def description(self) -> str: ...

    def missing(self) -> str | None:
        """Why this peer cannot run here; None if it can."""
        ...

    def start(self, site: Site, log: Path) -> contextlib.AbstractContextManager[Running]:
        """The peer with `site`'s model and adapters, ready. Raises `RuntimeError` or `OSError` if it does not start."""
        ...


def make_site(work: Workspace, agents: int, longest: int) -> Site:
    """The site for `agents` adapters; what is not there yet is made (0.6 GB and some seconds for the model)."""
    folder = peers_folder()
    model = make_model_folder(work, folder / "model")
    adapters = tuple(_make_adapter(folder / "adapters" / f"agent{i}", work.spec, i) for i in range(agents))
    tokenizer = work.tokenizer
    return Site(folder, model, adapters, longest, lambda text: tokenizer.encode(text, add_special_tokens=False))


def make_model_folder(work: Workspace, folder: Path) -> Path:
    """The small model as a Hugging Face folder in fp32, from the tensors that the server's own loader reads."""
    if folder.exists():
        return folder

    def fill(part: Path) -> None:
        model = work.transformers_model()
        model.config.max_position_embeddings = CONTEXT
        model.config.eos_token_id = model.generation_config.eos_token_id = list(work.spec.eos_token_ids)
        model.save_pretrained(part)
        work.tokenizer.save(part)

    return _made_whole(folder, fill)


def _make_adapter(folder: Path, spec: Any, number: int) -> Path:
    """A random adapter of rank 16 on q, k, v and o, strong enough to change the first tokens of an answer."""
    if folder.exists():
        return folder

    def fill(part: Path) -> None:
        make_adapter(part, spec, rank=RANK, targets=ATTENTION, b_std=0.04, seed=1 + number)

    return _made_whole(folder, fill)


def _made_whole(folder: Path, fill: Callable[[Path], object]) -> Path:
    """`folder`, filled under another name first, so that it never exists in part."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fill(part)
    part.rename(folder)
    return folder
