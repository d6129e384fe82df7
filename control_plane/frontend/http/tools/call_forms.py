"""The forms in which families of models write tool calls, for readers and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from control_plane.frontend.http.tools.call_readers import (
    STRICT_JSON,
    CallReader,
    JsonReader,
    TaggedReader,
    ToolCall,
    Tools,
    named,
)
from control_plane.frontend.http.tools.tool_schemas import FOR_PEOPLE, Schema

Parts = list[Any]
"""Content between the markers of a call, as in a structural tag (see tagged_text)."""
Value = Callable[..., Any]
"""Makes the part for all arguments as an object, or for one value and its end.

A value has a name, an end, and texts that a bare string cannot contain.
"""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a family of models writes tool calls."""

    begins: tuple[str, ...]
    """Tags that begin a call. One that ends with = continues with a name and >."""
    end: str
    reader: Callable[[Tools], CallReader]
    parts: Callable[[str, Schema, Value], Parts]
    """Returns the content between the markers for (the function's name, parameters, Value)."""
    section: tuple[str, ...] = ()
    """Tags around all calls, without further meaning."""
    within: tuple[str, ...] = ()
    """Other tags within a call."""
    new_id: Callable[[str, int], str] = lambda name, number: f"chatcmpl-tool-{uuid4().hex}"
    """Makes an id of (the function's name, earlier calls in the conversation), if the model writes
    none. It is vLLM's, unless the model has a form of its own."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of the form."""
        return (*self.begins, self.end, *self.section, *self.within)


_GAP = re.compile(r"\s*:\s*|[\s{},]*")
"""Text between the keys and values of a JSON object."""


def members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, as written. Raises ValueError."""
    if not isinstance(STRICT_JSON.decode(text), dict):
        raise ValueError("no object")
    found = {}
    at = _behind_gap(text, 0)
    while at < len(text):
        key, at = STRICT_JSON.raw_decode(text, at)
        begin = _behind_gap(text, at)
        _, at = STRICT_JSON.raw_decode(text, begin)
        found[key] = text[begin:at]
        at = _behind_gap(text, at)
    return found


def _behind_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return gap.end() if gap else at


def _arguments(text: str) -> str:
    """Nothing and null stand for no arguments; a JSON string may hold the object.

    Raises ValueError for anything else.
    """
    text = text.strip()
    if text in ("", "null", '""'):
        return "{}"
    value = STRICT_JSON.decode(text)
    if isinstance(value, str):
        return _arguments(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    text.encode()  # A half of a surrogate pair, taken out of a string, is no text.
    return text


def _hermes(text: str, tools: Tools) -> ToolCall:
    call = members(text)
    name = json.loads(call.get("name", "0"))
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    name.encode()
    return ToolCall("", name, _arguments(call.get("arguments", call.get("parameters", ""))))


def _deepseek_v3(text: str, tools: Tools) -> ToolCall:
    kind, _, rest = text.partition("<｜tool▁sep｜>")
    name, _, block = rest.partition("\n")
    begin = re.match(r"\s*```(?:json)?\n", block)
    if kind.strip() != "function" or begin is None or not name.strip():
        raise ValueError("no function with a block of JSON")
    written = block[begin.end() :].rstrip()
    arguments = _arguments(written.removesuffix("```"))
    if not written.endswith("```"):
        raise ValueError("the block of JSON does not end")
    return ToolCall("", name.strip(), arguments)


def _deepseek_v31(text: str, tools: Tools) -> ToolCall:
    name, separator, arguments = text.partition("<｜tool▁sep｜>")
    if not separator or not name.strip() or "\n" in name.strip():
        raise ValueError("no name")
    return ToolCall("", name.strip(), _arguments(arguments))


def _kimi_k2(text: str, tools: Tools) -> ToolCall:
    written, separator, arguments = text.partition("<|tool_call_argument_begin|>")
    call_id = written.strip()
    if not separator:
        raise ValueError("no arguments")
    if found := re.fullmatch(r"(?:functions\.)?(.+):\d+", call_id):
        # The model counts over the whole conversation; its template prints the id again.
        return ToolCall(call_id, named(found[1], tools), _arguments(arguments))
    for name in sorted(tools, key=len, reverse=True):
        # Such as functionsexec5 and functions_exec_1 (sglang#21377).
        if re.fullmatch(rf"(?:functions)?[._]?{re.escape(name)}[:._]?\d*", call_id):
            return ToolCall("", name, _arguments(arguments))
    raise ValueError("no id")


class _GlmReader(TaggedReader):
    letters = {"<tool_call>": "T", "</tool_call>": "t", "<arg_key>": "K", "</arg_key>": "k",
               "<arg_value>": "P", "</arg_value>": "p"}  # fmt: skip
    heads = ("TnK-kP", "Tnt")
    opens, ends, argument = "TnK-kP", "pt", "K-kP"

    def call(self, has_end: bool, is_cut: bool = False) -> ToolCall:
        # Without its end nothing shows that a call is whole.
        return super().call(has_end, is_cut=True)


class _QwenReader(TaggedReader):
    letters = {"<tool_call>": "T", "</tool_call>": "t", "<function=": "F", "</function>": "f",
               "<parameter=": "P", "</parameter>": "p"}  # fmt: skip
    heads = ("TFft", "TFP", "Fft", "FP")
    opens, ends, argument = "FP", "pft", "P"

    def _text(self, begin: int, end: int) -> str:
        # The template puts one newline before a value and one behind it.
        return super()._text(begin, end).removeprefix("\n").removesuffix("\n")


_SPLIT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
"""Words of a schema whose properties are written one by one, besides those for people."""


def _one_by_one(
    schema: Schema, before: Callable[[str], Parts], value: Callable[[str], Any], after: Any
) -> Parts:
    """Raises ValueError for parameters that are not all given by name."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    unknown = set(schema) - _SPLIT_KEYS - FOR_PEOPLE
    if unknown or set(required) - set(properties) or schema.get("type", "object") != "object":
        raise ValueError("it must be an object with properties, and require only them")
    parts: Parts = []
    for key in properties:
        if re.search(r"[<>\n]", key):
            raise ValueError(f"{key!r:.60} must have no < > and line breaks in its name")
        argument = [*before(key), value(key), after]
        parts += argument if key in required else [argument]
    return parts


