"""Errors in OpenAI's form with vLLM's types, and in Anthropic's for the endpoints of that API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.open_requests import RequestError
from control_plane.frontend.validation import CONTEXT_LENGTH
from control_plane.observe.request_log import log_refused
from nanocp.values.plan import FinishReason

RETRY_AFTER_S = 1
"""Seconds until a client should retry at a full cluster."""

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "TimeoutError",
}
_MESSAGES_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_FIELDS_BY_PATH = {
    "/v1/messages": {
        r"(tools\.\d+)\.function\.parameters": r"\1.input_schema",
        r"(tools\.\d+)\.function": r"\1",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    },
    "/v1/responses": {
        r"(tools\.\d+)\.function": r"\1",
        "response_format": "text.format",
        "messages": "input",
        "max_tokens": "max_output_tokens",
    },
}
"""Names of a chat's fields, which begin sentences, in other APIs."""
_OVERLOADED = 529
"""Anthropic's status of a service that is full or not ready."""
_STATUS = {
    FinishReason.INVALID: HTTPStatus.BAD_REQUEST,
    FinishReason.REFUSED: HTTPStatus.SERVICE_UNAVAILABLE,
    FinishReason.FAILED: HTTPStatus.SERVICE_UNAVAILABLE,
    FinishReason.FATAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    FinishReason.EXPIRED: HTTPStatus.GATEWAY_TIMEOUT,
}
_FIELDS = {
    "cache_salt",
    "max_completion_tokens",
    "messages",
    "priority",
    "response_format",
    "structured_outputs",
    "tools",
    *(field.name for field in fields(ClientRequest)),
}
_UNREADABLE = "the body cannot be read: it must be JSON in UTF-8, and not nested too deeply"
_TOO_LONG = re.compile(rf"has (?:at least )?(\d+) tokens.* {CONTEXT_LENGTH} (\d+) tokens")
_MAX_REPEATED_CHARACTERS = 60
"""Longest part of a client's value that a sentence repeats."""


class ErrorInfo(BaseModel):
    """The mistake."""

    message: str
    type: str
    param: str | None = None
    """The field of the request, if the error is about one."""
    code: int | str
    """HTTP status, or OpenAI's `context_length_exceeded`."""


class ErrorResponse(BaseModel):
    """The body of an error response in OpenAI's form."""

    error: ErrorInfo


class MessagesErrorInfo(BaseModel):
    """A mistake in Anthropic's form."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class MessagesErrorResponse(BaseModel):
    """The body of an error response in Anthropic's form, and the event of one in a stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorInfo
    request_id: str


class ApiError(Exception):
    """A request that the HTTP API itself refuses."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        code: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        """code: a word in place of the status. details: of Anthropic's form."""
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.details = details


FAILED = ApiError(
    "the service failed to answer this request; its log says why",
    status=HTTPStatus.INTERNAL_SERVER_ERROR,
)
TOO_LARGE = "the body is larger than any request that the model can serve"


def renamed(body: ErrorResponse, path: str) -> ErrorResponse:
    """Name fields as the API of this path does, in place of a chat's."""
    info, names = body.error, _FIELDS_BY_PATH.get("/".join(path.split("/")[:3]), {})
    for ours, theirs in names.items():
        info.message = re.sub(f"^{ours}\\b", theirs, info.message)
        info.param = info.param and re.sub(f"^{ours}\\b", theirs, info.param)
    return body


def error_body(error: ApiError | RequestError) -> tuple[HTTPStatus, ErrorResponse]:
    """Return the status and the body for an error."""
    if isinstance(error, ApiError):
        body = _body(error.status, str(error), error.param)
        body.error.code = error.code or body.error.code
        return error.status, body
    status = _STATUS.get(error.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    if error.reason is FinishReason.FAILED:
        return status, _body(status, f"{error}; send the request again")
    if error.reason is not FinishReason.INVALID:
        return status, _body(status, str(error))
    body = _body(status, str(error), _named_field(str(error)))
    if CONTEXT_LENGTH in str(error):
        body.error.code = code = "context_length_exceeded"
        # Some clients look for it in the sentence.
        body.error.message += f" ({code})"
    return status, body


def _named_field(sentence: str) -> str | None:
    word = re.split(r"[ ']", sentence, maxsplit=1)[0]
    return word if word.partition(".")[0] in _FIELDS else None


def messages_error_body(
    error: ApiError | RequestError, request_id: str
) -> tuple[int, MessagesErrorResponse]:
    """Return the status and the body for an error in Anthropic's form."""
    status, body = error_body(error)
    body = renamed(body, "/v1/messages")
    return _messages_form(status, body, request_id, getattr(error, "details", None))


def _messages_form(
    status: HTTPStatus, body: ErrorResponse, request_id: str, details: dict[str, Any] | None = None
) -> tuple[int, MessagesErrorResponse]:
    kind, sentence = _MESSAGES_TYPES.get(status, "invalid_request_error"), body.error.message
    if found := _TOO_LONG.search(sentence):
        # Clients look for these words, and show the numbers.
        sentence = f"prompt is too long: {found[1]} tokens > {found[2]} maximum. {sentence}"
    more = {"details": details} if details else {}
    info = MessagesErrorInfo(type=kind, message=sentence, **more)
    is_full = status is HTTPStatus.SERVICE_UNAVAILABLE
    number = _OVERLOADED if is_full else int(status)
    return number, MessagesErrorResponse(type="error", error=info, request_id=request_id)


def speaks_messages(scope: Scope) -> bool:
    """Return whether the client expects Anthropic's form."""
    path = scope["path"]
    is_models = path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope)
    return path.startswith("/v1/messages") or is_models


