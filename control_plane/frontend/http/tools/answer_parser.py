"""A parser of a chat's answer into reasoning, content and tool calls, as its text comes.

All cuts of a text give the same parts. A broken tool call stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from control_plane.frontend.client_request import Contents
from control_plane.frontend.http.tools.call_forms import CallForm
from control_plane.frontend.http.tools.call_readers import NO_CALL, CallReader, ToolCall, Tools

THINK = ("<think>", "</think>")
"""Markers of reasoning of DeepSeek, Kimi, Qwen and GLM."""
_MAX_NAME = 256


class PartKind(Enum):
    """The kind of a part of an answer."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: text, or a call."""

    kind: PartKind
    text: str = ""
    call: ToolCall | None = None
    end: int = field(default=0, compare=False)
    """End of content in the answer's whole text."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """A request's settings for the calls in its answer."""

    form: CallForm | None = None
    """None if calls stay content."""
    tools: Tools = field(default_factory=dict)
    num_earlier: int = 0
    """Calls before the answer in the conversation."""


class _Before(Enum):
    """The part before a text, which gives white space its meaning."""

    NOTHING = "text"
    MARKER = "text if other text follows"
    REASONING = "none of the content"


Piece = tuple[str, bool]
"""A tag (True), or text without any."""


class _Tags:
    """Cuts text into tags and the text between them. Tags have < only at the start."""

    def __init__(self, tags: Sequence[str]) -> None:
        """tags: one that ends with = continues with a name and >."""
        self._tags = tags
        self._pattern = _pattern(tuple(tags))
        self.held = ""
        """End of the text, which may begin a tag."""

    def cut(self, text: str, is_last: bool = False) -> Iterator[Piece]:
        text, at = self.held + text, 0
        for found in self._pattern.finditer(text) if self._tags else ():
            if at < found.start():
                yield text[at : found.start()], False
            yield found[0], True
            at = found.end()
        end = len(text) if is_last else text.rfind("<", at) % (len(text) + 1)
        if not any(map(self._may_become, self._tags, [text[end:]] * len(self._tags))):
            end = len(text)
        self.held = text[end:]
        if at < end:
            yield text[at:end], False

    @staticmethod
    def _may_become(tag: str, begun: str) -> bool:
        is_named = tag.endswith("=") and len(begun) <= len(tag) + _MAX_NAME
        return tag.startswith(begun) or (is_named and re.match(f"{tag}[^>\n]*$", begun) is not None)


@lru_cache(maxsize=64)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    name = rf"[^<>\n]{{1,{_MAX_NAME}}}>"
    return re.compile("|".join(re.escape(tag) + name * tag.endswith("=") for tag in tags))


