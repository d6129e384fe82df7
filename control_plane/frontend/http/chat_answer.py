"""One choice's answer of a chat, as a message and as what is new of it.

Enters: pieces of text. Leaves: OpenAI's messages, with reasoning and tool calls apart. Does not
know: how an answer is parsed, other choices.
"""

from __future__ import annotations

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
        self._texts: dict[PartKind, list[str]] = {PartKind.REASONING: [], PartKind.CONTENT: []}
        self._calls: list[MessageToolCall] = []
        self._new: list[AnswerPart] = []
        self.num_calls = 0

    def add(self, text: str, is_last: bool) -> None:
        """Add text that the choice has generated."""
        self._new = self._parser.feed(text)
        if is_last:
            self._new += self._parser.finish()
        if not self._has_many_calls:
            calls = [part for part in self._new if part.call]
            extra = calls[0 if self.num_calls else 1 :]
            self._new = [part for part in self._new if part not in extra]
        for part in self._new:
            if part.call:
                self.num_calls += 1
                function = FunctionCall(name=part.call.name, arguments=part.call.arguments)
                self._calls.append(
                    MessageToolCall(id=part.call.id, type="function", function=function)
                )
            else:
                self._texts[part.kind].append(part.text)

    def new_message(self) -> ChatMessage:
        """What the latest text has added; without any field if that is nothing."""
        fields: dict[str, Any] = {}
        for kind in (PartKind.REASONING, PartKind.CONTENT):
            text = "".join(part.text for part in self._new if part.kind is kind)
            if text and (kind is PartKind.CONTENT or self._has_reasoning):
                fields[kind.value] = text
        calls = [part.call for part in self._new if part.call]
        if calls:
            first = self.num_calls - len(calls)
            fields["tool_calls"] = [
                MessageToolCall(
                    index=index,
                    id=call.id,
                    type="function",
                    function=FunctionCall(name=call.name, arguments=call.arguments),
                )
                for index, call in enumerate(calls, first)
            ]
        return ChatMessage(**fields)

    def whole_message(self) -> ChatMessage:
        """The message of the whole answer; its content is null if there are calls and no text."""
        content = "".join(self._texts[PartKind.CONTENT])
        fields: dict[str, Any] = {"content": content or (None if self._calls else "")}
        reasoning = "".join(self._texts[PartKind.REASONING])
        if reasoning and self._has_reasoning:
            fields["reasoning"] = reasoning
        if self._calls:
            fields["tool_calls"] = self._calls
        return ChatMessage(role="assistant", **fields)
