"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from control_plane.frontend.access.api_keys import ApiKeys
from control_plane.frontend.client_request import origin_of
from control_plane.frontend.http.answers.deltas import deltas
from control_plane.frontend.http.answers.responses import respond
from control_plane.frontend.http.client_requests import (
    call_id,
    chat_request,
    check_model,
    prompt_length,
)
from control_plane.frontend.http.errors import MessagesErrorResponse
from control_plane.frontend.http.messages.protocol import (
    MessagesAnswer,
    MessagesPrompt,
    MessagesRequest,
    ModelInfo,
    ModelPage,
    TokenCount,
)
from control_plane.frontend.http.messages.translate import tenant_of, translated
from control_plane.frontend.http.messages.writer import MessagesWriter
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.open_requests import OpenRequests

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessagesErrorResponse, "description": "The request is invalid."},
    "529": {"model": MessagesErrorResponse, "description": "The cluster is full or not ready."},
}


def add_messages(
    app: FastAPI, open_requests: OpenRequests, model: ServedModel, keys: ApiKeys, post: Any
) -> None:
    """Add the endpoints. post: what every POST endpoint checks."""
    limits = open_requests.limits
    post = {**post, "responses": _ERRORS}

    @app.post("/v1/messages", response_model=MessagesAnswer, **post)
    async def messages(request: MessagesRequest, http_request: Request) -> Response:
        check_model(request.model, model)
        # More than the model's length would be refused in a chat.
        most = min(request.max_tokens, limits.max_model_len)
        as_chat = translated(request, model)
        chat = as_chat.chat.model_copy(update={"max_tokens": most})
        name = call_id("msg_", http_request, chat)
        headers, path, user = http_request.headers, http_request.url.path, tenant_of(request)
        salt, remote = request.cache_salt, http_request.state.remote_blocks
        origin = origin_of(headers, keys, path, user, request.priority, salt, remote)
        asked, new_parser = await chat_request(chat, model, name, origin, as_chat.hidden)
        writer = MessagesWriter(request, name, model.name, open_requests.tokenizer, new_parser)
        return await respond(http_request, deltas(open_requests, [asked]), writer, request.stream)

    @app.post("/v1/messages/count_tokens", **post)
    async def count_tokens(request: MessagesPrompt) -> TokenCount:
        check_model(request.model, model)
        as_chat = translated(request, model)
        num = await prompt_length(as_chat.chat, model, open_requests, as_chat.hidden)
        return TokenCount(input_tokens=num)


def model_page(model: ServedModel, max_model_len: int) -> ModelPage:
    """Return the served model as a list of one."""
    info = ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
    )
    return ModelPage(data=[info], first_id=info.id, last_id=info.id)
