"""What all servers of a comparison get: the same fp32 weights, the same adapters, the same memory for their caches.

Everything lies under `$FORKKV_PEERS_DIR` (default `~/.cache/forkkv/peers`) and is made once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


@dataclass
class Site:
    """`agents`: number of adapters. `longest`: most tokens of a prompt with its answer. Folders are made when a server
    first asks for them."""

    work: Workspace
    agents: int
    longest: int

    @functools.cached_property
    def model(self) -> Path:
        """Folder in Hugging Face format: config, tokenizer, and fp32 weights as the server's own loader reads them."""

        def fill(part: Path) -> None:
            model = self.work.transformers_model()
            model.config.max_position_embeddings = CONTEXT
            model.config.eos_token_id = model.generation_config.eos_token_id = list(self.work.spec.eos_token_ids)
            model.save_pretrained(part)
            self.work.tokenizer.save(part)

        return _made_once(peers_folder() / "model", fill)

    @functools.cached_property
    def adapters(self) -> dict[str, Path]:
        """PEFT folders of random adapters, rank 16 on q, k, v and o, strong enough to change an answer's first tokens.
        In the order of the agents' numbers."""

        def fill(part: Path, number: int) -> None:
            make_adapter(part, self.work.spec, rank=RANK, targets=ATTENTION, b_std=0.04, seed=1 + number)

        names = [f"agent{i}" for i in range(self.agents)]
        folder = peers_folder() / "adapters"
        return {name: _made_once(folder / name, functools.partial(fill, number=i)) for i, name in enumerate(names)}

    def encode(self, text: str) -> Sequence[int]:
        return self.work.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Running:
    """A peer that answers. `server` None: its processes are not ours to watch. `kv_bytes`: bytes that its caches hold
    now, None if it does not tell. `flush` empties them where it can be asked to."""

    server: Server | None
    target: Target
    kv_bytes: Callable[[], float | None]
    flush: Callable[[], object] = lambda: None


class Peer(Protocol):
    @property
    def description(self) -> str: ...

    def missing(self) -> str | None:
        """Why this peer cannot run here; None if it can."""
        ...

    def start(self, site: Site, log: Path) -> contextlib.AbstractContextManager[Running]:
        """The peer with `site`'s model and adapters, ready. Raises `RuntimeError` or `OSError` if it does not start."""
        ...


def _made_once(folder: Path, fill: Callable[[Path], object]) -> Path:
    """`folder`; if it is not there, filled under another name first, so that it never exists in part."""
    if folder.exists():
        return folder
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fill(part)
    part.rename(folder)
    return folder
