"""A conversation in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.protocol import Message, TextPart
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from control_plane.frontend.http.tools.template_habits import (
    INSTRUCTIONS,
    TemplateHabits,
    habits_of,
)


def conversation(messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return the messages for this template. Raises ApiError.

    Instructions that it would lose become the user's, at their place, or join those before; so
    do a user's messages in a row that it refuses.
    """
    habits = habits_of(template)
    written: list[dict[str, Any]] = []
    contents: list[list[Any]] = []
    is_late = was_moved = False
    for number, message in enumerate(messages):
        role = message.role
        if role == "developer" and not habits.knows_developer:
            role = "system"
        is_late = is_late or role not in INSTRUCTIONS
        is_moved = is_late and role in INSTRUCTIONS and role not in habits.late_roles
        role = "user" if is_moved else role
        fields = _message(message, role, number, habits)
        pair = (written[-1]["role"] if written else "", role)
        is_joined = number > 0 and pair not in habits.pairs
        if is_late:
            is_joined = pair == ("user", "user") and (is_joined or is_moved or was_moved)
        if is_joined:
            contents[-1].append(fields["content"])
        else:
            written.append(fields)
            contents.append([fields["content"]])
        was_moved = is_moved
    return [
        {**fields, "content": _joined(some)} if len(some) > 1 else fields
        for fields, some in zip(written, contents, strict=True)
    ]


def earlier_calls(message: Message) -> list[Any]:
    """Return the calls of a message."""
    calls = (message.model_extra or {}).get("tool_calls")
    return calls if isinstance(calls, list) else []


def _joined(contents: Sequence[Any]) -> str | list[dict[str, str]]:
    """Return the contents as one; a single part is as a text."""
    parts: list[list[str]] = [[]]
    for content in contents:
        given = content if isinstance(content, list) else [{"text": content or ""}]
        for index, part in enumerate(given):
            if index:
                parts.append([])
            parts[-1].append(part["text"])
    texts = ["\n\n".join(filter(None, part)) for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _message(message: Message, role: str, number: int, habits: TemplateHabits) -> dict[str, Any]:
    # Most templates handle an absent field, and few one that is null.
    fields = {name: value for name, value in message.model_dump().items() if value is not None}
    fields["role"] = role
    if isinstance(message.content, list):
        parts = [_text_part(part, message.role, number) for part in message.content]
        takes_parts = role in habits.roles_with_parts
        fields["content"] = parts if takes_parts else "\n".join(part["text"] for part in parts)
    elif message.content is None:
        fields["content"] = habits.no_content
    if isinstance(fields.get("reasoning"), str):
        fields.setdefault("reasoning_content", fields["reasoning"])
    fields.pop("tool_calls", None)
    if calls := earlier_calls(message):
        fields["tool_calls"] = [
            _call(call, f"messages.{number}.tool_calls", index, habits.takes_text)
            for index, call in enumerate(calls)
        ]
    return fields


def _text_part(part: TextPart, role: str, number: int) -> dict[str, str]:
    field = f"messages.{number}.content"
    kinds = {"text": part.text} | ({"refusal": part.refusal} if role == "assistant" else {})
    if part.type not in kinds:
        raise ApiError(
            f"{field} has a part of type {part.type!r:.60}; only {' and '.join(kinds)} parts are "
            "supported",
            field,
        )
    text = kinds[part.type]
    if text is None:
        raise ApiError(
            f"{field} has a part of type {part.type!r} without {part.type}; it must be a text",
            field,
        )
    return {"type": "text", "text": text}


def _call(call: Any, field: str, index: int, takes_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            f"{field}.{index} is no call; it must be "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
            field,
        )
    arguments = _arguments(function.get("arguments"), takes_text)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _arguments(sent: Any, takes_text: bool) -> dict[str, Any] | str:
    try:
        value = json.loads(sent) if isinstance(sent, str) else sent
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        value = {}
    elif takes_text and isinstance(sent, str):
        return sent.strip()
    return json.dumps(value, ensure_ascii=False) if takes_text else value
