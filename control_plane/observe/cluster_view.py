"""What the cluster page and `nanocp top` show: where each request is, and its timeline so far.

Enters: every call of the scheduler with its events and answer, on the controller's thread; requests
for a snapshot, on any other. Leaves: a JSON text of bounded size. Does not know: HTTP, pages,
tokens. While snapshots are requested, the controller's thread publishes an immutable value now and
then; no other thread reads the scheduler.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from control_plane.scheduler.request import Request
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config import Config
from nanocp.plan import (
    PAGE_SIZE,
    Arrival,
    Ended,
    Event,
    Finished,
    InstanceLoad,
    Placement,
    Plan,
    Preempted,
    Transfer,
    TransferDone,
    WindowDone,
)

_PERIOD_S = 0.5
"""Between two snapshots, and between two points of the curves."""
_LOOK_S = 3.0
"""Snapshots are made for so long after the last question."""
_ANSWER_S = 2.0
"""Longest wait for a snapshot to be made."""
_MAX_REQUESTS = 256
"""Placed requests shown, those with the most pages first; the pages of the others are one number an
instance."""
_MAX_WAITING = 32
_MAX_ENDED = 16
_MAX_LIVES = 4096
"""Requests whose life is kept; the oldest is forgotten first."""
_MAX_MOMENTS = 24
"""Of one life: the first and the latest of them."""
_NUM_POINTS = 240

_Moment = tuple[int, Arrival | Transfer | Placement | Preempted | Finished | Ended]
"""(time in us, what happened). A Transfer stands for its arrival."""


@dataclass(slots=True, eq=False)
class _Life:
    """A request since it arrived."""

    arrival: Arrival
    moments: list[_Moment] = field(default_factory=list)
    has_ended: bool = False

    def add(self, now_us: int, what: Any) -> None:
        """One more moment; of very many the ones in the middle are forgotten."""
        if len(self.moments) >= _MAX_MOMENTS:
            del self.moments[_MAX_MOMENTS // 2]
        self.moments.append((now_us, what))


@dataclass(frozen=True, slots=True)
class _Shown:
    """One request of a snapshot."""

    request_id: int
    state: str
    moe_binding: int | None
    num_tokens: int
    """Of prompt and output, as far as planned."""
    pages_on: tuple[tuple[int, int], ...]
    life: tuple[_Moment, ...]
    arrival: Arrival | None
    """None: its life is forgotten."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The cluster at one moment."""

    at_us: int
    num_running: int
    num_waiting: int
    loads: tuple[InstanceLoad, ...]
    attention_rows: tuple[int, ...]
    other_pages: tuple[int, ...]
    """By instance: pages of requests that are not shown."""
    reports: tuple[WindowDone | None, ...]
    requests: tuple[_Shown, ...]
    waiting: tuple[_Shown, ...]
    ended: tuple[_Shown, ...]
    curves: tuple[tuple[float | None, float], ...]
    """(ms from token to token, tokens a second), the oldest first."""


