"""Tools of a request: functions for the model, and by their own kinds and names for the client."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.responses_api.protocol import is_writable
from control_plane.frontend.http.tools.call_readers import ToolCall
from control_plane.frontend.http.tools.translated_chat import LoadedTools

logger = logging.getLogger(__name__)

SEARCH = "tool_search"
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as it is."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool, which takes a text."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it."""

    kind: str
    """function, custom or tool_search."""
    name: str
    namespace: str = ""

    def text(self, call: ToolCall) -> str:
        """Return the arguments of a function, as JSON; of another tool its input."""
        try:
            given = json.loads(call.arguments)["input"] if self.kind == "custom" else None
        except (ValueError, KeyError, TypeError):
            given = None
        # A half of a surrogate pair is no text.
        text = given if isinstance(given, str) else call.arguments
        return text.encode(errors="replace").decode()

    def values(self, call: ToolCall) -> Any:
        """Return the arguments of a search; those that cannot be written are left out."""
        try:
            given = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return {}
        return given if is_writable(given) else {}

    @property
    def names(self) -> dict[str, str]:
        """The fields `name` and, of a tool that has one, `namespace`."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


class ClientTools:
    """The tools of one request."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Raises ApiError for a tool without what its type needs."""
        self.loaded = LoadedTools()
        self._by_function: dict[str, ClientTool] = {}
        self._allowed: set[str] | None = None
        tools = tools or ()
        # Without a search nothing would load tools that wait for it.
        self._has_search = any(
            one.get("type") == SEARCH and one.get("execution") == "client" for one in tools
        )
        for number, tool in enumerate(tools):
            self._declare(tool, f"tools.{number}")

    @property
    def available(self) -> list[dict[str, Any]]:
        """The tools that the model may call, in the form of chats."""
        tools = self.loaded.available
        if self._allowed is None:
            return tools
        return [one for one in tools if one["function"]["name"] in self._allowed]

    def of(self, function: str) -> ClientTool:
        """Return the tool that the model calls by this name."""
        return self._by_function.get(function) or ClientTool("function", function)

    def load(self, tools: Sequence[Any], field: str) -> str:
        """Return the definitions of found tools, for the place where they are loaded."""
        return "\n".join(
            self.loaded.load(name)
            for number, tool in enumerate(tools)
            for name in self._declare(tool, f"{field}.{number}", is_late=True)
        )

    def choice(self, choice: Any) -> Any:
        """Return the tool_choice of a chat. Raises ApiError for a tool that is not there."""
        match choice:
            case {"type": "allowed_tools", "tools": list(tools)}:
                known = self._known()
                self._allowed = {
                    self._chosen(one, f"tool_choice.tools.{number}", known)
                    for number, one in enumerate(tools)
                }
                return choice.get("mode", "auto")
            case {"type": str()}:
                name = self._chosen(choice, "tool_choice", self._known())
                return {"type": "function", "function": {"name": name}}
        if choice in (None, "none", "auto", "required"):
            return choice
        raise ApiError(
            f"tool_choice is {choice!r:.60}; it must be none, auto, required or "
            '{"type": "function", "name": ...}',
            "tool_choice",
        )

    def _known(self) -> dict[str, str]:
        """Return the available functions by name, and by a tool's own name that no other has."""
        functions = [tool["function"]["name"] for tool in self.loaded.available]
        own = [self.of(name).name for name in functions]
        counts = Counter(own)
        alone = {name: one for name, one in zip(own, functions, strict=True) if counts[name] == 1}
        return alone | {name: name for name in functions}

    @staticmethod
    def _chosen(choice: Any, field: str, known: Mapping[str, str]) -> str:
        match choice:
            case {"type": "tool_search"}:
                name = SEARCH
            case {"type": "function" | "custom", "name": str(name)}:
                name = called_as(name, choice.get("namespace"))
            case _:
                kind = choice.get("type") if isinstance(choice, dict) else choice
                raise ApiError(
                    f"{field}.type is {kind!r:.60}; tools of the service's are not served: it must "
                    "name a function or a custom tool, or be auto",
                    f"{field}.type",
                )
        if name not in known:
            named = ", ".join(dict.fromkeys(known.values())) or "none"
            sentence = f"{field}.name is {name!r:.60}; the tools are {named}"
            raise ApiError(sentence, f"{field}.name")
        return known[name]

    def _declare(
        self, tool: Any, field: str, is_late: bool = False, namespace: str = ""
    ) -> list[str]:
        """Return the functions of a tool. is_late: a message loads it."""
        match tool:
            case {"type": "namespace", "name": str(name), "tools": list(inner)} if name:
                return [
                    function
                    for number, one in enumerate(inner)
                    for function in self._declare(one, f"{field}.tools.{number}", is_late, name)
                ]
            case {"type": "function" | "custom" as kind, "name": str(own)} if own:
                pass
            case {"type": "tool_search" as kind, "execution": "client"}:
                own = SEARCH
            case {"type": "function" | "custom" | "namespace" as kind}:
                needed = "a name and a list of tools" if kind == "namespace" else "a name"
                raise ApiError(f"{field} must have {needed}", field)
            case {"type": str(kind)}:
                _say_once(f"tools of the type {kind:.60} are left out: the service runs none")
                return []
            case _:
                raise ApiError(f'{field} must be like {{"type": "function", "name": ...}}', field)
        name = called_as(own, namespace)
        if is_late and name in self._by_function:
            return [name]
        function = {**tool, "name": name}
        if kind == "custom":
            function |= {"parameters": _INPUT, "description": _described(tool)}
        if not isinstance(function.get("parameters"), dict | None):
            raise ApiError(f"{field}.parameters must be a JSON schema", f"{field}.parameters")
        waits = is_late or (self._has_search and tool.get("defer_loading") is True)
        self.loaded.declare(function, field, waits)
        self._by_function[name] = ClientTool(kind, own, namespace)
        return [name]


def called_as(name: str, namespace: Any) -> str:
    """Return the function's name of a tool that the client names so."""
    return f"{namespace}__{name}" if namespace else name


def _described(tool: Mapping[str, Any]) -> str:
    """Return the description of a custom tool, with its grammar, to which nothing holds it."""
    described = str(tool.get("description") or "")
    match tool.get("format"):
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            _say_once(f"custom tools have grammars ({syntax:.60}), which the model only reads")
            described += f"\n\nThe input follows this grammar ({syntax}):\n{definition}"
    return described.strip()


@lru_cache(maxsize=64)
def _say_once(sentence: str) -> None:
    logger.warning(sentence)
