"""The API process's side of the engine: `ProcClient` over ZMQ, `InprocClient` in this process.

A request is a `RequestStream`. Closing it before its end aborts in the engine whatever of it still runs, waits or was
forked; an engine that dies ends every open stream with `EngineDeadError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import zmq
import zmq.asyncio

from forkkv.config import EngineConfig
from forkkv.engine import wire
from forkkv.engine.proc import thread_environment
from forkkv.errors import EngineDeadError, ForkKVError
from forkkv.log import get_logger
from forkkv.types import EngineInfo, EngineOutput, EngineRequest, StepStats

if TYPE_CHECKING:
    from forkkv.engine.core import EngineCore

logger = get_logger(__name__)

MERGE_AT = 128
"""Outputs that a slow consumer leaves unread before they are folded into one per sequence."""
EXIT_TIMEOUT = 5.0
"""Seconds that a closing client gives the engine process before it is killed."""


def merge_outputs(outputs: Iterable[EngineOutput]) -> list[EngineOutput]:
    """Fold outputs of one sequence into one, in order of first appearance; pure."""
    merged: dict[tuple[str, int], list[EngineOutput]] = {}
    for output in outputs:
        merged.setdefault((output.request_id, output.index), []).append(output)
    return [_fold(parts) for parts in merged.values()]


def _fold(parts: list[EngineOutput]) -> EngineOutput:
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    return EngineOutput(
        request_id=last.request_id,
        index=last.index,
        new_token_ids=tuple(token for part in parts for token in part.new_token_ids),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        usage=next((part.usage for part in parts if part.usage is not None), None),
        error=last.error,
    )


class RequestStream:
    """Outputs of one or several requests that belong together, as an async iterator of merged batches.

    Ends when all their sequences have finished. Raises `RequestError` if the engine refuses one of them (the others
    are aborted then) and `EngineDeadError` if the engine is lost. Must be closed (`async with` or `aclose`).
    """

    def __init__(self, client: ProcClient, requests: Sequence[EngineRequest]):
        self._client = client
        self._open = {request.request_id: request.n for request in requests}
        self._undecided = set(self._open)
        self._pending: list[EngineOutput] = []
        self._error: ForkKVError | None = None
        self._event = asyncio.Event()

    async def accepted(self) -> None:
        """Wait until the engine has taken every request; raises what it answered otherwise."""
        while self._undecided and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[EngineOutput]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            await self._wait()
        outputs, self._pending = self._pending, []
        return merge_outputs(outputs)

    def abort(self, request_id: str) -> None:
        """End one of the requests: the engine drops it and no output follows. Idempotent."""
        self._pending = [output for output in self._pending if output.request_id != request_id]
        if self._open.pop(request_id, None) is not None:
            self._client.release([request_id], abort=True)
            self._event.set()

    async def aclose(self) -> None:
        """Abort what has not finished. Idempotent."""
        unfinished, self._open = list(self._open), {}
        if unfinished:
            self._client.release(unfinished, abort=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _wait(self) -> None:
        self._event.clear()
        await self._event.wait()

    def on_accepted(self, request_id: str) -> None:
        self._undecided.discard(request_id)
        self._event.set()

    def on_output(self, output: EngineOutput) -> None:
        self._undecided.discard(output.request_id)
        self._pending.append(output)
        if len(self._pending) >= MERGE_AT:
            self._pending = merge_outputs(self._pending)
        if output.finish_reason is not None:
            self._open[output.request_id] -= 1
            if self._open[output.request_id] == 0:
                del self._open[output.request_id]
                self._client.release([output.request_id], abort=False)
        self._event.set()

    def on_error(self, error: ForkKVError, refused: str | None = None) -> None:
        """End the stream with `error`; `refused` is the request that the engine does not know."""
        self._error = error
        others = [request_id for request_id in self._open if request_id != refused]
        gone, self._open = list(self._open), {}
        self._client.release(others, abort=True)
        self._client.release(gone, abort=False)
        self._event.set()


class EngineClient(Protocol):
    """What the HTTP layer needs of an engine."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> StepStats | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_dead(self) -> bool: ...
    def generate(self, *requests: EngineRequest) -> RequestStream: ...
    async def abort(self, request_ids: Iterable[str]) -> None: ...
    async def flush_cache(self) -> bool: ...
    async def close(self) -> None: ...


