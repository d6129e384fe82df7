"""One choice as its client sees it, with tokens in order (protocol.md, ordered tokens)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.frontend.access.token_owners import TokenOwners
from control_plane.frontend.client_request import NOWHERE, Origin
from control_plane.frontend.text.tokenizer import OutputText
from control_plane.observe.observer import EndedRequest, Observer
from nanocp.values.plan import Arrival, Ended, FinishReason, Placement
from nanocp.values.sampling import SamplingParams, Token, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Choice:
    """One output that a client's request asks for."""

    params: SamplingParams
    text: OutputText | None = None
    """The text of the output; None without a tokenizer."""
    prompt_logprobs: int | None = None
    """Most likely tokens beside each prompt token; None: no log probabilities of the prompt."""
    index: int = 0
    """Number among the outputs that the client's request asks for."""
    output_ids: Sequence[int] = ()
    """Tokens that the client has; `text` has been fed with them."""
    text_before: str = ""
    """The text that the client has of it."""
    attempt: int = 0
    """How often the client has resumed it."""


class DraftCounts:
    """The drafts of one choice."""

    def __init__(self) -> None:
        self.num_drafts = 0
        """Drafts that were checked, and those behind a wrong one in the same step."""
        self.num_steps_by_accepted: list[int] = []
        """Steps with drafts, by how many of them were right."""
        self._num_accepted: int | None = None

    def add(self, num_drafts: int) -> None:
        """Count the next token in order; see Token.num_drafts."""
        steps = self.num_steps_by_accepted
        if num_drafts >= 0:
            self._num_accepted = 0 if num_drafts else None
            if num_drafts:
                self.num_drafts += num_drafts
                steps.extend([0] * (num_drafts + 1 - len(steps)))
                steps[0] += 1
        elif self._num_accepted is not None and self._num_accepted + 1 < len(steps):
            steps[self._num_accepted] -= 1
            self._num_accepted += 1
            steps[self._num_accepted] += 1


class OrderedOutput:
    """The output of a choice, in order and once, and how much of it the client has taken."""

    def __init__(self, choice: Choice) -> None:
        self.ids = list(choice.output_ids)
        """The tokens so far, without gaps."""
        self.drafts = DraftCounts()
        self.finish_reason: FinishReason | None = None
        self.row_runs_on = False
        """True if a stop string ended the request while its row still runs."""
        self._max_tokens = choice.params.max_tokens
        self._text = choice.text
        self._early: dict[int, Token] = {}
        self._num_taken = len(choice.output_ids)
        self._untaken_logprobs: list[TokenLogprobs] = []

    @property
    def num_undelivered(self) -> int:
        """The number of tokens held for the client."""
        return len(self.ids) - self._num_taken + len(self._early)

    def add(self, token: Token) -> int:
        """Put the token in its place; return how many came into order, 0 for a repeated token."""
        num_before = len(self.ids)
        if not num_before <= token.index < self._max_tokens:
            return 0
        self._early.setdefault(token.index, token)
        while self.finish_reason is None and (following := self._early.pop(len(self.ids), None)):
            self.ids.append(following.token_id)
            self.drafts.add(following.num_drafts)
            if following.logprobs is not None:
                self._untaken_logprobs.append(following.logprobs)
            self.finish_reason = following.finish_reason
            is_stop_token = following.finish_reason not in (None, FinishReason.LENGTH)
            if self._text is not None and self._text.feed(following.token_id, is_stop_token):
                self.row_runs_on, self.finish_reason = self.finish_reason is None, FinishReason.STOP
        return len(self.ids) - num_before

    def drop_early(self) -> None:
        """Forget the tokens that are not in order."""
        self._early.clear()

    def take_new(self) -> list[int]:
        """Return new ids in order."""
        ids = self.ids[self._num_taken :]
        self._num_taken = len(self.ids)
        return ids

    def take_new_logprobs(self) -> list[TokenLogprobs]:
        """Return new log probabilities of the ids that `take_new` has returned."""
        logprobs, self._untaken_logprobs = self._untaken_logprobs, []
        return logprobs


class Attempts:
    """The submissions of a choice, and the instances that may generate tokens of the latest."""

    def __init__(self, choice: Choice, prompt_len: int, steps_per_window: int) -> None:
        self.number = choice.attempt
        """Number of the latest submission, from 0; only its tokens are taken."""
        self.was_preempted = False
        self.resumes_after: int | None = None
        """Output length at which a preempted request is submitted again; None: not preempted."""
        self.owners = TokenOwners(prompt_len, steps_per_window)
        self.owners.begin_attempt(len(choice.output_ids))
        self.unplaced: list[tuple[int, Token]] = []
        """(instance, token) before a placement that allows it."""
        self._losses = (0, 0)
        """(tokens in order, losses since there were so many)."""

    def begin(self, num_known: int) -> None:
        """Begin another with this many output tokens."""
        self.number += 1
        self.resumes_after = None
        self.unplaced.clear()
        self.owners.begin_attempt(num_known)

    def may_lose_tokens(self, num_known: int, most: int) -> bool:
        """Count a loss; False after `most` losses without progress."""
        num_tokens, num_losses = self._losses
        self._losses = (num_known, num_losses + 1 if num_tokens == num_known else 1)
        return self._losses[1] <= most