def _glm_parts(name: str, schema: Schema, value: Value) -> Parts:
    # GLM-4.5 has line breaks there, and GLM-4.7 none.
    return [name, ["\n"], *_one_by_one(
        schema,
        lambda key: [f"<arg_key>{key}</arg_key>", ["\n"], "<arg_value>"],
        lambda key: value(key, "</arg_value>", ["<arg_key>", "</arg_value>"]),
        ["\n"],
    )]  # fmt: skip


def _qwen3_coder_parts(name: str, schema: Schema, value: Value) -> Parts:
    return [f"\n<function={name}>\n", *_one_by_one(
        schema,
        lambda key: [f"<parameter={key}>\n"],
        lambda key: value(key, "\n</parameter>", ["<parameter=", "</parameter>"]),
        "\n",
    ), "</function>\n"]  # fmt: skip


_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK: dict[str, Any] = {
    "begins": ("<｜tool▁call▁begin｜>",),
    "end": "<｜tool▁call▁end｜>",
    "section": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "within": (_SEPARATOR,),
}
_GLM = CallForm(
    ("<tool_call>",), "</tool_call>", _GlmReader, _glm_parts, within=tuple(_GlmReader.letters)
)
CALL_FORMS = {
    "hermes": CallForm(
        ("<tool_call>",),
        "</tool_call>",
        partial(JsonReader, _hermes, "</tool_call>", ""),
        lambda name, _, value: [f'\n{{"name": "{name}", "arguments": ', value(), "}\n"],
    ),
    "deepseek_v3": CallForm(
        reader=partial(JsonReader, _deepseek_v3, _DEEPSEEK["end"], _SEPARATOR),
        parts=lambda name, _, value: [f"function<｜tool▁sep｜>{name}\n```json\n", value(), "\n```"],
        **_DEEPSEEK,
    ),
    "deepseek_v31": CallForm(
        reader=partial(JsonReader, _deepseek_v31, _DEEPSEEK["end"], _SEPARATOR),
        parts=lambda name, _, value: [f"{name}<｜tool▁sep｜>", value()],
        **_DEEPSEEK,
    ),
    "kimi_k2": CallForm(
        ("<|tool_call_begin|>",),
        "<|tool_call_end|>",
        partial(JsonReader, _kimi_k2, "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        lambda name, _, value: [
            f"functions.{name}:",
            {"type": "integer", "minimum": 0, "maximum": 9999},
            "<|tool_call_argument_begin|>",
            value(),
        ],
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_argument_begin|>",),
        lambda name, number: f"functions.{name}:{number}",
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "qwen3_coder": CallForm(
        ("<tool_call>", "<function="),
        "</tool_call>",
        _QwenReader,
        _qwen3_coder_parts,
        within=tuple(_QwenReader.letters),
    ),
}
"""Forms by service.tool_call_parser. Qwen's other models write as hermes does."""