class _Content:
    def __init__(self, context: CallContext, before: _Before, at: int = 0) -> None:
        """at: offset of its start in the answer's text."""
        self._context = context
        self._form = context.form
        self._before = before
        self._at = at
        """Offset of the end of the taken text in the answer's text."""
        self._space: str | None = ""
        """White space since the latest marker; None after other text."""
        self.num_calls = 0
        self.call: CallReader | None = None
        """Reads the call that has begun."""
        self._call_at = 0
        """Offset of that call, with the white space before it."""

    @property
    def num_decided(self) -> int:
        return self._call_at if self.call else self._at - len(self._space or "")

    def take(self, parts: list[AnswerPart], piece: Piece) -> None:
        """Take the next piece, and add the parts that it completes."""
        text, is_tag = piece
        is_end = self.call.add(text, is_tag) if self.call else False
        if self.call and is_end is False:
            self._end_as_text(parts, self.call.pieces)
        self._at += len(text)
        if self.call:
            if is_end and not self.end_as_call(parts, has_end=True):
                self._end_as_text(parts, self.call.pieces)
        elif is_tag and self._form and text.startswith(self._form.begins):
            self._call_at = self.num_decided - len(text)
            self.call = self._form.reader(self._context.tools)
            self.call.add(text, is_tag)
        elif is_tag and self._form and text in self._form.section:
            self._space, self._before = "", _Before.MARKER
        else:
            self._give(parts, text)

    def finish(self, parts: list[AnswerPart], is_cut: bool) -> None:
        """Add the rest at the answer's end. is_cut: more would have come."""
        if self.call and self._form and not self.end_as_call(parts, False, is_cut):
            pieces, found = self.call.pieces, list[AnswerPart]()
            first = len(pieces) if is_cut else _behind_broken(pieces, self._form)
            behind = "".join(pieces[first:])
            content = _Content(self._context, _Before.MARKER, self._at - len(behind))
            for piece in _Tags(self._form.tags).cut(behind, is_last=True):
                content.take(found, piece)
            content.finish(found, is_cut=True)
            is_broken = bool(found) and found[0].call is not None
            self._end_as_text(parts, pieces[:first] if is_broken else pieces)
            parts += found if is_broken else []
        if self._space and self._before is _Before.NOTHING:
            parts.append(AnswerPart(PartKind.CONTENT, self._space, end=self._at))

    def end_as_call(self, parts: list[AnswerPart], has_end: bool, is_cut: bool = False) -> bool:
        """Return False if the call that has begun is none. See CallReader.call."""
        assert self.call and self._form
        try:
            call = self.call.call(has_end, is_cut)
        except NO_CALL:
            return False
        number = self._context.num_earlier + self.num_calls
        call = replace(call, id=call.id or self._form.new_id(call.name, number))
        parts.append(AnswerPart(PartKind.CALL, call=call))
        self.num_calls += 1
        self.call, self._space, self._before = None, "", _Before.MARKER
        return True

    def _end_as_text(self, parts: list[AnswerPart], pieces: Sequence[str]) -> None:
        self.call = None
        self._give(parts, "".join(pieces))

    def _give(self, parts: list[AnswerPart], text: str) -> None:
        """Keep white space until more text follows."""
        if self._space is not None:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._space = None
            if self._before is _Before.REASONING:
                text = text.lstrip()
        if text:
            parts.append(AnswerPart(PartKind.CONTENT, text, end=self._at))


def _behind_broken(pieces: Sequence[str], form: CallForm) -> int:
    """Return the piece that begins the next call, behind the end of a broken one."""
    num_own = 2 if len(form.begins) > 1 and pieces[0] == form.begins[0] else 1
    begins = [number for number, one in enumerate(pieces) if one.startswith(form.begins)]
    first = next(iter(begins[num_own:]), len(pieces))
    return first if "".join(pieces[:first]).rstrip().endswith(form.end) else len(pieces)


@dataclass(slots=True)
class _Draft:
    """A call within the reasoning, and the text behind it; alone it ends the reasoning."""

    content: _Content
    pieces: list[Piece] = field(default_factory=list)
    parts: list[AnswerPart] = field(default_factory=list)
    end: int = -1
    """Piece that may end the reasoning, if it is outside the call's values; -1: none."""


