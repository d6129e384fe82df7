"""Tools of a chat: what the request asks, as a grammar of its answer and a parser for it.

Enters: tools, tool_choice and the rendered prompt. Leaves: the constraint of a ClientRequest, and
parsers, or an ApiError that names the field. Does not know: how a model writes calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from control_plane.frontend.client_request import Reasoning
from control_plane.frontend.http.answer_parser import THINK, AnswerParser, CallContext, Parser
from control_plane.frontend.http.call_forms import CALL_FORMS
from control_plane.frontend.http.conversation import earlier_calls
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.forced_calls import ForcedCallsParser
from control_plane.frontend.http.protocol import ChatRequest
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.strict_calls import strict_calls
from control_plane.frontend.http.tool_schemas import moved, parameters_of

_MAX_CALLS = 16
"""Most calls of one answer with tool_choice "required"."""


def check_tools(request: ChatRequest, model: ServedModel) -> None:
    """Raise ApiError for tools or a choice that cannot be."""
    names = [_name(tool, number) for number, tool in enumerate(request.tools or ())]
    for number, name in enumerate(names):
        if (first := names.index(name)) < number:
            raise ApiError(
                f"tools.{number} and tools.{first} have one name, {name!r:.60}; each must have its "
                "own",
                "tools",
            )
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
            "tools are given, and the model's chat template writes calls in no known form: "
            'tool_choice must be "none", "required" or a function, or the service must be started '
            f"with the form as --tool-call-parser ({', '.join(CALL_FORMS)})",
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
    if isinstance(choice, dict):
        one = next(one for one in functions if one["name"] == _chosen(choice))
        schema = moved(parameters_of(one), "#")
        return {"constraint_field": "tools", "json_schema": json.dumps(schema)}
    schemas = [moved(parameters_of(one), f"#/$defs/{n}") for n, one in enumerate(functions)]
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": one["name"]},
                "parameters": {"$ref": f"#/$defs/{number}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, one in enumerate(functions)
    ]
    most = 1 if request.parallel_tool_calls is False else _MAX_CALLS
    schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": items}}
    schema["$defs"] = {str(number): one for number, one in enumerate(schemas)}
    return {"constraint_field": "tools", "json_schema": json.dumps(schema)}


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
    form = CALL_FORMS.get(model.call_form)
    num_earlier = sum(len(calls) for one in request.messages if (calls := earlier_calls(one)))
    if is_forced:
        name = _chosen(choice) if isinstance(choice, dict) else None
        new_id = (form or CALL_FORMS["hermes"]).new_id
        return lambda: ForcedCallsParser(
            name, AnswerParser(CallContext(), has_reasoning, begins_inside), new_id, num_earlier
        )
    if choice != "auto":
        form = None
    if form is None and not has_reasoning:
        return None
    tools = {one["function"]["name"]: parameters_of(one["function"]) for one in request.tools or ()}
    context = CallContext(form, tools, num_earlier)
    return lambda: AnswerParser(context, has_reasoning, begins_inside)


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


def _is_strict(request: ChatRequest) -> bool:
    """Whether calls must follow their schemas. An answer that is held to a form has none."""
    functions = (tool["function"] for tool in request.tools or ())
    return not _has_format(request) and any(one.get("strict") is True for one in functions)


def _has_format(request: ChatRequest) -> bool:
    form = request.response_format
    return request.structured_outputs is not None or (form is not None and form.type != "text")