class ProcClient:
    """Engine in its own process. `launch` starts that process at once, before any event loop or heavy import here;
    `start` connects from inside the loop; `wait_ready` returns the engine's `EngineInfo`."""

    def __init__(self, address: str, process: subprocess.Popen[bytes] | None = None, folder: Path | None = None):
        self.address = address
        self.process = process
        self.stats: StepStats | None = None
        self.error: EngineDeadError | None = None
        self.on_stats: Callable[[StepStats], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self.last_message = time.monotonic()
        self._folder = folder
        self._info: EngineInfo | None = None
        self._streams: dict[str, RequestStream] = {}
        self._flushes: list[asyncio.Future[bool]] = []
        self._ready = asyncio.Event()
        self._probe_tokens: tuple[int, ...] | None = None
        self._probe_wanted = False
        self._closing = False
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    def launch(cls, config: EngineConfig, log_level: str = "INFO") -> ProcClient:
        """Start the engine process for `config`. The folder of the socket is readable by this user alone."""
        folder = Path(tempfile.mkdtemp(prefix="forkkv-"))
        address = f"ipc://{folder}/engine.sock"
        command = [sys.executable, "-m", "forkkv.engine.proc", "--address", address]
        command += ["--parent-pid", str(os.getpid()), "--log-level", log_level]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=thread_environment(os.environ))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(wire.encode_config(config))
            process.stdin.close()
        return cls(address, process, folder)

    @property
    def info(self) -> EngineInfo:
        """Raises `EngineDeadError` before the engine is ready."""
        if self._info is None:
            raise EngineDeadError("The engine is still loading.")
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._info is not None and self.error is None

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    @property
    def num_open(self) -> int:
        """Requests without their last output."""
        return len(self._streams)

    async def start(self) -> None:
        """Open the socket and begin to read; call once, inside the running loop."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(self.address)
        self._reader = asyncio.create_task(self._read(self._socket), name="engine-reader")
        if self.process is not None:
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._wait_process, args=(loop,), name="engine-wait", daemon=True).start()

    async def wait_ready(self) -> EngineInfo:
        """Wait for the engine to have loaded. Raises `EngineDeadError` with the engine's own message if it failed."""
        await self._ready.wait()
        if self.error is not None:
            raise self.error
        return self.info

    def offer_probe(self, token_ids: Iterable[int]) -> None:
        """Tokens of the probe's text, for the engine to measure adapters with; sent when it asks for them."""
        self._probe_tokens = tuple(token_ids)
        self._send_probe()

    def _send_probe(self) -> None:
        if self._probe_wanted and self._probe_tokens is not None:
            self._send(wire.ProbeTokens(self._probe_tokens))

    def generate(self, *requests: EngineRequest) -> RequestStream:
        """Send requests with distinct, unused ids; they are on their way when this returns."""
        stream = RequestStream(self, requests)
        if self.error is not None:
            stream.on_error(self.error)
            return stream
        for request in requests:
            if request.request_id in self._streams:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._streams[request.request_id] = stream
            self._send(wire.Add(request))
        return stream

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort by id; the streams end without further output. Unknown ids are ignored."""
        for request_id in list(request_ids):
            if stream := self._streams.get(request_id):
                stream.abort(request_id)

    async def flush_cache(self) -> bool:
        """Drop every unleased block; True if both pools are entirely free afterwards."""
        if self.error is not None:
            raise self.error
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flushes.append(answer)
        self._send(wire.Flush())
        return await answer

    def release(self, request_ids: Sequence[str], *, abort: bool) -> None:
        """Forget requests; with `abort` the engine is told too. Called by `RequestStream`."""
        known = [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]
        if known and abort and self.error is None:
            self._send(wire.Abort(tuple(known)))

    async def close(self) -> None:
        """Stop the engine process and release the socket. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._send(wire.Shutdown())
        if self.process is not None:
            await self._end_process(self.process)
        if self._reader is not None:
            self._reader.cancel()
        self._die(EngineDeadError("The server is shutting down."))
        if self._socket is not None and self._context is not None:
            self._socket.close()
            self._context.term()
        self.discard()

    def discard(self) -> None:
        """Remove the socket's folder, and the process if it still runs; for exits without an event loop."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_process(self, process: subprocess.Popen[bytes]) -> None:
        if self._info is None:
            # Still loading: it reads no messages yet.
            process.terminate()
        deadline = time.monotonic() + EXIT_TIMEOUT
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            logger.warning("engine process %d does not end, killing it", process.pid)
            process.kill()

    def _send(self, message: wire.ToCore) -> None:
        if self._socket is None or self._socket.closed:
            return
        # Without a high-water mark the message is queued at once and the future is done when it is returned. It
        # fails only while no engine is connected, which is before it is ready or after its end: nothing to tell it.
        asyncio.ensure_future(self._socket.send(wire.encode(message), zmq.NOBLOCK)).add_done_callback(_retrieve)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                data = await socket.recv()
                self.last_message = time.monotonic()
                self._handle(wire.decode_from_core(data))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("reading from the engine failed")
            self._die(EngineDeadError(f"The engine's answer could not be read: {error}"))

    def _handle(self, message: wire.FromCore) -> None:
        match message:
            case wire.Outputs(outputs, stats):
                self._set_stats(stats)
                for output in outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.on_output(output)
            case wire.Accepted(request_id):
                if stream := self._streams.get(request_id):
                    stream.on_accepted(request_id)
            case wire.Rejected(request_id):
                if stream := self._streams.get(request_id):
                    stream.on_error(message.error(), refused=request_id)
            case wire.Flushed(ok):
                answer = self._flushes.pop(0)
                if not answer.done():
                    answer.set_result(ok)
            case wire.ProbeWanted():
                self._probe_wanted = True
                self._send_probe()
            case wire.Ready(info, stats):
                self._info = info
                self._set_stats(stats)
                self._ready.set()
            case wire.Failed(text):
                self._die(EngineDeadError(f"The engine failed: {text}"))

    def _set_stats(self, stats: StepStats) -> None:
        self.stats = stats
        if self.on_stats is not None:
            self.on_stats(stats)

    def _die(self, error: EngineDeadError) -> None:
        """Record the first cause, end every stream and flush with it, tell the owner."""
        if self.error is not None:
            return
        self.error = error
        for stream in set(self._streams.values()):
            stream.on_error(error)
        for answer in self._flushes:
            if not answer.done():
                answer.set_exception(error)
        self._flushes.clear()
        self._ready.set()
        if not self._closing:
            logger.error("%s", error.message)
            if self.on_death is not None:
                self.on_death()

    def _wait_process(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.process is not None
        status = self.process.wait()

        def report() -> None:
            # The last words of the process may still be in the socket; they name the cause better.
            loop.call_later(0.2, self._die, EngineDeadError(f"The engine process ended with status {status}."))

        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(report)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as seen."""
    if not future.cancelled():
        future.exception()


