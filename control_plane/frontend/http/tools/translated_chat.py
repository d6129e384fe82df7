"""Chats made of requests in the form of another API."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.protocol import ChatRequest

logger = logging.getLogger(__name__)

PICTURE = "[a picture was here; this model reads text]"
"""Text in the place of a picture or document in a tool's result, which stays in the history."""


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """A request as a chat."""

    chat: ChatRequest
    hidden: frozenset[str]
    """Tools that messages define, where they were loaded, and the template does not."""


def chat_of(fields: Mapping[str, Any], hidden: frozenset[str]) -> TranslatedChat:
    """Return the chat of these fields. Raises RequestValidationError for wrong ones."""
    try:
        return TranslatedChat(ChatRequest(**fields), hidden)
    except ValidationError as error:
        mistakes = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(mistakes, body=fields) from error


def check_refused(given: Mapping[str, Any] | None, refused: Mapping[str, str]) -> None:
    """Raise ApiError for a field that asks for something. refused: fields with what to do."""
    for name, instead in refused.items():
        if (given or {}).get(name):
            raise ApiError(f"{name} is not supported; {instead}", name)


def picture_sentence() -> str:
    """Return PICTURE, and note it in the log."""
    logger.info("a tool's result has a picture or document; the model reads text")
    return PICTURE


class LoadedTools:
    """Tools at the top of a prompt, and deferred ones, which messages define."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, Any]] = {}
        self._deferred: set[str] = set()
        self._loaded: set[str] = set()
        self._written: set[str] = set()
        """Deferred tools whose definition is in a message."""

    @property
    def available(self) -> list[dict[str, Any]]:
        """The tools that the model may call, in the form of chats."""
        waiting = self._deferred - self._loaded
        return [tool for name, tool in self._by_name.items() if name not in waiting]

    @property
    def hidden(self) -> frozenset[str]:
        """Tools that messages define."""
        return frozenset(self._deferred)

    def declare(
        self, tool: Mapping[str, Any], field: str, is_deferred: bool, is_again: bool = False
    ) -> None:
        """Add a tool of the fields name, description, parameters and strict.

        is_deferred: it waits until it is loaded. is_again: it may take the place of a deferred one.
        Raises ApiError if its name is taken.
        """
        name = tool["name"]
        if name in self._by_name and not (is_again and name in self._deferred):
            raise ApiError(f"{field}.name is {name!r:.60}; another tool has this name", field)
        # Some templates refuse a tool without a description.
        function = {"name": name, "description": tool.get("description") or ""}
        if tool.get("parameters") is not None:
            function["parameters"] = tool["parameters"]
        if tool.get("strict") is True:
            function["strict"] = True
        self._by_name[name] = {"type": "function", "function": function}
        if is_deferred:
            self._deferred.add(name)
            self._written.discard(name)

    def load(self, name: Any) -> str:
        """Return the definition of a tool where it is first loaded, later its name."""
        tool = self._by_name.get(name) if isinstance(name, str) else None
        if tool is None or name not in self._deferred:
            return str(name)
        self._loaded.add(name)
        if name in self._written:
            return str(name)
        self._written.add(name)
        return json.dumps(tool, ensure_ascii=False)

    def unload(self, name: str) -> None:
        """Take a deferred tool away until it is loaded again."""
        self._loaded.discard(name)
