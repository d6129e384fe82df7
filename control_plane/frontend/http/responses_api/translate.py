"""OpenAI's Responses as a chat, so that one code renders, constrains and parses both."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.responses_api.client_tools import SEARCH, ClientTools, called_as
from control_plane.frontend.http.responses_api.protocol import (
    CHAT_FIELDS,
    LOGPROBS,
    REFUSED,
    Item,
    ResponsesRequest,
)
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.translated_chat import (
    TranslatedChat,
    chat_of,
    check_refused,
    picture_sentence,
)

_SEALED = "nanocp:"
"""Start of encrypted_content that this service wrote."""
_EFFORT = {"reasoning_effort", "enable_thinking", "thinking"}
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_PICTURES = ("input_image", "input_file", "input_audio")


def translated(
    request: ResponsesRequest,
    before: Sequence[Item],
    own: Sequence[tuple[str, Item]],
    tools: ClientTools,
    model: ServedModel,
) -> TranslatedChat:
    """Return the request as a chat. Raises ApiError for what cannot be served.

    before: items of earlier responses. own: those of the request, without references, each behind
    its field.
    """
    _check_fields(request)
    conversation = _Conversation(tools)
    if request.instructions:
        conversation.messages.append({"role": "system", "content": request.instructions})
    for field, item in [*(("previous_response_id", item) for item in before), *own]:
        conversation.add(item, field)
    if not conversation.messages:
        raise ApiError("input is empty; it must be a text, or at least one item", "input")
    given = {name: getattr(request, name, None) for name in CHAT_FIELDS}
    fields = {name: value for name, value in given.items() if value is not None} | {
        "messages": conversation.joined(),
        "tool_choice": tools.choice(request.tool_choice),
        "tools": tools.available or None,
    }
    read = model.chat_template.variables if model.chat_template else frozenset()
    effort = request.reasoning and request.reasoning.effort
    if effort and not read.isdisjoint(_EFFORT):
        fields["reasoning_effort"] = effort
    form = request.text and request.text.format
    if form and form.type != "text":
        fields["response_format"] = {"type": form.type}
    if form and form.type == "json_schema":
        schema = {"name": form.name, "schema": form.schema_}
        fields["response_format"]["json_schema"] = schema
    return chat_of(fields, tools.loaded.hidden)


def own_items(
    request: ResponsesRequest, find: Callable[[str, str], Item]
) -> list[tuple[str, Item]]:
    """Return the items of the input, each behind its field, with others in place of references.

    find: returns the item of an id and its field, or raises ApiError; then reasoning is left out.
    """
    given = request.input or []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items, found = [], set[str]()
    for number, item in enumerate(given):
        name, field = item.get("id"), f"input.{number}"
        is_reference = item.get("type") == "item_reference" or {*item} <= {"id", "type"}
        if is_reference and isinstance(name, str):
            if name in found:
                sentence = f"{field}.id is {name!r:.60}, as in an item before; refer to it once"
                raise ApiError(sentence, f"{field}.id")
            found.add(name)
            try:
                item = find(name, f"{field}.id")
            except ApiError:
                if name.startswith("rs_"):
                    continue
                raise
        items.append((field, item))
    return items


def sealed(reasoning: str) -> str:
    """Return reasoning as encrypted_content: in a form for clients that only send it back."""
    return _SEALED + b64encode(reasoning.encode()).decode()


def _unsealed(content: Any) -> str:
    """Empty for what another service wrote."""
    if not isinstance(content, str) or not content.startswith(_SEALED):
        return ""
    try:
        return b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


def _check_fields(request: ResponsesRequest) -> None:
    check_refused(request.model_extra, REFUSED)
    if request.truncation == "auto":
        sentence = "truncation is 'auto'; it must be disabled: send a shorter input"
        raise ApiError(sentence, "truncation")
    if LOGPROBS in (request.include or ()):
        instead = REFUSED["top_logprobs"]
        raise ApiError(f"include has {LOGPROBS!r}, which is not supported; {instead}", "include")


class _Conversation:
    """The messages of a chat, made of items."""

    def __init__(self, tools: ClientTools) -> None:
        self._tools = tools
        self._names: dict[str, str] = {}
        """Names of the functions that were called, by the call's id."""
        self.messages: list[dict[str, Any]] = []
        """The assistant's have lists of texts."""

    def add(self, item: Item, field: str) -> None:
        """Add an item. Raises ApiError for one of another kind."""
        match item:
            case {"role": str(role), "content": content, **rest} if (
                rest.get("type") in (None, "message") and role in _ROLES
            ):
                self._message(role, [*_texts(content, f"{field}.content")])
            case {"type": "reasoning"}:
                parts = item.get("content") or item.get("summary")
                text = "\n".join(_texts(parts, f"{field}.content")) if parts else ""
                if text := text or _unsealed(item.get("encrypted_content")):
                    turn = self._turn("content", "tool_calls")
                    turn.setdefault("reasoning", []).append(text)
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                self._call(item, name, arguments)
            case {"type": "custom_tool_call", "name": str(name), "input": str(text)}:
                self._call(item, name, json.dumps({"input": text}, ensure_ascii=False))
            case {"type": "tool_search_call", "arguments": given}:
                self._call(item, SEARCH, json.dumps(given, ensure_ascii=False))
            case {"type": "tool_search_output", "tools": list(tools)}:
                text = self._tools.load(tools, f"{field}.tools")
                self._result(item, text or "No tools were found.")
            case {"type": "function_call_output" | "custom_tool_call_output", "output": output}:
                self._result(item, "\n".join(_texts(output, f"{field}.output", is_output=True)))
            case {"type": str(kind)}:
                raise ApiError(
                    f"{field} has the type {kind!r:.60}, which is not read here, or without its "
                    "fields; send its text as a message",
                    field,
                )
            case _:
                raise ApiError(f'{field} must be like {{"role": "user", "content": ...}}', field)

    def _message(self, role: str, texts: Sequence[str]) -> None:
        if role != "assistant":
            self.messages.append({"role": role, "content": "\n".join(texts)})
            return
        last = self.messages[-1] if self.messages else {}
        # Text behind calls is of the same answer.
        turn = self._turn(*(() if last.get("tool_calls") else ("content",)))
        turn["content"] = turn["content"] or []
        turn["content"] += filter(None, texts)

    def joined(self) -> list[dict[str, Any]]:
        """Return the messages, whose texts are joined once: there may be thousands."""
        for message in self.messages:
            for name, between in (("content", ""), ("reasoning", "\n")):
                if isinstance(texts := message.get(name), list):
                    message[name] = between.join(texts)
        return self.messages

    def _call(self, item: Item, name: str, arguments: str) -> None:
        call = str(item.get("call_id") or "")
        self._names[call] = name = called_as(name, item.get("namespace"))
        function = {"name": name, "arguments": arguments}
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": function})

    def _result(self, item: Item, text: str) -> None:
        call = str(item.get("call_id") or "")
        name = {"name": self._names[call]} if call in self._names else {}
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text, **name})

    def _turn(self, *full: str) -> dict[str, Any]:
        """Return the assistant's message at the end; a new one if that has one of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in full):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _texts(content: Any, field: str, is_output: bool = False) -> Iterator[str]:
    """is_output: of a tool, in which a picture becomes a sentence. Raises ApiError."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ApiError(f"{field} must be a text, or a list of parts", field)
    for number, part in enumerate(parts):
        match part:
            case {"type": kind, "text": str(text)} if kind in _TEXTS:
                yield text
            case {"type": "refusal", "refusal": str(text)}:
                yield text
            case {"type": kind} if is_output and kind in _PICTURES:
                yield picture_sentence()
            case {"type": str(kind)}:
                raise ApiError(
                    f"{field}.{number} has the type {kind!r:.60}, which is not read here; send "
                    "input_text instead",
                    f"{field}.{number}",
                )
            case _:
                example = '{"type": "input_text", "text": ...}'
                raise ApiError(f"{field}.{number} must be like {example}", f"{field}.{number}")
