"""Tools of a chat: the constraint and the parser of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.frontend.client_request import Reasoning
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.protocol import ChatRequest
from control_plane.frontend.http.tools.answer_parser import AnswerParser, CallContext
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.conversation import earlier_calls
from control_plane.frontend.http.tools.forced_calls import ForcedCallsParser, Parser
from control_plane.frontend.http.tools.strict_calls import strict_calls
from control_plane.frontend.http.tools.tool_schemas import moved, parameters_of

_MAX_CALLS = 16
"""Most calls of one answer with tool_choice "required"."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A chat's use of tools."""

    form: str
    """The model's form of calls, a name of CALL_FORMS; empty: unknown."""
    functions: list[dict[str, Any]]
    """Functions that the model may call, as the request has them."""
    choice: str
    """none, auto, required, or `function`: the one that the model must call."""
    max_calls: int
    """Most calls of one answer with the choice `required`."""
    num_earlier: int
    """Calls in the conversation."""

    def constraint(self, is_free: bool) -> dict[str, Any]:
        """Return fields of a ClientRequest for required calls, or strict ones; empty without.

        is_free: nothing else constrains the answer. Raises ApiError.
        """
        match self.choice:
            case "function":
                schema = moved(parameters_of(self.functions[0]), "#")
            case "required":
                calls = [_call_schema(one, number) for number, one in enumerate(self.functions)]
                items = {"anyOf": calls}
                schema = {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": self.max_calls,
                    "items": items,
                }
            case "auto" if is_free and any(one.get("strict") is True for one in self.functions):
                tag = strict_calls(self.form, self.functions)
                return {"constraint_field": "tools", "structural_tag": tag}
            case _:
                return {}
        return {"constraint_field": "tools", "json_schema": json.dumps(schema)}

    def new_parser(self, reasoning: Reasoning | None) -> Callable[[], Parser] | None:
        """Return the maker of each choice's parser; None if the text is the content."""
        form = CALL_FORMS.get(self.form)
        has_reasoning, is_inside = reasoning is not None, bool(reasoning and reasoning.has_begun)
        if self.choice in ("required", "function"):
            name = self.functions[0]["name"] if self.choice == "function" else None
            new_id = (form or CALL_FORMS["hermes"]).new_id
            return lambda: ForcedCallsParser(
                name, AnswerParser(CallContext(), has_reasoning, is_inside), new_id,
                self.num_earlier,
            )  # fmt: skip
        if self.choice == "none":
            form = None
        if form is None and not has_reasoning:
            return None
        schemas = {one["name"]: parameters_of(one) for one in self.functions}
        context = CallContext(form, schemas, self.num_earlier)
        return lambda: AnswerParser(context, has_reasoning, is_inside)


def read_tools(request: ChatRequest, form: str, has_format: bool) -> ToolUse:
    """Read the request's tools. Raises ApiError for impossible tools or choices.

    form: see ToolUse. has_format: the request constrains its output.
    """
    functions = [_function(tool, number) for number, tool in enumerate(request.tools or ())]
    names = [function["name"] for function in functions]
    firsts: dict[str, int] = {}
    for number, name in enumerate(names):
        if (first := firsts.setdefault(name, number)) < number:
            raise _refusal(
                f"tools.{number} and tools.{first} have one name, {name!r:.60}; each must have its "
                "own",
                "tools",
            )
    match request.tool_choice:
        case None:
            choice = "auto"
        case "none" | "auto" | "required" as choice:
            pass
        case {"function": dict(named)}:
            choice, chosen = "function", str(named.get("name", ""))
            if functions and chosen not in names:
                raise _refusal(f"tool_choice names {chosen!r}; the tools are {', '.join(names)}")
            functions = [one for one in functions if one["name"] == chosen]
        case wrong:
            raise _refusal(
                f"tool_choice is {wrong!r:.60}; it must be none, auto, required or "
                '{"type": "function", "function": {"name": ...}}'
            )
    if choice == "auto" and not functions:
        choice = "none"
    if choice != "none" and not functions:
        raise _refusal("tool_choice is given; it needs tools")
    if choice == "auto" and not form:
        raise _refusal(
            "tools are given, and the model's chat template writes calls in no known form: "
            'tool_choice must be "none", "required" or a function, or the service must be started '
            f"with the form as --tool-call-parser ({', '.join(CALL_FORMS)})"
        )
    if choice in ("required", "function") and has_format:
        raise _refusal("tool_choice is given beside a form of the output; only one of them can be")
    max_calls = 1 if request.parallel_tool_calls is False else _MAX_CALLS
    num_earlier = sum(len(earlier_calls(message)) for message in request.messages)
    return ToolUse(form, functions, choice, max_calls, num_earlier)


def _function(tool: dict[str, Any], number: int) -> dict[str, Any]:
    function: Any = tool.get("function")
    match tool:
        case {"type": "function", "function": {"name": str(name)}} if name:
            if isinstance(function.get("parameters"), dict | None):
                return dict(function)
            raise _refusal(f"tools.{number}.function.parameters must be a JSON schema", "tools")
    raise _refusal(
        f'tools.{number} must be {{"type": "function", "function": {{"name": ...}}}}', "tools"
    )


def _refusal(sentence: str, field: str = "tool_choice") -> ApiError:
    return ApiError(sentence, field)


def _call_schema(function: Mapping[str, Any], number: int) -> dict[str, Any]:
    place = f"#/items/anyOf/{number}/properties/parameters"
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "parameters": moved(parameters_of(function), place),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
