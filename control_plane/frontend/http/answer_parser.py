"""A chat's answer in its parts: reasoning, content and tool calls, as its text comes.

Enters: pieces of text, cut anywhere. Leaves: parts in order; all cuts of a text give the same.
Does not know: tokens, requests, responses, grammars.

A tool call is a part once it is complete. What begins as one and does not parse stays content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from control_plane.frontend.http.call_forms import CallForm, ToolCall, Tools, Unfinished

THINK = ("<think>", "</think>")
"""Markers of reasoning: DeepSeek, Kimi, Qwen and GLM have the same."""
_MAX_ENDS = 64
"""A call with so many end markers in its values is none."""
_NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class PartKind(Enum):
    """What a part of an answer is."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: text, or a call."""

    kind: PartKind
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a request says of the calls in its answer."""

    form: CallForm | None = None
    """None if calls stay content."""
    tools: Tools = field(default_factory=dict)
    num_earlier: int = 0
    """Calls before the answer in the conversation."""


class _Before(Enum):
    """What stands before a stretch of text, and so what white space at its start is."""

    NOTHING = "text"
    MARKER = "text if other text follows"
    REASONING = "none of the content"


class _Calls:
    """Parses content that may have calls in it."""

    def __init__(self, context: CallContext, before: _Before) -> None:
        self._form = form = context.form
        self._tools = context.tools
        self._number = context.num_earlier
        self._markers = (*form.begins, *form.section) if form else ()
        self._before = before
        self._space: str | None = ""
        """White space since the latest marker; None once there was other text."""
        self._held = ""
        self._begin = ""
        """What has begun the call that the held text is in; empty: it is in none."""
        self._first_end = -1
        """Where the first end marker ends that stands within a value of the call."""
        self._num_ends = 0
        """End markers within a value of the call, each of which cost a look at all of it."""
        self._num_tried = 0
        """Characters of the held text in which no end marker begins that ends the call."""

    def feed(self, text: str, is_last: bool = False) -> list[AnswerPart]:
        """Parts that the text completes; all that is left if it is the last."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._call_step(parts, is_last) if self._begin else self._text_step(parts, is_last):
            pass
        return parts

    def _text_step(self, parts: list[AnswerPart], is_last: bool) -> bool:
        """Give the text before a marker, and take the marker; False if there is none."""
        at, marker = _first_of(self._held, self._markers)
        if not marker:
            end = len(self._held) - (0 if is_last else _num_begun(self._held, self._markers))
            self._give(parts, self._held[:end])
            self._held = self._held[end:]
            if is_last and self._space and self._before is _Before.NOTHING:
                parts.append(AnswerPart(PartKind.CONTENT, self._space))
                self._space = ""
            return False
        self._give(parts, self._held[:at])
        self._held = self._held[at + len(marker) :]
        if self._form and marker in self._form.begins:
            self._begin, self._first_end, self._num_tried, self._num_ends = marker, -1, 0, 0
        else:
            self._space, self._before = "", _Before.MARKER
        return True

    def _call_step(self, parts: list[AnswerPart], is_last: bool) -> bool:
        """Take the call that has begun, or its marker as text; False if it may go on."""
        form = self._form
        assert form is not None
        call, end = self._read(form, is_last)
        if call is not None:
            call_id = call.id or form.new_id(call.name, self._number)
            parts.append(AnswerPart(PartKind.CALL, call=replace(call, id=call_id)))
            self._number += 1
            self._held = self._held[end:]
            self._space, self._before = "", _Before.MARKER
        elif end < 0:
            return False
        else:
            # Another call may begin behind it; if none of them ends, only the last can be whole.
            is_ended = not is_last or form.end in self._held
            begun = 0 if is_ended else max(map(self._held.rfind, form.begins))
            self._give(parts, self._begin + self._held[: max(begun, 0)])
            self._held = self._held[max(begun, 0) :]
        self._begin = ""
        return True

    def _read(self, form: CallForm, is_last: bool) -> tuple[ToolCall | None, int]:
        """The call and where it ends; (None, -1) if it may go on; (None, 0) if it is none.

        An end marker within a value belongs to it, unless another call begins behind the marker.
        """
        marker = "" if self._begin == form.begins[0] else self._begin
        while True:
            at = self._held.find(form.end, self._num_tried)
            between = self._held[self._first_end : at if at >= 0 else None]
            if self._first_end >= 0 and _first_of(between, form.begins)[1]:
                return None, 0
            if at < 0:
                break
            try:
                return form.read(marker + self._held[:at], self._tools), at + len(form.end)
            except Unfinished:
                self._num_tried = at + len(form.end)
                self._first_end = self._num_tried if self._first_end < 0 else self._first_end
                self._num_ends += 1
                if self._num_ends == _MAX_ENDS:
                    return None, 0
            except _NO_CALL:
                return None, 0
        if not is_last:
            self._num_tried = max(self._num_tried, len(self._held) - len(form.end) + 1)
            return None, -1
        try:
            if form.is_whole_without_end:
                return form.read(marker + self._held, self._tools), len(self._held)
        except _NO_CALL:
            pass
        return None, 0

    def _give(self, parts: list[AnswerPart], text: str) -> None:
        """Give text, and the white space before it once there is more than that."""
        if self._space is not None:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._space = None
            if self._before is _Before.REASONING:
                text = text.lstrip()
        if text:
            parts.append(AnswerPart(PartKind.CONTENT, text))


