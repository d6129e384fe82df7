"""The bounded global queue of requests not yet placed, by class, tenant and arrival (4.1)."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from control_plane.scheduler.queue.fair_share import FairShare
from control_plane.scheduler.state.request import num_pages
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE, Arrival


def earliest(*deadlines_us: int | None) -> int | None:
    """Return the first of these deadlines, in us; None if there is none."""
    return min((each for each in deadlines_us if each is not None), default=None)


class Waiting(NamedTuple):
    """One waiting request."""

    arrival: Arrival
    arrived_us: int


class WaitingQueue:
    """Yields the lowest priority number first, then the least served tenant, then the oldest."""

    def __init__(self, config: SchedulerConfig, fair_share: FairShare | None = None) -> None:
        self._fair_share = fair_share or FairShare()
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._waiting: dict[int, Waiting] = {}
        self._classes: dict[int, dict[str, list[int]]] = {}
        """Priority -> tenant -> request ids, ascending, in order of first arrival; no list is
        empty."""
        self._deadlines: list[tuple[int, int]] = []
        """A heap of (deadline in us, request id); some of these requests no longer wait."""
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield requests in order. A tenant that is charged meanwhile moves back."""
        for priority in sorted(self._classes):
            yield from self._of_class(self._classes[priority])

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def refusal(self, arrival: Arrival) -> str | None:
        """Return why the queue cannot take the request, naming the cap; None if it can."""
        if len(self._waiting) >= self._max_requests:
            return f"the waiting queue is full: max_queued_requests is {self._max_requests}"
        if self.num_tokens + arrival.prompt_len > self._max_tokens:
            return (
                f"the waiting queue holds {self.num_tokens} prompt tokens and cannot take "
                f"{arrival.prompt_len} more: "
                f"max_queued_tokens is {self._max_tokens}"
            )
        return None

    def admit(self, arrival: Arrival, now_us: int) -> list[tuple[int, str]]:
        """Add a new request; return (request id, sentence) of each request refused for it.

        A full queue refuses it, or the newest of the tenant with the longest queue.
        """
        refused: list[tuple[int, str]] = []
        while refusal := self.refusal(arrival):
            displaced = self._displaced_by(arrival)
            if displaced is None:
                return [*refused, (arrival.request_id, refusal)]
            self.remove(displaced)
            sentence = f"tenants with fewer waiting requests go before: {refusal}"
            refused.append((displaced, sentence))
        self.append(arrival, now_us)
        return refused

    def append(self, arrival: Arrival, now_us: int) -> None:
        """Add an arrival, without caps if it was admitted before."""
        assert arrival.request_id not in self._waiting
        self._waiting[arrival.request_id] = Waiting(arrival, now_us)
        tenants = self._classes.setdefault(arrival.priority, {})
        insort(tenants.setdefault(arrival.tenant, []), arrival.request_id)
        self._fair_share.waits(arrival)
        if arrival.deadline_us is not None:
            heapq.heappush(self._deadlines, (arrival.deadline_us, arrival.request_id))
        self.num_tokens += arrival.prompt_len

    def replace(self, arrival: Arrival) -> None:
        """Replace a waiting request by its later attempt, with the same deadline."""
        old, arrived_us = self._waiting[arrival.request_id]
        if arrival.attempt > old.attempt:
            self.num_tokens += arrival.prompt_len - old.prompt_len
            arrival = replace(arrival, deadline_us=old.deadline_us)
            self._waiting[arrival.request_id] = Waiting(arrival, arrived_us)

    def remove(self, request_id: int) -> None:
        """Remove a request that is placed or ended."""
        arrival = self._waiting.pop(request_id).arrival
        tenants = self._classes[arrival.priority]
        ids = tenants[arrival.tenant]
        del ids[bisect_left(ids, request_id)]
        if not ids:
            del tenants[arrival.tenant]
            if not tenants:
                del self._classes[arrival.priority]
        self._fair_share.leaves(arrival)
        self.num_tokens -= arrival.prompt_len

    def _of_class(self, tenants: Mapping[str, Sequence[int]]) -> Iterator[Waiting]:
        if len(tenants) == 1:
            (ids,) = tenants.values()
            for request_id in ids:
                yield self._waiting[request_id]
            return

        def place(tenant: str, index: int) -> tuple[bool, int, int, str, int]:
            request_id = tenants[tenant][index]
            is_new = not self._waiting[request_id].arrival.resumes
            return is_new, self._fair_share.counters[tenant], request_id, tenant, index

        order = [place(tenant, 0) for tenant in tenants]
        heapq.heapify(order)
        while order:
            _, _, request_id, tenant, index = heapq.heappop(order)
            yield self._waiting[request_id]
            if index + 1 < len(tenants[tenant]):
                heapq.heappush(order, place(tenant, index + 1))

    def _displaced_by(self, arrival: Arrival) -> int | None:
        """Return None if the arrival's tenant has the longest queue, or it alone is too long."""
        if arrival.prompt_len > self._max_tokens:
            return None
        num_waiting: dict[str, int] = {}
        for tenants in self._classes.values():
            for tenant, ids in tenants.items():
                num_waiting[tenant] = num_waiting.get(tenant, 0) + len(ids)
        most, longest = max(((num, tenant) for tenant, num in num_waiting.items()), default=(0, ""))
        if most <= num_waiting.get(arrival.tenant, 0) + 1:
            return None
        newest = [
            (priority, request_id)
            for priority, tenants in self._classes.items()
            for request_id in tenants.get(longest, ())
            if not self._waiting[request_id].arrival.resumes
        ]
        return max(newest)[1] if newest else None

    @property
    def next_deadline_us(self) -> int | None:
        """The earliest deadline of the waiting requests; None if none has one."""
        while self._deadlines:
            deadline_us, request_id = self._deadlines[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting.arrival.deadline_us == deadline_us:
                return deadline_us
            heapq.heappop(self._deadlines)
        return None

    def expired(self, now_us: int) -> Waiting | None:
        """Return a waiting request whose deadline has passed, or None; it stays in the queue."""
        deadline_us = self.next_deadline_us
        if deadline_us is None or deadline_us > now_us:
            return None
        return self._waiting[self._deadlines[0][1]]


def invalidity(arrival: Arrival, cluster: ClusterConfig, num_open: int = 0) -> str | None:
    """Explain with numbers why even an empty cluster cannot hold the request; None if it can.

    num_open: instances that accept placements; 0: all.
    """
    if arrival.prompt_len < 1 or arrival.max_tokens < 1:
        return (
            f"prompt_len is {arrival.prompt_len} and max_tokens {arrival.max_tokens}; both must be "
            "at least 1"
        )
    num_hashes, num_full = len(arrival.page_hashes), (arrival.prompt_len - 1) // PAGE_SIZE
    if num_hashes > num_full:
        return (
            f"a prompt of {arrival.prompt_len} tokens has {num_hashes} page_hashes; it fills "
            f"{num_full} pages"
        )
    total_len = arrival.prompt_len + arrival.max_tokens
    num_holders = cluster.num_holders(num_open)
    # The last generated token has no KV.
    pages, frames = num_pages(total_len - 1), num_holders * cluster.num_frames
    asked = "prompt of {0.prompt_len} tokens and max_tokens {0.max_tokens}"
    if total_len > cluster.max_model_len:
        return (
            f"{asked.format(arrival)} make {total_len} tokens; max_model_len is "
            f"{cluster.max_model_len}"
        )
    if pages > frames:
        return (
            f"{asked.format(arrival)} need {pages} frames of {PAGE_SIZE} tokens; {num_holders} "
            f"instances hold {frames}"
        )
    return None
