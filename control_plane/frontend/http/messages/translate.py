"""Anthropic's Messages as a chat, so that one code renders, constrains and parses both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.messages.protocol import (
    REFUSED,
    Blocks,
    InputMessage,
    MessagesPrompt,
    MessagesRequest,
)
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.translated_chat import (
    LoadedTools,
    TranslatedChat,
    chat_of,
    check_refused,
    picture_sentence,
)

_BILLING = "x-anthropic-billing-header"
"""Start of a system block that changes with each talk, and would keep talks from sharing KV."""
_MIN_BUDGET = 1024
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAMPLING = ("temperature", "top_p", "top_k")


def translated(request: MessagesPrompt, model: ServedModel) -> TranslatedChat:
    """Return the request as a chat. Raises ApiError for what cannot be served."""
    _check_fields(request)
    tools = _Tools(request)
    messages = [*_system(request), *tools.messages(request.messages)]
    is_open = messages[-1]["role"] == "assistant"
    _check_end(request, messages)
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": tools.loaded.available or None,
        "tool_choice": tools.choice(),
        "continue_final_message": is_open,
        **_thinking(request, model),
    }
    form = request.output_format or (request.output_config and request.output_config.format)
    if form:
        schema = {"name": "output", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.tool_choice and request.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if isinstance(request, MessagesRequest):
        given = {name: getattr(request, name) for name in _SAMPLING}
        fields |= {name: value for name, value in given.items() if value is not None}
        fields["stop"] = request.stop_sequences
    return chat_of(fields, tools.loaded.hidden)


def tenant_of(request: MessagesRequest) -> str:
    """Return whose request it is: of a user_id that is JSON its device_id, else the user_id."""
    user = (request.metadata and request.metadata.user_id) or ""
    try:
        device = json.loads(user).get("device_id")
    except (ValueError, AttributeError, RecursionError):
        return user
    return device if isinstance(device, str) else user


def _check_fields(request: MessagesPrompt) -> None:
    extra = request.model_extra or {}
    if extra.get("thread"):
        # Runners that get these details send all messages instead.
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        sentence = "thread is not supported; send all messages of the conversation"
        raise ApiError(sentence, "thread", details=details)
    check_refused(extra, REFUSED)
    management = extra.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else None
    for number, edit in enumerate(edits if isinstance(edits, list) else ()):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        # Edits that clear are for short contexts: without them the model sees more.
        if not str(kind).startswith("clear_"):
            field = f"context_management.edits.{number}"
            raise ApiError(
                f"{field} is {kind!r:.60}; only edits that clear are taken: send a shorter history",
                field,
            )


def _check_end(request: MessagesPrompt, messages: list[dict[str, Any]]) -> None:
    last, number = messages[-1], len(request.messages) - 1
    if last["role"] != "assistant":
        return
    if request.thinking and request.thinking.type != "disabled":
        raise ApiError(
            f"messages.{number} is the assistant's, to be continued; thinking must be disabled "
            "then, or a user message must follow",
            "messages",
        )
    if last.get("tool_calls") or not last["content"]:
        raise ApiError(
            f"messages.{number} is the assistant's, without text to continue; a user message "
            "with the results of its calls must follow",
            "messages",
        )


def _thinking(request: MessagesPrompt, model: ServedModel) -> dict[str, Any]:
    """Return fields for the template's own switches; what it does not read is left out."""
    thinking, fields = request.thinking, dict[str, Any]()
    read = model.chat_template.variables if model.chat_template else frozenset()
    arguments = dict[str, Any]()
    if thinking:
        budget, most = thinking.budget_tokens, getattr(request, "max_tokens", None)
        is_enough = budget is not None and budget >= _MIN_BUDGET
        if thinking.type == "enabled" and not (is_enough and (most is None or budget < most)):
            raise ApiError(
                f"thinking.budget_tokens is {budget}; it must be at least {_MIN_BUDGET} and less "
                "than max_tokens",
                "thinking.budget_tokens",
            )
        switch = thinking.type != "disabled"
        arguments = {name: switch for name in ("enable_thinking", "thinking") if name in read}
    arguments |= request.chat_template_kwargs or {}
    if arguments:
        fields["chat_template_kwargs"] = arguments
    effort = request.output_config and request.output_config.effort
    if effort and "reasoning_effort" in read:
        fields["reasoning_effort"] = effort
    return fields


def _system(request: MessagesPrompt) -> Iterator[dict[str, Any]]:
    blocks = request.system or []
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    texts = [_text(block, f"system.{number}") for number, block in enumerate(blocks)]
    if texts := [text for text in texts if not text.startswith(_BILLING)]:
        yield {"role": "system", "content": "\n\n".join(texts)}