class ClusterView:
    """`planned` and `publish_for_ever` belong to the controller's thread, `snapshot_json` to all
    others."""

    def __init__(self, config: Config, inter_token_sums: Callable[[], tuple[int, float]]) -> None:
        """inter_token_sums: (tokens, seconds between them) that clients got since the start."""
        self._config = config
        self._inter_token_sums = inter_token_sums
        self._lives: dict[int, _Life] = {}
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        self._receivers: dict[int, tuple[Transfer, set[int]]] = {}
        """By ticket: who has not got all its pages."""
        self._reports: list[WindowDone | None] = [None] * config.cluster.num_instances
        self._num_tokens = 0
        self._curves: deque[tuple[float | None, float]] = deque(maxlen=_NUM_POINTS)
        self._changed = threading.Condition()
        self._published: _Snapshot | None = None
        self._wanted_until_s = 0.0

    # --- the controller's thread ---

    def planned(self, now_us: int, events: Sequence[Event], plan: Plan) -> None:
        """Record one call of the scheduler."""
        for event in events:
            match event:
                case WindowDone():
                    self._reports[event.instance] = event
                    self._num_tokens += event.num_tokens
                    for finished in event.finished:
                        self._end(now_us, finished.request_id, finished)
                case Arrival():
                    self._arrived(now_us, event)
                case TransferDone(ticket, instance) if ticket in self._receivers:
                    transfer, receivers = self._receivers[ticket]
                    receivers.discard(instance)
                    if not receivers:
                        del self._receivers[ticket]
                        self._add(now_us, transfer.request_id, transfer)
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

    async def publish_for_ever(self, scheduler: Scheduler) -> None:
        """Add to the curves, and publish a snapshot while somebody looks."""
        last_s, last_tokens, (last_intervals, last_sum_s) = time.monotonic(), 0, (0, 0.0)
        while True:
            await asyncio.sleep(_PERIOD_S)
            now_s, (intervals, sum_s) = time.monotonic(), self._inter_token_sums()
            num_new = intervals - last_intervals
            tpot_ms = (sum_s - last_sum_s) / num_new * 1e3 if num_new else None
            self._curves.append((tpot_ms, (self._num_tokens - last_tokens) / (now_s - last_s)))
            last_s, last_tokens, last_intervals, last_sum_s = (
                now_s,
                self._num_tokens,
                intervals,
                sum_s,
            )
            if now_s < self._wanted_until_s:
                snapshot = self._snapshot(scheduler)
                with self._changed:
                    self._published = snapshot
                    self._changed.notify_all()

    def _arrived(self, now_us: int, arrival: Arrival) -> None:
        if not arrival.resumes:
            if len(self._lives) >= _MAX_LIVES:
                del self._lives[next(iter(self._lives))]
            self._lives[arrival.request_id] = _Life(arrival)
        self._add(now_us, arrival.request_id, arrival)

    def _add(self, now_us: int, request_id: int, what: Any) -> None:
        if life := self._lives.get(request_id):
            life.add(now_us, what)

    def _end(self, now_us: int, request_id: int, what: Finished | Ended) -> None:
        life = self._lives.get(request_id)
        # An aborted row may go on to stop by itself in the window that runs.
        if life is not None and not life.has_ended:
            life.has_ended = True
            life.add(now_us, what)
            self._ended.append(request_id)

    def _snapshot(self, scheduler: Scheduler) -> _Snapshot:
        state, queue = scheduler.decided
        placed = heapq.nlargest(
            _MAX_REQUESTS, state.requests.values(), key=lambda request: request.num_pages
        )
        other_pages = [frames.num_committed for frames in state.frames]
        for request in placed:
            for instance, count in request.pages_on.items():
                other_pages[instance] -= count
            if request.move is not None:
                other_pages[request.move.destination] -= request.move.num_pages
        return _Snapshot(
            time.monotonic_ns() // 1000,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.loads(),
            tuple(state.committed.attention_rows),
            tuple(other_pages),
            tuple(self._reports),
            tuple(self._placed(request, state.step) for request in placed),
            tuple(
                self._unplaced(entry.arrival.request_id, "waiting")
                for entry in islice(queue, _MAX_WAITING)
            ),
            tuple(self._unplaced(request_id, "ended") for request_id in reversed(self._ended)),
            tuple(self._curves),
        )

    def _placed(self, request: Request, step: int) -> _Shown:
        life = self._lives.get(request.request_id)
        return _Shown(
            request.request_id,
            request.state.value,
            request.moe_binding,
            min(request.position_at(step) + 1, request.kv_len_max + 1),
            tuple(request.pages_on.items()),
            tuple(life.moments) if life else (),
            life.arrival if life else None,
        )

    def _unplaced(self, request_id: int, state: str) -> _Shown:
        life = self._lives.get(request_id)
        return _Shown(
            request_id,
            state,
            None,
            0,
            (),
            tuple(life.moments) if life else (),
            life.arrival if life else None,
        )

    # --- any other thread ---

    def snapshot_json(self) -> bytes:
        """The latest snapshot as JSON; waits a bounded time for one if the latest is old. Raises
        TimeoutError."""
        self._wanted_until_s = time.monotonic() + _LOOK_S
        with self._changed:
            if not self._changed.wait_for(self._is_fresh, _ANSWER_S) or self._published is None:
                raise TimeoutError(
                    f"the controller published nothing in {_ANSWER_S:g} s; it is starting or stopping"
                )
            snapshot = self._published
        return json.dumps(self._as_dict(snapshot), separators=(",", ":")).encode()

    def _is_fresh(self) -> bool:
        return (
            self._published is not None
            and time.monotonic() - self._published.at_us / 1e6 < 2 * _PERIOD_S
        )

    def _as_dict(self, now: _Snapshot) -> dict[str, Any]:
        cluster = self._config.cluster
        return {
            "policy": self._config.scheduler.policy,
            "page_size": PAGE_SIZE,
            "num_frames": cluster.num_frames,
            "max_rows": cluster.bounds.max_rows,
            "num_running": now.num_running,
            "num_waiting": now.num_waiting,
            "instances": [
                {
                    "instance": instance,
                    "node": cluster.node_of(instance),
                    "kv_tokens": load.kv_tokens,
                    "rows": load.num_rows,
                    "attention_rows": now.attention_rows[instance],
                    "frames_free": load.frames_free,
                    "frames_quarantined": load.frames_quarantined,
                    "frames_committed": load.frames_committed,
                    "other_pages": now.other_pages[instance],
                    "step_ms": report.step_us / 1e3 if (report := now.reports[instance]) else None,
                    "exchange_ms": report.exchange_us / 1e3 if report else None,
                }
                for instance, load in enumerate(now.loads)
            ],
            "requests": [_request(shown, now.at_us) for shown in now.requests],
            "waiting": [_request(shown, now.at_us) for shown in now.waiting],
            "ended": [_request(shown, now.at_us) for shown in now.ended],
            "curve_period_s": _PERIOD_S,
            "tpot_ms": [None if ms is None else round(ms, 3) for ms, _ in now.curves],
            "tokens_per_s": [round(rate, 1) for _, rate in now.curves],
        }


