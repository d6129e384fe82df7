"""How families of models write tool calls: the one description of each form.

Enters: what a model wrote between a form's markers, and the functions that it may call. Leaves:
calls; of a call to be written, the parts that a grammar holds it to. Does not know: answers,
requests, grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from control_plane.frontend.http.tool_schemas import (
    ALL_TYPES,
    FOR_PEOPLE,
    Schema,
    property_of,
    type_of,
    types_of,
)

Tools = Mapping[str, Schema]
"""Schemas of arguments by the function's name."""
Parts = list[Any]
"""What stands between the markers of a call, as a structural tag has it (see tagged_text)."""
Value = Callable[..., Any]
"""Makes the part with all arguments as an object; or, of a name, what ends its value, and texts
that a string cannot have in it if it stands as it is, the part with this value and its end."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes."""

    id: str
    """Empty if the model writes none."""
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class Unfinished(ValueError):
    """The text ends within a value, so the marker behind it belongs to the value."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes tool calls."""

    begins: tuple[str, ...]
    """What begins a call. The first is the marker; another one is part of the call itself."""
    end: str
    read: Callable[[str, Tools], ToolCall]
    """Reads what is between the markers. Raises Unfinished, or another error if that is no call."""
    parts: Callable[[str, Schema, Value], Parts]
    """What stands between the markers of a call of the function with these parameters."""
    section: tuple[str, ...] = ()
    """Markers around all calls; they mean nothing more."""
    is_whole_without_end: bool = True
    """Whether `read` sees that a call is whole, so that an answer may end without the marker."""
    new_id: Callable[[str, int], str] = lambda name, number: f"chatcmpl-tool-{uuid4().hex}"
    """An id for (the function's name, calls before it in the conversation), if the model writes
    none. As vLLM makes it, unless the model has a form of its own."""


def is_plain_name(name: str) -> bool:
    """Whether a function's name can be told from what surrounds it in every form."""
    return re.fullmatch(r"[\w.-]+", name) is not None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse, parse_int=lambda digits: 0)
"""Reads what JSON is, and how long; a number of any length is one."""


def _loaded(text: str) -> Any:
    """The value of strict JSON, with 0 for integers. Raises ValueError."""
    try:
        value = _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise (Unfinished if error.msg.startswith("Unterminated") else ValueError)(
            error.msg
        ) from None
    return value


_GAP = re.compile(r"\s*:\s*|[\s{},]*")
"""What is between the keys and values of a JSON object."""


def members(text: str) -> dict[str, str]:
    """The members of a JSON object, each as it is written. Raises ValueError."""
    if not isinstance(_loaded(text), dict):
        raise ValueError("no object")
    found = {}
    at = _behind_gap(text, 0)
    while at < len(text):
        key, at = _JSON.raw_decode(text, at)
        begin = _behind_gap(text, at)
        _, at = _JSON.raw_decode(text, begin)
        found[key] = text[begin:at]
        at = _behind_gap(text, at)
    return found


def _behind_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return gap.end() if gap else at


