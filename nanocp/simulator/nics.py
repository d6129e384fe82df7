"""KV transfers in flight to the instances, which share the NICs' bandwidth equally."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from nanocp.simulator.costs.cluster_file import ClusterFile

_ARRIVED_BYTES = 1e-3


@dataclass(slots=True)
class _UnderWay:
    ticket: int
    left_bytes: float


class Nics:
    """Receiving NICs of all instances, and the sending side of prefill. Times in us."""

    def __init__(self, file: ClusterFile) -> None:
        self._bytes_per_us = file.ingest_gb_per_s * 1e3
        self._prefill_bytes_per_us = (file.prefill_gb_per_s or inf) * 1e3
        self._under_way: dict[tuple[int, bool], list[_UnderWay]] = {}
        """(instance, whether prefill sends it) -> transfers at one rate; no list is empty."""
        self._num_at = [0] * file.cluster.num_instances
        self._num_from_prefill = 0
        self._now_us = 0.0
        self._next_us: int | None = None
        self._is_next_known = True

    @property
    def next_us(self) -> int | None:
        """Time of the next arrival if no other transfer starts."""
        if not self._is_next_known:
            self._look_ahead()
        return self._next_us

    def start(
        self, ticket: int, instance: int, num_bytes: float, is_from_prefill: bool, now_us: int
    ) -> None:
        """Begin one instance's share of a transfer."""
        self._advance(now_us)
        group = self._under_way.setdefault((instance, is_from_prefill), [])
        group.append(_UnderWay(ticket, num_bytes))
        self._num_at[instance] += 1
        self._num_from_prefill += is_from_prefill
        self._is_next_known = False

    def arrived(self, now_us: int) -> list[tuple[int, int]]:
        """Take the transfers that have arrived: (ticket, instance), ascending."""
        self._advance(now_us)
        arrived: list[tuple[int, int]] = []
        for (instance, is_from_prefill), group in list(self._under_way.items()):
            left = [one for one in group if one.left_bytes > _ARRIVED_BYTES]
            if len(left) == len(group):
                continue
            here = [one.ticket for one in group if one.left_bytes <= _ARRIVED_BYTES]
            arrived += [(ticket, instance) for ticket in here]
            self._num_at[instance] -= len(here)
            self._num_from_prefill -= is_from_prefill * len(here)
            if left:
                self._under_way[instance, is_from_prefill] = left
            else:
                del self._under_way[instance, is_from_prefill]
        self._is_next_known = False
        return sorted(arrived)

    def _rate(self, instance: int, is_from_prefill: bool) -> float:
        """Bytes per us of a transfer until another starts or ends."""
        rate = self._bytes_per_us / self._num_at[instance]
        if is_from_prefill:
            rate = min(rate, self._prefill_bytes_per_us / self._num_from_prefill)
        return rate

    def _advance(self, now_us: int) -> None:
        passed_us, self._now_us = now_us - self._now_us, now_us
        if passed_us:
            for kind, group in self._under_way.items():
                num_bytes = passed_us * self._rate(*kind)
                for one in group:
                    one.left_bytes -= num_bytes

    def _look_ahead(self) -> None:
        lasts_us = [
            max(min(one.left_bytes for one in group), 0) / self._rate(*kind)
            for kind, group in self._under_way.items()
        ]
        # Not in the same microsecond: the scheduler has just been called in it.
        self._next_us = ceil(self._now_us + max(min(lasts_us), 1)) if lasts_us else None
        self._is_next_known = True
