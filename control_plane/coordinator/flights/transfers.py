"""Tickets under way: what each member is sent of one, and which receivers have not answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from control_plane.coordinator.flights.held_blocks import HeldBlocks
from control_plane.coordinator.members.members import Members
from control_plane.ports.controller_interface import Submission
from nanocp.values.commands import (
    CancelPrefill,
    ExpectPages,
    PagesArrived,
    PrefillRequest,
    RefusePages,
    SendPages,
)
from nanocp.values.members import PREFILL, PULLER, Member
from nanocp.values.plan import (
    CARRY_PAGE,
    PAGE_SIZE,
    Fence,
    Fetch,
    Plan,
    TargetRun,
    Transfer,
    TransferFailed,
)

_NOBODY_COMPUTES = (
    "the request has no KV to be pulled (any more), and nothing here computes prompts "
    "(prefill.pull.on_failure is fail)"
)


@dataclass(slots=True)
class _Unanswered:
    receivers: set[int]
    """Those that have not answered for it."""
    request: PrefillRequest | None
    """What its writer is to do; None once the ticket is fenced, or without a writer."""
    writer: Member
    num_pages: int


class Transfers:
    """The tickets of one cluster. Used from the controller's thread."""

    def __init__(self, members: Members, has_drafts: bool = False, recomputes: bool = True) -> None:
        """has_drafts: whether pages have KV of an MTP layer.

        recomputes: whether the prefill computes what cannot be pulled.
        """
        self._recomputes = recomputes
        self._members = members
        self._has_drafts = has_drafts
        self._unanswered: dict[int, _Unanswered] = {}
        """By ticket of the prefill, ascending."""
        self.num_pages_awaited = 0
        """Pages of these tickets."""
        self._writers = {PREFILL, PULLER}.intersection(members.expected)
        self._is_synthetic = not self._writers
        self.held = HeldBlocks(members)

    def start(
        self, transfer: Transfer, submission: Submission | None, num_fetched: int = 0
    ) -> TransferFailed | None:
        """Send each receiver its own pages of the ticket, and all of them to what writes them.

        submission: the request, for a transfer without a source. num_fetched: the first so many
        pages come from slots. Returns an event if the ticket fails at once. The two ways are not
        ordered: a receiver keeps a page in its ring until the ticket's `expect` has come.
        """
        for instance in transfer.receivers:
            own = tuple(target for target in transfer.targets if target.instance == instance)
            expect = ExpectPages(replace(transfer, targets=own))
            self._members.send(Member("instance", instance), expect)
        if transfer.source is not None:
            self._members.send(Member("instance", transfer.source), SendPages(transfer))
            return None
        transfer = replace(transfer, targets=_after(transfer.targets, num_fetched))
        if not transfer.targets:
            return None
        if self._is_synthetic:
            # Each receiver makes the KV itself, and answers for it.
            self._await(transfer, None, PREFILL)
            return None
        assert submission is not None, f"request {transfer.request_id} has no prompt to prefill"
        # The log probability of a token needs the id after it, and so does its KV for drafts.
        has_next = self._has_drafts or submission.prompt_logprobs is not None
        num_ids = transfer.num_tokens + has_next
        request = PrefillRequest(
            transfer,
            token_ids=submission.prompt_ids[:num_ids],
            prompt_logprobs=submission.prompt_logprobs,
            front_end=submission.front_end,
            salt=submission.salt,
        )
        # An engine computed no log probabilities of the prompt.
        is_held = transfer.request_id in self.held and submission.prompt_logprobs is None
        writer = PULLER if is_held and PULLER in self._writers else PREFILL
        if writer not in self._writers:
            was_lost = writer in self._members.expected
            reason = f"the {writer} was lost" if was_lost else _NOBODY_COMPUTES
            return TransferFailed(transfer.ticket, reason)
        if writer == PULLER:
            self.held.pull(transfer.request_id)
        self._await(transfer, request, writer)
        self._members.send(writer, request)
        return None

    def _await(self, transfer: Transfer, request: PrefillRequest | None, writer: Member) -> None:
        num_pages = len(transfer.instances())
        self._unanswered[transfer.ticket] = _Unanswered(
            set(transfer.receivers), request, writer, num_pages
        )
        self.num_pages_awaited += num_pages

    def fence(self, fence: Fence) -> None:
        """No receiver takes a page of the ticket any more, and the prefill sends none."""
        for instance in fence.instances:
            self._members.send(Member("instance", instance), RefusePages(fence.ticket))
        unanswered = self._unanswered.get(fence.ticket)
        if unanswered is not None:
            unanswered.request = None
            self._members.send(unanswered.writer, CancelPrefill(fence.ticket))

    def answered(self, ticket: int, instance: int) -> None:
        """The receiver has all its pages of the ticket, or refuses the rest."""
        unanswered = self._unanswered.get(ticket)
        if unanswered is None:
            return
        unanswered.receivers.discard(instance)
        if not unanswered.receivers:
            del self._unanswered[ticket]
            self.num_pages_awaited -= unanswered.num_pages
            self._members.send(unanswered.writer, PagesArrived(ticket))
            if unanswered.writer == PULLER and unanswered.request is not None:
                self.held.release(unanswered.request.transfer.request_id)

    @property
    def num_prefilling(self) -> int:
        """Tickets of the prefill that some receiver has not answered."""
        return len(self._unanswered)

    def end_term(self) -> None:
        """Every ticket is void."""
        self._unanswered.clear()
        self.num_pages_awaited = 0

    def prefill_arrived(self, writer: Member) -> None:
        """A new prefill or puller begins again with every ticket that the lost one left open."""
        if writer == PULLER:
            self.held.send_again()
        for unanswered in self._unanswered.values():
            if unanswered.request is not None and unanswered.writer == writer:
                self._members.send(writer, unanswered.request)

    def prefill_lost(self, writer: Member) -> Iterator[TransferFailed]:
        """No such member will come: the failure of every ticket that it left open."""
        self._writers.discard(writer)
        for ticket, unanswered in self._unanswered.items():
            if unanswered.writer == writer:
                yield TransferFailed(ticket, f"the {writer} was lost")

    def failed(self, writer: Member, failed: TransferFailed) -> TransferFailed | None:
        """Take a writer's report; what the puller could not read is computed, if it can be.

        Returns the event for the scheduler, if any.
        """
        unanswered = self._unanswered.get(failed.ticket)
        if writer != PULLER or unanswered is None or unanswered.request is None:
            return failed
        if unanswered.writer != PULLER:
            return None  # A lost puller and the next one have both failed; it is computed by now.
        request = unanswered.request
        self.held.release(request.transfer.request_id)
        if not self._recomputes or PREFILL not in self._writers:
            return failed
        self._members.output.warn(f"request {request.transfer.request_id}: {failed.message}")
        unanswered.writer = PREFILL
        self._members.send(PREFILL, request)
        return None


