"""This project's own server, as a user starts it, with the sharing mode and the weights' type of a comparison."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from benchmarks.lib.process import Server
from benchmarks.lib.server import running_server
from benchmarks.peers.site import BASE, KV_GIB, Running, Site
from benchmarks.workloads.client import Target, by_model

_MAX_LORAS = 16
_TEAM = 9
"""Largest team for which one base prefill writes all residuals: the requester's and `--residual-fanout` (8)."""


@dataclass(frozen=True, slots=True)
class ForkKVServer:
    sharing: Literal["none", "fork"]
    quantization: Literal["none", "int8"] = "none"

    @property
    def description(self) -> str:
        weights = "fp32" if self.quantization == "none" else f"{self.quantization} weights"
        return f"forkkv --kv-sharing {self.sharing}, {weights}"

    def missing(self) -> str | None:
        return None

    @contextlib.contextmanager
    def start(self, site: Site, log: Path) -> Iterator[Running]:
        flags = ["--model", str(site.model), "--served-model-name", BASE, "--dtype", "float32"]
        flags += ["--quantization", self.quantization, "--cpu-memory-gib", str(KV_GIB), "--log-level", "warning"]
        flags += ["--enable-forkkv", "--kv-sharing", self.sharing]
        if site.agents:
            modules = [f"{name}={folder}" for name, folder in site.adapters.items()]
            flags += ["--max-loras", str(min(len(modules), _MAX_LORAS)), "--lora-modules", *modules]
        if 1 < site.agents <= _TEAM:
            flags += ["--teams", json.dumps({"team": list(site.adapters)})]
        with running_server(log, *flags, ready_within=300) as server:
            target = Target(server.url, by_model(BASE, list(site.adapters)), site.encode, {"return_token_ids": True})
            yield Running(server, target, lambda: _kv_bytes(server), lambda: _flush(server.url))


def _kv_bytes(server: Server) -> float:
    """Bytes of blocks that live sequences hold or that are kept for later ones, of both pools."""
    names = []
    for pool in ("base", "residual"):
        names += [f'forkkv_pool_blocks{{pool="{pool}",state="{state}"}}' for state in ("in_use", "cached")]
        names.append(f'forkkv_pool_block_bytes{{pool="{pool}"}}')
    values = server.metrics(*names)
    return sum((in_use + cached) * size for in_use, cached, size in (values[:3], values[3:]))


def _flush(url: str) -> None:
    httpx.post(f"{url}/reset_prefix_cache", timeout=60, trust_env=False, verify=False).raise_for_status()