def _request(shown: _Shown, now_us: int) -> dict[str, Any]:
    arrival, first_us = shown.arrival, shown.life[0][0] if shown.life else now_us
    return {
        "id": shown.request_id,
        "state": shown.state,
        "moe_binding": shown.moe_binding,
        "num_tokens": shown.num_tokens,
        "prompt_len": arrival.prompt_len if arrival else None,
        "max_tokens": arrival.max_tokens if arrival else None,
        "priority": arrival.priority if arrival else 0,
        "pages_on": shown.pages_on,
        "age_s": round((now_us - first_us) / 1e6, 3),
        "life": [
            [round((at_us - first_us) / 1e6, 3), *text]
            for (at_us, _), text in zip(shown.life, _told(shown.life), strict=True)
        ],
    }


def _told(life: Sequence[_Moment]) -> list[tuple[str, str]]:
    """(word, sentence) of each moment."""
    told: list[tuple[str, str]] = []
    before: Placement | None = None
    for _, what in life:
        match what:
            case Arrival():
                word = "back in the queue" if what.resumes else "arrived"
                told.append(
                    (
                        word,
                        f"{what.prompt_len:,} tokens of prompt, at most {what.max_tokens:,} to generate",
                    )
                )
            case Transfer(source=None):
                told.append(
                    (
                        "KV is there",
                        f"{what.num_tokens:,} tokens from the prefill; its row can start",
                    )
                )
            case Transfer():
                told.append(("pages have moved", f"from instance {what.source}"))
            case Placement():
                told.append((_placement_word(what, before), _where(what)))
                before = what
            case Preempted():
                told.append(
                    ("preempted", f"its frames go to others after {what.num_tokens:,} tokens")
                )
                before = None
            case Finished():
                told.append(
                    (f"ended: {what.reason.value}", f"{what.num_tokens:,} tokens generated")
                )
            case Ended():
                told.append((f"ended: {what.reason.value}", what.message))
    return told


def _placement_word(now: Placement, before: Placement | None) -> str:
    if before is None:
        return "placed"
    return "re-bound" if now.moe_binding != before.moe_binding else "KV binding changed"


def _where(placement: Placement) -> str:
    split = ", ".join(f"{pages} on {instance}" for instance, pages in placement.kv_split())
    return f"MoE binding {placement.moe_binding}; pages: {split or 'none yet'}"
