"""Servers for the tests: the whole HTTP side over an echo engine, and a real one in its own processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.server.fake_engine import EchoCore, EngineThread

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def tokenizer_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Converted tokenizers go to a folder of this session; compiled kernels stay where they are."""
    previous = os.environ.get("XDG_CACHE_HOME")
    os.environ.setdefault("FORKKV_CACHE_DIR", os.path.join(previous or Path.home() / ".cache", "forkkv"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if previous is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = previous


@pytest.fixture(scope="session")
def tokenizer(tokenizer_cache: None):
    from forkkv.frontend.tokenizer import Tokenizer

    return Tokenizer.load("smollm2")


@dataclass
class FakeServer:
    """The HTTP side over a real socket, and the echo engine behind it."""

    url: str
    core: EchoCore
    http: httpx.Client

    def metric(self, name: str) -> float:
        return metric(self.http, name)


def metric(http: httpx.Client, name: str) -> float:
    """One sample of /metrics by its full name with labels."""
    text = http.get("/metrics").text
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert match, f"{name} is not in /metrics"
    return float(match[1])


def wait_for(condition, timeout: float = 10.0, message: str = "condition") -> None:
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {message}"
        time.sleep(0.01)


def start_fake(folder: Path, tokenizer, core: EchoCore, *flags: str) -> Iterator[FakeServer]:
    import uvicorn
    from sse_starlette.sse import AppStatus

    from forkkv.engine.client import ProcClient
    from forkkv.entrypoints.args import parse_args
    from forkkv.entrypoints.openai.app import create_app
    from forkkv.entrypoints.openai.state import ServerState

    AppStatus.disable_automatic_graceful_drain()
    address = f"ipc://{folder}/engine.sock"
    args, _ = parse_args(list(flags))
    app = create_app(ServerState(args, ProcClient(address)), lambda: tokenizer)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    engine = EngineThread(core, address)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        wait_for(lambda: http.get("/ready").status_code == 200, message="the fake server")
        yield FakeServer(url, core, http)
    server.should_exit = True
    thread.join(10)
    engine.thread.join(10)
    listener.close()


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Iterator[FakeServer]:
    yield from start_fake(tmp_path_factory.mktemp("fake"), tokenizer, EchoCore(), "--sse-keep-alive", "0.05")


@pytest.fixture
def slow(tmp_path: Path, tokenizer) -> Iterator[FakeServer]:
    """A fresh server whose steps take 5 ms, so that requests are still running when a client leaves."""
    yield from start_fake(tmp_path, tokenizer, EchoCore(0.005), "--sse-keep-alive", "0.05", "--max-body-mib", "0.01")


@dataclass
class RealServer:
    process: subprocess.Popen[bytes]
    url: str
    http: httpx.Client
    log: Path
    ready_seconds: float

    def metric(self, name: str) -> float:
        return metric(self.http, name)

    def stop(self) -> int:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start_real(log: Path, *flags: str) -> RealServer:
    """`python -m forkkv.entrypoints.openai.api_server` with `flags`, ready."""
    port = free_port()
    command = [sys.executable, "-m", "forkkv.entrypoints.openai.api_server", "--port", str(port), *flags]
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, timeout=120, message="the real server")
    return RealServer(process, url, http, log, time.monotonic() - began)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A random model of two small layers with the default model's tokenizer: loads at once."""
    from tests.models.factory import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, vocab=tokenizer.vocab_size, max_position=4096, head_dim=32)
    tokenizer.save(folder)
    return folder


def tiny_flags(model: Path) -> list[str]:
    return ["--model", str(model), "--served-model-name", "tiny", "--cpu-memory-gib", "0.25"]


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    """Random adapters for the tiny model, strong enough to change its answers, and one that changes nothing."""
    from tests.models.factory import make_adapter

    folder = tmp_path_factory.mktemp("adapters")
    kinds = {"plain": "plain", "fork1": "fork", "fork2": "fork", "fork3": "fork"}
    for seed, (name, kind) in enumerate(kinds.items(), start=1):
        make_adapter(folder / name, tiny_model, rank=8, seed=seed, kind=kind, b_std=0.3)
    make_adapter(folder / "zero", tiny_model, rank=8, b_std=0.0)
    return {name: folder / name for name in (*kinds, "zero")}


@pytest.fixture(scope="session")
def real(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, adapter_folders: dict[str, Path]
) -> Iterator[RealServer]:
    modules = [f"{name}={path}" for name, path in adapter_folders.items()]
    log = tmp_path_factory.mktemp("real") / "server.log"
    server = start_real(log, *tiny_flags(tiny_model), "--enable-forkkv", "--lora-modules", *modules)
    yield server
    assert server.stop() == 0, log.read_text()
