"""One choice's answer of a chat, as a message and as what is new of it.

Enters: pieces of text. Leaves: OpenAI's messages, with reasoning and tool calls apart. Does not
know: how an answer is parsed, other choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from control_plane.frontend.http.answer_parser import AnswerPart, Parser, PartKind
from control_plane.frontend.http.response_bodies import (
    ChatMessage,
    FunctionCall,
    MessageToolCall,
)


class ChatAnswer:
    """The answer so far."""

    def __init__(self, parser: Parser, has_reasoning: bool, has_many_calls: bool) -> None:
        """has_reasoning: whether messages have it. has_many_calls: False keeps the first call."""
        self._parser = parser
        self._has_reasoning = has_reasoning
        self._has_many_calls = has_many_calls
        self._parts: list[AnswerPart] = []
        self._num_old = 0
        """Parts before those that the latest text has added."""
        self.num_calls = 0

    def add(self, text: str, is_last: bool) -> None:
        """Add text that the choice has generated."""
        self._num_old = len(self._parts)
        for part in self._parser.feed(text) + (self._parser.finish() if is_last else []):
            if part.call is None or self._has_many_calls or not self.num_calls:
                self._parts.append(part)
                self.num_calls += part.call is not None

    def new_message(self) -> ChatMessage:
        """What the latest text has added; without any field if that is nothing."""
        fields = self._fields(self._parts[self._num_old :])
        calls = fields.get("tool_calls", [])
        for index, call in enumerate(calls, self.num_calls - len(calls)):
            call.index = index
        return ChatMessage(**fields)

    def whole_message(self) -> ChatMessage:
        """The message of the whole answer; its content is null if there are calls and no text."""
        no_content = {"content": None if self.num_calls else ""}
        return ChatMessage(role="assistant", **{**no_content, **self._fields(self._parts)})

    def _fields(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Fields of a message with these parts."""
        fields: dict[str, Any] = {}
        for kind in (PartKind.REASONING, PartKind.CONTENT):
            text = "".join(part.text for part in parts if part.kind is kind)
            if text and (kind is PartKind.CONTENT or self._has_reasoning):
                fields[kind.value] = text
        calls = [
            MessageToolCall(
                id=part.call.id,
                type="function",
                function=FunctionCall(name=part.call.name, arguments=part.call.arguments),
            )
            for part in parts
            if part.call
        ]
        return fields | ({"tool_calls": calls} if calls else {})
