"""`kv_transfer_params`, by which a router says that a vLLM server has computed the prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, FailFast, Field, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.validation import ModelLimits
from nanocp.values.remote_blocks import RemoteBlocks

FIELD = "kv_transfer_params"
_PREFILL, _DECODE = "do_remote_prefill", "do_remote_decode"
_Natural = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
_Positive = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]
_Name = Annotated[str, Field(min_length=1, max_length=512)]
_Host = Annotated[str, Field(max_length=512, pattern=r"^[\w.:%-]+$")]


class KvTransferParams(BaseModel):
    """What vLLM's NixlConnector answers to the first of a router's two calls."""

    remote_engine_id: _Name
    remote_request_id: _Name
    # One mistake is enough: a hundred thousand would stop the event loop for seconds.
    remote_block_ids: Annotated[list[Annotated[list[_Natural], FailFast()]], FailFast()]
    """For each group of layers."""
    remote_host: _Host
    remote_port: Annotated[_Positive, Field(lt=1 << 16)]
    remote_num_tokens: _Positive
    tp_size: Annotated[_Positive, Field(le=1024)] = 1
    dcp_size: _Positive | None = None
    pp_size: _Positive | None = None
    transfer_mode: str | None = None
    remote_prefill_cached_tokens: _Natural | None = None
    remote_registration_generation: _Natural | None = None

    def blocks(self) -> RemoteBlocks:
        """Return what the puller needs, of the first group of layers."""
        return RemoteBlocks(
            self.remote_engine_id,
            self.remote_request_id,
            tuple(self.remote_block_ids[0]) if self.remote_block_ids else (),
            self.remote_host,
            self.remote_port,
            self.tp_size,
            self.remote_num_tokens,
            self.remote_prefill_cached_tokens or 0,
            self.remote_registration_generation,
        )

    def check(self) -> None:
        """Raise ApiError naming a form of the KV that cannot be read."""
        num_groups = len(self.remote_block_ids)
        for name, value, wanted, why in (
            ("transfer_mode", self.transfer_mode, "pull", "the prefill must wait to be read"),
            ("pp_size", self.pp_size, 1, "KV of some layers in each of several ranks is not read"),
            ("dcp_size", self.dcp_size, 1, "tokens that alternate between ranks are not read"),
            ("groups of remote_block_ids", num_groups, 1, "other caches than KV are not read"),
        ):
            if value not in (None, wanted):
                field = f"{FIELD}.{name.rpartition(' ')[2]}"
                raise ApiError(
                    f"{FIELD}.{name} is {value!r:.60}; it must be {wanted}: {why}", field
                )


def remote_blocks_of(limits: ModelLimits) -> Callable[[Request], Awaitable[None]]:
    """Return the check of a body's kv_transfer_params; blocks go to `state.remote_blocks`."""

    async def check(request: Request) -> None:
        request.state.remote_blocks = None
        if FIELD.encode() not in await request.body():
            return
        body = await request.json()
        given = body.get(FIELD) if isinstance(body, dict) else None
        if isinstance(given, dict) and (given.get(_DECODE) or given.get(_PREFILL)):
            _check(request, given, body, limits)

    return check


def _check(request: Request, given: dict[str, Any], body: Any, limits: ModelLimits) -> None:
    if not limits.pulls_kv:
        raise ApiError(
            f"{FIELD} is given, and this service pulls no KV: its setting prefill.pull.allowed is "
            "empty (docs/use/prefill.md)",
            FIELD,
        )
    for name, wanted in ((_PREFILL, True), (_DECODE, False)):
        if (value := given.get(name, False)) is not wanted:
            raise ApiError(
                f"{FIELD}.{name} is {value!r:.60}; it must be {wanted}: this service decodes, and "
                "computes no prompt for others",
                f"{FIELD}.{name}",
            )
    ids = given.get("remote_block_ids")
    if isinstance(ids, list) and not any(isinstance(each, list) for each in ids):
        ids = [ids]  # as engines wrote it before they had several groups
    # Before each is looked at: there may be millions.
    num_ids = 0
    if isinstance(ids, list):
        num_ids = max(len(ids), sum(len(each) for each in ids if isinstance(each, list)))
    if num_ids > limits.max_model_len:
        raise ApiError(
            f"{FIELD}.remote_block_ids has {num_ids} ids; a prompt of this model takes at most "
            f"{limits.max_model_len}",
            f"{FIELD}.remote_block_ids",
        )
    try:
        params = KvTransferParams.model_validate({**given, "remote_block_ids": ids})
    except ValidationError as error:
        mistakes = [{**each, "loc": ("body", FIELD, *each["loc"])} for each in error.errors()]
        raise RequestValidationError(mistakes, body=body) from error
    # Set before the rest is checked: also what is refused is to be freed.
    request.state.remote_blocks = params.blocks()
    params.check()


class FreeRefusedBlocks:
    """Names blocks to the puller once the call has ended; it frees those that nobody read."""

    def __init__(self, app: ASGIApp, refuse: Callable[[RemoteBlocks], None]) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Also a call that failed, or whose client went away before it was submitted."""
        try:
            await self._app(scope, receive, send)
        finally:
            if (blocks := scope.get("state", {}).get("remote_blocks")) is not None:
                self._refuse(blocks)
