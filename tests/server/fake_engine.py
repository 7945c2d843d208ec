"""An engine core that answers with its own prompt: the API of `forkkv.engine.core.EngineCore` without a model.

Completion token i is prompt token i; behind the prompt comes end-of-sequence, or the prompt again under `ignore_eos`.
So a test chooses the generated text, down to single bytes, by choosing the prompt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import zmq

from forkkv.engine import wire
from forkkv.engine.proc import EngineLoop, connect
from forkkv.errors import RequestError
from forkkv.types import (
    AdapterMeta,
    AdapterReport,
    CacheUsage,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    PoolStats,
    StepStats,
    TokenLogprob,
)

EOS = 2
VOCAB = 49152
MAX_MODEL_LEN = 2048
MAX_RUNNING = 8
REFUSED_SALT = "refuse-me"
FAILING_SALT = "fail-me"

PLAIN = AdapterMeta(1, "plain-a", "a" * 64, "plain", 8, 8)
FORK = AdapterMeta(2, "org/fork-b", "b" * 64, "fork", 16, 16, team="orders")
ADAPTERS = (PLAIN, FORK)


def make_info(adapters: tuple[AdapterMeta, ...] = ADAPTERS) -> EngineInfo:
    reports = tuple(
        AdapterReport(
            meta.name, f"/adapters/{meta.name}", meta.adapter_id, meta.digest, meta.kind, 4, (("q", 8, 2.0),), 9
        )
        for meta in adapters
    )
    return EngineInfo("smollm2", MAX_MODEL_LEN, VOCAB, (EOS,), "auto", 16, 1024, 512, adapters, reports)


@dataclass
class Running:
    request: EngineRequest
    done: list[int] = field(init=False)
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done = [0] * self.request.n


class EchoCore:
    """`step_seconds`: pretended work of a step. `seen`: every request that was accepted. `crash`: next step raises."""

    def __init__(self, step_seconds: float = 0.0):
        self.info = make_info()
        self.step_seconds = step_seconds
        self.requests: dict[str, Running] = {}
        self.seen: list[EngineRequest] = []
        self.crash = False
        self._stats = StepStats(
            step_id=0,
            timestamp=time.time(),
            step_seconds=0.0,
            prefill_tokens=0,
            decode_tokens=0,
            attention_pairs=0,
            running=0,
            waiting=0,
            kv_pool=PoolStats(100, 99, 1, 64),
            residual_pool=PoolStats(50, 50, 0, 32),
            active_residual_adapters=0,
        )

    def add_request(self, request: EngineRequest) -> None:
        if request.cache_salt == REFUSED_SALT:
            raise RequestError("The pool is too small.", code="pool_exceeded", param="prompt")
        self.requests[request.request_id] = Running(request)
        self.seen.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if self.requests.pop(request_id, None)]
        self._stats = replace(self._stats, aborts_total=self._stats.aborts_total + len(known))

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> tuple[list[EngineOutput], StepStats]:
        if self.crash:
            raise RuntimeError("the device is gone")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        batch = list(self.requests.values())[:MAX_RUNNING]
        outputs: list[EngineOutput] = []
        prefill = 0
        for running in batch:
            prefill += len(running.request.prompt_token_ids) if not any(running.done) else 0
            outputs += self._advance(running)
        self._stats = replace(
            self._stats,
            step_id=self._stats.step_id + 1,
            step_seconds=0.001 + prefill * 1e-5,
            prefill_tokens=prefill,
            attention_pairs=prefill * prefill // 2,
            decode_tokens=0 if prefill else len(outputs),
        )
        return outputs, self.stats()

    def _advance(self, running: Running) -> list[EngineOutput]:
        request, sampling = running.request, running.request.sampling
        if request.cache_salt == FAILING_SALT and running.done[0] == 2:
            del self.requests[request.request_id]
            return [EngineOutput(request.request_id, 0, (), "error", error="The step failed twice.")]
        outputs = []
        for index in set(range(request.n)) - running.finished:
            position = running.done[index]
            prompt = request.prompt_token_ids
            ended = position >= len(prompt) and not sampling.ignore_eos
            token = EOS if ended else prompt[position % len(prompt)]
            running.done[index] += 1
            reason = "stop" if ended or token in sampling.stop_token_ids else None
            stop_token = token if reason else None
            if reason is None and running.done[index] >= sampling.max_tokens:
                reason = "length"
            logprobs = () if sampling.logprobs is None else (self._logprob(token, sampling.logprobs),)
            usage = _usage(request) if position == 0 else None
            outputs.append(EngineOutput(request.request_id, index, (token,), reason, stop_token, logprobs, usage))
            if reason is not None:
                running.finished.add(index)
        if len(running.finished) == request.n:
            del self.requests[request.request_id]
        return outputs

    @staticmethod
    def _logprob(token: int, count: int) -> TokenLogprob:
        top = [(token, -0.25), (100, float("-inf")), *((token, -5.0) for token in range(200, 220))][:count]
        return TokenLogprob(token, -0.25, tuple(top))

    def flush_cache(self) -> bool:
        return not self.requests

    def stats(self) -> StepStats:
        running = min(len(self.requests), MAX_RUNNING)
        return replace(self._stats, running=running, waiting=len(self.requests) - running)


def _usage(request: EngineRequest) -> CacheUsage:
    """Pretends that all but the last 4 tokens of the part below the fork (16) were cached."""
    n = len(request.prompt_token_ids)
    if request.adapter_id == 0:
        return CacheUsage("base", n, n - 1, 0, 0, 1, n, n)
    fork = min(16, n - 1)
    kind = "fork" if request.adapter_id == 2 else "plain"
    return CacheUsage(kind, fork, fork, fork, 0, n - fork, (n - fork) * n, fork)


class EngineThread:
    """The engine's loop over a real ZMQ socket, in a thread instead of a process."""

    def __init__(self, core: EchoCore, address: str):
        self.core = core
        self._address = address
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        socket: zmq.Socket[bytes] = connect(self._address)
        try:
            EngineLoop(self.core, socket).run()
        except Exception as error:
            socket.send(wire.encode(wire.Failed(str(error))))
        finally:
            socket.close()
