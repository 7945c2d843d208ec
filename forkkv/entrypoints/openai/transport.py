"""HTTP plumbing that every route shares: bodies, JSON answers, errors, request ids, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkkv.errors import RequestError
from forkkv.log import get_logger

logger = get_logger(__name__)

REQUEST_ID_HEADER = "x-request-id"
IGNORED_HEADER = "x-forkkv-ignored"
MAX_REQUEST_ID = 128

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Strictly valid JSON: the encoder has no NaN or infinity."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    return json_response(error.body(), error.status)


def internal_error() -> RequestError:
    """What a client learns of a fault of this server; the rest is in the log."""
    error = RequestError("The server failed to answer.", code="internal_error", status=500)
    error.error_type = "server_error"
    return error


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises `RequestError` (413) above `limit` bytes, before it has been read if announced."""
    too_large = RequestError(f"The request body is larger than {limit} bytes.", code="request_too_large", status=413)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which is cancelled as soon as the client is gone (`ClientGone`). The body must have been
    read: only then does the next message mean the end of the connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, watcher):
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pending


class RequestIdMiddleware:
    """Echoes `X-Request-Id`, or makes one up. It is a label for the client's own logs and never a key here."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID_HEADER.encode(), b"")
        usable = 0 < len(given) <= MAX_REQUEST_ID and all(0x20 < byte < 0x7F for byte in given)
        label = given if usable else uuid.uuid4().hex.encode()

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (REQUEST_ID_HEADER.encode(), label)]
            await send(message)

        await self.app(scope, receive, send_labelled)


def add_error_handlers(app: FastAPI) -> None:
    """Every error body is OpenAI's, also those of the framework."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "method_not_allowed"}
        answer = RequestError(
            f"{error.detail}: {request.method} is not served at this path."
            if error.status_code in codes
            else str(error.detail),
            code=codes.get(error.status_code),
            status=error.status_code,
        )
        response = error_response(answer)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(RequestError("The request is malformed.", code="invalid_value"))

    @app.exception_handler(ClientGone)
    async def on_client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def on_exception(request: Request, error: Exception) -> Response:
        return error_response(internal_error())
