"""llama.cpp's `llama-server`, built from the source in the sdist of llama-cpp-python: set-up, conversion, server."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from benchmarks.lib.process import free_port, running
from benchmarks.peers.site import BASE, Running, Site, peers_folder
from benchmarks.workloads.client import Target
from forkkv.models.spec import ModelSpec

VERSION = "0.3.36"
_MAX_SLOTS = 16
_OFF = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")


def _folder() -> Path:
    return peers_folder() / "llama"


def _source() -> Path:
    return _folder() / f"llama_cpp_python-{VERSION}" / "vendor/llama.cpp"


def _binary() -> Path:
    return _folder() / "build/bin/llama-server"


def _built_for() -> Path:
    """Says for which processor the server was built: on another one it is slow, or dies of an illegal instruction."""
    return _folder() / "build/processor"


def _processor() -> str:
    """Name and instructions of this processor."""
    words = ("model name", "flags", "Features")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(words)))
    return platform.processor()


def _is_ours() -> bool:
    return _built_for().exists() and _built_for().read_text() == _processor()


def set_up() -> None:
    """Fetch the source, build the server for this processor (minutes), and what its converter needs beside our own
    packages; the compiler's output goes to `build.log`. Raises `CalledProcessError`; run again, it goes on where it
    stopped."""
    folder, python = _folder(), sys.executable
    folder.mkdir(parents=True, exist_ok=True)
    if not _source().exists():
        pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
        subprocess.run([*pip, f"llama-cpp-python=={VERSION}"], check=True)
        with tarfile.open(folder / f"llama_cpp_python-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    if not (folder / "python/sentencepiece").exists():
        target = ["--target", str(folder / "python")]
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *target, "sentencepiece"], check=True)
    build = folder / "build"
    options = [*(f"-D{name}=OFF" for name in (*_OFF, "LLAMA_OPENSSL")), "-DCMAKE_BUILD_TYPE=Release"]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    jobs = str(os.cpu_count() or 1)
    if build.exists() and not _is_ours():
        shutil.rmtree(build)
    build.mkdir(exist_ok=True)
    _built_for().write_text(_processor())
    with (folder / "build.log").open("w") as log:  # thousands of the compiler's warnings
        for arguments in (
            ["-S", str(_source()), "-B", str(build), *generator, *options],
            ["--build", str(build), "--target", "llama-server", "-j", jobs],
        ):
            subprocess.run(["cmake", *arguments], check=True, stdout=log, stderr=subprocess.STDOUT)


def _convert(script: str, result: Path, outtype: str, *arguments: str) -> Path:
    """`result`, written by llama.cpp's own converter unless it is there. Raises `RuntimeError` with what it said."""
    if result.exists():
        return result
    result.parent.mkdir(parents=True, exist_ok=True)
    part = result.with_suffix(".part")
    command = [sys.executable, str(_source() / script), "--outtype", outtype, "--outfile", str(part), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(_folder() / "python"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")
    part.rename(result)
    return result


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """Adapters are chosen by `lora` in each request. Every agent keeps a slot of its own where there are at most 16,
    so that its cache survives the others' requests. The prompt cache in RAM is off: it does not tell adapters apart,
    and a slot would go on from another agent's K and V, with other answers."""

    weights: Literal["f32", "q8_0"]

    @property
    def description(self) -> str:
        tiles = ", --no-repack" if self._avoids_tiles else ""
        return f"llama-server ({self.weights} weights, f16 KV cache as by default{tiles})"

    @property
    def _avoids_tiles(self) -> bool:
        """Its product of q8_0 weights with matrix tiles (AMX) dies of an illegal instruction in this version: a thread
        uses tiles that it has not configured."""
        return self.weights == "q8_0" and "amx_int8" in _processor()

    def missing(self) -> str | None:
        if _binary().exists() and _is_ours():
            return None
        return "not set up on this processor: python -m benchmarks.peers.setup llama-server"

    @contextlib.contextmanager
    def start(self, site: Site, log: Path) -> Iterator[Running]:
        port = free_port()
        folder = _folder() / "gguf"
        model = _convert("convert_hf_to_gguf.py", folder / f"{self.weights}.gguf", self.weights, str(site.model))
        slots = min(max(1, site.agents), _MAX_SLOTS)
        threads = str(psutil.cpu_count(logical=False) or os.cpu_count() or 1)
        command = [str(_binary()), "-m", str(model), "--alias", BASE, "--host", "127.0.0.1", "--port", str(port)]
        command += ["-np", str(slots), "-c", str(slots * (site.longest + 64)), "-t", threads, "-tb", threads]
        command += ["--no-webui", "--cache-ram", "0", "--lora-init-without-apply"]
        if self._avoids_tiles:
            command.append("--no-repack")
        for name, adapter in site.adapters.items():
            source = ["--base", str(site.model), str(adapter)]
            converted = _convert("convert_lora_to_gguf.py", folder / f"{name}.gguf", "f32", *source)
            command += ["--lora", str(converted)]
        with running(command, port, log, ready_path="/health", ready_within=300) as server:
            target = Target(server.url, _choose(site.agents, slots), site.encode, {"verbose": True})
            held = slots * _slot_tokens(server.url) * _kv_bytes_per_token(site.work.spec)
            yield Running(server, target, lambda: held)


def _choose(adapters: int, slots: int) -> Callable[[int | None], dict[str, Any]]:
    def fields(agent: int | None) -> dict[str, Any]:
        lora = [{"id": i, "scale": float(i == agent)} for i in range(adapters)]
        own_slot = {"id_slot": agent} if agent is not None and adapters <= slots else {}
        return {"model": BASE, "lora": lora, "cache_prompt": True, **own_slot}

    return fields


def _slot_tokens(url: str) -> int:
    """Tokens for which a slot has room in the K/V buffer, which is allocated whole at the start."""
    properties = httpx.get(f"{url}/props", timeout=60, trust_env=False, verify=False).json()
    return int(properties["default_generation_settings"]["n_ctx"])


def _kv_bytes_per_token(spec: ModelSpec) -> int:
    """K and V of all layers in two bytes each."""
    return 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
