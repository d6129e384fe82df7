"""Experts of real instances that move while they serve, at random, by the real coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from control_plane.coordinator.flights.expert_changes import expert_changes
from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.output import MembersOutput
from control_plane.coordinator.members.seats import Seats
from control_plane.observe.metrics.experts import ExpertMetrics
from harness.hash_clusters.expert_moves import move_at_random
from nanocp.config.cluster import ClusterConfig
from nanocp.values.members import ExpertLoad, ExpertsHere, Member
from nanocp.values.plan import Plan, WindowDone


class MovedExperts:
    """The changes of a cluster's table, and what they need of its members."""

    def __init__(self, cluster: ClusterConfig, num_experts: int, inboxes: Sequence[Queue]) -> None:
        self.seats = list(range(cluster.num_instances))
        self.changes = SimpleNamespace(seats=Seats(cluster, num_experts))
        self.table = self.changes.seats.table(self.seats)
        """The table of the first term."""
        self.deadlines, self.output = Deadlines(), MembersOutput()
        self._inboxes = inboxes
        self.counts: Counter[str] = Counter()
        """Changes by outcome, and experts that moved."""
        changes = expert_changes(cluster, self, ExpertMetrics(CollectorRegistry()))  # type: ignore
        assert changes is not None
        self._changes = changes
        move_at_random(changes, cluster.num_instances, self.counts)
        self._done: Counter[int] = Counter()

    def send(self, member: Member, message: Any) -> None:
        """See Members."""
        self._inboxes[member.instance or 0].put(message)

    def sent(self, plan: Plan) -> Plan:
        """The plan with the number of its table."""
        if plan.window is None:
            return plan
        number = self._changes.sent(plan.window)
        return replace(plan, instances=tuple(p._replace(experts=number) for p in plan.instances))

    def heard(self, event: Any) -> None:
        """Take an instance's report."""
        match event:
            case WindowDone():
                self._done[event.window] += 1
                if self._done[event.window] == len(self.seats):
                    self._changes.window_done(event.window)
                    self._changes.advance(lambda: True)
            case ExpertLoad() | ExpertsHere():
                self._changes.reported(event)
        assert not self.output.says, self.output.says