class ChoiceTimes:
    """The times at which a choice arrived, was placed, and got its first and last tokens."""

    def __init__(self) -> None:
        self._arrived_s = time.monotonic()
        self._placed_s: float | None = None
        self.first_token_s: float | None = None
        self._last_token_s = self._arrived_s
        self._paused_by = ""
        """Cause of a pause until another attempt brings tokens; see Observer.on_token."""

    def placed(self) -> None:
        """The choice was placed; only the first time counts."""
        self._placed_s = self._placed_s or time.monotonic()

    def pause(self, cause: str) -> None:
        """Another attempt begins. Until the next token the first cause counts."""
        self._paused_by = self._paused_by or cause

    def add_tokens(self, num_new: int, observer: Observer) -> None:
        """Tell the observer of tokens that came into order."""
        now_s = time.monotonic()
        for _ in range(num_new):
            if self.first_token_s is None:
                self.first_token_s = now_s
                observer.on_first_token(now_s - self._arrived_s)
            else:
                observer.on_token(now_s - self._last_token_s, self._paused_by)
            self._last_token_s, self._paused_by = now_s, ""

    def durations(self) -> tuple[float, float | None, float | None, float | None]:
        """Return e2e_s, queue_s, prefill_s and decode_s of an EndedRequest until now."""
        arrived_s, placed_s, first_s = self._arrived_s, self._placed_s, self.first_token_s
        return (
            time.monotonic() - arrived_s,
            None if placed_s is None else placed_s - arrived_s,
            None if first_s is None else max(0.0, first_s - (placed_s or first_s)),
            None if first_s is None else self._last_token_s - first_s,
        )


class ClientStream:
    """A choice of a client's request in the cluster, until the client has all of it.

    It ends with `output.finish_reason`, when all tokens are here, or with `ended`.
    """

    def __init__(
        self,
        request_id: int,
        client_id: str,
        prompt_ids: Sequence[int],
        choice: Choice,
        origin: Origin = NOWHERE,
        changed: asyncio.Event | None = None,
        steps_per_window: int = 1,
    ) -> None:
        """changed: the event shared by the choices of one client's request."""
        self.request_id = request_id
        self.client_id = client_id
        self.prompt_ids = prompt_ids
        self.choice = choice
        self.origin = origin
        self.output = OrderedOutput(choice)
        self.attempts = Attempts(choice, len(prompt_ids), steps_per_window)
        self.times = ChoiceTimes()
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            None if choice.prompt_logprobs is None else []
        )
        """Log probabilities of the prompt's tokens, from the second on; None if not asked for."""
        self.num_cached = 0
        """Tokens of the prompt whose KV was in the cluster."""
        self.placement: Placement | None = None
        """The latest placement; None until the first."""
        self.ended: Ended | None = None
        self.changed = changed or asyncio.Event()
        """Set when `take_new` has tokens, or when the request ended."""

    @property
    def prompt_len(self) -> int:
        """The length of the client's prompt."""
        return len(self.prompt_ids)

    def arrival(self, row_start: bytes, page_hashes: tuple[bytes, ...]) -> Arrival:
        """Return the present attempt, whose prompt has the output so far."""
        num_done, params = len(self.output.ids), self.choice.params
        return Arrival(
            self.request_id,
            self.prompt_len + num_done,
            params.max_tokens - num_done,
            row_start,
            priority=self.origin.priority,
            resumes=self.attempts.was_preempted,
            attempt=self.attempts.number,
            page_hashes=page_hashes,
            client_id=self.client_id,
            tenant=self.origin.tenant,
            sampler_work=int(params.work),
        )

    def summary(self) -> EndedRequest:
        """Return lengths and durations until now, for the observer."""
        return EndedRequest(
            self.prompt_len,
            len(self.output.ids),
            self.choice.params.max_tokens,
            *self.times.durations(),
            client_id=self.client_id,
            request_id=self.request_id,
            endpoint=self.origin.endpoint,
            tenant=self.origin.tenant,
            traceparent=self.origin.traceparent,
            moe_binding=self.placement and self.placement.moe_binding,
            cp_degree=self.placement and self.placement.cp_degree,
            num_attempts=1 + self.attempts.number,
            message=self.ended.message if self.ended else "",
        )

    def begin_attempt(self, cause: str) -> None:
        """Continue from the tokens that are in order (protocol.md, one history).

        Early tokens are dropped. cause: see Observer.on_token.
        """
        self.times.pause(cause)
        self.output.drop_early()
        self.attempts.begin(len(self.output.ids))

    def take_new(self) -> list[int]:
        """Return new ids in order, and clear `changed`."""
        self.changed.clear()
        return self.output.take_new()
