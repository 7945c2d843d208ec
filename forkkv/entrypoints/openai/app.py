"""The FastAPI application: routes and life cycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from forkkv.entrypoints.openai.formats import ChatFormat, CompletionFormat
from forkkv.entrypoints.openai.serving import answer
from forkkv.entrypoints.openai.state import ServerState
from forkkv.entrypoints.openai.transport import RequestIdMiddleware, add_error_handlers, json_response, read_body
from forkkv.errors import ForkKVError
from forkkv.frontend.input import ServedModel
from forkkv.frontend.probe_text import probe_tokens
from forkkv.frontend.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, parse_body
from forkkv.frontend.tokenizer import Tokenizer
from forkkv.log import get_logger
from forkkv.metrics.prometheus import CONTENT_TYPE
from forkkv.sharing import is_shared

logger = get_logger(__name__)

OWNER = "forkkv"
TokenizerLoader = Callable[[], Tokenizer]


def server_version() -> str:
    """Version of the installed package; "unknown" when run from a bare checkout."""
    try:
        return version("forkkv")
    except PackageNotFoundError:
        return "unknown"


def create_app(
    state: ServerState,
    load_tokenizer: TokenizerLoader,
    *,
    on_ready: Callable[[ServerState], None] | None = None,
    on_failure: Callable[[], None] | None = None,
) -> FastAPI:
    """Application over `state`. It listens at once and answers 503 until engine and tokenizer are loaded; then
    `on_ready` is called. `on_failure` is called when either cannot load or the engine dies."""
    client = state.client

    async def load_text_side() -> Tokenizer:
        tokenizer = await asyncio.to_thread(load_tokenizer)
        client.offer_probe(probe_tokens(tokenizer, state.args.probe_file))
        return tokenizer

    async def load() -> None:
        try:
            tokenizer, _ = await asyncio.gather(load_text_side(), client.wait_ready())
        except ForkKVError as error:
            logger.error("start failed: %s", error)
            if on_failure is not None:
                on_failure()
            return
        state.finish_loading(tokenizer)
        if on_ready is not None:
            on_ready(state)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client.on_death = on_failure
        await client.start()
        loading = asyncio.create_task(load())
        try:
            yield
        finally:
            loading.cancel()
            await client.close()

    app = FastAPI(title="forkkv", version=server_version(), lifespan=lifespan)
    app.state.server = state
    app.add_middleware(RequestIdMiddleware)
    add_error_handlers(app)
    for router in (generation_routes(state), model_routes(state), operation_routes(state)):
        app.include_router(router)
    return app


def _body_schema(model: type[GenerationRequest]) -> dict[str, Any]:
    """OpenAPI description of a body that the route reads by itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def generation_routes(state: ServerState) -> APIRouter:
    """`/v1/chat/completions` and `/v1/completions`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_body_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        processor = state.processor
        data = await read_body(request, state.body_limit)
        body = parse_body(ChatCompletionRequest, data)
        return await answer(state, request, len(data), lambda: processor.chat(body), ChatFormat)

    @router.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        processor = state.processor
        data = await read_body(request, state.body_limit)
        body = parse_body(CompletionRequest, data)
        return await answer(state, request, len(data), lambda: processor.completion(body), CompletionFormat)

    return router


def model_routes(state: ServerState) -> APIRouter:
    """`/v1/models` and `/v1/models/{id}`."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        cards = [model_card(state, model) for model in state.processor.models]
        return json_response({"object": "list", "data": cards})

    # Names may hold slashes (hub ids), so the id is the whole rest of the path.
    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(model_card(state, state.processor.find(name)))

    return router


def model_card(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """OpenAI's model object with vLLM's `root` and `parent`, and what sharing depends on under `forkkv`."""
    info = state.client.info
    card: dict[str, Any] = {"id": model.name, "object": "model", "created": state.created, "owned_by": OWNER}
    if model.adapter is None:
        sharing = {"kind": "base", "kv_sharing": info.kv_sharing, "block_size": info.block_size}
        return {
            **card,
            "root": state.args.model,
            "parent": None,
            "max_model_len": info.max_model_len,
            "forkkv": sharing,
        }
    adapter = model.adapter
    report = next((report for report in info.reports if report.adapter_id == adapter.adapter_id), None)
    modules = [] if report is None else [[name, rank, scaling] for name, rank, scaling in report.modules]
    return {
        **card,
        "root": model.name if report is None else report.path,
        "parent": state.args.base_name,
        "max_model_len": info.max_model_len,
        "forkkv": {
            "kind": adapter.kind,
            "digest": adapter.digest,
            "rank_k": adapter.rank_k,
            "rank_v": adapter.rank_v,
            "ranks": sorted({rank for _, rank, _ in modules}),
            "shares_base_kv": is_shared(adapter, info.kv_sharing),
            "probe": None if report is None or report.probe is None else asdict(report.probe),
            "team": adapter.team,
            "modules": len(modules),
            "num_bytes": 0 if report is None else report.num_bytes,
        },
    }


def operation_routes(state: ServerState) -> APIRouter:
    """Health, version, metrics and the cache reset."""
    router = APIRouter()

    def health(ok: Callable[[], bool]) -> Callable[[], Awaitable[Response]]:
        async def route() -> Response:
            good = ok()
            status = "ok" if good else ("dead" if not state.is_alive else "loading")
            return json_response({"status": status}, 200 if good else 503)

        return route

    for path in ("/health/live", "/live"):
        router.get(path)(health(lambda: state.is_alive))
    for path in ("/health", "/health/ready", "/ready"):
        router.get(path)(health(lambda: state.is_ready))

    @router.get("/version")
    async def get_version() -> Response:
        return json_response({"version": server_version()})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Drops every block that no running request holds; `success` tells whether both pools are entirely free."""
        state.processor  # noqa: B018 - raises while loading
        return json_response({"success": await state.client.flush_cache()})

    return router
