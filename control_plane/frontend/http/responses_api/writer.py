"""Responses of /v1/responses, made of a call's deltas."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from pydantic import BaseModel

from control_plane.frontend.http.answers.blocks import Block, BlockWriter, StreamEvent
from control_plane.frontend.http.answers.deltas import FinishWord
from control_plane.frontend.http.errors import ApiError, error_body, renamed
from control_plane.frontend.http.responses_api.client_tools import ClientTools
from control_plane.frontend.http.responses_api.protocol import (
    ENCRYPTED,
    Item,
    ResponsesAnswer,
    ResponsesRequest,
    Status,
)
from control_plane.frontend.http.responses_api.translate import sealed
from control_plane.frontend.http.tools.answer_parser import PartKind
from control_plane.frontend.http.tools.forced_calls import Parser
from control_plane.frontend.open_requests import RequestError
from control_plane.frontend.text.tokenizer import Tokenizer


class _Form(NamedTuple):
    """The kind of an item: the names of its fields and events."""

    prefix: str
    """Start of the item's id."""
    type: str
    text: str = ""
    """Events of the text; empty: it has none."""
    whole: str = "text"
    """Field of the text."""
    part: str = ""
    """Events of the part that has the text; empty: the item itself has it."""
    kind: str = ""
    """Type of that part."""
    place: str = "content_index"
    """Field of the part's number."""


_MESSAGE = _Form("msg", "message", "output_text", part="content_part", kind="output_text")
_CONTENT = _Form("rs", "reasoning", "reasoning_text", part="content_part", kind="reasoning_text")
_SUMMARY = _Form(
    "rs", "reasoning", "reasoning_summary_text", "text", "reasoning_summary_part", "summary_text",
    "summary_index",
)  # fmt: skip
_CALLS = {
    "function": _Form("fc", "function_call", "function_call_arguments", "arguments"),
    "custom": _Form("ctc", "custom_tool_call", "custom_tool_call_input", "input"),
    "tool_search": _Form("tsc", "tool_search_call"),
}
_SHOWN: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "temperature": None, "top_p": None,
    "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "text": {},
    "reasoning": {}, "truncation": "disabled", "previous_response_id": None, "background": False,
}  # fmt: skip
"""Fields of a request that its answer has, with their defaults."""
_STATUS: dict[FinishWord, Status] = {
    "stop": "completed", "length": "incomplete", "abort": "cancelled"
}  # fmt: skip


