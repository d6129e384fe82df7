"""A chat's answer in its parts: reasoning, content and tool calls, as its text comes.

Enters: pieces of text, cut anywhere. Leaves: parts in order; all cuts of a text give the same.
Does not know: tokens, requests, responses, grammars.

A tool call is a part once it is complete. What begins as one and does not parse stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol
from uuid import uuid4

THINK = ("<think>", "</think>")
"""Markers of reasoning: DeepSeek, Kimi, Qwen and GLM have the same."""


class PartKind(Enum):
    """What a part of an answer is."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: text, or a call."""

    kind: PartKind
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes tool calls."""

    begin: str
    end: str
    read: Callable[[str], ToolCall]
    """Reads what is between the markers. Raises ValueError or KeyError if that is no call."""
    section: tuple[str, ...] = ()
    """Markers around all calls; they mean nothing more."""


class Parser(Protocol):
    """Takes an answer apart."""

    @property
    def is_reasoning(self) -> bool | None:
        """Whether the next text is reasoning; None: the answer has none."""

    def feed(self, text: str) -> list[AnswerPart]:
        """Parts that the text completes, in order."""

    def finish(self) -> list[AnswerPart]:
        """What was held back, at the answer's end."""


def new_call_id() -> str:
    """An id as vLLM makes it, for models that write none themselves."""
    return f"chatcmpl-tool-{uuid4().hex}"


def _arguments(text: str) -> str:
    """The text, if it is a JSON object. Raises ValueError."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("arguments are no object")
    return text.strip()


def _hermes(text: str) -> ToolCall:
    call = json.loads(text)
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict) or not isinstance(call["name"], str):
        raise ValueError("no name, or arguments that are no object")
    return ToolCall(new_call_id(), call["name"], json.dumps(arguments, ensure_ascii=False))


def _deepseek_v3(text: str) -> ToolCall:
    kind, _, rest = text.partition("<｜tool▁sep｜>")
    name, _, block = rest.partition("\n")
    found = re.fullmatch(r"\s*```json\n(.*)\n```\s*", block, re.DOTALL)
    if kind.strip() != "function" or found is None:
        raise ValueError("no function with a block of JSON")
    return ToolCall(new_call_id(), name.strip(), _arguments(found[1]))


def _deepseek_v31(text: str) -> ToolCall:
    name, separator, arguments = text.partition("<｜tool▁sep｜>")
    if not separator or not name.strip():
        raise ValueError("no name")
    return ToolCall(new_call_id(), name.strip(), _arguments(arguments))


def _kimi_k2(text: str) -> ToolCall:
    call_id, _, arguments = text.partition("<|tool_call_argument_begin|>")
    found = re.fullmatch(r"\s*((?:functions\.)?([\w.-]+):\d+)\s*", call_id)
    if found is None:
        raise ValueError("no id")
    # The model counts over the whole conversation; its template prints the id again.
    return ToolCall(found[1], found[2], _arguments(arguments))


def _glm45(text: str) -> ToolCall:
    name, _, rest = text.strip().partition("\n")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", rest, re.DOTALL)
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError("no name")
    arguments = {key.strip(): _value(value) for key, value in pairs}
    return ToolCall(new_call_id(), name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
CALL_FORMS = {
    "hermes": CallForm("<tool_call>", "</tool_call>", _hermes),
    "deepseek_v3": CallForm(*_DEEPSEEK_CALL, _deepseek_v3, _DEEPSEEK),
    "deepseek_v31": CallForm(*_DEEPSEEK_CALL, _deepseek_v31, _DEEPSEEK),
    "kimi_k2": CallForm(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _kimi_k2,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "glm45": CallForm("<tool_call>", "</tool_call>", _glm45),
}
"""By service.tool_call_parser. Qwen's models write as hermes does."""


def call_form_of(template: str) -> str:
    """The name of the form that a chat template shows; empty if it shows none."""
    if "<|tool_calls_section_begin|>" in template:
        return "kimi_k2"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<arg_key>" in template:
        return "glm45"
    return "hermes" if "<tool_call>" in template else ""