def _arguments(text: str) -> str:
    """The text, if it is a JSON object. Nothing and null stand for no arguments.

    An object that stands in a JSON string is taken out of it. Raises ValueError.
    """
    text = text.strip()
    if text in ("", "null", '""'):
        return "{}"
    value = _loaded(text)
    if isinstance(value, str):
        return _arguments(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    text.encode()  # A half of a surrogate pair, taken out of a string, is no text.
    return text


def _named(name: str, tools: Tools) -> str:
    """The name, if it can be one. Raises ValueError."""
    if name in tools or is_plain_name(name):
        return name
    raise ValueError("no name")


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
        return ToolCall(call_id, _named(found[1], tools), _arguments(arguments))
    for name in sorted(tools, key=len, reverse=True):
        # Such as functionsexec5 and functions_exec_1 (sglang#21377).
        if re.fullmatch(rf"(?:functions)?[._]?{re.escape(name)}[:._]?\d*", call_id):
            return ToolCall("", name, _arguments(arguments))
    raise ValueError("no id")


_GLM_BEGIN = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>")
_QWEN_BEGIN = re.compile(r"\s*<parameter=([^>\n]+)>")


def _tagged(text: str, begin: re.Pattern[str], end: str) -> dict[str, str]:
    """Texts by their names, one by one, and nothing else. Raises ValueError."""
    values: dict[str, str] = {}
    at = 0
    while found := begin.match(text, at):
        stop = text.find(end, found.end())
        if stop < 0:
            raise Unfinished("a value has no end")
        name = found[1].strip()
        if name in values or begin.search(text, found.end(), stop):
            raise ValueError("one argument in another, or twice")
        values[name] = text[found.end() : stop]
        at = stop + len(end)
    if text[at:].strip():
        raise ValueError("text between arguments")
    return values


def _glm(text: str, tools: Tools) -> ToolCall:
    name, key, rest = text.partition("<arg_key>")
    values = _tagged(key + rest, _GLM_BEGIN, "</arg_value>")
    return _typed(_named(name.strip(), tools), values, tools)


def _qwen3_coder(text: str, tools: Tools) -> ToolCall:
    found = re.match(r"\s*<function=([^>\n]+)>", text)
    if found is None:
        raise ValueError("no function")
    inner, end, rest = text[found.end() :].rpartition("</function>")
    values = _tagged(inner if end else rest, _QWEN_BEGIN, "</parameter>")
    if not end or rest.strip():
        raise ValueError("the function does not end")
    # The template puts one newline before a value and one behind it.
    plain = {name: text.removeprefix("\n").removesuffix("\n") for name, text in values.items()}
    return _typed(_named(found[1].strip(), tools), plain, tools)


def _typed(name: str, values: Mapping[str, str], tools: Tools) -> ToolCall:
    """A call whose arguments are texts: each is of a type that its schema allows."""
    schema = tools.get(name, {})
    pairs = (
        f"{_text(key)}: {_value(text, types_of(property_of(schema, key), schema))}"
        for key, text in values.items()
    )
    return ToolCall("", name, "{" + ", ".join(pairs) + "}")


def _value(text: str, types: frozenset[str]) -> str:
    """The JSON of a value, as it is written if it is one; else a string."""
    written = text.strip()
    if {"boolean", "null"} & types and written in ("True", "False", "None"):
        written = {"True": "true", "False": "false", "None": "null"}[written]
    try:
        value = _loaded(written)
    except (ValueError, RecursionError):
        return _text(text)
    fits = type_of(value) in types and (types == ALL_TYPES or not isinstance(value, str))
    return written if fits else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_SPLIT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
"""What a schema may say whose properties are written one by one; beside words for people."""


def _one_by_one(
    schema: Schema, before: Callable[[str], Parts], value: Callable[[str], Any], after: Any
) -> Parts:
    """Each argument between its parts, which may be left out if it is not required.

    Raises ValueError for parameters that are not all said by their names.
    """
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


_TOOL_CALL = ("<tool_call>",)
_DEEPSEEK: dict[str, Any] = {
    "begins": ("<｜tool▁call▁begin｜>",),
    "end": "<｜tool▁call▁end｜>",
    "section": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
}
_GLM = CallForm(_TOOL_CALL, "</tool_call>", _glm, _glm_parts, is_whole_without_end=False)
CALL_FORMS = {
    "hermes": CallForm(
        _TOOL_CALL,
        "</tool_call>",
        _hermes,
        lambda name, _, value: [f'\n{{"name": "{name}", "arguments": ', value(), "}\n"],
    ),
    "deepseek_v3": CallForm(
        read=_deepseek_v3,
        parts=lambda name, _, value: [f"function<｜tool▁sep｜>{name}\n```json\n", value(), "\n```"],
        **_DEEPSEEK,
    ),
    "deepseek_v31": CallForm(
        read=_deepseek_v31,
        parts=lambda name, _, value: [f"{name}<｜tool▁sep｜>", value()],
        **_DEEPSEEK,
    ),
    "kimi_k2": CallForm(
        ("<|tool_call_begin|>",),
        "<|tool_call_end|>",
        _kimi_k2,
        lambda name, _, value: [
            f"functions.{name}:",
            {"type": "integer", "minimum": 0, "maximum": 9999},
            "<|tool_call_argument_begin|>",
            value(),
        ],
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        new_id=lambda name, number: f"functions.{name}:{number}",
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "qwen3_coder": CallForm(
        ("<tool_call>", "<function="), "</tool_call>", _qwen3_coder, _qwen3_coder_parts
    ),
}
"""By service.tool_call_parser. Qwen's other models write as hermes does."""
