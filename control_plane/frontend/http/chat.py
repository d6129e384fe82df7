"""Responses of /v1/chat/completions, made of a call's deltas.

Enters: deltas. Leaves: chunks, or the whole response in OpenAI's shape. Does not know: sockets,
where deltas come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from control_plane.frontend.http.answer_parser import Parser
from control_plane.frontend.http.chat_answer import ChatAnswer
from control_plane.frontend.http.deltas import Delta
from control_plane.frontend.http.protocol import ChatRequest
from control_plane.frontend.http.response_bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChoicePlacement,
    TokenLogprob,
    TopLogprob,
)
from control_plane.frontend.http.responses import Writer
from control_plane.frontend.http.token_names import finite
from control_plane.frontend.tokenizer import Tokenizer


class ChatWriter(Writer):
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
        """See responses.Writer. A choice begins with a chunk that has the role, as OpenAI's do."""
        self._begin(delta)
        is_first = self._usage.add(delta)
        usage = self._usage.in_chunk(delta)
        chunks: list[BaseModel] = []
        if is_first:
            opening = ChatChunkChoice(
                index=delta.index,
                delta=ChatMessage(role="assistant", content=""),
                logprobs=None,
                finish_reason=None,
            )
            prompt_ids = (
                {"prompt_token_ids": list(delta.prompt_ids)}
                if self._request.return_token_ids
                else {}
            )
            chunks.append(self._chunk([opening], **usage, **prompt_ids))
        fields = self._fields(delta)
        if self._new_parser is None:
            message = ChatMessage(content=delta.text)
        else:
            message = self._answer(delta).new_message()
            fields["finish_reason"] = self._finish_reason(delta)
            is_silent = not message.model_fields_set and fields["finish_reason"] is None
            if is_silent and not self._request.logprobs and not self._request.return_token_ids:
                return chunks
        choice = ChatChunkChoice(delta=message, **fields)
        return [*chunks, self._chunk([choice], **usage)]

    def add(self, delta: Delta) -> None:
        """See responses.Writer."""
        self._begin(delta)
        self._usage.add(delta)
        if not self._choices:
            if self._request.return_token_ids:
                self._of_prompt["prompt_token_ids"] = list(delta.prompt_ids)
            if self._request.prompt_logprobs is not None:
                logprobs = self._names.of_prompt(delta.prompt_ids, delta.prompt_logprobs)
                self._of_prompt["prompt_logprobs"] = logprobs
        fields = self._fields(delta)
        if self._new_parser is not None:
            self._answer(delta)
            fields["finish_reason"] = self._finish_reason(delta)
        message = ChatMessage(role="assistant", content="")
        self._keep(delta.text, ChatChoice(message=message, **fields))

    def body(self) -> BaseModel:
        """See responses.Writer."""
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
            **self._of_prompt,
        )

    def _chunk(self, choices: list[Any], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            **self._head, object="chat.completion.chunk", choices=choices, **more
        )

    def _begin(self, delta: Delta) -> None:
        """Make the choice's answer at its first delta, if answers are parsed."""
        if self._new_parser is not None and delta.index not in self._answers:
            parser = self._new_parser()
            answer = self._answers[delta.index] = ChatAnswer(
                parser,
                self._request.include_reasoning,
                self._request.parallel_tool_calls is not False,
            )
            if delta.text_before:
                answer.add(delta.text_before, False)
            if parser.is_reasoning is not None:
                self._usage.begin_reasoning(delta.index, parser.is_reasoning)

    def _answer(self, delta: Delta) -> ChatAnswer:
        """The choice's answer, to which the delta's text was added."""
        answer = self._answers[delta.index]
        answer.add(delta.text, delta.finish_reason is not None)
        return answer

    def _finish_reason(self, delta: Delta) -> str | None:
        # As OpenAI's: whoever names the function knows that it is called.
        is_said = self._answers[delta.index].num_calls and isinstance(
            self._request.tool_choice, str | None
        )
        return "tool_calls" if is_said and delta.finish_reason == "stop" else delta.finish_reason

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """Fields that a ChatChoice and a ChatChunkChoice have in common."""
        more: dict[str, Any] = (
            {"token_ids": list(delta.token_ids)} if self._request.return_token_ids else {}
        )
        if delta.finish and self._request.return_placement:
            more["placement"] = ChoicePlacement.of(delta.finish)
        return {
            "index": delta.index,
            "logprobs": self._logprobs(delta) if self._request.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **more,
        }

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
