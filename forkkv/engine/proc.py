"""The engine process: one `EngineCore` behind one socket, in a loop that sleeps when there is nothing to do.

Run as `python -m forkkv.engine.proc --address ipc://... --parent-pid N` with the configuration as JSON on standard
input. torch is imported only after the thread environment is set, because OpenMP reads it once, at load.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

import zmq

from forkkv.engine import wire
from forkkv.errors import ForkKVError, RequestError
from forkkv.log import get_logger, setup_logging
from forkkv.types import EngineInfo, EngineOutput, EngineRequest, StepStats

logger = get_logger(__name__)

THREAD_ENVIRONMENT = {
    # Waiting threads soon sleep: an idle engine uses no CPU and leaves the cores to the API process. They spin for some
    # ten microseconds first, since a layer is a dozen parallel regions in a row and waking a thread takes longer.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "GOMP_SPINCOUNT": "10000",
    "TOKENIZERS_PARALLELISM": "false",
}
LINGER_MS = 2000


class Core(Protocol):
    """The part of `forkkv.engine.core.EngineCore` that the loop drives."""

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> tuple[list[EngineOutput], StepStats]: ...
    def flush_cache(self) -> bool: ...
    def stats(self) -> StepStats: ...


def thread_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the engine's OpenMP settings; what the user has set himself stays."""
    return {**THREAD_ENVIRONMENT, **base}


class EngineLoop:
    """Messages in, steps, messages out. `socket` is a connected ZMQ PAIR socket owned by the calling thread."""

    def __init__(self, core: Core, socket: zmq.Socket[bytes]):
        self.core = core
        self.socket = socket
        self._running = True
        self._reported: StepStats | None = None

    def run(self) -> None:
        """Serve until `Shutdown`. Whatever the core raises beyond `RequestError` leaves this function."""
        self._send(wire.Ready(self.core.info, self.core.stats()))
        while True:
            self._receive(block=not self.core.has_work())
            if not self._running:
                return
            if self.core.has_work():
                outputs, stats = self.core.step()
                self._report(outputs, stats)
            else:
                self._report([], self.core.stats())

    def _receive(self, block: bool) -> None:
        """Handle every message that waits; with `block`, wait for the first one."""
        flags = 0 if block else zmq.NOBLOCK
        while True:
            try:
                data = self.socket.recv(flags)
            except zmq.Again:
                return
            self._handle(wire.decode_to_core(data))
            flags = zmq.NOBLOCK

    def _handle(self, message: wire.ToCore) -> None:
        match message:
            case wire.Add(request):
                try:
                    self.core.add_request(request)
                except RequestError as error:
                    self._send(wire.Rejected.of(request.request_id, error))
                else:
                    self._send(wire.Accepted(request.request_id))
            case wire.Abort(request_ids):
                self.core.abort(request_ids)
            case wire.Flush():
                ok = self.core.flush_cache()
                # First the figures, so that whoever waited for the flush reads what it left.
                self._report([], self.core.stats())
                self._send(wire.Flushed(ok))
            case wire.Shutdown():
                self._running = False

    def _report(self, outputs: list[EngineOutput], stats: StepStats) -> None:
        """Send a step's outcome; without outputs only when a gauge changed, so that gauges are right after the last
        request was aborted and no further step runs."""
        if outputs or stats != self._reported:
            self._reported = stats
            self._send(wire.Outputs(tuple(outputs), stats))

    def _send(self, message: wire.FromCore) -> None:
        self.socket.send(wire.encode(message))


def connect(address: str) -> zmq.Socket[bytes]:
    """A PAIR socket connected to `address` without a send limit: a slow reader must never stall a step."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = LINGER_MS
    socket.connect(address)
    return socket


def follow_parent(parent_pid: int) -> None:
    """Start a thread that ends this process within a second of its parent's death, whatever it is doing then."""

    def watch() -> NoReturn:
        while os.getppid() == parent_pid:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def ask_probe_tokens(socket: zmq.Socket[bytes]) -> tuple[int, ...]:
    """Ask the peer, which has the tokenizer, for the probe's text and wait for it. Raises `SystemExit` if the peer
    gives up instead."""
    socket.send(wire.encode(wire.ProbeWanted()))
    match wire.decode_to_core(socket.recv()):
        case wire.ProbeTokens(token_ids):
            return token_ids
        case _:
            raise SystemExit(0)


def serve(socket: zmq.Socket[bytes], config_json: bytes) -> int:
    """Build the core and run the loop; returns the exit status. Every failure is reported to the peer first."""
    try:
        config = wire.decode_config(config_json)
        from forkkv.engine.core import EngineCore

        EngineLoop(EngineCore(config, probe_tokens=lambda: ask_probe_tokens(socket)), socket).run()
    except ForkKVError as error:
        socket.send(wire.encode(wire.Failed(str(error))))
        return 1
    except Exception as error:
        logger.error("engine failed\n%s", traceback.format_exc())
        socket.send(wire.encode(wire.Failed(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def _exit_on_signal(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="forkkv.engine.proc", description=__doc__)
    parser.add_argument("--address", required=True, help="ZMQ address of the API process")
    parser.add_argument("--parent-pid", type=int, required=True, help="exit when this process is gone")
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args(argv)
    os.environ.update(thread_environment(os.environ))
    setup_logging(args.log_level)
    # Ctrl-C reaches the whole group; the API process drains and then says Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    follow_parent(args.parent_pid)
    config_json = sys.stdin.buffer.read()
    socket = connect(args.address)
    try:
        return serve(socket, config_json)
    finally:
        socket.close()
        zmq.Context.instance().term()


if __name__ == "__main__":
    sys.exit(main())
