"""A server in processes of its own: started, waited for, watched, ended with all its children."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.lib.common import ROOT


@dataclass
class Server:
    """A running server process and its address."""

    process: psutil.Process
    url: str
    ready_seconds: float

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_seconds(self) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in self.family()))

    def rss(self) -> int:
        """Bytes resident in all its processes."""
        return sum(process.memory_info().rss for process in self.family())

    def metric(self, name: str) -> float:
        """One sample of /metrics by its full name with labels. Raises `RuntimeError` if it is not there."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Several samples of one scrape, likewise."""
        text = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False, verify=False).text
        found = [re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE) for name in names]
        if missing := [name for name, match in zip(names, found, strict=True) if match is None]:
            raise RuntimeError(f"{', '.join(missing)} is not in /metrics")
        return [float(match[1]) for match in found if match is not None]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    log: Path,
    *,
    ready_path: str,
    ready_within: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`command`, which listens on `port` of this machine, once `ready_path` answers 200; it and its children are ended
    on the way out. `environment` is added to this process's own. Raises `RuntimeError` with its log if it does not get
    ready within that many seconds, `OSError` if it cannot be started."""
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command), cwd=ROOT, stdout=file, stderr=file, env={**os.environ, **(environment or {})}
        )
    server = Server(psutil.Process(process.pid), url, 0.0)
    try:
        while not _answers(url + ready_path):
            if process.poll() is not None or time.monotonic() - began > ready_within:
                raise RuntimeError(f"the server did not get ready:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)
        server.ready_seconds = time.monotonic() - began
        yield server
    finally:
        _end(process, server)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def _end(process: subprocess.Popen[bytes], server: Server) -> None:
    children = server.process.children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
