"""The global waiting queue: requests not yet placed, in order of arrival, bounded in requests and in tokens (4.1).

Enters: arrivals. Leaves: the next ones to place, or the sentence that refuses one. Does not know: instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from control_plane.request import num_pages
from nanocp.config import ClusterConfig, SchedulerConfig
from nanocp.plan import PAGE_SIZE, Arrival


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request."""

    arrival: Arrival
    arrived_us: int


class WaitingQueue:
    """First come, first out; removal of any."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._waiting: dict[int, Waiting] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def refusal(self, arrival: Arrival) -> str | None:
        """Why the queue cannot take it, naming the cap; None if it can."""
        if len(self._waiting) >= self._max_requests:
            return f"the waiting queue is full: max_queued_requests is {self._max_requests}"
        if self.num_tokens + arrival.prompt_len > self._max_tokens:
            return (
                f"the waiting queue holds {self.num_tokens} prompt tokens and cannot take {arrival.prompt_len} more: "
                f"max_queued_tokens is {self._max_tokens}"
            )
        return None

    def append(self, arrival: Arrival, now_us: int) -> None:
        """Take an arrival that is not refused."""
        assert arrival.request_id not in self._waiting and self.refusal(arrival) is None
        self._waiting[arrival.request_id] = Waiting(arrival, now_us)
        self.num_tokens += arrival.prompt_len

    def remove(self, request_id: int) -> None:
        """Take out one that is placed or ended."""
        self.num_tokens -= self._waiting.pop(request_id).arrival.prompt_len


def invalidity(arrival: Arrival, cluster: ClusterConfig) -> str | None:
    """Why no state of the cluster could ever hold the request, with the numbers; None if an empty one could."""
    if arrival.prompt_len < 1 or arrival.max_tokens < 1:
        return f"prompt_len is {arrival.prompt_len} and max_tokens {arrival.max_tokens}; both must be at least 1"
    asked = f"prompt of {arrival.prompt_len} tokens and max_tokens {arrival.max_tokens}"
    total_len = arrival.prompt_len + arrival.max_tokens
    if total_len > cluster.max_model_len:
        return f"{asked} make {total_len} tokens; max_model_len is {cluster.max_model_len}"
    # The last generated token has no KV. A KV binding is the MoE binding and as many others as partials may return.
    num_holders = min(cluster.num_instances, 1 + cluster.bounds.max_partials)
    pages, frames = num_pages(total_len - 1), num_holders * cluster.num_frames
    if pages > frames:
        return f"{asked} need {pages} frames of {PAGE_SIZE} tokens; {num_holders} instances hold {frames}"
    return None