class AnswerParser:
    """Parses one choice's text by markers."""

    def __init__(self, form: CallForm | None, has_reasoning: bool, begins_inside: bool) -> None:
        """form: None if tool calls stay content. has_reasoning: whether THINK marks reasoning.

        begins_inside: the prompt has the marker that begins reasoning.
        """
        self._form = form
        self._kind = PartKind.REASONING if begins_inside else PartKind.CONTENT
        self._has_reasoning = has_reasoning
        self._may_reason = has_reasoning and not begins_inside
        """Whether the answer is empty so far: reasoning can only be at its start."""
        self._held = ""
        self._is_first = begins_inside
        """Whether nothing was given since the latest marker: white space after it is dropped."""

    @property
    def is_reasoning(self) -> bool | None:
        """See Parser."""
        return self._kind is PartKind.REASONING if self._has_reasoning else None

    def feed(self, text: str) -> list[AnswerPart]:
        """See Parser."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """See Parser."""
        held, self._held = self._held, ""
        if self._kind is PartKind.CALL and self._form is not None:
            held, self._kind = self._form.begin + held, PartKind.CONTENT
        parts: list[AnswerPart] = []
        self._give(parts, held)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Take one marker, and what is before it, from the held text; False if there is none."""
        if self._may_reason:
            return self._begin()
        markers = self._markers()
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if not found:
            if self._kind is not PartKind.CALL:
                self._give(parts, self._take_safe(markers))
            return False
        at, marker = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        before, self._held = self._held[:at], self._held[at + len(marker) :]
        form = self._form
        if self._kind is PartKind.CALL and form is not None:
            self._kind, self._is_first = PartKind.CONTENT, True
            try:
                parts.append(AnswerPart(PartKind.CALL, call=form.read(before)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self._give(parts, form.begin + before + form.end)
            return True
        self._give(parts, before.rstrip())
        self._is_first = True
        if marker == THINK[1]:
            self._kind = PartKind.CONTENT
        elif form is not None and marker == form.begin:
            self._kind = PartKind.CALL
        return True

    def _begin(self) -> bool:
        """Decide whether the answer starts with reasoning; False if its text is too short yet."""
        text = self._held.lstrip()
        if THINK[0].startswith(text) and text != THINK[0]:
            return False
        self._may_reason = False
        if text.startswith(THINK[0]):
            self._kind, self._is_first = PartKind.REASONING, True
            self._held = text.removeprefix(THINK[0])
        return True

    def _markers(self) -> tuple[str, ...]:
        if self._kind is PartKind.REASONING:
            return (THINK[1],)
        if self._form is None:
            return ()
        if self._kind is PartKind.CALL:
            return (self._form.end,)
        return (self._form.begin, *self._form.section)

    def _take_safe(self, markers: tuple[str, ...]) -> str:
        """The held text but for an end that may be white space before a marker, or a part of it."""
        end = len(self._held)
        for size in range(min(max(map(len, markers), default=1) - 1, end), 0, -1):
            if any(marker.startswith(self._held[-size:]) for marker in markers):
                end -= size
                break
        end = len(self._held[:end].rstrip())
        safe, self._held = self._held[:end], self._held[end:]
        return safe

    def _give(self, parts: list[AnswerPart], text: str) -> None:
        if self._is_first:
            text = text.lstrip()
        if text:
            self._is_first = False
            parts.append(AnswerPart(self._kind, text))


class ForcedCallsParser:
    """Parses an answer that a grammar held to tool calls: reasoning, JSON, and nothing else."""

    def __init__(self, name: str | None, text: AnswerParser) -> None:
        """name: the function whose arguments the answer is; None: the answer is a list of calls.

        text: takes reasoning apart from the JSON.
        """
        self._name = name
        self._parser = text
        self._text = ""

    @property
    def is_reasoning(self) -> bool | None:
        """See Parser."""
        return self._parser.is_reasoning

    def feed(self, text: str) -> list[AnswerPart]:
        """See Parser."""
        return self._taken(self._parser.feed(text))

    def finish(self) -> list[AnswerPart]:
        """See Parser. What max_tokens cut is content."""
        return self._taken(self._parser.finish()) + self._calls()

    def _taken(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """The reasoning among the parts; the content is kept."""
        self._text += "".join(part.text for part in parts if part.kind is PartKind.CONTENT)
        return [part for part in parts if part.kind is PartKind.REASONING]

    def _calls(self) -> list[AnswerPart]:
        try:
            value = json.loads(self._text)
            calls = [{"name": self._name, "parameters": value}] if self._name else value
            return [
                AnswerPart(
                    PartKind.CALL,
                    call=ToolCall(
                        new_call_id(),
                        one["name"],
                        json.dumps(one["parameters"], ensure_ascii=False),
                    ),
                )
                for one in calls
            ]
        except ValueError:
            return [AnswerPart(PartKind.CONTENT, self._text)] if self._text else []