def fetched_pages(fetches: Sequence[Fetch]) -> dict[int, int]:
    """Ticket -> how many of its pages come from slots."""
    numbers: dict[int, int] = {}
    for fetch in fetches:
        numbers[fetch.ticket] = numbers.get(fetch.ticket, 0) + len(fetch.pages)
    return numbers


def cached_tokens(plan: Plan) -> dict[int, int]:
    """Request -> tokens of its prompt that nobody computes: pages of other requests."""
    num_fetched, cached = fetched_pages(plan.fetches), dict[int, int]()
    for transfer in plan.transfers:
        if transfer.source is None:
            number = num_fetched.get(transfer.ticket, 0)
            left = _after(transfer.targets, number) if number else transfer.targets
            if left:  # a state that is computed takes the whole prompt, though no page is written
                tokens = left[0].first_page % CARRY_PAGE * PAGE_SIZE
                cached.setdefault(transfer.request_id, tokens)
    return cached


def _after(targets: Sequence[TargetRun], num_pages: int) -> tuple[TargetRun, ...]:
    left = []
    for first_page, count, instance, frame in targets:
        gone = min(num_pages, count)
        num_pages -= gone
        if gone < count:
            left.append(TargetRun(first_page + gone, count - gone, instance, frame + gone))
    return tuple(left)
