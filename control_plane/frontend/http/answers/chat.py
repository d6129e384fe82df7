"""Responses of /v1/chat/completions, made of a call's deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from control_plane.frontend.http.answers.deltas import Delta
from control_plane.frontend.http.answers.response_bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChoicePlacement,
    FunctionCall,
    MessageToolCall,
    TokenLogprob,
    TopLogprob,
)
from control_plane.frontend.http.answers.responses import ChoicesWriter
from control_plane.frontend.http.answers.token_names import finite
from control_plane.frontend.http.protocol import ChatRequest
from control_plane.frontend.http.tools.answer_parser import AnswerPart, PartKind
from control_plane.frontend.http.tools.forced_calls import Parser
from control_plane.frontend.text.tokenizer import Tokenizer


class ChatAnswer:
    """One choice's answer so far, whole and as its latest change."""

    def __init__(self, parser: Parser, has_reasoning: bool, has_many_calls: bool) -> None:
        """has_reasoning: messages have it. has_many_calls: False keeps the first call."""
        self._parser = parser
        self._has_reasoning = has_reasoning
        self._has_many_calls = has_many_calls
        self._parts: list[AnswerPart] = []
        self._num_old = 0
        """Parts before those that the latest text has added."""
        self.num_calls = 0

    def add(self, text: str, ended_by: str | None = None) -> None:
        """Add generated text. ended_by: the reason, with the last text."""
        self._num_old = len(self._parts)
        parts = self._parser.feed(text)
        if ended_by:
            parts += self._parser.finish(is_cut=ended_by != "stop")
        for part in parts:
            if part.call is None or self._has_many_calls or not self.num_calls:
                self._parts.append(part)
                self.num_calls += part.call is not None

    @property
    def new_parts(self) -> Sequence[AnswerPart]:
        """The parts of the latest text."""
        return self._parts[self._num_old :]

    def new_message(self) -> ChatMessage:
        """Return the parts of the latest text, if any."""
        fields = self._fields(self.new_parts)
        calls = fields.get("tool_calls", [])
        for index, call in enumerate(calls, self.num_calls - len(calls)):
            call.index = index
        return ChatMessage(**fields)

    def whole_message(self) -> ChatMessage:
        """Return the whole answer's message; without text its content is null."""
        no_content = {"content": None if self.num_calls else ""}
        return ChatMessage(role="assistant", **{**no_content, **self._fields(self._parts)})

    def _fields(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for kind in (PartKind.REASONING, PartKind.CONTENT):
            text = "".join(part.text for part in parts if part.kind is kind)
            if text and (kind is PartKind.CONTENT or self._has_reasoning):
                fields[kind.value] = text
        calls = [
            MessageToolCall(
                id=part.call.id,
                type="function",
                function=FunctionCall(name=part.call.name, arguments=part.call.arguments),
            )
            for part in parts
            if part.call
        ]
        return fields | ({"tool_calls": calls} if calls else {})


class ChatWriter(ChoicesWriter):
    """Writes chat completions."""

    def __init__(
        self,
        request: ChatRequest,
        call_id: str,
        model: str,
        tokenizer: Tokenizer | None,
        new_parser: Callable[[], Parser] | None = None,
    ) -> None:
        """new_parser: makes the parser of a choice's text; None: the text is the content."""
        super().__init__(request, call_id, model, tokenizer)
        self._request = request
        self._new_parser = new_parser
        self._answers: dict[int, ChatAnswer] = {}
        self._of_prompt: dict[str, Any] = {}

    def chunks(self, delta: Delta) -> list[BaseModel]:
        """Return an output as chunks. A choice begins with the role, as OpenAI's do."""
        is_first, fields = self._taken(delta)
        usage = self._usage.in_chunk(delta)
        chunks: list[BaseModel] = []
        if is_first:
            opening = ChatChunkChoice(
                index=delta.index,
                delta=ChatMessage(role="assistant", content=""),
                logprobs=None,
                finish_reason=None,
            )
            ids = {"prompt_token_ids": list(delta.prompt_ids)}
            chunks.append(
                self._chunk([opening], **usage, **(ids if self._request.return_token_ids else {}))
            )
        message = ChatMessage(content=delta.text)
        if answer := self._answers.get(delta.index):
            message = answer.new_message()
            is_silent = not message.model_fields_set and fields["finish_reason"] is None
            if is_silent and not self._request.logprobs and not self._request.return_token_ids:
                return chunks
        return [*chunks, self._chunk([ChatChunkChoice(delta=message, **fields)], **usage)]

    def add(self, delta: Delta) -> None:
        if not self._choices:
            if self._request.return_token_ids:
                self._of_prompt["prompt_token_ids"] = list(delta.prompt_ids)
            if self._request.prompt_logprobs is not None:
                logprobs = self._names.of_prompt(delta.prompt_ids, delta.prompt_logprobs)
                self._of_prompt["prompt_logprobs"] = logprobs
        _, fields = self._taken(delta)
        message = ChatMessage(role="assistant", content="")
        self._keep(delta.text, ChatChoice(message=message, **fields))

    def body(self) -> BaseModel:
        for index, texts in self._texts.items():
            if answer := self._answers.get(index):
                self._choices[index].message = answer.whole_message()
            else:
                self._choices[index].message.content = "".join(texts)
        return ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=self._kept(),
            usage=self._usage.total,
            **self._usage.metrics,
            **self._of_prompt,
        )

    def _chunk(self, choices: list[Any], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            **self._head, object="chat.completion.chunk", choices=choices, **more
        )

    def _taken(self, delta: Delta) -> tuple[bool, dict[str, Any]]:
        """Count and parse a delta; return True for its choice's first, and fields of the choice."""
        if self._new_parser is not None and delta.index not in self._answers:
            self._begin(delta, self._new_parser())
        answer, reason = self._answers.get(delta.index), delta.finish_reason
        fields: dict[str, Any] = {"finish_reason": reason}
        if answer:
            answer.add(delta.text, reason)
            # As OpenAI's: whoever names the function knows that it is called.
            is_said = answer.num_calls and isinstance(self._request.tool_choice, str | None)
            if is_said and reason == "stop":
                fields["finish_reason"] = "tool_calls"
        is_first = self._usage.add(delta)
        if self._request.return_token_ids:
            fields["token_ids"] = list(delta.token_ids)
        if delta.finish and self._request.return_placement:
            fields["placement"] = ChoicePlacement.of(delta.finish)
        fields["logprobs"] = self._logprobs(delta) if self._request.logprobs else None
        return is_first, {"index": delta.index, "stop_reason": delta.stop_reason, **fields}

    def _begin(self, delta: Delta, parser: Parser) -> None:
        has_many_calls = self._request.parallel_tool_calls is not False
        answer = ChatAnswer(parser, self._request.include_reasoning, has_many_calls)
        self._answers[delta.index] = answer
        if delta.text_before:
            answer.add(delta.text_before)
        if parser.is_reasoning is not None:
            self._usage.begin_reasoning(delta.index, parser, len(delta.text_before))

    def _logprobs(self, delta: Delta) -> ChatLogprobs:
        content = []
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
            top = [TopLogprob(**self._named(top_id, logprob)) for top_id, logprob in logprobs.top]
            content.append(
                TokenLogprob(**self._named(token_id, logprobs.logprob), top_logprobs=top)
            )
        return ChatLogprobs(content=content)

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = list(self._names.spelled(token_id))
        return {"token": self._names.name(token_id), "logprob": finite(logprob), "bytes": spelled}
