"""Steps before every endpoint: request id, API key, length, and a count."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.frontend.access.api_keys import REFUSED, ApiKeys, OperatorKeys
from control_plane.frontend.client_request import header_of
from control_plane.frontend.http.errors import (
    TOO_LARGE,
    ApiError,
    error_response,
    speaks_messages,
)
from control_plane.observe.status_server import DATA_PATHS, OPERATOR_REQUIRED

REQUEST_ID_HEADER = "X-Request-Id"
ASSETS_PATH = "/docs/assets"
PROBE_PATHS = ("/health", "/ping", "/ready")
"""Paths that say whether the service is well."""
PUBLIC_PATHS = (
    "/", "/docs", f"{ASSETS_PATH}/swagger-ui.css", f"{ASSETS_PATH}/swagger-ui-bundle.js",
    *PROBE_PATHS, "/version", "/openapi.json", "/cluster",
)  # fmt: skip
"""Paths without a key: probes have none. The page at /cluster asks for the key of its data."""


OnResponse = Callable[[str, str, int], None]
"""(path of the endpoint, method, status)."""


class NameResponses:
    """Puts the request's id into a header of every response, and reports the response.

    HEAD is answered as GET, without the body.
    """

    def __init__(self, app: ASGIApp, on_response: OnResponse) -> None:
        self._app = app
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`state.request_id` is the id until the endpoint finds another in the body.

        Unknown paths count as `none`, as in vLLM: clients must not make labels.
        """
        method, state = scope["method"], scope.setdefault("state", {})
        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        state["request_id"] = Headers(scope=scope).get(REQUEST_ID_HEADER) or uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers, name = MutableHeaders(scope=message), header_of(state["request_id"])
                headers[REQUEST_ID_HEADER] = name
                if speaks_messages(scope):
                    headers["Request-Id"] = name
                endpoint = getattr(scope.get("route"), "path", "none")
                self._on_response(endpoint, method, message["status"])
            await send(message)

        await self._app(scope, receive, named)


class RequireKey:
    """Refuses requests without a key with 401."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, operators: OperatorKeys) -> None:
        self._app = app
        self._keys = keys
        self._operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unknown paths need a key too; data of the cluster needs an operator's."""
        is_data = scope["path"] in DATA_PATHS
        keys = self._operators if is_data else self._keys
        if scope["path"] in PUBLIC_PATHS or keys.admit(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            sentence = OPERATOR_REQUIRED if is_data else REFUSED
            refusal = error_response(ApiError(sentence, status=HTTPStatus.UNAUTHORIZED), scope)
            await refusal(scope, receive, send)


class BodyLimit:
    """Refuses too long bodies, with an error in the usual form."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a declared length at once; else raise HTTPException as the body is read."""
        declared = Headers(scope=scope).get("Content-Length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            error = ApiError(TOO_LARGE, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            refusal = error_response(error, scope)
            await refusal(scope, receive, send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return message

        await self._app(scope, limited, send)
