"""KV under way to the instances: what shares a NIC takes turns, and prefill sends only so much.

Enters: transfers that start, in bytes. Leaves: when each has arrived. Does not know: requests,
tickets' meaning, which instance was chosen.

A turn is a chunk of a transfer, so short that all transfers of a NIC go on at the same rate: one
request of a million tokens does not keep a short one waiting behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from nanocp.simulator.cluster_file import ClusterFile

_ARRIVED_BYTES = 1e-3
"""Less than this is what rounding left."""


@dataclass(slots=True)
class _UnderWay:
    """A transfer's share for one instance."""

    ticket: int
    instance: int
    left_bytes: float
    is_from_prefill: bool


class Nics:
    """Receiving NICs of all instances, and the sending side of prefill. Times in us."""

    def __init__(self, file: ClusterFile) -> None:
        self._bytes_per_us = file.ingest_gb_per_s * 1e3
        self._prefill_bytes_per_us = (file.prefill_gb_per_s or inf) * 1e3
        self._under_way: list[_UnderWay] = []
        self._num_at = [0] * file.cluster.num_instances
        self._num_from_prefill = 0
        self._now_us = 0.0
        self.next_us: int | None = None
        """When the next transfer will have arrived, if no other starts until then."""

    def start(
        self, ticket: int, instance: int, num_bytes: float, is_from_prefill: bool, now_us: int
    ) -> None:
        """One instance's share of a transfer begins."""
        self._advance(now_us)
        self._under_way.append(_UnderWay(ticket, instance, num_bytes, is_from_prefill))
        self._num_at[instance] += 1
        self._num_from_prefill += is_from_prefill
        self._look_ahead()

    def arrived(self, now_us: int) -> list[tuple[int, int]]:
        """Take what has arrived by now: (ticket, instance), ascending."""
        self._advance(now_us)
        arrived = [one for one in self._under_way if one.left_bytes <= _ARRIVED_BYTES]
        self._under_way = [one for one in self._under_way if one.left_bytes > _ARRIVED_BYTES]
        for one in arrived:
            self._num_at[one.instance] -= 1
            self._num_from_prefill -= one.is_from_prefill
        self._look_ahead()
        return sorted((one.ticket, one.instance) for one in arrived)

    def _rate(self, one: _UnderWay) -> float:
        """Bytes per us of a transfer, as long as no other starts or ends."""
        rate = self._bytes_per_us / self._num_at[one.instance]
        if one.is_from_prefill:
            rate = min(rate, self._prefill_bytes_per_us / self._num_from_prefill)
        return rate

    def _advance(self, now_us: int) -> None:
        """Let time pass in which nothing starts or ends."""
        passed_us, self._now_us = now_us - self._now_us, now_us
        if passed_us:
            for one in self._under_way:
                one.left_bytes -= passed_us * self._rate(one)

    def _look_ahead(self) -> None:
        lasts_us = [max(one.left_bytes, 0) / self._rate(one) for one in self._under_way]
        # Not in the same microsecond: the scheduler has just been called in it.
        self.next_us = ceil(self._now_us + max(min(lasts_us), 1)) if lasts_us else None
