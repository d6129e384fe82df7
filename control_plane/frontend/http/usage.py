"""The number of tokens that a call has used, counted as its deltas come.

Enters: deltas. Leaves: usage for the response and, if the client asks for it, for chunks. Does not
know: what chunks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

from control_plane.frontend.client_stream import DraftCounts
from control_plane.frontend.http.answer_parser import THINK
from control_plane.frontend.http.deltas import Delta
from control_plane.frontend.http.protocol import StreamOptions
from control_plane.frontend.http.response_bodies import (
    CallMetrics,
    CompletionTokensDetails,
    PromptTokensDetails,
    SpeculativeDecoding,
    Usage,
)


class UsageCount:
    """The usage of one call."""

    def __init__(self, options: StreamOptions | None, token_name: Callable[[int], bytes]) -> None:
        """token_name: the UTF-8 of a token, that of its name if it is special."""
        self._token_name = token_name
        self._reasoning: dict[int, ReasoningCount] = {}
        self._options = options or StreamOptions()
        self._prompts: dict[int, tuple[int, int]] = {}
        """(tokens, those of them that were cached) of each prompt."""
        self._choices: dict[int, int] = {}
        """Tokens of each choice so far."""
        self._drafts: dict[int, DraftCounts] = {}

    def begin_reasoning(self, index: int, is_inside: bool) -> None:
        """Count the choice's tokens of reasoning from now on.

        is_inside: its prompt ends within the reasoning.
        """
        self._reasoning[index] = ReasoningCount(is_inside, self._token_name)

    def add(self, delta: Delta) -> bool:
        """Count the delta; True if it is its choice's first."""
        is_first = delta.index not in self._choices
        self._prompts[delta.prompt] = len(delta.prompt_ids), delta.num_cached
        self._choices[delta.index] = self._choices.get(delta.index, 0) + len(delta.token_ids)
        if reasoning := self._reasoning.get(delta.index):
            reasoning.add(delta.token_ids)
        if delta.finish and delta.finish.drafts.num_drafts:
            self._drafts[delta.index] = delta.finish.drafts
        return is_first

    @property
    def metrics(self) -> dict[str, Any]:
        """The field `metrics`; empty if no step had drafts."""
        if not self._drafts:
            return {}
        counts = [each.num_steps_by_accepted for each in self._drafts.values()]
        steps = [sum(of_choices) for of_choices in zip_longest(*counts, fillvalue=0)]
        num_drafts = sum(each.num_drafts for each in self._drafts.values())
        num_accepted = sum(index * count for index, count in enumerate(steps))
        found = SpeculativeDecoding(
            mean_acceptance_length=1 + num_accepted / sum(steps),
            draft_acceptance_rate=num_accepted / num_drafts,
            acceptance_histogram=steps,
            num_spec_steps=sum(steps),
            num_accepted_draft_tokens=num_accepted,
            num_draft_tokens=num_drafts,
            num_spec_tokens=len(steps) - 1,
        )
        return {"metrics": CallMetrics(speculative_decoding=found)}

    @property
    def total(self) -> Usage:
        """Usage of all prompts and choices. A prompt counts once, however many choices it has."""
        prompts = self._prompts.values()
        return _usage(
            sum(tokens for tokens, _ in prompts),
            sum(cached for _, cached in prompts),
            sum(self._choices.values()),
            sum(one.num_tokens for one in self._reasoning.values()) if self._reasoning else None,
        )

    def in_chunk(self, delta: Delta) -> dict[str, Any]:
        """The field `usage` of a chunk for this delta: that of its choice.

        Null, as OpenAI has it, if only the last chunk has the usage; empty if none has.
        """
        if not self._options.include_usage:
            return {}
        if not self._options.continuous_usage_stats:
            return {"usage": None}
        reasoning = self._reasoning.get(delta.index)
        usage = _usage(
            len(delta.prompt_ids),
            delta.num_cached,
            self._choices[delta.index],
            reasoning.num_tokens if reasoning else None,
        )
        return {"usage": usage}

    def in_last_chunk(self) -> list[Usage]:
        """The usage for a chunk of its own at the end, if the client asks for it; else none."""
        return [self.total] if self._options.include_usage else []


class ReasoningCount:
    """Counts the tokens of one choice that are reasoning, up to the one that ends it."""

    def __init__(self, is_inside: bool, token_name: Callable[[int], bytes]) -> None:
        self._is_inside = is_inside
        self._token_name = token_name
        self._held = b""
        self.num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Add generated tokens; a marker may be cut by their edges."""
        for token_id in token_ids:
            self.num_tokens += self._is_inside
            marker = THINK[self._is_inside].encode()
            self._held += self._token_name(token_id)
            if marker in self._held:
                self._is_inside = not self._is_inside
                self._held = b""
            self._held = self._held[-len(THINK[1]) :]


def _usage(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int | None
) -> Usage:
    details: dict[str, Any] = {}
    if reasoning_tokens is not None:
        of_reasoning = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        details = {"completion_tokens_details": of_reasoning}
    return Usage(
        **details,
        prompt_tokens=prompt_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        completion_tokens=completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
