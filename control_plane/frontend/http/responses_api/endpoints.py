"""The endpoints of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import Response

from control_plane.frontend.access.api_keys import ApiKeys
from control_plane.frontend.client_request import origin_of
from control_plane.frontend.http.answers.deltas import Delta, deltas
from control_plane.frontend.http.answers.responses import respond
from control_plane.frontend.http.client_requests import chat_request, check_model, prompt_length
from control_plane.frontend.http.errors import FAILED, ApiError
from control_plane.frontend.http.middleware import REQUEST_ID_HEADER
from control_plane.frontend.http.responses_api.client_tools import ClientTools
from control_plane.frontend.http.responses_api.protocol import (
    InputTokenCount,
    Item,
    ResponsesAnswer,
    ResponsesRequest,
    is_writable,
)
from control_plane.frontend.http.responses_api.store import ResponseStore
from control_plane.frontend.http.responses_api.translate import own_items, translated
from control_plane.frontend.http.responses_api.writer import ResponsesWriter, begun
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.translated_chat import TranslatedChat
from control_plane.frontend.open_requests import OpenRequests, RequestError

logger = logging.getLogger(__name__)


def add_responses(
    app: FastAPI,
    open_requests: OpenRequests,
    model: ServedModel,
    keys: ApiKeys,
    store: ResponseStore,
    post: Any,
) -> None:
    """Add the endpoints. post: what every POST endpoint checks."""
    longest, tokenizer = open_requests.limits.max_model_len, open_requests.tokenizer

    def read(
        request: ResponsesRequest, owner: str, tools: ClientTools
    ) -> tuple[TranslatedChat, list[Item]]:
        """Return the chat, and the request's own items. Raises ApiError."""
        check_model(request.model, model)
        own = own_items(request, partial(store.item, owner, {}))
        before = store.history(owner, request.previous_response_id)
        return translated(request, before, own, tools, model), [item for _, item in own]

    @app.post("/v1/responses", response_model=ResponsesAnswer, **post)
    async def responses(request: ResponsesRequest, http_request: Request) -> Response:
        if not is_writable(request):
            raise RecursionError
        tools, owner = ClientTools(request.tools), owner_of(http_request)
        as_chat, items = read(request, owner, tools)
        # More than the model's length would be refused in a chat.
        most = request.max_output_tokens and min(request.max_output_tokens, longest)
        chat = as_chat.chat.model_copy(update={"max_tokens": most})
        headers, path = http_request.headers, http_request.url.path
        # A client's name may come twice, and would take the place of what is kept.
        is_own = not headers.get(REQUEST_ID_HEADER)
        name = store.new_id(http_request.state.request_id if is_own else "")
        user, salt, remote = request.user or "", chat.cache_salt, http_request.state.remote_blocks
        if remote is not None and request.background:
            # Blocks that nobody has read yet are freed as the call ends.
            sentence = "background is true; with kv_transfer_params it must be false"
            raise ApiError(sentence, "background")
        origin = origin_of(headers, keys, path, user, chat.priority, salt, remote)
        asked, new_parser = await chat_request(chat, model, name, origin, as_chat.hidden)
        # Behind all waiting, so that many requests at once cannot pass its limit.
        is_kept = store.keeps(request)
        answer = begun(request, name, model.name, is_kept)
        keep = partial(store.keep, owner, items) if is_kept else None
        writer = ResponsesWriter(request, answer, tools, tokenizer, new_parser, keep)
        coming = deltas(open_requests, [asked])
        if not request.background:
            return await respond(http_request, coming, writer, request.stream)
        answer.status = "queued"
        writer.keep(answer)
        if answer.id not in store:
            # It would be computed for nobody.
            sentence = "background is true; the request is too large to be kept: leave it out"
            raise ApiError(sentence, "background")
        store.run(answer.id, asyncio.create_task(_computed(coming, writer)))
        return _json(answer.model_dump_json())

    @app.post("/v1/responses/input_tokens", **post)
    async def input_tokens(request: ResponsesRequest, http_request: Request) -> InputTokenCount:
        as_chat, _ = read(request, owner_of(http_request), ClientTools(request.tools))
        num = await prompt_length(as_chat.chat, model, open_requests, as_chat.hidden)
        return InputTokenCount(input_tokens=num)

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> None:
        # Else it would be the id of a response, which other methods take.
        raise HTTPException(HTTPStatus.NOT_FOUND)

    def owner_of(http_request: Request) -> str:
        # A user is no key: whoever may name one could read what others keep.
        return keys.tenant(http_request.headers, "")

    _add_kept(app, store, owner_of, post["responses"])


def _add_kept(
    app: FastAPI, store: ResponseStore, owner_of: Callable[[Request], str], errors: Any
) -> None:
    place = "/v1/responses/{response_id}"

    @app.get(place, response_model=ResponsesAnswer, responses=errors)
    async def kept(response_id: str, http_request: Request, stream: bool = False) -> Response:
        if stream:
            raise ApiError("stream is true; it must be false: ask until it is completed", "stream")
        return _json(store.find(owner_of(http_request), response_id).answer.model_dump_json())

    @app.get(place + "/input_items", responses=errors)
    async def input_items(
        response_id: str,
        http_request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        items = store.find(owner_of(http_request), response_id).items
        name = response_id.removeprefix("resp_")
        items = [{"id": f"in_{name}_{n}", "type": "message", **one} for n, one in enumerate(items)]
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise ApiError(f"after is {after!r:.60}; it must be the id of an item", "after")
        rest = items if after is None else items[ids.index(after) + 1 :]
        page, has_more = rest[:limit], len(rest) > limit
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        ends = {"first_id": first, "last_id": last, "has_more": has_more}
        return {"object": "list", "data": page, **ends}

    @app.delete(place, responses=errors)
    async def delete(response_id: str, http_request: Request) -> dict[str, Any]:
        store.delete(owner_of(http_request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post(place + "/cancel", response_model=ResponsesAnswer, responses=errors)
    async def cancel(response_id: str, http_request: Request) -> Response:
        return _json(store.cancel(owner_of(http_request), response_id).answer.model_dump_json())


async def _computed(coming: AsyncGenerator[Delta, None], writer: ResponsesWriter) -> None:
    """Compute a response while nobody waits; cancelling aborts its request."""
    try:
        async with aclosing(coming):
            async for delta in coming:
                if writer.last is None:
                    writer.keep(writer.answer.model_copy(update={"status": "in_progress"}))
                writer.add(delta)
        writer.body()
    except RequestError as error:
        writer.keep(writer.failed(error))
    except Exception:
        logger.exception("a response of the background failed")
        writer.keep(writer.failed(FAILED))


def _json(body: str) -> Response:
    return Response(body, media_type="application/json")
