"""Timelines: what has happened to each request since it arrived.

Enters: every call of the scheduler with its events and answer. Leaves: the latest requests'
timelines, as values and as sentences. Does not know: HTTP, pages, tokens.

Used from the controller's thread only; what it gives out does not change any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nanocp.plan import (
    Arrival,
    Ended,
    Event,
    Finished,
    Placement,
    Plan,
    Preempted,
    Transfer,
    TransferDone,
    WindowDone,
)

_MAX_TIMELINES = 4096
"""Requests whose timeline is kept; the oldest is forgotten first."""
_MAX_MOMENTS = 24
"""Most moments of one timeline. Of more, the first and the latest are kept."""
_MAX_ENDED = 16
"""Requests that ended last."""


class Moment(NamedTuple):
    """One thing that happened to a request."""

    at_us: int
    """The controller's time."""
    what: Arrival | Transfer | Placement | Preempted | Finished | Ended
    """A Transfer stands for its arrival."""


class Timeline(NamedTuple):
    """A request since it arrived."""

    arrival: Arrival
    moments: tuple[Moment, ...]


class _Growing:
    """A timeline to which moments are added."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.moments: list[Moment] = []
        self.has_ended = False

    def add(self, now_us: int, what: Any) -> None:
        """Add a moment. If there are too many, the one in the middle is forgotten."""
        if len(self.moments) >= _MAX_MOMENTS:
            del self.moments[_MAX_MOMENTS // 2]
        self.moments.append(Moment(now_us, what))


class Timelines:
    """The timelines of the latest requests."""

    def __init__(self) -> None:
        self._timelines: dict[int, _Growing] = {}
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        self._receivers: dict[int, tuple[Transfer, set[int]]] = {}
        """Transfers under way by ticket, with the instances that wait for pages."""

    def of(self, request_id: int) -> Timeline | None:
        """The request's timeline so far; None if it is forgotten."""
        growing = self._timelines.get(request_id)
        return None if growing is None else Timeline(growing.arrival, tuple(growing.moments))

    def latest_ended(self) -> Iterator[int]:
        """The requests that ended last, the latest first."""
        return reversed(self._ended)

    def planned(self, now_us: int, events: Sequence[Event], plan: Plan) -> None:
        """Record one call of the scheduler."""
        for event in events:
            match event:
                case WindowDone():
                    for finished in event.finished:
                        self._end(now_us, finished.request_id, finished)
                case Arrival():
                    self._arrived(now_us, event)
                case TransferDone(ticket, instance) if ticket in self._receivers:
                    self._received(now_us, ticket, instance)
        for fence in plan.fences:
            self._receivers.pop(fence.ticket, None)
        for transfer in plan.transfers:
            self._receivers[transfer.ticket] = transfer, set(transfer.receivers)
        for placement in plan.placements:
            self._add(now_us, placement.request_id, placement)
        for preempted in plan.preempted:
            self._add(now_us, preempted.request_id, preempted)
        for ended in plan.ended:
            self._end(now_us, ended.request_id, ended)

    def _arrived(self, now_us: int, arrival: Arrival) -> None:
        if not _is_again(arrival):
            if len(self._timelines) >= _MAX_TIMELINES:
                del self._timelines[next(iter(self._timelines))]
            self._timelines[arrival.request_id] = _Growing(arrival)
        self._add(now_us, arrival.request_id, arrival)

    def _received(self, now_us: int, ticket: int, instance: int) -> None:
        transfer, receivers = self._receivers[ticket]
        receivers.discard(instance)
        if not receivers:
            del self._receivers[ticket]
            self._add(now_us, transfer.request_id, transfer)

    def _add(self, now_us: int, request_id: int, what: Any) -> None:
        if growing := self._timelines.get(request_id):
            growing.add(now_us, what)

    def _end(self, now_us: int, request_id: int, what: Finished | Ended) -> None:
        growing = self._timelines.get(request_id)
        # An aborted row may go on to stop by itself in the window that runs.
        if growing is not None and not growing.has_ended:
            growing.has_ended = True
            growing.add(now_us, what)
            self._ended.append(request_id)


def sentences(moments: Sequence[Moment]) -> list[tuple[str, str]]:
    """(title, detail) of each moment."""
    shown: list[tuple[str, str]] = []
    before: Placement | None = None
    for _, what in moments:
        match what:
            case Arrival():
                title = "back in the queue" if _is_again(what) else "arrived"
                lengths = f"{what.prompt_len:,} tokens of prompt, at most {what.max_tokens:,}"
                shown.append((title, f"{lengths} to generate"))
            case Transfer(source=None):
                detail = f"{what.num_tokens:,} tokens from the prefill; its row can start"
                shown.append(("KV is there", detail))
            case Transfer():
                shown.append(("pages have moved", f"from instance {what.source}"))
            case Placement():
                shown.append((_placement_title(what, before), _where(what)))
                before = what
            case Preempted():
                detail = f"its frames go to others after {what.num_tokens:,} tokens"
                shown.append(("preempted", detail))
                before = None
            case Finished():
                detail = f"{what.num_tokens:,} tokens generated"
                shown.append((f"ended: {what.reason.value}", detail))
            case Ended():
                shown.append((f"ended: {what.reason.value}", what.message))
    return shown


def _is_again(arrival: Arrival) -> bool:
    return arrival.resumes or arrival.attempt > 0


def _placement_title(now: Placement, before: Placement | None) -> str:
    if before is None:
        return "placed"
    return "re-bound" if now.moe_binding != before.moe_binding else "KV binding changed"


def _where(placement: Placement) -> str:
    split = ", ".join(f"{pages} on {instance}" for instance, pages in placement.kv_split())
    return f"MoE binding {placement.moe_binding}; pages: {split or 'none yet'}"
