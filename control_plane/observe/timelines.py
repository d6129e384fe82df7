"""Timelines: the events of each request since it arrived, and the time of each part.

Only `find` may be called from any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from nanocp.values.passes import ServiceEvent
from nanocp.values.plan import (
    PAGE_SIZE,
    Arrival,
    Ended,
    Finished,
    FinishReason,
    Placement,
    Plan,
    Preempted,
    Transfer,
    TransferDone,
    WindowDone,
)

_MAX_TIMELINES = 4096
"""Requests whose timeline is kept, some 2 KB each; the oldest is forgotten first."""
_MAX_MOMENTS = 24
"""Most moments of one timeline; the first and the latest are kept."""
NOTHING_NOTED: Mapping[int, str] = MappingProxyType({})
_MAX_ENDED = 16
"""Requests that ended last."""


class Started(NamedTuple):
    """A row that is in every window from this one on."""

    window: int


class Part(Enum):
    """The phases of a request, which add up to its time."""

    QUEUE = "queue"
    """The request waits to be placed."""
    PREFILL = "prefill"
    """It is placed, and its KV is not there yet."""
    START = "start"
    """The KV is there, and the row waits for a window."""
    DECODE = "decode"
    """The row is in the windows."""
    AWAY = "away"
    """It was preempted, and has not come back to the queue."""


QUEUE, PREFILL, START, DECODE, AWAY = Part


class Moment(NamedTuple):
    """One event of a request."""

    at_us: int
    """The controller's time."""
    what: Arrival | Transfer | Placement | Started | Preempted | Finished | Ended
    """A Transfer stands for its arrival."""


class Timeline(NamedTuple):
    """A request since it arrived."""

    arrival: Arrival
    moments: tuple[Moment, ...]
    num_frames: int
    """Frames that an instance has."""
    obstacle: str
    """Reason for its wait to be placed, else empty."""


@dataclass(slots=True)
class Account:
    """The time of each part of a request, and counts of its events."""

    parts_us: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    """Time in each part until the latest moment, us."""
    num_queued_before: int = 0
    """Requests in the queue when it arrived."""
    num_prefilling_before: int = 0
    """Requests prefilling when it was placed first."""
    num_windows: int = 0
    """Windows while its row ran."""
    step_us: int = 0
    """Sum of these windows' mean steps, us."""
    num_moves: int = 0
    num_rebindings: int = 0
    obstacle: str = ""
    """Obstacle of the latest try to place it; empty if there was none."""
    num_preemptions: int = 0
    num_resubmissions: int = 0
    """Attempts after a loss."""


class Found(NamedTuple):
    """A found request, at one moment."""

    timeline: Timeline
    account: Account
    part: Part | None
    """None: it has ended."""
    placement: Placement | None
    """The latest; None if it was never placed."""


