"""The data of the cluster page and `nanocp top`: where each request is, and its timeline.

The controller's thread publishes immutable snapshots on request.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from control_plane.observe.load_log import LoadLog, num_prefilling
from control_plane.observe.observed import ObservedScheduler
from control_plane.observe.request_values import request_values
from control_plane.observe.timelines import NOTHING_NOTED, Timeline, Timelines, sentences
from control_plane.scheduler.state.request import TRANSFERRING, Request, num_pages
from nanocp.config.cluster import ClusterConfig
from nanocp.values.passes import ServiceEvent
from nanocp.values.plan import PAGE_SIZE, Finished, InstanceLoad, Plan, WindowDone

_PERIOD_S = 0.5
"""Time between two snapshots, and between two points of the curves."""
_LOOK_S = 3.0
"""Snapshots are made for this time after a request for one."""
_ANSWER_S = 2.0
"""Longest wait for a snapshot to be made."""
_MAX_REQUESTS = 256
"""Placed requests shown, those with the most pages first."""
_MAX_WAITING = 32
"""Waiting requests shown, the first of the queue first."""
_MAX_TENANTS = 8
_NUM_POINTS = 240
"""Points of a curve."""


@dataclass(frozen=True, slots=True)
class _Shown:
    request_id: int
    state: str
    timeline: Timeline | None
    """None if it is forgotten."""
    moe_binding: int | None = None
    num_tokens: int = 0
    """Planned tokens of prompt and output."""
    pages_on: tuple[tuple[int, int], ...] = ()
    promised_on: tuple[tuple[int, int], ...] = ()
    """(instance, pages without KV yet), for coming tokens or on their way."""
    parts_s: dict[str, float] | None = None
    """Seconds in each part of an ended request (timelines.Part)."""


class TenantLoad(NamedTuple):
    """One tenant's requests and tokens in the cluster."""

    tenant: str
    """`Arrival.tenant`; empty for requests without a key and a user."""
    placed: int
    """Requests that are placed and have not ended."""
    queued: int
    """Requests in the waiting queue."""
    kv_tokens: int
    """Tokens that fit its frames."""
    served_tokens: int
    """Virtual token counter, by which tenants are ordered."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    at_us: int
    num_running: int
    num_prefilling: int
    num_queued: int
    loads: tuple[InstanceLoad, ...]
    attention_rows: tuple[int, ...]
    other_pages: tuple[int, ...]
    """Pages of hidden requests, on each instance."""
    reports: tuple[WindowDone | None, ...]
    requests: tuple[_Shown, ...]
    waiting: tuple[_Shown, ...]
    ended: tuple[_Shown, ...]
    tenants: tuple[TenantLoad, ...]
    """Tenants with most requests, the most first."""
    curves: tuple[tuple[float | None, float], ...]
    """(ms from token to token, tokens a second), the oldest first."""
    stages: list[dict[str, Any]]
    """Those of a pipeline; see Flights.stages."""


class ClusterView:
    """The state of the cluster for people. Other threads may only call `snapshot_json`."""

    def __init__(
        self,
        cluster: ClusterConfig,
        policy: str,
        inter_token_sums: Callable[[], tuple[int, float]],
        engines: Callable[[], list[dict[str, Any]]] = list,
        recovery: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """inter_token_sums: (tokens, seconds between them) of clients since the start.

        engines: see EngineMetrics.rows. recovery: see RecoveryMetrics.row.
        """
        self._engines, self._recovery = engines, recovery
        self._cluster, self._policy = cluster, policy
        self._inter_token_sums = inter_token_sums
        self._timelines = Timelines(cluster.num_frames)
        self.timeline_of = self._timelines.of
        """The timeline of a request by its number; from any thread."""
        self._reports: list[WindowDone | None] = [None] * cluster.num_instances
        self._num_tokens = 0
        self._curves: deque[tuple[float | None, float]] = deque(maxlen=_NUM_POINTS)
        self._changed = threading.Condition()
        self._published: _Snapshot | None = None
        self._wanted_until_s = 0.0

    # --- the controller's thread ---

    def planned(
        self,
        now_us: int,
        events: Sequence[ServiceEvent],
        plan: Plan,
        noted: Mapping[int, str] = NOTHING_NOTED,
    ) -> None:
        """Record one call of the scheduler. noted: see Scheduler.noted."""
        for event in events:
            if isinstance(event, WindowDone):
                self._reports[event.instance] = event
                self._num_tokens += event.num_tokens
        self._timelines.planned(now_us, events, plan, noted)

    async def publish_for_ever(
        self, scheduler: ObservedScheduler, stages: Callable[[], list[dict[str, Any]]] = list
    ) -> None:
        """Add to the curves, and publish a snapshot while they are requested.

        stages: of a pipeline.
        """
        last_s, last_tokens, (last_intervals, last_sum_s) = time.monotonic(), 0, (0, 0.0)
        load_log = LoadLog(last_s)
        while True:
            await asyncio.sleep(_PERIOD_S)
            now_s, (intervals, sum_s) = time.monotonic(), self._inter_token_sums()
            num_new = intervals - last_intervals
            tpot_ms = (sum_s - last_sum_s) / num_new * 1e3 if num_new else None
            self._curves.append((tpot_ms, (self._num_tokens - last_tokens) / (now_s - last_s)))
            last_s, last_tokens = now_s, self._num_tokens
            last_intervals, last_sum_s = intervals, sum_s
            load_log.tick(now_s, scheduler, self._num_tokens)
            if now_s < self._wanted_until_s:
                snapshot = self._snapshot(scheduler, stages())
                with self._changed:
                    self._published = snapshot
                    self._changed.notify_all()

    def _snapshot(self, scheduler: ObservedScheduler, stages: list[dict[str, Any]]) -> _Snapshot:
        state, queue = scheduler.requests.decided
        placed = heapq.nlargest(
            _MAX_REQUESTS, state.requests.values(), key=lambda request: request.num_pages
        )
        other_pages = [frames.num_committed for frames in state.frames]
        for request in placed:
            for instance, count in request.pages_on.items():
                other_pages[instance] -= count
            if request.move is not None:
                other_pages[request.move.destination] -= request.move.num_pages
        waiting = (entry.arrival.request_id for entry in islice(queue, _MAX_WAITING))
        prefilling, loads = num_prefilling(scheduler), scheduler.requests.loads()
        return _Snapshot(
            at_us=time.monotonic_ns() // 1000,
            num_running=scheduler.requests.num_running - prefilling,
            num_prefilling=prefilling,
            num_queued=scheduler.requests.num_waiting,
            loads=loads,
            attention_rows=tuple(state.committed.attention_rows),
            other_pages=tuple(other_pages),
            # What a seat that serves nothing reported last is over.
            reports=tuple(
                report if load.num_frames else None
                for report, load in zip(self._reports, loads, strict=False)
            ),
            requests=tuple(self._placed(request, state.step) for request in placed),
            waiting=tuple(self._unplaced(request_id, "waiting") for request_id in waiting),
            ended=tuple(
                self._unplaced(request_id, "ended", self._timelines.parts_s(request_id))
                for request_id in self._timelines.latest_ended()
            ),
            tenants=tenant_loads(scheduler),
            curves=tuple(self._curves),
            stages=stages,
        )

    def _placed(self, request: Request, step: int) -> _Shown:
        return _Shown(
            request.request_id,
            request.state.value,
            self._timelines.of(request.request_id),
            request.moe_binding,
            num_tokens=min(request.position_at(step) + 1, request.kv_len_max + 1),
            pages_on=tuple(request.pages_on.items()),
            promised_on=_promised_on(request, step),
        )

    def _unplaced(
        self, request_id: int, state: str, parts_s: dict[str, float] | None = None
    ) -> _Shown:
        return _Shown(request_id, state, self._timelines.of(request_id), parts_s=parts_s)

    # --- any other thread ---

    def snapshot_json(self) -> bytes:
        """Return the latest snapshot as JSON, after a bounded wait for a new one.

        Raises TimeoutError.
        """
        self._wanted_until_s = time.monotonic() + _LOOK_S
        with self._changed:
            if not self._changed.wait_for(self._is_fresh, _ANSWER_S) or self._published is None:
                raise TimeoutError(
                    f"the controller published nothing in {_ANSWER_S:g} s; it is starting or "
                    "stopping"
                )
            snapshot = self._published
        return json.dumps(self._as_dict(snapshot), separators=(",", ":")).encode()

    def numbers_of(self, name: str) -> list[int]:
        """Return the numbers of the latest requests of this name."""
        return [each.timeline.arrival.request_id for each in self._timelines.find(name, 0)]

    def requests_json(self, name: str) -> bytes | None:
        """Explain the time of requests of this name or number as JSON; None if none is known."""
        now_us = time.monotonic_ns() // 1000
        wall_us = time.time_ns() // 1000 - now_us
        found = self._timelines.find(name, now_us)
        values = [request_values(one, wall_us) for one in found]
        return json.dumps(values, separators=(",", ":")).encode() if values else None

    def _is_fresh(self) -> bool:
        return (
            self._published is not None
            and time.monotonic() - self._published.at_us / 1e6 < 2 * _PERIOD_S
        )

    def _as_dict(self, now: _Snapshot) -> dict[str, Any]:
        cluster = self._cluster
        return {
            "policy": self._policy,
            "page_size": PAGE_SIZE,
            "num_frames": cluster.num_frames,
            "max_rows": cluster.bounds.max_rows,
            "num_running": now.num_running,
            "num_prefilling": now.num_prefilling,
            "num_queued": now.num_queued,
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
            "stages": now.stages,
            "engines": self._engines(),
            "recovery": self._recovery(),
            "requests": [_request(shown, now.at_us) for shown in now.requests],
            "waiting": [_request(shown, now.at_us) for shown in now.waiting],
            "ended": [_request(shown, now.at_us) for shown in now.ended],
            "tenants": [one._asdict() for one in now.tenants],
            "curve_period_s": _PERIOD_S,
            "tpot_ms": [None if ms is None else round(ms, 3) for ms, _ in now.curves],
            "tokens_per_s": [round(rate, 1) for _, rate in now.curves],
        }


def tenant_loads(scheduler: ObservedScheduler) -> tuple[TenantLoad, ...]:
    """Return at most 8 tenants, those with most requests first."""
    state, queue = scheduler.requests.decided
    placed: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    for request in state.requests.values():
        placed[request.arrival.tenant] += 1
        pages[request.arrival.tenant] += request.num_pages
    queued = Counter(entry.arrival.tenant for entry in queue)
    counters = scheduler.requests.fair_share.counters
    return tuple(
        TenantLoad(
            tenant,
            placed[tenant],
            queued[tenant],
            pages[tenant] * PAGE_SIZE,
            counters.get(tenant, 0),
        )
        for tenant, _ in (placed + queued).most_common(_MAX_TENANTS)
    )


def _promised_on(request: Request, step: int) -> tuple[tuple[int, int], ...]:
    """Return (instance, pages without KV at this step), by instance."""
    is_coming = request.state is TRANSFERRING
    written = request.num_shared if is_coming else num_pages(request.position_at(step) + 1)
    promised: dict[int, int] = {}
    for run in request.runs:
        if count := run.num_pages - min(max(written - run.first_page, 0), run.num_pages):
            promised[run.instance] = promised.get(run.instance, 0) + count
    return tuple(sorted(promised.items()))


def _request(shown: _Shown, now_us: int) -> dict[str, Any]:
    timeline = shown.timeline
    arrival, moments = (timeline.arrival, timeline.moments) if timeline else (None, ())
    first_us = moments[0].at_us if moments else now_us
    last = moments[-1].what if moments else None
    return {
        "id": shown.request_id,
        "client_id": arrival.client_id if arrival else "",
        "state": shown.state,
        "moe_binding": shown.moe_binding,
        "num_tokens": shown.num_tokens,
        "prompt_len": arrival.prompt_len if arrival else None,
        "max_tokens": arrival.max_tokens if arrival else None,
        "priority": arrival.priority if arrival else 0,
        "pages_on": shown.pages_on,
        "promised_on": shown.promised_on,
        "num_generated": last.num_tokens if isinstance(last, Finished) else None,
        "parts_s": shown.parts_s,
        "age_s": round((now_us - first_us) / 1e6, 3),
        "timeline": [
            [round((moment.at_us - first_us) / 1e6, 3), *sentence]
            for moment, sentence in zip(
                moments, sentences(timeline) if timeline else (), strict=True
            )
        ],
    }
