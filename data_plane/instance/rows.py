"""The rows of one MoE binding: each request's generated tokens, and its hand-off state."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from nanocp.values.offload import next_page_hash
from nanocp.values.plan import PAGE_SIZE, FinishReason, RowStart, WrittenPage
from nanocp.values.sampling import HandOffState, RowInput, SamplingParams, Token, TokenLogprobs
from nanocp.wire.rows import decode_row_input


@dataclass(slots=True)
class Row:
    """One request's state at its MoE binding; a hand-off carries all (protocol.md, hand-offs)."""

    request_id: int
    position: int
    """Position of the next step's input token; once finished, of the last step's."""
    token: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    front_end: str
    output_ids: list[int] = field(default_factory=list)
    prompt_ids: array[int] = field(default_factory=lambda: array("q"))
    """An array, for the sampler at every step."""
    finished: bool = False
    is_broken_off: bool = False
    """True if the row's grammar has failed: its next token ends an incomplete output."""
    attempt: int = 0
    page_hash: bytes = b""
    page_ids: list[int] = field(default_factory=list)
    """Token ids in the page of `position`, up to it; empty without hashes."""
    written: WrittenPage | None = None
    """The page that the last token filled, if hashes are wanted."""
    drafts: list[int] = field(default_factory=list)
    """Guesses of the tokens after `token`; they do not travel."""

    @classmethod
    def start(cls, start: RowStart) -> Row:
        """Return the row of a request that begins here."""
        return cls._from(
            start.request_id, start.position, decode_row_input(start.row_start), finished=False
        )

    @classmethod
    def received(cls, state: HandOffState) -> Row:
        """Return a row that another instance handed over."""
        return cls._from(state.request_id, state.position, state.row, state.finished)

    @classmethod
    def _from(cls, request_id: int, position: int, row: RowInput, finished: bool) -> Row:
        stop_ids = frozenset(row.params.stop_token_ids)
        return cls(
            request_id,
            position,
            row.last_token,
            row.params,
            stop_ids,
            row.front_end,
            list(row.output_ids),
            array("q", row.prompt_ids),
            finished,
            attempt=row.attempt,
            page_hash=row.page_hash,
            page_ids=list(row.page_ids),
        )

    def handed_over(self) -> HandOffState:
        """Return the row's state for its next instance."""
        row = RowInput(
            self.token,
            self.params,
            self.front_end,
            tuple(self.output_ids),
            tuple(self.prompt_ids),
            self.attempt,
            self.page_hash,
            tuple(self.page_ids),
        )
        return HandOffState(self.request_id, self.finished, self.position, row)

    def num_live(self, num_drafts: int) -> int:
        """Return the next step's input tokens, drafts included."""
        if self.finished:
            return 0
        return min(1 + min(len(self.drafts), num_drafts), self.num_left)

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.params.max_tokens - len(self.output_ids)

    def step_token(self, offset: int) -> int:
        """Return the next step's input token: the known one at 0, then the drafts."""
        return self.drafts[offset - 1] if 0 < offset <= len(self.drafts) else self.token

    def _turn_page(self) -> None:
        page, offset = divmod(self.position, PAGE_SIZE)
        if offset == 0:
            self.page_hash = next_page_hash(self.page_hash, self.page_ids)
            self.page_ids.clear()
            self.written = WrittenPage(self.request_id, self.attempt, page - 1, self.page_hash)
        self.page_ids.append(self.token)

    def commit(
        self, token_id: int, logprobs: TokenLogprobs | None = None, num_drafts: int = 0
    ) -> Token:
        """Commit one sampled token at the end of a step (protocol.md, step commit).

        The row stops if it was the last. num_drafts: as of Token.
        """
        self.output_ids.append(token_id)
        reason = None
        self.written = None
        if self.is_broken_off:
            reason = FinishReason.INVALID
        elif token_id in self.stop_token_ids:  # the sampler masks them before min_tokens
            reason = FinishReason.STOP
        elif len(self.output_ids) >= self.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            self.token = token_id
            self.position += 1
            if self.page_ids:
                self._turn_page()
        else:
            self.finished = True
        return Token(
            self.front_end,
            self.request_id,
            len(self.output_ids) - 1,
            token_id,
            reason,
            logprobs,
            self.attempt,
            num_drafts,
        )
