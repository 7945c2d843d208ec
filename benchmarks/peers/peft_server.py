"""transformers + PEFT, served by `peft_app`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.lib.process import free_port, running
from benchmarks.peers.site import BASE, KV_GIB, Running, Site
from benchmarks.workloads.client import Target, by_model


@dataclass(frozen=True, slots=True)
class PeftServer:
    description: str = "transformers + PEFT, fp32, one request at a time, a KV cache kept for each adapter"

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("peft") else "the package peft is not installed"

    @contextlib.contextmanager
    def start(self, site: Site, log: Path) -> Iterator[Running]:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.peers.peft_app", "--model", str(site.model)]
        command += ["--port", str(port), "--kv-gib", str(KV_GIB)]
        command += [f"{name}={folder}" for name, folder in site.adapters.items()]
        with running(command, port, log, ready_path="/ready", ready_within=300) as server:
            target = Target(server.url, by_model(BASE, list(site.adapters)), site.encode)
            yield Running(server, target, lambda: _kv_bytes(server.url))


def _kv_bytes(url: str) -> float:
    return float(httpx.get(f"{url}/kv_bytes", timeout=60, trust_env=False, verify=False).json())