class AnswerParser(Contents):
    """Parses one choice's text by markers."""

    def __init__(
        self, calls: CallContext, has_reasoning: bool = False, begins_inside: bool = False
    ) -> None:
        """has_reasoning: THINK marks reasoning. begins_inside: the prompt begins it."""
        self._context = calls
        self._has_reasoning = has_reasoning
        form = calls.form
        self._call_tags = (*form.begins, *form.section[:1]) if form else ()
        self._tags = _Tags((*(form.tags if form else ()), *THINK[1:] * has_reasoning))
        self._held = ""
        """Text before reasoning is found or ruled out."""
        self._may_begin = has_reasoning and not begins_inside
        """True while the answer is empty: reasoning can only be at its start."""
        self._is_inside = begins_inside and has_reasoning
        self._gap = ""
        """White space of the reasoning that is dropped if nothing follows it."""
        self._num_thought = 0
        """Characters of the answer's text up to the end of reasoning, or before that."""
        self.reasoning = (0, 0)
        """(start, end) of reasoning in the answer's text so far, with its end marker."""
        self._content = _Content(calls, _Before.NOTHING)
        self._draft: _Draft | None = None

    @property
    def is_reasoning(self) -> bool | None:
        """Return whether the next text is reasoning; None: the answer has none."""
        return self._is_inside if self._has_reasoning else None

    @property
    def num_decided(self) -> int:
        if self._may_begin:
            return 0
        return self._num_thought - len(self._gap) if self._is_inside else self._content.num_decided

    def contents(self, text: str) -> list[tuple[int, str]]:
        parts = [part for part in self.feed(text) if part.kind is PartKind.CONTENT]
        return [(part.end - len(part.text), part.text) for part in parts]

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that the text completes, in order."""
        return self._parsed(text, False)

    def finish(self, is_cut: bool = False) -> list[AnswerPart]:
        """Return the held parts at the answer's end. is_cut: max_tokens or an abort ended it.

        Then a call counts only if nothing else could follow it.
        """
        parts = self._parsed("", True)
        if self._is_inside:
            self._finish_reasoning(parts, is_cut)
        if not self._is_inside:
            self._content.finish(parts, is_cut)
        return parts

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
                num_before = len(text) - len(begun) + len(THINK[0])
                self._is_inside, text = True, text[num_before:]
                self._num_thought = num_before
                self.reasoning = self._num_thought, self._num_thought
        for piece in self._tags.cut(text, is_last):
            if self._is_inside:
                self._think(parts, piece)
            else:
                self._content.take(parts, piece)
        return parts

    def _think(self, parts: list[AnswerPart], piece: Piece) -> None:
        """A call ends reasoning, unless the end marker comes later: then it was a draft."""
        text, is_tag = piece
        is_end, draft = is_tag and text == THINK[1], self._draft
        if is_end and (draft is None or draft.content.call is None):
            self._end_reasoning(parts, draft.pieces if draft else [], [])
            return
        if draft is None and not (is_tag and text.startswith(self._call_tags)):
            self._reason(parts, text)
            return
        if draft is None:
            draft = _Draft(_Content(self._context, _Before.REASONING, self._num_thought))
            self._draft = draft
        if is_end and draft.end < 0:
            draft.end = len(draft.pieces)
        draft.pieces.append(piece)
        content = draft.content
        call, num_calls = content.call, content.num_calls
        content.take(draft.parts, piece)
        if content.num_calls > num_calls:
            draft.end = -1
        elif call is not content.call and draft.end >= 0:
            self._end_reasoning(parts, draft.pieces[: draft.end], draft.pieces[draft.end + 1 :])
        elif draft.parts and draft.parts[0].kind is PartKind.CONTENT:
            # No call: what looked like one is reasoning.
            self._drop_draft(parts, draft.pieces[:-1])
            self._think(parts, piece)

    def _end_reasoning(
        self, parts: list[AnswerPart], before: list[Piece], behind: list[Piece]
    ) -> None:
        self._drop_draft(parts, before)
        self._num_thought += len(THINK[1])
        if self.reasoning[1] > self.reasoning[0]:
            self.reasoning = self.reasoning[0], self._num_thought
        self._is_inside = False
        self._content = _Content(self._context, _Before.REASONING, self._num_thought)
        for piece in behind:
            self._content.take(parts, piece)

    def _finish_reasoning(self, parts: list[AnswerPart], is_cut: bool) -> None:
        draft = self._draft
        if draft and draft.end >= 0 and not draft.content.end_as_call(draft.parts, False, is_cut):
            # Whether a call goes on or the reasoning has ended is open if more would have come.
            self._context = CallContext() if is_cut else self._context
            self._end_reasoning(parts, draft.pieces[: draft.end], draft.pieces[draft.end + 1 :])
            return
        if draft:
            draft.content.finish(draft.parts, is_cut)
            calls = [number for number, part in enumerate(draft.parts) if part.call]
            if calls and not is_cut:
                self._drop_draft(parts, [(part.text, False) for part in draft.parts[: calls[0]]])
                parts += draft.parts[calls[0] :]
                self._is_inside, self._content = False, _Content(CallContext(), _Before.MARKER)
                return
            self._drop_draft(parts, draft.pieces)
        self._reason(parts, "", is_last=True)

    def _drop_draft(self, parts: list[AnswerPart], pieces: list[Piece]) -> None:
        self._draft = None
        for text, _ in pieces:
            self._reason(parts, text)

    def _reason(self, parts: list[AnswerPart], text: str, is_last: bool = False) -> None:
        """Drop white space around all reasoning, unless nothing is behind it."""
        begin, end = self.reasoning
        self._num_thought += len(text)
        text = self._gap + text
        until = len(text) if is_last else len(text.rstrip())
        text, self._gap = text[:until], text[until:]
        if end == begin:
            text = text.lstrip()
        if text:
            self.reasoning = begin, self._num_thought - len(self._gap)
            parts.append(AnswerPart(PartKind.REASONING, text))