class ResponsesWriter(BlockWriter):
    """Writes responses and their streams."""

    ping = b": ping\n\n"

    def __init__(
        self,
        request: ResponsesRequest,
        answer: ResponsesAnswer,
        tools: ClientTools,
        tokenizer: Tokenizer | None,
        new_parser: Callable[[], Parser] | None,
        keep: Callable[[ResponsesAnswer], None] | None = None,
    ) -> None:
        """new_parser: see BlockWriter. keep: takes the whole response before the client has it."""
        super().__init__(tokenizer, new_parser, request.parallel_tool_calls is not False)
        self._tools = tools
        self._name = answer.id.removeprefix("resp_")
        self._is_sealed = ENCRYPTED in (request.include or ())
        self._reasoning = _SUMMARY if request.reasoning and request.reasoning.summary else _CONTENT
        self._num_events = 0
        self.keep = keep or (lambda answer: None)
        self.answer = answer
        """The response as it began, and then as it ended."""

    def error_chunk(self, error: ApiError | RequestError) -> BaseModel:
        """Return the event that clients raise. Behind it stands that of the failed response."""
        info = renamed(error_body(error)[1], "/v1/responses").error
        failed = self.failed(error)
        told = {**(failed.error or {}), "param": info.param}
        event = self._event("error", **told, error={**info.model_dump(), **told})
        self.end = self.event(self._event("response.failed", response=failed))
        return event

    def failed(self, error: ApiError | RequestError) -> ResponsesAnswer:
        """Return the response with an error, whose code is a word, in place of items."""
        status, body = error_body(error)
        info = renamed(body, "/v1/responses").error
        word = "invalid_prompt" if status is HTTPStatus.BAD_REQUEST else "server_error"
        told = {"code": info.code if isinstance(info.code, str) else word, "message": info.message}
        return self.answer.model_copy(update={"status": "failed", "error": told})

    def began(self) -> list[BaseModel]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self.answer) for name in names]

    def opened(self, block: Block) -> list[BaseModel]:
        form, item = self._form(block), self._item(block, is_begun=True)
        added = self._event("response.output_item.added", output_index=block.number, item=item)
        if not form.part:
            return [added]
        return [added, self._of(block, form, f"{form.part}.added", part=_part(form, ""))]

    def grew(self, block: Block, text: str) -> list[BaseModel]:
        form = self._form(block)
        if not form.text:
            return []
        delta = self._text(block) if block.call else text
        return [self._of(block, form, f"{form.text}.delta", delta=delta, **_logprobs(form))]

    def closed(self, block: Block) -> list[BaseModel]:
        form, text = self._form(block), self._text(block)
        item, events = self._item(block), list[BaseModel]()
        if form.text:
            whole = {form.whole: text, **_logprobs(form)}
            events.append(self._of(block, form, f"{form.text}.done", **whole))
        if form.part:
            events.append(self._of(block, form, f"{form.part}.done", part=_part(form, text)))
        name = "response.output_item.done"
        return [*events, self._event(name, output_index=block.number, item=item)]

    def last_chunks(self) -> list[BaseModel]:
        answer = self.body()
        name = "completed" if answer.status == "completed" else "incomplete"
        return [self._event(f"response.{name}", response=answer)]

    def body(self) -> ResponsesAnswer:
        assert self.last is not None, "an answer has at least one delta"
        answer = self.answer.model_copy()
        answer.status = _STATUS[self.last.finish_reason or "stop"]
        if answer.status == "incomplete":
            answer.incomplete_details = {"reason": "max_output_tokens"}
        answer.output = [self._item(block) for block in self.blocks]
        usage = self.usage
        before, after = usage.prompt_tokens_details, usage.completion_tokens_details
        num_cached = before.cached_tokens if before else 0
        answer.usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": after.reasoning_tokens if after else 0},
            "total_tokens": usage.total_tokens,
        }
        self.answer = answer
        if answer.status != "cancelled" or answer.background:
            self.keep(answer)
        return answer

    def _form(self, block: Block) -> _Form:
        if block.call:
            return _CALLS[self._tools.of(block.call.name).kind]
        return self._reasoning if block.kind is PartKind.REASONING else _MESSAGE

    def _text(self, block: Block) -> str:
        return self._tools.of(block.call.name).text(block.call) if block.call else block.text

    def _item(self, block: Block, is_begun: bool = False) -> Item:
        """is_begun: further events bring the rest."""
        form = self._form(block)
        text = "" if is_begun else self._text(block)
        is_cut = self.last and self.last.finish_reason not in (None, "stop")
        is_whole = not (is_cut and block is self.blocks[-1])
        status = "in_progress" if is_begun else "completed" if is_whole else "incomplete"
        item: Item = {"type": form.type, "id": self._id(block), "status": status}
        parts = [] if is_begun else [_part(form, text)]
        if block.call:
            item["call_id"] = self._call_id(block)
            tool = self._tools.of(block.call.name)
            if tool.kind == "tool_search":
                values = {} if is_begun else tool.values(block.call)
                return item | {"execution": "client", "arguments": values}
            return item | {**tool.names, form.whole: text}
        if form is _MESSAGE:
            return item | {"role": "assistant", "content": parts}
        item["summary"] = parts if form is _SUMMARY else []
        if form is _CONTENT:
            item["content"] = parts
        if self._is_sealed:
            item["encrypted_content"] = sealed(text)
        return item

    def _id(self, block: Block) -> str:
        """Return an item's id: it names the answer."""
        return f"{self._form(block).prefix}_{self._name}_{block.number}"

    def _call_id(self, block: Block) -> str:
        """Return the call's id, which models may write twice, and clients do not expect."""
        assert block.call
        before = (one.call.id for one in self.blocks[: block.number] if one.call)
        return f"{block.call.id}_{block.number}" if block.call.id in before else block.call.id

    def _of(self, block: Block, form: _Form, name: str, **fields: Any) -> StreamEvent:
        place = {"item_id": self._id(block), "output_index": block.number}
        place |= {form.place: 0} if form.part else {}
        return self._event(f"response.{name}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        self._num_events += 1
        return StreamEvent.of(kind, sequence_number=self._num_events - 1, **fields)


def begun(request: ResponsesRequest, answer_id: str, model: str, is_kept: bool) -> ResponsesAnswer:
    """Return the response before its first token. answer_id: `resp_` and a unique name."""
    shown = _SHOWN | request.model_dump(by_alias=True, include={*_SHOWN}, exclude_none=True)
    shown["text"] = {"format": {"type": "text"}, **shown["text"]}
    shown["reasoning"] = {"effort": None, "summary": None, **shown["reasoning"]}
    return ResponsesAnswer(
        id=answer_id,
        object="response",
        created_at=int(time.time()),
        status="in_progress",
        error=None,
        incomplete_details=None,
        model=model,
        output=[],
        usage=None,
        store=is_kept,
        **shown,
    )


def _part(form: _Form, text: str) -> dict[str, Any]:
    more = {"annotations": list[Any]()} if form is _MESSAGE else {}
    return {"type": form.kind, "text": text, **more, **_logprobs(form)}


def _logprobs(form: _Form) -> dict[str, Any]:
    return {"logprobs": []} if form is _MESSAGE else {}
