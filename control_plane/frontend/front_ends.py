"""Several front ends for one controller: each has a port, a thread and clients of its own.

Enters: what one front end gets. Leaves: the same, and each callback of the controller to the front
end that owns the request. Does not know: gRPC, streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from control_plane.frontend.controller_interface import ControllerEvents, ControllerInterface
from control_plane.frontend.front_end import FrontEnd
from control_plane.frontend.http.server import HttpServer
from control_plane.frontend.tokenizer import Tokenizer
from control_plane.frontend.validation import ModelLimits
from control_plane.observe.observer import Observer
from control_plane.ports.members_port import MemberSecrets
from nanocp.config.whole import Config
from nanocp.values.plan import ClusterLoad, Ended, Placement, Preempted

_DRAIN_REPORT_S = 5.0
"""Time between two reports of a drain."""


class FrontEnds(ControllerEvents):
    """service.front_ends front ends, with the methods of one.

    Request id r belongs to number (r - 1) % front_ends.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        member_secrets: MemberSecrets,
        observer: Observer,
        http: Sequence[HttpServer] = (),
    ) -> None:
        """`observer` is called from each front end's thread.

        http: one server for each front end, or none at all.
        """
        self.events: ControllerEvents = self
        self._drain_timeout_s = config.limits.drain_timeout_ms / 1000
        servers: Sequence[HttpServer | None] = http or [None] * config.service.front_ends
        self._front_ends = [
            FrontEnd(config, tokenizer, limits, member_secrets, observer, server, index)
            for index, server in enumerate(servers)
        ]

    def start(self) -> tuple[str, ...]:
        """Bind every port; returns the addresses for gRPC clients.

        Raises OSError, naming the port, if one cannot be bound.
        """
        return tuple(front_end.start() for front_end in self._front_ends)

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """Addresses of the HTTP API, once started."""
        return tuple(front_end.http_address for front_end in self._front_ends)

    def open(
        self, controller: ControllerInterface, load: Callable[[], ClusterLoad] = ClusterLoad
    ) -> None:
        """Accept requests: the cluster is ready. load: what is decided for each instance now."""
        addresses = [front_end.address for front_end in self._front_ends]
        for front_end in self._front_ends:
            front_end.open(controller, load, addresses)

    @property
    def num_open(self) -> int:
        """Choices that have not ended, or that a client still reads."""
        return sum(front_end.num_open for front_end in self._front_ends)

    def drain(self, report: Callable[[int, float], None] = lambda num_open, left_s: None) -> bool:
        """Refuse new requests and wait for the open ones, in all front ends at the same time.

        `report` is called now and then with the number of open requests and the time left, s.
        """
        until_s = time.monotonic() + self._drain_timeout_s
        drains = [front_end.begin_drain() for front_end in self._front_ends]
        begun = [drain for drain in drains if drain is not None]
        while wait(begun, _DRAIN_REPORT_S).not_done:
            if (left_s := until_s - time.monotonic()) <= 0:
                break
            report(self.num_open, left_s)
        # Every one is waited for, also if one before it has not ended.
        ended = [
            front_end.end_drain(drain)
            for front_end, drain in zip(self._front_ends, drains, strict=True)
        ]
        return all(ended)

    def stop(self, reason: str) -> None:
        """End every open request with UNAVAILABLE and the reason, and close the ports."""
        for front_end in self._front_ends:
            front_end.stop(reason)

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        self._owner(placement.request_id).placed(placement, num_cached)

    def preempted(self, preempted: Preempted) -> None:
        self._owner(preempted.request_id).preempted(preempted)

    def interrupted(self) -> int:
        for front_end in self._front_ends:
            front_end.interrupted()
        return len(self._front_ends)

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        self._owner(request_id).tokens_lost(request_id, sentence)

    def ended(self, ended: Ended) -> None:
        self._owner(ended.request_id).ended(ended)

    def _owner(self, request_id: int) -> FrontEnd:
        return self._front_ends[(request_id - 1) % len(self._front_ends)]
