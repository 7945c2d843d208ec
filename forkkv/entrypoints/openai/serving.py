"""Runs one generation request: from the parsed body to a whole answer or an event stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from fastapi import Request
from fastapi.responses import Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from forkkv.engine.client import RequestStream
from forkkv.entrypoints.openai.formats import AnswerFormat, Object
from forkkv.entrypoints.openai.state import ServerState
from forkkv.entrypoints.openai.transport import IGNORED_HEADER, internal_error, json_response, until_disconnect
from forkkv.errors import RequestError
from forkkv.frontend.input import Job
from forkkv.frontend.output import Delta, Generation
from forkkv.log import get_logger

logger = get_logger(__name__)

INLINE_BODY_BYTES = 16 * 1024
"""Bodies up to this size are tokenised on the event loop; a thread costs more than it saves there."""
SEPARATOR = "\n"


async def answer(
    state: ServerState, request: Request, body_size: int, make_job: Callable[[], Job], form: type[AnswerFormat]
) -> Response:
    """Answer one request. Everything that can be refused is refused before the first byte of the answer, with its
    HTTP status. Raises `RequestError` and `ClientGone`."""
    job = make_job() if body_size <= INLINE_BODY_BYTES else await asyncio.to_thread(make_job)
    headers = {IGNORED_HEADER: _header_text(job.ignored)} if job.ignored else {}
    generation = Generation(job, state.tokenizer, state.metrics)
    stream = state.client.generate(*job.requests)
    try:
        await until_disconnect(request, stream.accepted())
        if job.stream:
            events = _events(stream, generation, form(generation))
            return _StreamResponse(events, stream, generation, headers, state.args.sse_keep_alive)
        whole = await until_disconnect(request, _collect(stream, generation, form(generation)))
    except BaseException as error:
        await _release(stream, generation, "error" if isinstance(error, RequestError) else "abort")
        raise
    await _release(stream, generation, "abort")
    return json_response(whole, headers=headers)


def _header_text(names: tuple[str, ...]) -> str:
    """Field names as a header value; clients may send any characters as a name."""
    text = ",".join(name.encode("ascii", "backslashreplace").decode() for name in names)
    return "".join(char for char in text if char.isprintable())[:1024]


async def _release(stream: RequestStream, generation: Generation, reason: str) -> None:
    await stream.aclose()
    generation.close(reason)


async def _deltas(stream: RequestStream, generation: Generation) -> AsyncIterator[Delta]:
    async for outputs in stream:
        deltas, ended = generation.feed(outputs)
        for request_id in ended:
            stream.abort(request_id)
        for delta in deltas:
            yield delta


async def _collect(stream: RequestStream, generation: Generation, form: AnswerFormat) -> Object:
    return form.whole([delta async for delta in _deltas(stream, generation)])


async def _events(stream: RequestStream, generation: Generation, form: AnswerFormat) -> AsyncIterator[ServerSentEvent]:
    """The stream's events. An error after the first byte is one `error` event, and no `[DONE]` follows it."""
    try:
        for chunk in form.opening():
            yield _event(chunk)
        async for delta in _deltas(stream, generation):
            for chunk in form.chunks(delta):
                yield _event(chunk)
        if generation.job.include_usage:
            yield _event(form.usage_chunk())
    except RequestError as error:
        generation.close("error")
        yield _event(error.body())
        return
    except Exception:
        logger.exception("stream %s failed", generation.job.job_id)
        generation.close("error")
        yield _event(internal_error().body())
        return
    yield ServerSentEvent("[DONE]", sep=SEPARATOR)


def _event(content: Object) -> ServerSentEvent:
    return ServerSentEvent(msgspec.json.encode(content).decode(), sep=SEPARATOR)


class _StreamResponse(EventSourceResponse):
    """Owns the engine stream: however the response ends, also before its first event, nothing keeps running."""

    def __init__(
        self,
        events: AsyncIterator[ServerSentEvent],
        stream: RequestStream,
        generation: Generation,
        headers: dict[str, str],
        keep_alive: float,
    ):
        super().__init__(
            events,
            headers=headers,
            ping=keep_alive,
            sep=SEPARATOR,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep=SEPARATOR),
        )
        self._stream = stream
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _release(self._stream, self._generation, "abort")
