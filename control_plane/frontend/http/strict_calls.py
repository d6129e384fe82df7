"""Tool calls that follow their schemas wherever the model makes one, as a structural tag.

Enters: functions, and the form in which the model writes calls. Leaves: the tag's JSON, or an
ApiError. Does not know: requests, grammars, tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from control_plane.frontend.http.answer_parser import CALL_FORMS
from control_plane.frontend.http.errors import ApiError

_SPACED = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
}
"""JSON as templates print the calls of earlier messages."""
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""A function without parameters takes none."""
_SPLIT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
"""What a schema may say whose properties are written one by one; beside words for people."""
_FOR_PEOPLE = {"title", "description", "$schema", "$id", "$comment", "examples"}


def strict_calls(form: str, functions: list[dict[str, Any]]) -> str:
    """The structural tag of text with calls of these functions, in this form of CALL_FORMS.

    Raises ApiError.
    """
    markers = CALL_FORMS[form]
    structures = []
    for number, function in enumerate(functions):
        if not re.fullmatch(r"[\w.-]+", function["name"]):
            raise ApiError(
                f"tools.{number}.function.name is {function['name']!r:.60}; it must have letters, "
                "digits, and . _ - only",
                "tools",
            )
        schema = function.get("parameters") or _NOTHING
        before, parts, after = _WRITTEN[form](function["name"], schema, number)
        structures.append(
            {"begin": markers.begin + before, "parts": parts, "end": after + markers.end}
        )
    return json.dumps(
        {"structures": structures, "triggers": [markers.begin], "between": markers.section}
    )


def _whole(before: str, after: str) -> Callable[[str, dict[str, Any], int], Any]:
    """Arguments as one JSON object between two texts; %s is the function's name."""

    def written(name: str, schema: dict[str, Any], number: int) -> Any:
        return before.replace("%s", name), [_SPACED | schema], after

    return written


def _kimi(name: str, schema: dict[str, Any], number: int) -> Any:
    index = {"type": "integer", "minimum": 0, "maximum": 9999}
    parts = [index, "<|tool_call_argument_begin|>", _SPACED | schema]
    return f"functions.{name}:", parts, ""


def _glm(name: str, schema: dict[str, Any], number: int) -> Any:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    unknown = set(schema) - _SPLIT_KEYS - _FOR_PEOPLE
    if unknown or set(required) - set(properties) or schema.get("type", "object") != "object":
        raise ApiError(
            f"tools.{number}.function.parameters cannot be strict with this model, which writes "
            "arguments one by one; it must be an object with properties, and require only them",
            "tools",
        )
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts: list[Any] = []
    for key, of_key in properties.items():
        value = _SPACED | definitions | (of_key if isinstance(of_key, dict) else {})
        argument = [f"<arg_key>{key}</arg_key>\n<arg_value>", value, "</arg_value>\n"]
        parts += argument if key in required else [argument]
    return f"{name}\n", parts, ""


_WRITTEN: dict[str, Callable[[str, dict[str, Any], int], Any]] = {
    "hermes": _whole('\n{"name": "%s", "arguments": ', "}\n"),
    "deepseek_v3": _whole("function<｜tool▁sep｜>%s\n```json\n", "\n```"),
    "deepseek_v31": _whole("%s<｜tool▁sep｜>", ""),
    "kimi_k2": _kimi,
    "glm45": _glm,
}
"""By service.tool_call_parser: (function's name, schema, number) -> what begins a call behind its
marker, parts, what ends it."""
