"""The real coordinator of members, around a hash cluster: what leaves it is kept until it is due.

It has no loop, no clock and no thread: a seed says when time passes, when a process reads what it
was sent, and when another one dials.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from control_plane.coordinator.members.members import Members
from control_plane.coordinator.members.output import KillProcess, MembersEvent, StartProcess
from control_plane.observe.recovery_metrics import RecoveryMetrics
from control_plane.scheduler.scheduler import Scheduler
from harness.hash_model import NUM_EXPERTS
from nanocp.config.prefill import PrefillConfig
from nanocp.config.whole import Config
from nanocp.values.members import Hello, Member, Peer, Said


class HashCoordinator:
    """Members, and what was sent to each and not read. Seats are instances."""

    def __init__(
        self, config: Config, redundant: int, scheduler: Scheduler, first_term: int = 0
    ) -> None:
        """redundant: slots for experts.

        first_term: the one before the first, of a controller that takes the place of a lost one.
        """
        cluster = replace(config.cluster, redundant_experts=redundant)
        # The cluster's own prefill is no member.
        config = Config(
            cluster=cluster, prefill=PrefillConfig(synthetic_kv=True), limits=config.limits
        )
        metrics = RecoveryMetrics(CollectorRegistry())
        self.members = Members(config, self, metrics, NUM_EXPERTS)
        self.members.takes_over = first_term > 0
        self.members.terms.number = first_term
        self.scheduler = scheduler
        self.clock_us = 0
        num = config.cluster.num_instances
        self.inboxes: list[deque[Any]] = [deque() for _ in range(num)]
        """By seat: what its process has yet to read of its stream; None is the end of it."""
        self.attached: set[int] = set()
        """Seats whose process has a stream."""
        self.coming = set(range(num))
        """Seats whose latest process has yet to dial."""
        self.numbers = [0] * num
        """By seat: the number of its latest process."""
        self.to_start: list[StartProcess] = []
        self.to_kill: list[int] = []
        self.events: deque[MembersEvent] = deque()
        self._exits: deque[tuple[Member, int, str]] = deque()
        self.members.begin()

    # --- output.Facts

    @property
    def newest_ticket(self) -> int:
        """See Facts."""
        return self.scheduler.newest_ticket

    @property
    def has_windows(self) -> bool:
        """See Facts: a short term, unless it would be the last that is recovered from."""
        return len(self.members._short_terms._seats) < 3

    def obstacle_to_more(self, num_instances: int) -> str:
        """See Facts."""
        return ""

    # --- what a seed lets happen

    def settle(self) -> None:
        """Carry out what the members want; processes to kill and to start are the cluster's."""
        while True:
            self.members.tick(self.clock_us)
            output = self.members.take()
            for member, message in output.sends:
                if (seat := member.instance) in self.attached:
                    self.inboxes[seat].append(message)
            for command in output.processes:
                if isinstance(command, KillProcess):
                    self.to_kill.append(command.member.instance or 0)
                    self.members.replacements.done(command, None)
                else:
                    self.to_start.append(command)
            self.events += output.events
            if self._exits:
                self.members.exited(*self._exits.popleft())
            elif not output:
                return

    def started(self, command: StartProcess, error: str | None) -> None:
        """A process was started, and will dial; or could not be."""
        if error is None:
            seat = command.member.instance or 0
            self.numbers[seat] = command.number
            self.coming.add(seat)
        self.members.replacements.done(command, error)

    def die(self, seat: int, how: str, is_seen: bool = True) -> None:
        """The latest process of the seat ends. is_seen: the controller hears of that too."""
        was_there = seat in self.coming or seat in self.attached
        self.coming.discard(seat)
        self.attached.discard(seat)
        self.inboxes[seat].clear()
        member = Member("instance", seat)
        if was_there and is_seen:
            self._exits.append((member, self.numbers[seat], how))
        elif was_there:
            self.members.failed(member, f"{member}: {how}")

    def dial(self, seat: int, kept: Any = None) -> None:
        """The process that comes has loaded its weights, or has lost its controller."""
        self.coming.discard(seat)
        self.attached.add(seat)
        try:
            self.members.attach(Member("instance", seat), Hello(seat, Peer(), kept))
        except ValueError as error:
            self.die(seat, str(error))

    def heard(self, seat: int, said: Said, term: int) -> bool:
        """A process says something; returns whether it is a report of the present term."""
        return self.members.heard(Member("instance", seat), said, term)

    def may_go_on(self) -> list[int]:
        """Seats whose process has something to read, or may dial."""
        return [seat for seat, inbox in enumerate(self.inboxes) if inbox or seat in self.coming]