class AnswerParser:
    """Parses one choice's text by markers."""

    def __init__(
        self, calls: CallContext, has_reasoning: bool = False, begins_inside: bool = False
    ) -> None:
        """has_reasoning: whether THINK marks reasoning.

        begins_inside: the prompt has the marker that begins reasoning.
        """
        self._context = calls
        self._has_reasoning = has_reasoning
        form = calls.form
        self._call_markers = (*form.begins, *form.section[:1]) if form else ()
        self._held = ""
        """Text of the reasoning, or before it is known whether there is any."""
        self._may_begin = has_reasoning and not begins_inside
        """Whether the answer is empty so far: reasoning can only be at its start."""
        self._is_inside = begins_inside and has_reasoning
        self._is_first = True
        """Whether nothing of the reasoning was given: white space is dropped."""
        self._calls: _Calls | None = None if has_reasoning else _Calls(calls, _Before.NOTHING)
        """Parses the content, or a call within the reasoning that ends it if nothing else does."""
        self._call_parts: list[AnswerPart] = []
        """Parts of a call within the reasoning, and of what is behind the call."""

    @property
    def is_reasoning(self) -> bool | None:
        """Whether the next text is reasoning; None: the answer has none."""
        return self._is_inside if self._has_reasoning else None

    def feed(self, text: str) -> list[AnswerPart]:
        """Parts that the text completes, in order."""
        return self._parsed(text, False)

    def finish(self) -> list[AnswerPart]:
        """What was held back, at the answer's end."""
        return self._parsed("", True)

    def _parsed(self, text: str, is_last: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._may_begin:
            self._held += text
            begun = self._held.lstrip()
            if not is_last and THINK[0].startswith(begun) and begun != THINK[0]:
                return []
            self._may_begin = False
            text, self._held = self._held, ""
            if begun.startswith(THINK[0]):
                self._is_inside, text = True, begun.removeprefix(THINK[0])
            else:
                self._calls = _Calls(self._context, _Before.NOTHING)
        if self._is_inside:
            text = self._reasoned(parts, text, is_last)
        if not self._is_inside and self._calls is not None:
            parts += self._calls.feed(text, is_last)
        return parts

    def _reasoned(self, parts: list[AnswerPart], text: str, is_last: bool) -> str:
        """Give reasoning; returns what is behind it.

        A call ends it, unless it proves to be a draft: the marker of the end comes later.
        """
        while True:
            self._held += text
            end = self._held.find(THINK[1])
            if end >= 0:
                self._reason(parts, self._held[:end].rstrip())
                rest, self._held = self._held[end + len(THINK[1]) :], ""
                self._is_inside, self._calls = False, _Calls(self._context, _Before.REASONING)
                return rest
            if self._calls is None:
                at, marker = _first_of(self._held, self._call_markers)
                begun = _num_begun(self._held, (THINK[1], *self._call_markers))
                until = at if marker else len(self._held) - begun
                # White space before a marker is none of the reasoning.
                until = len(self._held[:until].rstrip())
                if is_last and not marker:
                    until = len(self._held)
                self._reason(parts, self._held[:until])
                self._held = self._held[until:]
                if not marker:
                    return ""
                text = self._held.lstrip()
                self._calls = _Calls(self._context, _Before.REASONING)
            self._call_parts += self._calls.feed(text, is_last)
            if self._call_parts and self._call_parts[0].kind is PartKind.CALL:
                if is_last:
                    self._is_inside = False
                    parts += self._call_parts
                return ""
            if not self._call_parts:
                return ""
            # No call: what looked like one is reasoning.
            marker = _first_of(self._held, self._call_markers)[1]
            until = self._held.index(marker) + len(marker)
            self._reason(parts, self._held[:until])
            text, self._held = self._held[until:], ""
            self._calls, self._call_parts = None, []

    def _reason(self, parts: list[AnswerPart], text: str) -> None:
        if self._is_first:
            text = text.lstrip()
        if text:
            self._is_first = False
            parts.append(AnswerPart(PartKind.REASONING, text))


def _first_of(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first of the markers begins, and which it is; (-1, "") if there is none."""
    found = [(at, -len(one), one) for one in markers if (at := text.find(one)) >= 0]
    at, _, marker = min(found, default=(-1, 0, ""))
    return at, marker


def _num_begun(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of the text that may begin a marker."""
    longest = max(map(len, markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
