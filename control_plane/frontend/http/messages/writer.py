"""Responses of /v1/messages, made of a call's deltas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from control_plane.frontend.http.answers.blocks import Block, BlockWriter, StreamEvent
from control_plane.frontend.http.errors import ApiError, messages_error_body
from control_plane.frontend.http.messages.protocol import (
    AnswerBlock,
    MessagesAnswer,
    MessagesRequest,
    MessagesUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from control_plane.frontend.http.tools.answer_parser import PartKind
from control_plane.frontend.http.tools.forced_calls import Parser
from control_plane.frontend.open_requests import RequestError
from control_plane.frontend.text.tokenizer import Tokenizer

SIGNATURE = "bmFub2Nw"
"""Clients want one with each thinking block; it is not checked."""

_NO_INPUT = '"input":{}'
"""A call's arguments in a body without them; within a text the quotes would be escaped."""


class MessagesWriter(BlockWriter):
    """Writes messages and their streams."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(
        self,
        request: MessagesRequest,
        call_id: str,
        model: str,
        tokenizer: Tokenizer | None,
        new_parser: Callable[[], Parser] | None,
    ) -> None:
        """new_parser: see BlockWriter."""
        choice = request.tool_choice
        has_many_calls = choice is None or not choice.disable_parallel_tool_use
        super().__init__(tokenizer, new_parser, has_many_calls)
        self._call_id, self._model = call_id, model
        self._max_tokens = request.max_tokens
        self._shows_thinking = not (request.thinking and request.thinking.display == "omitted")

    def error_chunk(self, error: ApiError | RequestError) -> BaseModel:
        return messages_error_body(error, self._call_id.removeprefix("msg_"))[1]

    def began(self) -> list[BaseModel]:
        return [StreamEvent.of("message_start", message=self._message([], None))]

    def opened(self, block: Block) -> list[BaseModel]:
        begun = self._block(block, is_begun=True)
        return [StreamEvent.of("content_block_start", index=block.number, content_block=begun)]

    def grew(self, block: Block, text: str) -> list[BaseModel]:
        match block.kind:
            case PartKind.CALL:
                return [self._grew(block, type="input_json_delta", partial_json=text)]
            case PartKind.REASONING if self._shows_thinking:
                return [self._grew(block, type="thinking_delta", thinking=text)]
            case PartKind.CONTENT:
                return [self._grew(block, type="text_delta", text=text)]
        return []

    def closed(self, block: Block) -> list[BaseModel]:
        events: list[BaseModel] = [StreamEvent.of("content_block_stop", index=block.number)]
        if block.kind is PartKind.REASONING:
            events.insert(0, self._grew(block, type="signature_delta", signature=SIGNATURE))
        return events

    def last_chunks(self) -> list[BaseModel]:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            StreamEvent.of("message_delta", delta=delta, usage=self._counts()),
            StreamEvent.of("message_stop"),
        ]

    def body(self) -> BaseModel:
        return self._message([self._block(block) for block in self.blocks], *self._stop())

    def json(self) -> str:
        """Return the body as JSON, with arguments in the model's spelling, as in a stream."""
        first, *others = super().json().split(_NO_INPUT)
        calls = (block.text for block in self.blocks if block.call)
        pairs = zip(calls, others, strict=True)
        return first + "".join(f'"input":{call}{after}' for call, after in pairs)

    def _message(
        self, content: list[AnswerBlock], reason: StopReason | None, sequence: str | None = None
    ) -> MessagesAnswer:
        return MessagesAnswer(
            id=self._call_id,
            type="message",
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._counts(),
        )

    def _counts(self) -> MessagesUsage:
        usage = self.usage
        details = usage.prompt_tokens_details
        num_cached = details.cached_tokens if details else 0
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )

    def _block(self, block: Block, is_begun: bool = False) -> AnswerBlock:
        """is_begun: deltas bring the rest."""
        text = "" if is_begun else block.text
        if block.call:
            # The arguments follow in deltas, or in `json`.
            name = block.call.name
            return ToolUseBlock(type="tool_use", id=block.call.id, name=name, input={})
        if block.kind is PartKind.REASONING:
            shown, signature = text if self._shows_thinking else "", "" if is_begun else SIGNATURE
            return ThinkingBlock(type="thinking", thinking=shown, signature=signature)
        return TextBlock(type="text", text=text)

    def _grew(self, block: Block, **delta: Any) -> StreamEvent:
        return StreamEvent.of("content_block_delta", index=block.number, delta=delta)

    def _stop(self) -> tuple[StopReason, str | None]:
        last = self.last
        assert last is not None, "an answer has at least one delta"
        if last.finish_reason == "length":
            is_all = self.usage.completion_tokens >= self._max_tokens
            return "max_tokens" if is_all else "model_context_window_exceeded", None
        if self.num_calls:
            return "tool_use", None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return "end_turn", None