class _Tools:
    """The tools of a request: at the top, or where messages load them."""

    def __init__(self, request: MessagesPrompt) -> None:
        self._request = request
        self.loaded = LoadedTools()
        self._names: dict[str, str] = {}
        """Names of the tools that were called, by the call's id."""
        for number, tool in enumerate(request.tools or ()):
            self._declare(tool, f"tools.{number}", tool.get("defer_loading") is True)

    def choice(self) -> Any:
        """Return the tool_choice of a chat. Raises ApiError for a tool that is not there."""
        choice = self._request.tool_choice
        if choice is None:
            return None
        if choice.type != "tool":
            return _CHOICES[choice.type]
        names = [tool["function"]["name"] for tool in self.loaded.available]
        if choice.name not in names:
            raise ApiError(
                f"tool_choice.name is {choice.name!r}; the tools are {', '.join(names) or 'none'}",
                "tool_choice.name",
            )
        return {"type": "function", "function": {"name": choice.name}}

    def messages(self, messages: list[InputMessage]) -> Iterator[dict[str, Any]]:
        """Yield messages in the form of chats. Raises ApiError for a block of another kind."""
        for number, message in enumerate(messages):
            blocks = message.content
            if isinstance(blocks, str):
                blocks = [{"type": "text", "text": blocks}]
            yield from getattr(self, f"_{message.role}")(blocks, f"messages.{number}.content")

    def _declare(
        self, tool: Mapping[str, Any], field: str, is_deferred: bool, is_again: bool = False
    ) -> str:
        """is_again: see LoadedTools."""
        if (kind := tool.get("type")) not in (None, "custom"):
            raise ApiError(
                f"{field}.type is {kind!r:.60}; only tools of the client's are served, which have "
                "a name and an input_schema",
                field,
            )
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name or not isinstance(schema, dict):
            raise ApiError(f"{field} must have a name and an input_schema, a JSON schema", field)
        self.loaded.declare({**tool, "parameters": schema}, field, is_deferred, is_again)
        return name

    def _system(self, blocks: Blocks, field: str) -> Iterator[dict[str, Any]]:
        texts = []
        for number, block in enumerate(blocks):
            place = f"{field}.{number}"
            match block:
                case {"type": "tool_addition", "tool": {"definition": dict(tool)}}:
                    place = f"{place}.tool.definition"
                    name = self._declare(tool, place, is_deferred=True, is_again=True)
                    texts.append(self.loaded.load(name))
                case {"type": "tool_addition", "tool": {"name": name}}:
                    texts.append(self.loaded.load(name))
                case {"type": "tool_removal", "tool": {"name": str(name)}}:
                    self.loaded.unload(name)
                    texts.append(f"The tool {name} is no longer available.")
                case _:
                    texts.append(_text(block, place))
        yield {"role": "system", "content": "\n\n".join(texts)}

    def _user(self, blocks: Blocks, field: str) -> Iterator[dict[str, Any]]:
        if not blocks:
            raise ApiError(f"{field} is empty; it must have text or tool results", field)
        texts = []
        for number, block in enumerate(blocks):
            if block.get("type") == "tool_result":
                yield self._result(block, f"{field}.{number}")
            else:
                texts.append(_text(block, f"{field}.{number}"))
        if texts:
            yield {"role": "user", "content": "\n".join(texts)}

    def _result(self, block: Mapping[str, Any], field: str) -> dict[str, Any]:
        call, content = str(block.get("tool_use_id", "")), block.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list | None) or not call:
            raise ApiError(f"{field} must have a tool_use_id, and text or blocks as content", field)
        texts = [self._part(part, f"{field}.content.{n}") for n, part in enumerate(parts or ())]
        text = "Error: " * bool(block.get("is_error")) + "\n".join(texts)
        name = {"name": self._names[call]} if call in self._names else {}
        return {"role": "tool", "tool_call_id": call, "content": text, **name}

    def _part(self, part: Any, field: str) -> str:
        match part:
            case {"type": "tool_reference", "tool_name": name}:
                return self.loaded.load(name)
            case {"type": "image" | "document"}:
                return picture_sentence()
            case {"type": "search_result", "content": list(found)}:
                head = [str(part.get("title", "")), str(part.get("source", ""))]
                return "\n".join([*head, *(_text(one, field) for one in found)])
        return _text(part, field)

    def _assistant(self, blocks: Blocks, field: str) -> Iterator[dict[str, Any]]:
        texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
        for number, block in enumerate(blocks):
            match block:
                case {"type": "thinking", "thinking": str(text)}:
                    thoughts.append(text)
                case {"type": "redacted_thinking"}:
                    pass
                case {"type": "tool_use", "id": str(call), "name": str(name)}:
                    self._names[call] = name
                    given = block.get("input") or {}
                    if not isinstance(given, dict):
                        place = f"{field}.{number}.input"
                        raise ApiError(f"{place} is {given!r:.60}; it must be an object", place)
                    arguments = json.dumps(given, ensure_ascii=False)
                    function = {"name": name, "arguments": arguments}
                    calls.append({"id": call, "type": "function", "function": function})
                case _:
                    texts.append(_text(block, f"{field}.{number}"))
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
        if thoughts and any(thoughts):
            message["reasoning"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        yield message


def _text(block: Any, field: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise ApiError(
                f"{field} has the type {kind!r:.60}, which is not read here, or not without "
                "the other fields of such a block; send text instead",
                field,
            )
    raise ApiError(f'{field} must be like {{"type": "text", "text": ...}}', field)
