"""The habits of a chat template, found by rendering short conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from control_plane.frontend.http.tools.answer_parser import AnswerParser, CallContext
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.chat_template import ChatTemplate

_ARGUMENTS = {"city": "Ulm", "days": 3}
_NAME = "probe_weather"
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "Weather.", "parameters": _PARAMETERS},
}
_ID = f"functions.{_NAME}:0"
_USER = {"role": "user", "content": "Where?"}
_RESULT = {"role": "tool", "tool_call_id": _ID, "name": _NAME}
_SHOWN = ("first-probe", "second-probe")
_ROLES = ("system", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")
"""Roles of messages that nobody in the conversation says."""


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """The forms in which a template reads and writes messages."""

    call_form: str
    """Form of CALL_FORMS for the calls that the template writes; empty: none fits."""
    no_content: str | None
    """The content of a message that has none."""
    takes_text: bool
    """True: arguments of a call are given as JSON text, not as an object."""
    knows_developer: bool
    """True if it accepts messages of the role developer."""
    roles_with_parts: frozenset[str]
    """Roles whose content it accepts in parts."""
    late_roles: frozenset[str]
    """Those of INSTRUCTIONS that it writes behind a user's message, at their place."""
    pairs: frozenset[tuple[str, str]]
    """Roles of two first messages that it writes in order, of INSTRUCTIONS or the user's."""


@lru_cache(maxsize=16)
def habits_of(template: ChatTemplate) -> TemplateHabits:
    """Return the template's habits, found by a few rendered conversations."""
    call_form, no_content, takes_text = next(_ways(template), ("", "", _needs_text(template)))
    developer = [{"role": "developer", "content": _SHOWN[0]}, _USER]
    return TemplateHabits(
        call_form,
        no_content,
        takes_text,
        "developer" in template.source and _SHOWN[0] in _rendered(template, developer),
        frozenset(role for role in _ROLES if _takes_parts(template, role, takes_text)),
        frozenset(role for role in INSTRUCTIONS if _writes_both(template, role, role, _USER)),
        frozenset(
            pair
            for pair in [("user", "user"), *product(INSTRUCTIONS, INSTRUCTIONS)]
            if _writes_both(template, *pair)
        ),
    )


def _ways(template: ChatTemplate) -> Iterator[tuple[str, str | None, bool]]:
    """Yield ways to give the template a call so that its text is read as that call.

    Each is (form, content of the message, True if the arguments are a text).
    """
    for takes_text, no_content in product((False, True), ("", None)):
        text = _rendered(template, _with_call(no_content, takes_text))
        for name, form in CALL_FORMS.items():
            # Instructions before the call may show one that does not end.
            for found in re.finditer("|".join(map(re.escape, form.begins)), text):
                parser = AnswerParser(CallContext(form, {_NAME: _PARAMETERS}))
                parts = parser.feed(text[found.start() :]) + parser.finish()
                calls = [one.call for one in parts if one.call and one.call.name == _NAME]
                if any(json.loads(call.arguments) == _ARGUMENTS for call in calls):
                    yield name, no_content, takes_text


def _needs_text(template: ChatTemplate) -> bool:
    text = _rendered(template, _with_call("", False))
    return (not text or str(_ARGUMENTS) in text) and bool(_rendered(template, _with_call("", True)))


def _with_call(content: str | None, takes_text: bool) -> list[dict[str, Any]]:
    arguments = json.dumps(_ARGUMENTS) if takes_text else _ARGUMENTS
    function = {"name": _NAME, "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    asked = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [_USER, asked, {**_RESULT, "content": "Rain."}]


def _writes_both(template: ChatTemplate, role: str, other: str, *between: dict[str, Any]) -> bool:
    first, second = {"role": role, "content": _SHOWN[0]}, {"role": other, "content": _SHOWN[1]}
    answer = [{"role": "assistant", "content": "There."}] if between else []
    text = _rendered(template, [first, *between, second, *answer, _USER])
    shown = (_SHOWN[0], *(one["content"] for one in between), _SHOWN[1])
    places = [text.find(one) for one in shown]
    return -1 not in places and places == sorted(places)


def _takes_parts(template: ChatTemplate, role: str, takes_text: bool) -> bool:
    parts = [{"type": "text", "text": text} for text in _SHOWN]
    message = {"role": role, "content": parts}
    messages: dict[str, list[dict[str, Any]]] = {
        "system": [message, _USER],
        "user": [message],
        "assistant": [_USER, message, _USER],
        "tool": [*_with_call("", takes_text)[:-1], {**_RESULT, "content": parts}],
    }
    text = _rendered(template, messages[role])
    # Parts that are printed as they are have their types beside them.
    is_printed = any(f"{quote}type{quote}: {quote}text" in text for quote in "'\"")
    return all(one in text for one in _SHOWN) and not is_printed


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """Empty if the template refuses the messages."""
    try:
        return template.render(messages, tools=[_TOOL])
    except ValueError:
        return ""
