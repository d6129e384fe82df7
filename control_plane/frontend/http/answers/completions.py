"""Responses of /v1/completions, made of a call's deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from control_plane.frontend.http.answers.deltas import Delta
from control_plane.frontend.http.answers.response_bodies import (
    ChoicePlacement,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from control_plane.frontend.http.answers.responses import ChoicesWriter
from control_plane.frontend.http.answers.token_names import finite
from control_plane.frontend.http.protocol import CompletionRequest
from control_plane.frontend.text.tokenizer import Detokenizer, Tokenizer


class TextOffsets:
    """The offset of each token of one choice in its text."""

    def __init__(self, tokenizer: Tokenizer | None, skips_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = Detokenizer(tokenizer, skips_special_tokens) if tokenizer else None
        self._offset = 0

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the characters of the text before each token.

        Tokens that share a character begin where it does.
        """
        return [self._passed(token_id) for token_id in token_ids]

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the characters before each token of a prompt, which precedes the output.

        Special tokens may be missing from the text.
        """
        offsets = []
        for token_id in token_ids:
            if self._tokenizer and not self._tokenizer.token_bytes(token_id):
                offsets.append(self._offset)
                name = self._tokenizer.token_string(token_id)
                self._offset += len(name) if text.startswith(name, self._offset) else 0
            else:
                offsets.append(self._passed(token_id))
        if self._decoder:
            self._decoder.flush()
        self._offset = len(text)
        return offsets

    def _passed(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.feed([token_id])) if self._decoder else 0
        return offset


class CompletionWriter(ChoicesWriter):
    """Writes completions."""

    def __init__(
        self, request: CompletionRequest, call_id: str, model: str, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(request, call_id, model, tokenizer)
        self._request = request
        self._tokenizer = tokenizer
        self._offsets: dict[int, TextOffsets] = {}
        """By the choice's number."""

    def chunks(self, delta: Delta) -> list[BaseModel]:
        return [self._chunk([self._choice(delta)], **self._usage.in_chunk(delta))]

    def add(self, delta: Delta) -> None:
        choice = self._choice(delta)
        self._keep(choice.text, choice)

    def body(self) -> BaseModel:
        for index, texts in self._texts.items():
            self._choices[index].text = "".join(texts)
        return self._chunk(self._kept(), usage=self._usage.total, **self._usage.metrics)

    def _chunk(self, choices: list[Any], **more: Any) -> Completion:
        return Completion(**self._head, object="text_completion", choices=choices, **more)

    def _shown(self, delta: Delta) -> Delta:
        if not self._request.is_prompt_only:
            return delta
        reason = delta.finish_reason and "length"
        return replace(
            delta, token_ids=(), text="", logprobs=(), finish_reason=reason, stop_reason=None
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        delta = self._shown(delta)
        is_first = self._usage.add(delta)
        more: dict[str, Any] = {}
        if self._request.return_token_ids:
            more["token_ids"] = list(delta.token_ids)
            if is_first:
                more["prompt_token_ids"] = list(delta.prompt_ids)
        if is_first and self._request.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._names.of_prompt(
                delta.prompt_ids, delta.prompt_logprobs, self._request.prompt_logprobs
            )
        if delta.finish and self._request.return_placement:
            more["placement"] = ChoicePlacement.of(delta.finish)
        has_prompt = is_first and bool(self._request.echo)
        return CompletionChoice(
            index=delta.index,
            text=self._prompt_text(delta) + delta.text if has_prompt else delta.text,
            logprobs=self._logprobs(delta, has_prompt)
            if self._request.logprobs is not None
            else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            **more,
        )

    def _prompt_text(self, delta: Delta) -> str:
        sent: Any = self._request.prompt
        text = sent[delta.prompt] if isinstance(sent, list) else sent
        if isinstance(text, str):
            return text
        return self._tokenizer.decode(delta.prompt_ids) if self._tokenizer else ""

    def _logprobs(self, delta: Delta, has_prompt: bool) -> CompletionLogprobs:
        token_ids = [*delta.prompt_ids, *delta.token_ids] if has_prompt else delta.token_ids
        # The first token of a prompt has no log probability.
        of_tokens = (
            [None, *delta.prompt_logprobs, *delta.logprobs] if has_prompt else delta.logprobs
        )
        tokens = [self._names.name(token_id) for token_id in token_ids]
        if delta.index not in self._offsets:
            skips = self._request.skip_special_tokens
            self._offsets[delta.index] = TextOffsets(self._tokenizer, skips)
        text_offsets = self._offsets[delta.index]
        offsets = []
        if has_prompt:
            offsets += text_offsets.of_prompt(delta.prompt_ids, self._prompt_text(delta))
        offsets += text_offsets.of(delta.token_ids)
        num_top, pairs = self._request.logprobs, zip(token_ids, of_tokens, strict=True)
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if each is None else finite(each.logprob) for each in of_tokens],
            tokens=tokens,
            # The token itself is always among them.
            top_logprobs=[
                None
                if each is None
                else self._names.by_name([(token_id, each.logprob), *each.top[:num_top]])
                for token_id, each in pairs
            ],
        )
