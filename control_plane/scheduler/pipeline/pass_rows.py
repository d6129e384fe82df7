"""Rows of a pipeline, and the choice of their tokens for the next pass.

Each pass takes at most an even share of the rows; prompt tokens are spread so that passes take
equally long.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.scheduler.state.request import Request
from nanocp.values.passes import Span, prompt_passes
from nanocp.values.plan import PAGE_SIZE


@dataclass(slots=True, eq=False)
class PassRow:
    """A placed request, and the part of it that is planned."""

    request: Request
    next: int
    """First position that is in no planned pass."""
    last_pass: int | None = None
    """The last planned pass that contains it; None before the first."""
    last_sample: int = -1
    """Last planned pass that samples a token of it; -1 before the first."""
    sampler_work: int = 0
    """Bits of passes.SamplerWork, for the time that sampling takes."""

    @property
    def num_prompt_left(self) -> int:
        """The prompt tokens that are in no planned pass; 0 for a row that decodes."""
        return max(self.request.arrival.prompt_len - self.next, 0)

    @property
    def is_planned(self) -> bool:
        """Return whether all tokens that it may generate are planned."""
        return self.next == self.request.kv_len_max and self.num_prompt_left == 0


class PassRows:
    """The rows of a pipeline, by request id."""

    def __init__(self, num_stages: int, max_tokens: int) -> None:
        """max_tokens: most tokens of a pass."""
        self._num_stages = num_stages
        self._max_tokens = max_tokens
        self.max_in_flight = num_stages
        """Passes that stages work on: with more of them, each would have fewer rows."""
        self.by_id: dict[int, PassRow] = {}

    def decoding(self, newest: int) -> list[PassRow]:
        """Return rows that could decode, the least recently planned first.

        newest: the last pass whose tokens they may begin with.
        """
        ready = [
            row
            for row in self.by_id.values()
            if not row.num_prompt_left and row.last_sample <= newest
        ]
        return sorted(ready, key=lambda row: (row.last_sample, row.request.request_id))

    @property
    def num_share(self) -> int:
        """The most decoding rows of a pass: an even share of all."""
        num_rows = sum(not row.num_prompt_left for row in self.by_id.values())
        return min(-(-num_rows // self._num_stages), self._max_tokens)

    @property
    def num_prompt_left(self) -> int:
        """The prompt tokens that are in no planned pass."""
        return sum(row.num_prompt_left for row in self.by_id.values())

    def chunks(self, num_decoding: int) -> list[tuple[PassRow, int]]:
        """Return (row, tokens) of the prompts in the pass.

        num_decoding: tokens of the pass that rows decode.
        """
        share = max(-(-self.num_prompt_left // self._num_stages), PAGE_SIZE)
        return self._taken(min(share, self._max_tokens - num_decoding))

    def _taken(self, num_tokens: int) -> list[tuple[PassRow, int]]:
        rows = [row for row in self.by_id.values() if row.num_prompt_left]
        chunks: list[tuple[PassRow, int]] = []
        for row in sorted(rows, key=lambda row: row.request.order):
            if num_tokens <= 0:
                break
            count = min(row.num_prompt_left, num_tokens)
            chunks.append((row, count))
            num_tokens -= count
        return chunks

    def plan(self, row: PassRow, number: int, count: int) -> Span:
        """Put the row's next `count` tokens into the pass of this number."""
        first = row.next
        row.next += count
        row.last_pass = number
        samples = row.next >= row.request.arrival.prompt_len
        if samples:
            row.last_sample = number
        return Span(row.request.request_id, first, count, samples)


class PromptRows(PassRows):
    """Prompts that only need KV."""

    def __init__(self, num_stages: int, max_tokens: int) -> None:
        super().__init__(num_stages, max_tokens)
        self.max_in_flight = prompt_passes(num_stages)

    def chunks(self, num_decoding: int) -> list[tuple[PassRow, int]]:
        """Take no less for a pass than an equal chunk of a prompt, one for each stage.

        A short chunk reads all weights too, and nobody waits for a short pass.
        """
        rows = [row for row in self.by_id.values() if row.num_prompt_left]
        equal = max((self._equal_chunk(row.request.arrival.prompt_len) for row in rows), default=0)
        share = max(-(-self.num_prompt_left // self._num_stages), equal)
        return self._taken(min(share, self._max_tokens))

    def _equal_chunk(self, prompt_len: int) -> int:
        num_chunks = max(-(-prompt_len // self._max_tokens), self._num_stages)
        return -(-prompt_len // num_chunks // PAGE_SIZE) * PAGE_SIZE

    def plan(self, row: PassRow, number: int, count: int) -> Span:
        """Put the prompt's next `count` tokens into the pass of this number; none is sampled."""
        return super().plan(row, number, count)._replace(samples=False)