def error_response(error: ApiError | RequestError, scope: Scope | None = None) -> JSONResponse:
    """Return the response for an error, in the form that the client of `scope` expects."""
    return _response(scope, *error_body(error), details=getattr(error, "details", None))


def install(app: FastAPI) -> None:
    """Make the application answer every error in this one form."""

    @app.exception_handler(ApiError)
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: ApiError | RequestError) -> JSONResponse:
        if isinstance(error, ApiError):
            _log(request, error.status, str(error))
        return error_response(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        param, sentence = _first_mistake(error)
        _log(request, HTTPStatus.BAD_REQUEST, sentence)
        body = _body(HTTPStatus.BAD_REQUEST, sentence, param)
        return _response(request.scope, HTTPStatus.BAD_REQUEST, body)

    @app.exception_handler(HTTPException)
    async def refused_by_the_framework(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        message = str(error.detail)
        if status is HTTPStatus.NOT_FOUND:
            message = f"Not found: {request.url.path}. See /openapi.json."
        elif status is HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.url.path} does not accept {request.method}; it accepts {allowed}"
        elif status is HTTPStatus.BAD_REQUEST:
            message = _UNREADABLE
        elif status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            message = TOO_LARGE
        return _response(request.scope, status, _body(status, message), error.headers)

    @app.exception_handler(RecursionError)
    async def too_deep(request: Request, error: RecursionError) -> JSONResponse:
        # A schema goes on as JSON, and writing takes more of the stack than reading.
        status = HTTPStatus.BAD_REQUEST
        return _response(request.scope, status, _body(status, _UNREADABLE))


def _log(request: Request, status: HTTPStatus, sentence: str) -> None:
    """Log a refusal before anything was submitted; later ones are logged where they happen."""
    if request.method == "POST":
        is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        reason = FinishReason.REFUSED if is_ours else FinishReason.INVALID
        log_refused(request.state.request_id, request.url.path, reason, sentence)


def _body(status: HTTPStatus, message: str, param: str | None = None) -> ErrorResponse:
    name = _TYPES.get(status, status.phrase.title().replace(" ", "") + "Error")
    return ErrorResponse(error=ErrorInfo(message=message, type=name, param=param, code=status))


def _response(
    scope: Scope | None,
    status: HTTPStatus,
    body: ErrorResponse,
    headers: Any = None,
    details: dict[str, Any] | None = None,
) -> JSONResponse:
    headers = dict(headers or {})
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    body = renamed(body, scope["path"] if scope else "")
    if scope is not None and speaks_messages(scope):
        number, form = _messages_form(status, body, scope["state"]["request_id"], details)
        return JSONResponse(form.model_dump(exclude_unset=True), number, headers)
    return JSONResponse(body.model_dump(), status, headers)


def _field(location: Sequence[int | str], body: Any) -> str:
    """("body", "messages", 0, "str", "content") becomes "messages.0.content".

    Kinds such as "str" are no fields. Empty: the body itself.
    """
    if location[0] == "query":
        return str(location[1])
    names = []
    for number, part in enumerate(location[1:], 2):
        if isinstance(body, Mapping) and (part in body or number == len(location)):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        names.append(str(part))
    return ".".join(names)


def _first_mistake(error: RequestValidationError) -> tuple[str | None, str]:
    """Return a field and its mistake, of several the innermost."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        where = f"{errors[0]['ctx']['error']} at character {errors[0]['loc'][-1]}"
        return None, f"the body is not JSON: {where}"
    fields = [_field(one["loc"], error.body) for one in errors]
    field, first = max(zip(fields, errors, strict=True), key=lambda pair: pair[0].count("."))
    if not field:
        return None, f"the body is not a JSON object: {first['msg']}"
    if first["type"] == "missing":
        return field, f"{field} is absent; it is required"
    value = repr(first["input"])
    if len(value) > _MAX_REPEATED_CHARACTERS:
        value = value[:_MAX_REPEATED_CHARACTERS] + "..."
    messages = dict.fromkeys(
        one["msg"] for name, one in zip(fields, errors, strict=True) if name == field
    )
    return field, f"{field} is {value}: {', or '.join(messages)}"
