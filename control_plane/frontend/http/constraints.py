"""Structured output of an HTTP body, as the fields of a ClientRequest.

Enters: response_format and structured_outputs. Leaves: one constraint at most, or an ApiError that
names the field. Does not know: grammars.
"""

from __future__ import annotations

import json
from typing import Any

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.protocol import GenerationRequest, StructuredOutputs

_KINDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")


def constraint_fields(request: GenerationRequest) -> dict[str, Any]:
    """The constraint's fields of a ClientRequest; empty without one. Raises ApiError."""
    form, outputs = request.response_format, request.structured_outputs
    has_format = form is not None and form.type != "text"
    if outputs is not None:
        if has_format:
            raise ApiError(
                "structured_outputs is given beside response_format; only one of them can be",
                "structured_outputs",
            )
        return _structured(outputs)
    if form is None or not has_format:
        return {}
    if form.type == "json_object":
        return {"constraint_field": "response_format", "json_object": True}
    if form.type == "structural_tag":
        return {"constraint_field": "response_format", "structural_tag": form.tags}
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(
            "response_format has no json_schema.schema; it is required", "response_format"
        )
    return {
        "constraint_field": "response_format",
        "json_schema": _text(form.json_schema.schema_, {}),
    }


def _structured(outputs: StructuredOutputs) -> dict[str, Any]:
    given = {
        name: value for name in _KINDS if (value := getattr(outputs, name)) not in (None, False)
    }
    if len(given) != 1:
        names = ", ".join(name.strip("_") for name in given) or "none"
        raise ApiError(
            "structured_outputs must have exactly one of json, regex, choice, grammar, "
            f"json_object and structural_tag; it has {names}",
            "structured_outputs",
        )
    ((name, value),) = given.items()
    called = f"structured_outputs.{name.strip('_')}"
    if value == "":
        raise ApiError(f"{called} is empty; it must be a constraint", called)
    whitespace: dict[str, Any] = {}
    if not outputs.disable_any_whitespace:
        whitespace["whitespace_flexible"] = True
    if outputs.whitespace_pattern is not None:
        whitespace["whitespace_pattern"] = outputs.whitespace_pattern
    if name == "json_object" and whitespace:
        name, value = "json_", {"type": "object"}
    if name == "json_":
        name, value = "json_schema", _text(value, whitespace)
    return {"constraint_field": called, name: value}


def _text(schema: dict[str, Any] | bool | str, whitespace: dict[str, Any]) -> str:
    """The schema as text, with the library's own options for whitespace."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(
                f"structured_outputs.json is no JSON: {error}", "structured_outputs.json"
            ) from error
    if whitespace and isinstance(schema, dict):
        schema = {"x-guidance": whitespace, **schema}
    return json.dumps(schema)
