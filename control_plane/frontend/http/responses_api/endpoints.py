"""The endpoints of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

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
from control_plane.frontend.http.responses_api.client_tools import ClientTools
from control_plane.frontend.http.responses_api.protocol import (
    InputTokenCount,
    ResponsesAnswer,
    ResponsesRequest,
)
from control_plane.frontend.http.responses_api.translate import (
    items_of,
    translated,
    without_references,
)
from control_plane.frontend.http.responses_api.writer import ResponsesWriter
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.open_requests import OpenRequests


def add_responses(
    app: FastAPI, open_requests: OpenRequests, model: ServedModel, keys: ApiKeys, post: Any
) -> None:
    """Add the endpoints. post: what every POST endpoint checks."""
    longest = open_requests.limits.max_model_len

    @app.post("/v1/responses", response_model=ResponsesAnswer, **post)
    async def responses(request: ResponsesRequest, http_request: Request) -> Response:
        check_model(request.model, model)
        items = [*without_references(items_of(request), {})]
        tools = ClientTools(request.tools or ())
        as_chat = translated(request, items, tools, model)
        # More than the model's length would be refused in a chat.
        most = request.max_output_tokens and min(request.max_output_tokens, longest)
        chat = as_chat.chat.model_copy(update={"max_tokens": most})
        name = call_id("resp_", http_request, chat)
        headers, path = http_request.headers, http_request.url.path
        user, salt = request.user or "", chat.cache_salt
        origin = origin_of(headers, keys, path, user, chat.priority, salt)
        asked, new_parser = await chat_request(chat, model, name, origin, as_chat.hidden)
        answer_id, tokenizer = f"resp_{uuid4().hex}", open_requests.tokenizer
        writer = ResponsesWriter(request, answer_id, model.name, tools, tokenizer, new_parser)
        return await respond(http_request, deltas(open_requests, [asked]), writer, request.stream)

    @app.post("/v1/responses/input_tokens", **post)
    async def input_tokens(request: ResponsesRequest) -> InputTokenCount:
        check_model(request.model, model)
        items = [*without_references(items_of(request), {})]
        as_chat = translated(request, items, ClientTools(request.tools or ()), model)
        num = await prompt_length(as_chat.chat, model, open_requests, as_chat.hidden)
        return InputTokenCount(input_tokens=num)
