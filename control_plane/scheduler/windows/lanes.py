"""Micro-batches (lanes): the lane of each row, one or two a window (docs/develop/overlap.md)."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from control_plane.scheduler.state.request import Request
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.table import NUM_LANES

_MAX_DRIFT = 4
"""A row changes its lane where the lanes differ by more than 1 / _MAX_DRIFT of both."""


class _Place(NamedTuple):
    """A row's lane, and its cost to each instance, in KV tokens."""

    lane: int
    moe_binding: int
    costs: dict[int, int]


class Lanes:
    """The lanes of all rows in windows."""

    def __init__(self, num_instances: int, config: SchedulerConfig | None = None) -> None:
        """config: None for one lane."""
        self._num_instances = num_instances
        self._config = config or SchedulerConfig()
        self._mode = self._config.lanes
        self.end_term()

    def end_term(self) -> None:
        """Remove all rows from the windows."""
        self._places: dict[int, _Place] = {}
        self._loads = [[0] * self._num_instances for _ in range(NUM_LANES)]
        """Cost of rows, links and pages in KV tokens, by [lane][instance]."""

    @property
    def is_on(self) -> bool:
        """Return whether rows may be in lane 1."""
        return self._mode != "off"

    def enter(self, request: Request) -> int:
        """Choose the less loaded lane for a row that enters the windows."""
        if not self.is_on:
            return 0
        costs = self._costs(request)
        if self._mode == "random":
            lane = self._draw(request.request_id, NUM_LANES)
        else:
            loads = [sum(load[instance] for instance in costs) for load in self._loads]
            lane = loads.index(min(loads))
        self._put(request.request_id, _Place(lane, request.moe_binding, costs))
        return lane

    def leave(self, request_id: int) -> int:
        """Remove a row from the windows; return its lane."""
        if not self.is_on:
            return 0
        place = self._places.pop(request_id)
        self._count(place, -1)
        return place.lane

    def update(self, request: Request) -> int:
        """Update the pages of a row in the windows; return its lane."""
        if not self.is_on:
            return 0
        lane = self.leave(request.request_id)
        place = _Place(lane, request.moe_binding, self._costs(request))
        self._put(request.request_id, place)
        return lane

    def switch(self, request_id: int) -> None:
        """Move the row to the other lane."""
        place = self._places[request_id]
        self._count(place, -1)
        self._put(request_id, place._replace(lane=1 - place.lane))

    def drifted(self) -> list[int]:
        """Return rows whose change makes lanes more alike; one an instance."""
        if not self._places:
            return []
        gaps = [first - second for first, second in zip(*self._loads, strict=True)]
        totals = [first + second for first, second in zip(*self._loads, strict=True)]
        drifted: dict[int, int] = {}
        for request_id, (lane, moe_binding, costs) in self._places.items():
            sign = 1 if lane == 0 else -1
            gap = sum(gaps[instance] for instance in costs) * sign
            if (
                abs(gaps[moe_binding]) * _MAX_DRIFT > totals[moe_binding]
                and gaps[moe_binding] * sign > costs[moe_binding]
                and gap > sum(costs.values())
            ):
                drifted[moe_binding] = request_id
        return list(drifted.values())

    def order(self, window: int, num_rows: int, num_links: int) -> int:
        """Return a window's order. num_rows, num_links: of the instance with most."""
        if self._mode == "random":
            return self._draw(window, 1 + len(self._config.lane_orders))
        return self._config.lane_order(num_rows, num_links)

    def _costs(self, request: Request) -> dict[int, int]:
        prices = self._config.costs
        costs = {
            instance: prices.link_tokens + count * PAGE_SIZE
            for instance, count in request.pages_on.items()
        }
        pages = request.pages_on.get(request.moe_binding, 0)
        costs[request.moe_binding] = prices.dispatch_tokens_per_row + pages * PAGE_SIZE
        return costs

    def _put(self, request_id: int, place: _Place) -> None:
        self._places[request_id] = place
        self._count(place, +1)

    def _count(self, place: _Place, sign: int) -> None:
        load = self._loads[place.lane]
        for instance, cost in place.costs.items():
            load[instance] += sign * cost

    def _draw(self, number: int, num_choices: int) -> int:
        text = f"lanes {self._config.chaos_seed} {number}".encode()
        return blake2b(text, digest_size=1).digest()[0] % num_choices
