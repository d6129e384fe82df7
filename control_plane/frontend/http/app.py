"""The endpoints of the HTTP API: OpenAI's and vLLM's."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.middleware.errors import ServerErrorMiddleware

from control_plane.frontend.access.api_keys import ApiKeys, OperatorKeys
from control_plane.frontend.client_request import Origin, origin_of
from control_plane.frontend.http import errors
from control_plane.frontend.http.answers.chat import ChatWriter
from control_plane.frontend.http.answers.completions import CompletionWriter
from control_plane.frontend.http.answers.deltas import deltas
from control_plane.frontend.http.answers.response_bodies import (
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    Version,
)
from control_plane.frontend.http.answers.responses import respond
from control_plane.frontend.http.client_requests import (
    call_id,
    chat_prompt,
    chat_request,
    check_model,
    completion_requests,
    required_tokenizer,
)
from control_plane.frontend.http.errors import (
    FAILED,
    ApiError,
    ErrorResponse,
    error_response,
    speaks_messages,
)
from control_plane.frontend.http.kv_transfer import FreeRefusedBlocks, remote_blocks_of
from control_plane.frontend.http.messages.endpoints import add_messages, model_page
from control_plane.frontend.http.messages.protocol import ModelInfo, ModelPage
from control_plane.frontend.http.middleware import (
    ASSETS_PATH,
    REQUEST_ID_HEADER,
    BodyLimit,
    NameResponses,
    OnResponse,
    RequireKey,
)
from control_plane.frontend.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    check_template_fields,
)
from control_plane.frontend.http.responses_api.endpoints import add_responses
from control_plane.frontend.http.responses_api.store import ResponseStore
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.open_requests import OpenRequests
from control_plane.frontend.text.long_texts import in_thread
from control_plane.frontend.text.tokenizer import Tokenizer
from control_plane.observe.status_server import (
    METRICS_CONTENT_TYPE,
    SnapshotJson,
    cluster_page,
    start_page,
)

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""One half of a surrogate pair in JSON, which is a character only with the other half."""
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is invalid."},
    "503": {
        "model": ErrorResponse,
        "description": "The cluster is full or not ready; retry after Retry-After seconds.",
    },
}


@dataclass(frozen=True, slots=True)
class ApiParts:
    """Values that the endpoints use."""

    open_requests: OpenRequests
    model: ServedModel
    metrics: Callable[[], bytes]
    """Makes the page at /metrics. Raises TimeoutError, with a sentence."""
    snapshot_json: SnapshotJson
    has_served: Callable[[], bool]
    """Whether the cluster has been ready at some time."""
    on_response: OnResponse
    operators: OperatorKeys
    """Who may read metrics and the cluster's data."""
    responses: ResponseStore


def build_app(
    parts: ApiParts, max_body_bytes: int, keys: ApiKeys, cors_origins: Sequence[str] = ()
) -> FastAPI:
    """Build the application.

    Bodies above `max_body_bytes` get 413. cors_origins: see ServiceConfig.
    """
    # The framework's page at /docs would load scripts from elsewhere.
    app = FastAPI(
        title="NanoCP",
        version=version("nanocp"),
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(HTTPBearer(auto_error=False))],  # asks for it; RequireKey checks it
    )
    # The last one meets a request first.
    # Inside the others, so that this response too has its id and its origin.
    app.add_middleware(
        ServerErrorMiddleware, handler=lambda request, error: error_response(FAILED, request.scope)
    )
    app.add_middleware(FreeRefusedBlocks, parts.open_requests.refuse_blocks)
    app.add_middleware(BodyLimit, max_body_bytes)
    app.add_middleware(RequireKey, keys, parts.operators)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, "Request-Id", "Retry-After"],
        )
    app.add_middleware(NameResponses, parts.on_response)
    errors.install(app)
    pulled = Depends(remote_blocks_of(parts.open_requests.limits))
    post = {**_POST, "dependencies": [*_POST["dependencies"], pulled]}
    _add_generation(app, parts, keys, post)
    add_messages(app, parts.open_requests, parts.model, keys, post)
    add_responses(app, parts.open_requests, parts.model, keys, parts.responses, post)
    _add_tokenizer(app, parts)
    _add_model(app, parts)
    _add_health(app, parts)
    _add_cluster(app, parts)
    _add_pages(app)
    return app


