"""Tickets: each permits writes of one transfer's pages until all its receivers confirmed it."""

from __future__ import annotations

from control_plane.scheduler.state.answer import Answer
from control_plane.scheduler.state.request import Request
from nanocp.values.plan import Arrival, Fence, TargetRun, Transfer


class Tickets:
    """The tickets in force. A request has at most one."""

    def __init__(self, answer: Answer, arriving_tokens: list[int]) -> None:
        """arriving_tokens: tokens under way to each instance, to keep up to date."""
        self._answer = answer
        self._arriving_tokens = arriving_tokens
        self._owners: dict[int, Request] = {}
        self._unfilled: dict[int, int] = {}
        """Tokens that the prefill fills, by ticket in force."""
        self.num_unfilled_tokens = 0
        """Sum of these tokens: KV that has frames and may not have arrived."""
        self.num_issued = 0
        """The number of the newest ticket: those of earlier controllers count too."""

    def __len__(self) -> int:
        return len(self._owners)

    def are_full(self, arrival: Arrival, max_tokens: int) -> bool:
        """Return whether too many frames stand empty already; 0: no bound."""
        unfilled = self.num_unfilled_tokens
        is_over = 0 < max_tokens < unfilled + arrival.prompt_len and unfilled > 0
        return is_over and arrival.needs_prefill

    def owner(self, ticket: int) -> Request | None:
        """Return the request whose pages may be written; None if the ticket is not in force."""
        return self._owners.get(ticket)

    def next_number(self) -> int:
        """Return the number of a new ticket of any kind."""
        self.num_issued += 1
        return self.num_issued

    def issue(
        self,
        request: Request,
        num_tokens: int,
        targets: tuple[TargetRun, ...],
        source: int | None = None,
    ) -> None:
        """Permit writes of the pages of the request's first num_tokens tokens at these targets.

        source: the instance that sends them; None: the prefill.
        """
        request.ticket = self.next_number()
        request.receivers = {}
        for target in targets:
            tokens = target.num_tokens_of(num_tokens)
            request.receivers[target.instance] = request.receivers.get(target.instance, 0) + tokens
        self._count(request, +1)
        self._owners[request.ticket] = request
        if source is None:
            self._unfilled[request.ticket] = num_tokens
            self.num_unfilled_tokens += num_tokens
        self._answer.transfers.append(
            Transfer(request.ticket, request.request_id, num_tokens, targets, source)
        )

    def confirmed(self, request: Request, instance: int) -> bool:
        """Record that the receiver has all its pages; True if the ticket is over."""
        assert request.ticket is not None
        self._arriving_tokens[instance] -= request.receivers.pop(instance, 0)
        if request.receivers:
            return False
        self._forget(request.ticket)
        request.ticket = None
        return True

    def _count(self, request: Request, sign: int) -> None:
        for instance, tokens in request.receivers.items():
            self._arriving_tokens[instance] += sign * tokens

    def _forget(self, ticket: int) -> None:
        del self._owners[ticket]
        self.num_unfilled_tokens -= self._unfilled.pop(ticket, 0)

    def end_term(self) -> None:
        """End all tickets, which receivers have forgotten."""
        for ticket, request in self._owners.items():
            self._answer.fences.append(Fence(ticket, ()))
            self._count(request, -1)
            request.ticket = None
            request.receivers = {}
        self._owners.clear()
        self._unfilled.clear()
        self.num_unfilled_tokens = 0

    def fence(self, request: Request) -> None:
        """End the request's ticket, if any: its receivers refuse the missing pages.

        The request keeps both: its frames wait for answers (protocol.md, quarantine).
        """
        if request.ticket is not None:
            self._forget(request.ticket)
            self._count(request, -1)
            self._answer.fences.append(Fence(request.ticket, tuple(sorted(request.receivers))))