@dataclass(eq=False, slots=True)
class _Growing:
    arrival: Arrival
    since_us: int
    num_frames: int
    moments: list[Moment] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    part: Part | None = QUEUE
    """None: it has ended."""
    placement: Placement | None = None
    decodes_from: tuple[int, int] = (0, 0)
    """The cluster's windows and their steps (us) when its row began to run."""

    def add(self, now_us: int, what: Any) -> None:
        """Forget the moment in the middle if there are too many."""
        if len(self.moments) >= _MAX_MOMENTS:
            del self.moments[_MAX_MOMENTS // 2]
        self.moments.append(Moment(now_us, what))

    @property
    def timeline(self) -> Timeline:
        obstacle = self.account.obstacle if self.part is QUEUE else ""
        return Timeline(self.arrival, tuple(self.moments), self.num_frames, obstacle)

    def found(self, now_us: int, steps: tuple[int, int]) -> Found:
        part = self.part
        account = replace(self.account, parts_us=dict(self.account.parts_us))
        if part is not None:
            account.parts_us[part] += max(0, now_us - self.since_us)
        if part is DECODE:
            account.num_windows += steps[0] - self.decodes_from[0]
            account.step_us += steps[1] - self.decodes_from[1]
        return Found(self.timeline, account, part, self.placement)

    def goes_on(self, now_us: int, part: Part | None, steps: tuple[int, int]) -> None:
        """steps: the cluster's windows and their steps so far."""
        if self.part is None:
            return
        self.account = self.found(now_us, steps).account
        self.decodes_from = steps
        self.part, self.since_us = part, now_us


class Timelines:
    """The timelines of the latest requests."""

    def __init__(self, num_frames: int, most: int = _MAX_TIMELINES) -> None:
        """num_frames: of an instance. most: requests to keep; the oldest is forgotten first."""
        self._num_frames = num_frames
        self._most = most
        self._timelines: dict[int, _Growing] = {}
        self._by_name: dict[str, list[int]] = {}
        self._num_in = dict.fromkeys(Part, 0)
        """Requests in each part."""
        self._steps = (0, 0)
        """Windows that instance 0 has reported, and the sum of their mean steps, us."""
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        self._receivers: dict[int, tuple[Transfer, set[int]]] = {}
        """Transfers under way by ticket, with the instances that wait for pages."""

    def of(self, request_id: int) -> Timeline | None:
        """Return the request's timeline so far; None if it is forgotten."""
        growing = self._timelines.get(request_id)
        return None if growing is None else growing.timeline

    def parts_s(self, request_id: int) -> dict[str, float]:
        """Return the seconds of each part of an ended request, unless forgotten."""
        growing = self._timelines.get(request_id)
        parts_us = growing.account.parts_us if growing else {}
        return {part.value: round(us / 1e6, 6) for part, us in parts_us.items()}

    def find(self, name: str, now_us: int) -> list[Found]:
        """Return requests of this name (Arrival.names) until now; from any thread.

        Several may be choices of one request, or reuse the name.
        """
        return [
            growing.found(now_us, self._steps)
            for request_id in tuple(self._by_name.get(name, ()))
            if (growing := self._timelines.get(request_id))
        ]

    def latest_ended(self) -> Iterator[int]:
        """Yield the latest ended requests, the latest first."""
        return reversed(self._ended)

    def planned(
        self,
        now_us: int,
        events: Sequence[ServiceEvent],
        plan: Plan,
        noted: Mapping[int, str] = NOTHING_NOTED,
    ) -> None:
        """Record one call of the scheduler. noted: see Scheduler.noted."""
        for event in events:
            match event:
                case WindowDone():
                    if event.instance == 0:
                        self._steps = (self._steps[0] + 1, self._steps[1] + event.step_us)
                    for finished in event.finished:
                        self._end(now_us, finished.request_id, finished)
                case Arrival():
                    # A request of any length takes as much: its ids and hashes are not kept.
                    self._arrived(now_us, replace(event, row_start=b"", page_hashes=()))
                case TransferDone(ticket, instance) if ticket in self._receivers:
                    self._received(now_us, ticket, instance)
        for request_id, obstacle in noted.items():
            if growing := self._timelines.get(request_id):
                growing.account.obstacle = obstacle
        for fence in plan.fences:
            self._receivers.pop(fence.ticket, None)
        for transfer in plan.transfers:
            kept = replace(transfer, targets=transfer.targets[:1])  # what was there is before it
            self._receivers[transfer.ticket] = kept, set(transfer.receivers)
        for placement in plan.placements:
            self._placed(now_us, placement)
        for share in plan.instances:
            for start in share.starts:
                self._add(now_us, start.request_id, Started(share.window), DECODE)
        for preempted in plan.preempted:
            if growing := self._timelines.get(preempted.request_id):
                growing.account.num_preemptions += 1
            self._add(now_us, preempted.request_id, preempted, AWAY)
        for ended in plan.ended:
            self._end(now_us, ended.request_id, ended)

    def _arrived(self, now_us: int, arrival: Arrival) -> None:
        if not _is_again(arrival):
            if len(self._timelines) >= self._most:
                self._forget(next(iter(self._timelines)))
            growing = self._timelines[arrival.request_id] = _Growing(
                arrival, now_us, self._num_frames
            )
            growing.account.num_queued_before = self._num_in[QUEUE]
            self._num_in[QUEUE] += 1
            for name in arrival.names:
                self._by_name.setdefault(name, []).append(arrival.request_id)
        elif not arrival.resumes and (known := self._timelines.get(arrival.request_id)):
            known.account.num_resubmissions += 1
        self._add(now_us, arrival.request_id, arrival, QUEUE)

    def _forget(self, request_id: int) -> None:
        growing = self._timelines.pop(request_id)
        self._goes_on(growing.since_us, growing, None)
        for name in growing.arrival.names:
            self._by_name[name].remove(request_id)
            if not self._by_name[name]:
                del self._by_name[name]

    def _placed(self, now_us: int, placement: Placement) -> None:
        growing = self._timelines.get(placement.request_id)
        if growing is None:
            return
        account, before = growing.account, growing.placement
        if growing.part is QUEUE:
            if before is None:
                account.num_prefilling_before = self._num_in[PREFILL]
            self._goes_on(now_us, growing, PREFILL)
        elif before is not None and before.moe_binding != placement.moe_binding:
            account.num_rebindings += 1
        growing.placement = placement
        growing.add(now_us, placement)

    def _received(self, now_us: int, ticket: int, instance: int) -> None:
        transfer, receivers = self._receivers[ticket]
        receivers.discard(instance)
        if not receivers:
            del self._receivers[ticket]
            if transfer.source is None:
                self._add(now_us, transfer.request_id, transfer, START)
            elif growing := self._timelines.get(transfer.request_id):
                growing.account.num_moves += 1
                growing.add(now_us, transfer)

    def _add(self, now_us: int, request_id: int, what: Any, part: Part | None) -> None:
        if growing := self._timelines.get(request_id):
            growing.add(now_us, what)
            self._goes_on(now_us, growing, part)

    def _goes_on(self, now_us: int, growing: _Growing, part: Part | None) -> None:
        if growing.part is not None:
            self._num_in[growing.part] -= 1
            if part is not None:
                self._num_in[part] += 1
        growing.goes_on(now_us, part, self._steps)

    def _end(self, now_us: int, request_id: int, what: Finished | Ended) -> None:
        growing = self._timelines.get(request_id)
        # An aborted row may go on to stop by itself in the window that runs.
        if growing is not None and growing.part is not None:
            growing.add(now_us, what)
            self._goes_on(now_us, growing, None)
            # Of an overload's refusals the log and the metrics tell.
            if not isinstance(what, Ended) or what.reason is not FinishReason.REFUSED:
                self._ended.append(request_id)


def sentences(timeline: Timeline) -> list[tuple[str, str]]:
    """Return (title, detail) of each moment."""
    shown: list[tuple[str, str]] = []
    before: Placement | None = None
    for _, what in timeline.moments:
        match what:
            case Arrival():
                title = "back in the queue" if _is_again(what) else "arrived"
                lengths = f"{what.prompt_len:,} tokens of prompt, at most {what.max_tokens:,}"
                shown.append((title, f"{lengths} to generate"))
            case Transfer(source=None):
                num_there = min(what.targets[0].first_page * PAGE_SIZE, what.num_tokens)
                there = f" behind {num_there:,} that were in the cluster" if num_there else ""
                num_sent = what.num_tokens - num_there
                detail = f"{num_sent:,} tokens from the prefill{there}; its row can start"
                shown.append(("KV is there", detail))
            case Transfer():
                shown.append(("pages have moved", f"from instance {what.source}"))
            case Placement():
                why = "" if before else f"; {_why(what, timeline)}"
                shown.append((_placement_title(what, before), _where(what) + why))
                before = what
            case Started():
                shown.append(("row starts", f"in every window from {what.window} on"))
            case Preempted():
                detail = f"its frames go to others after {what.num_tokens:,} tokens"
                shown.append(("preempted", detail))
                before = None
            case Finished():
                detail = f"{what.num_tokens:,} tokens generated"
                shown.append((f"ended: {what.reason.value}", detail))
            case Ended():
                shown.append((f"ended: {what.reason.value}", what.message))
    if timeline.obstacle:
        title, detail = shown[-1]
        shown[-1] = title, f"{detail}; kept in the queue by {timeline.obstacle}"
    return shown


def _is_again(arrival: Arrival) -> bool:
    return arrival.resumes or arrival.attempt > 0


def _placement_title(now: Placement, before: Placement | None) -> str:
    if before is None:
        return "placed"
    return "re-bound" if now.moe_binding != before.moe_binding else "KV binding changed"


def _why(placement: Placement, timeline: Timeline) -> str:
    pages, num_frames = -(-timeline.arrival.prompt_len // PAGE_SIZE), timeline.num_frames
    if pages > num_frames:
        return f"split because an instance has {num_frames} frames, and it needs {pages}"
    return "the policy chose to split it" if placement.cp_degree > 1 else "an instance holds it"


def _where(placement: Placement) -> str:
    split = ", ".join(f"{pages} on {instance}" for instance, pages in placement.kv_split())
    return f"MoE binding {placement.moe_binding}; pages: {split or 'none yet'}"
