"""Responses of /v1/responses, made of a call's deltas."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from control_plane.frontend.http.answers.blocks import Block, BlockWriter, StreamEvent
from control_plane.frontend.http.errors import ApiError, ErrorInfo, error_body, renamed
from control_plane.frontend.http.responses_api.client_tools import ClientTools
from control_plane.frontend.http.responses_api.protocol import (
    ENCRYPTED,
    Item,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
)
from control_plane.frontend.http.responses_api.translate import sealed
from control_plane.frontend.http.tools.answer_parser import PartKind
from control_plane.frontend.http.tools.forced_calls import Parser
from control_plane.frontend.open_requests import RequestError
from control_plane.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Form:
    """The events of a kind of item, besides those that begin and end it."""

    prefix: str
    """Of the item's id."""
    type: str
    """Of the item."""
    text: str = ""
    """Events of its text; empty: it has none."""
    whole: str = "text"
    """Field of the whole text in the last of these."""
    part: str = ""
    """Events of the part that has the text; empty: the item itself has it."""
    kind: str = ""
    """Type of that part."""
    place: Mapping[str, int] = field(default_factory=lambda: {"content_index": 0})


_MESSAGE = _Form("msg", "message", "output_text", part="content_part", kind="output_text")
_CONTENT = _Form("rs", "reasoning", "reasoning_text", part="content_part", kind="reasoning_text")
_SUMMARY = _Form(
    "rs", "reasoning", "reasoning_summary_text", part="reasoning_summary_part", kind="summary_text",
    place={"summary_index": 0},
)  # fmt: skip
_CALLS = {
    "function": _Form("fc", "function_call", "function_call_arguments", "arguments", place={}),
    "custom": _Form("ctc", "custom_tool_call", "custom_tool_call_input", "input", place={}),
    "tool_search": _Form("tsc", "tool_search_call"),
}


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
        keep: Callable[[ResponsesAnswer], None] = lambda answer: None,
    ) -> None:
        """new_parser: see BlockWriter. keep: takes the whole response before the client has it."""
        super().__init__(tokenizer, new_parser, request.parallel_tool_calls is not False)
        self._tools = tools
        self._name = answer.id.removeprefix("resp_")
        self._is_sealed = ENCRYPTED in (request.include or ())
        self._reasoning = _SUMMARY if request.reasoning and request.reasoning.summary else _CONTENT
        self._num_events = 0
        self.keep = keep
        self.answer = answer
        """The response as it began, and then as it ended."""

    def error_chunk(self, error: ApiError | RequestError) -> BaseModel:
        """Return the event that clients raise. Behind it stands that of the failed response."""
        info = _error(error)
        told = {"code": info.code, "message": info.message, "param": info.param}
        event = self._event("error", **told, error=info.model_dump())
        self.end = self.event(self._event("response.failed", response=self.failed(error)))
        return event

    def failed(self, error: ApiError | RequestError) -> ResponsesAnswer:
        """Return the response with an error in place of items."""
        info = _error(error)
        told = {"code": info.code, "message": info.message}
        return self.answer.model_copy(update={"status": "failed", "error": told})

    def began(self) -> list[BaseModel]:
        return [
            self._event(f"response.{name}", response=self.answer)
            for name in ("created", "in_progress")
        ]

    def opened(self, block: Block) -> list[BaseModel]:
        form = self._form(block)
        item = self._item(block, is_begun=True)
        name, events = "response.output_item.added", list[BaseModel]()
        events.append(self._event(name, output_index=block.number, item=item))
        if form.part:
            part = _part(form, "")
            events.append(self._of(block, form, f"{form.part}.added", part=part))
        return events

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
        answer = self._ended()
        is_whole = answer.status == "completed"
        name = f"response.{'completed' if is_whole else 'incomplete'}"
        return [self._event(name, response=answer)]

    def body(self) -> BaseModel:
        return self._ended()

    def _ended(self) -> ResponsesAnswer:
        """Complete the answer."""
        assert self.last is not None, "an answer has at least one delta"
        answer, reason = self.answer.model_copy(), self.last.finish_reason
        answer.status = "completed"
        if reason == "length":
            answer.status = "incomplete"
            answer.incomplete_details = {"reason": "max_output_tokens"}
        elif reason == "abort":
            answer.status = "cancelled"
        answer.output = [self._item(block) for block in self.blocks]
        usage = self.usage
        before, after = usage.prompt_tokens_details, usage.completion_tokens_details
        num_cached = before.cached_tokens if before else 0
        answer.usage = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": num_cached, "cache_write_tokens": 0},
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": after.reasoning_tokens if after else 0},
            total_tokens=usage.total_tokens,
        )
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
                return item | {"execution": "client", "arguments": json.loads(text or "{}")}
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
        place = {"item_id": self._id(block), "output_index": block.number, **form.place}
        return self._event(f"response.{name}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        self._num_events += 1
        return StreamEvent.of(kind, sequence_number=self._num_events - 1, **fields)


def _error(error: ApiError | RequestError) -> ErrorInfo:
    """The code is a word, for clients that read no number."""
    status, body = error_body(error)
    info = renamed(body, "/v1/responses").error
    if isinstance(info.code, int):
        is_wrong = status is HTTPStatus.BAD_REQUEST
        info.code = "invalid_prompt" if is_wrong else "server_error"
    return info


def begun(request: ResponsesRequest, answer_id: str, model: str, is_kept: bool) -> ResponsesAnswer:
    """Return the response before its first token. answer_id: `resp_` and a unique name."""
    choice = "auto" if request.tool_choice is None else request.tool_choice
    text = request.text.model_dump(by_alias=True, exclude_unset=True) if request.text else {}
    reasoning = request.reasoning.model_dump() if request.reasoning else {}
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
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": None, "summary": None, **reasoning},
        temperature=request.temperature,
        text={"format": {"type": "text"}, **text},
        tool_choice=choice,
        tools=request.tools or [],
        top_p=request.top_p,
        truncation="disabled",
        store=is_kept,
        previous_response_id=request.previous_response_id,
        background=bool(request.background),
    )


def _part(form: _Form, text: str) -> dict[str, Any]:
    more = {"annotations": list[Any]()} if form is _MESSAGE else {}
    return {"type": form.kind, "text": text, **more, **_logprobs(form)}


def _logprobs(form: _Form) -> dict[str, Any]:
    return {"logprobs": []} if form is _MESSAGE else {}
