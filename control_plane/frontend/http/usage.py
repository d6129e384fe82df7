"""The number of tokens that a call has used, counted as its deltas come.

Enters: deltas. Leaves: usage for the response and, if the client asks for it, for chunks. Does not
know: what chunks are.
"""

from __future__ import annotations

from typing import Any

from control_plane.frontend.http.deltas import Delta
from control_plane.frontend.http.protocol import StreamOptions
from control_plane.frontend.http.response_bodies import PromptTokensDetails, Usage


class UsageCount:
    """The usage of one call."""

    def __init__(self, options: StreamOptions | None) -> None:
        self._options = options or StreamOptions()
        self._prompts: dict[int, tuple[int, int]] = {}
        """(tokens, those of them that were cached) of each prompt."""
        self._choices: dict[int, int] = {}
        """Tokens of each choice so far."""

    def add(self, delta: Delta) -> bool:
        """Count the delta; True if it is its choice's first."""
        is_first = delta.index not in self._choices
        self._prompts[delta.prompt] = len(delta.prompt_ids), delta.num_cached
        self._choices[delta.index] = self._choices.get(delta.index, 0) + len(delta.token_ids)
        return is_first

    @property
    def total(self) -> Usage:
        """Usage of all prompts and choices. A prompt counts once, however many choices it has."""
        prompts = self._prompts.values()
        return _usage(
            sum(tokens for tokens, _ in prompts),
            sum(cached for _, cached in prompts),
            sum(self._choices.values()),
        )

    def in_chunk(self, delta: Delta) -> dict[str, Any]:
        """The field `usage` of a chunk for this delta: that of its choice.

        Empty if the client does not ask for it.
        """
        if not self._options.continuous_usage_stats:
            return {}
        return {
            "usage": _usage(len(delta.prompt_ids), delta.num_cached, self._choices[delta.index])
        }

    def in_last_chunk(self) -> list[Usage]:
        """The usage for a chunk of its own at the end, if the client asks for it; else none."""
        return [self.total] if self._options.include_usage else []


def _usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        completion_tokens=completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