class InprocClient:
    """The same core in this process, for the offline `LLM` and tests. Synchronous; not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore | None = None,
        probe_tokens: Callable[[], Sequence[int]] | None = None,
    ):
        """`probe_tokens`: see `EngineCore`."""
        if core is None:
            from forkkv.engine.core import EngineCore

            core = EngineCore(config, probe_tokens=probe_tokens)
        self.core = core
        self.info = core.info

    @property
    def stats(self) -> StepStats:
        return self.core.stats()

    def stream(self, requests: Sequence[EngineRequest]) -> Iterator[list[EngineOutput]]:
        """Run `requests` together and yield each step's outputs. All are refused if one is (`RequestError`). Closing
        the iterator early aborts the rest."""
        remaining: dict[str, int] = {}
        try:
            for request in requests:
                self.core.add_request(request)
                remaining[request.request_id] = request.n
            while remaining and self.core.has_work():
                outputs, _ = self.core.step()
                for output in outputs:
                    if output.finish_reason is not None and output.request_id in remaining:
                        remaining[output.request_id] -= 1
                        if remaining[output.request_id] == 0:
                            del remaining[output.request_id]
                if outputs:
                    yield outputs
        finally:
            self.core.abort(list(remaining))

    def generate_all(self, requests: Sequence[EngineRequest]) -> dict[str, list[EngineOutput]]:
        """Run `requests` to their end; per request id one merged output per completion, by index."""
        outputs = merge_outputs(output for batch in self.stream(requests) for output in batch)
        answers: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
        for output in sorted(outputs, key=lambda output: output.index):
            answers[output.request_id].append(output)
        return answers

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort by id; unknown ids are ignored."""
        self.core.abort(request_ids)

    def flush_cache(self) -> bool:
        """Drop every unleased block; True if both pools are entirely free afterwards."""
        return self.core.flush_cache()
