"""Tools of a chat: what the request asks, as a grammar of its answer and a parser for it.

Enters: tools, tool_choice and the rendered prompt. Leaves: the constraint of a ClientRequest, and
parsers, or an ApiError that names the field. Does not know: how a model writes calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from control_plane.frontend.client_request import Reasoning
from control_plane.frontend.http.answer_parser import (
    CALL_FORMS,
    THINK,
    AnswerParser,
    ForcedCallsParser,
    Parser,
)
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.protocol import ChatRequest
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.strict_calls import strict_calls

_MAX_CALLS = 16
"""Most calls of one answer with tool_choice "required"."""


def check_tools(request: ChatRequest, model: ServedModel) -> None:
    """Raise ApiError for tools or a choice that cannot be."""
    names = [_name(tool, number) for number, tool in enumerate(request.tools or ())]
    choice = _choice(request)
    if choice == "none":
        return
    if not names:
        raise ApiError("tool_choice is given; it needs tools", "tool_choice")
    if isinstance(choice, dict) and _chosen(choice) not in names:
        raise ApiError(
            f"tool_choice names {_chosen(choice)!r}; the tools are {', '.join(names)}",
            "tool_choice",
        )
    if choice == "auto" and not model.call_form:
        raise ApiError(
            "tools are given, and the model's chat template shows no known form of tool calls "
            '(service.tool_call_parser); tool_choice must be "none", "required" or a function',
            "tool_choice",
        )
    if choice != "auto" and _has_format(request):
        raise ApiError(
            "tool_choice is given beside a form of the output; only one of them can be",
            "tool_choice",
        )


def constrained_fields(request: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """The constraint that tools put on the answer: calls that it must have, or strict ones.

    Empty if the model is free. Raises ApiError.
    """
    choice = _choice(request)
    functions = [tool["function"] for tool in request.tools or ()]
    if choice == "auto" and _is_strict(request):
        tags = strict_calls(model.call_form, functions)
        return {"constraint_field": "tools", "structural_tag": tags}
    if choice in ("none", "auto"):
        return {}
    definitions: dict[str, Any] = {}
    if isinstance(choice, dict):
        (one,) = [one for one in functions if one["name"] == _chosen(choice)]
        return {"constraint_field": "tools", "json_schema": json.dumps(_parameters(one))}
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": one["name"]},
                "parameters": _hoisted(one, definitions),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    most = 1 if request.parallel_tool_calls is False else _MAX_CALLS
    schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": items}}
    text = json.dumps({**schema, "$defs": definitions})
    return {"constraint_field": "tools", "json_schema": text}


def reasoning_before(model: ServedModel, prompt: str) -> Reasoning | None:
    """What may come before an answer that is held to a form.

    None for a model that does not reason, and if the prompt has ended the reasoning.
    """
    end = prompt.rstrip()
    if not model.has_reasoning or end.endswith(THINK[1]):
        return None
    return Reasoning(*THINK, has_begun=end.endswith(THINK[0]))


def new_parser(
    request: ChatRequest, model: ServedModel, prompt: str
) -> Callable[[], Parser] | None:
    """Makes the parser of each choice's text; None if the text is the content."""
    choice = _choice(request)
    is_forced = choice == "required" or isinstance(choice, dict)
    has_reasoning = model.has_reasoning
    if is_forced or _has_format(request) or _is_strict(request):
        has_reasoning = reasoning_before(model, prompt) is not None
    begins_inside = has_reasoning and prompt.rstrip().endswith(THINK[0])
    if is_forced:
        name = _chosen(choice) if isinstance(choice, dict) else None
        return lambda: ForcedCallsParser(name, AnswerParser(None, has_reasoning, begins_inside))
    form = CALL_FORMS[model.call_form] if choice == "auto" else None
    if form is None and not has_reasoning:
        return None
    return lambda: AnswerParser(form, has_reasoning, begins_inside)


def template_message(fields: dict[str, Any], template: str) -> dict[str, Any]:
    """A message as templates read it: arguments of calls parsed, reasoning by its older name."""
    if isinstance(fields.get("reasoning"), str):
        fields.setdefault("reasoning_content", fields["reasoning"])
    calls = fields.get("tool_calls")
    reads_objects = re.search(r"arguments[^}]{0,40}(\|\s*tojson|items\(\))|_args", template)
    if not isinstance(calls, list) or not reads_objects:
        return fields
    return {**fields, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _choice(request: ChatRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return "auto" if request.tools else "none"
    if choice in ("none", "auto", "required"):
        return str(choice)
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        return choice
    raise ApiError(
        f"tool_choice is {choice!r:.60}; it must be none, auto, required or "
        '{"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def _chosen(choice: dict[str, Any]) -> str:
    return str(choice["function"].get("name", ""))


def _name(tool: dict[str, Any], number: int) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        raise ApiError(
            f'tools.{number} must be {{"type": "function", "function": {{"name": ...}}}}', "tools"
        )
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(f"tools.{number}.function.parameters must be a JSON schema", "tools")
    return name


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _hoisted(function: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The parameters' schema; its definitions go to the root, where references look for them."""
    schema = dict(_parameters(function))
    for name, definition in schema.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise ApiError(f"tools define {name!r} in $defs in two ways; rename one", "tools")
    return schema


def _is_strict(request: ChatRequest) -> bool:
    """Whether calls must follow their schemas. An answer that is held to a form has none."""
    functions = (tool["function"] for tool in request.tools or ())
    return not _has_format(request) and any(one.get("strict") is True for one in functions)


def _has_format(request: ChatRequest) -> bool:
    form = request.response_format
    return request.structured_outputs is not None or (form is not None and form.type != "text")