async def _well_formed(request: Request) -> None:
    """Refuse other content types, and text that is not UTF-8. Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            f"the Content-Type is {kind or 'absent'}; it must be application/json",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            f"the Content-Encoding is {encoding:.60}; the body must not be compressed",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    try:
        text = (await request.body()).decode()
        if _SURROGATE.search(text):
            json.dumps(await request.json(), ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ApiError(f"the body is not Unicode text in UTF-8: {error}") from error


_POST: dict[str, Any] = {"responses": _ERRORS, "dependencies": [Depends(_well_formed)]}


def _add_generation(app: FastAPI, parts: ApiParts, keys: ApiKeys, post: Any) -> None:
    open_requests, model = parts.open_requests, parts.model
    tokenizer = open_requests.tokenizer

    def named(prefix: str, request: GenerationRequest, http_request: Request) -> tuple[str, Origin]:
        check_model(request.model, model)
        request.check_supported()
        headers, path = http_request.headers, http_request.url.path
        user, salt, remote = request.user, request.cache_salt, http_request.state.remote_blocks
        origin = origin_of(headers, keys, path, user or "", request.priority, salt, remote)
        return call_id(prefix, http_request, request), origin

    @app.post("/v1/completions", response_model=Completion, **post)
    async def completions(request: CompletionRequest, http_request: Request) -> Response:
        name, origin = named("cmpl-", request, http_request)
        asked = completion_requests(request, model, name, origin)
        writer = CompletionWriter(request, name, model.name, tokenizer)
        return await respond(http_request, deltas(open_requests, asked), writer, request.stream)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, **post)
    async def chat_completions(request: ChatRequest, http_request: Request) -> Response:
        name, origin = named("chatcmpl-", request, http_request)
        asked, new_parser = await chat_request(request, model, name, origin)
        writer = ChatWriter(request, name, model.name, tokenizer, new_parser)
        return await respond(http_request, deltas(open_requests, [asked]), writer, request.stream)


def _add_tokenizer(app: FastAPI, parts: ApiParts) -> None:
    limits, model = parts.open_requests.limits, parts.model

    @app.post("/tokenize", response_model=TokenizeResponse, **_POST)
    async def tokenize(request: TokenizeTextRequest | TokenizeChatRequest) -> Response:
        check_model(request.model, model)
        library = required_tokenizer(parts.open_requests)
        if isinstance(request, TokenizeChatRequest):
            check_template_fields(request.chat_template)
            text = await chat_prompt(request, model)
        else:
            text = request.prompt
        return await in_thread(len(text), False, tokenized, library, text, request)

    def tokenized(
        library: Tokenizer, text: str, request: TokenizeTextRequest | TokenizeChatRequest
    ) -> Response:
        # Millions of ids are written here too: the framework would write them in the event loop.
        ids = library.encode(text, add_special_tokens=request.add_special_tokens)
        names = [*map(library.token_string, ids)] if request.return_token_strs else None
        body = TokenizeResponse(
            count=len(ids), max_model_len=limits.max_model_len, tokens=ids, token_strs=names
        )
        return Response(body.model_dump_json(), media_type="application/json")

    @app.post("/detokenize", **_POST)
    async def detokenize(request: DetokenizeRequest) -> DetokenizeResponse:
        check_model(request.model, model)
        text = await in_thread(len(request.tokens), False, detokenized, request.tokens)
        return DetokenizeResponse(prompt=text)

    def detokenized(token_ids: Sequence[int]) -> str:
        for token_id in token_ids:
            if token_id >= limits.vocab_size:
                raise ApiError(
                    f"tokens has {token_id}; ids must be below the vocabulary size "
                    f"({limits.vocab_size})",
                    "tokens",
                )
        return required_tokenizer(parts.open_requests).decode(token_ids)


def _add_model(app: FastAPI, parts: ApiParts) -> None:
    model = parts.model
    card = ModelCard(
        id=model.name,
        created=model.created,
        root=model.root,
        max_model_len=parts.open_requests.limits.max_model_len,
    )

    page = model_page(model, card.max_model_len)

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def models(request: Request) -> ModelList | ModelPage:
        return page if speaks_messages(request.scope) else ModelList(data=[card])

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def one_model(name: str, request: Request) -> ModelCard | ModelInfo:
        check_model(name, model)
        return page.data[0] if speaks_messages(request.scope) else card

    @app.get("/version")
    async def service_version() -> Version:
        return Version(version=app.version)


def _add_health(app: FastAPI, parts: ApiParts) -> None:
    open_requests = parts.open_requests

    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        """Answer 200 once the cluster has been ready, also while it drains."""
        return _unless(open_requests.closed_because if not parts.has_served() else "")

    @app.get("/ping", responses=_ERRORS, include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    async def ping() -> Response:
        """Answer as /health; some platforms ask for this path."""
        return await health()

    @app.get("/ready", responses=_ERRORS)
    async def ready() -> Response:
        """Answer 200 while new requests are accepted."""
        return _unless(open_requests.closed_because)

    @app.get("/metrics")
    async def metrics() -> Response:
        page = await _made(parts.metrics)
        return Response(page, headers={"Content-Type": METRICS_CONTENT_TYPE})


_ABOUT = (
    "OpenAI's API, as vLLM serves it. [The cluster](cluster) is a page, and gRPC has a port of its "
    "own. Authorize takes the API key, if the service asks for one."
)


def _add_pages(app: FastAPI) -> None:
    app.mount(ASSETS_PATH, StaticFiles(packages=[("fastapi_offline", "static")]))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title="NanoCP API",
            swagger_js_url=f"{ASSETS_PATH[1:]}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS_PATH[1:]}/swagger-ui.css",
            swagger_favicon_url="data:,",
        )

    @app.get("/", include_in_schema=False)
    async def links() -> Response:
        return HTMLResponse(start_page())


def _add_cluster(app: FastAPI, parts: ApiParts) -> None:
    page = cluster_page()

    @app.get("/cluster", include_in_schema=False)
    async def cluster() -> Response:
        return HTMLResponse(page)

    @app.get("/cluster/snapshot.json", include_in_schema=False)
    async def snapshot() -> Response:
        return Response(await _made(parts.snapshot_json), media_type="application/json")


async def _made(make: Callable[[], bytes]) -> bytes:
    try:
        return await asyncio.to_thread(make)
    except TimeoutError as error:
        raise ApiError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE) from error


def _unless(reason: str) -> Response:
    if reason:
        raise ApiError(reason, status=HTTPStatus.SERVICE_UNAVAILABLE)
    return Response()
