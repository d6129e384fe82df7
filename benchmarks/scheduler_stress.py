"""A simulated service under stress: many changes in every step, for the scheduler to plan.

Enters: how many instances, rows and changes a step. Leaves: the time and the plan of each call.
Does not know: how often a service changes (`scheduler_churn` does), what a time is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request
from control_plane.scheduler.windows.row_windows import MAX_WINDOWS_IN_FLIGHT
from nanocp.simulator.cluster_file import load_cluster_file
from nanocp.simulator.cost import CostModel, Loads
from nanocp.simulator.simulation import scheduler_config
from nanocp.simulator.workload import Workload
from nanocp.values.plan import (
    Arrival,
    Event,
    Finished,
    FinishReason,
    Plan,
    TransferDone,
    WindowDone,
)

STEPS_PER_LIFE = 600
"""Churn: of each kind one in this many active requests a step."""
STEPS_PER_PROMISE = 512
"""Tokens promised at admission, and windows over which the rows are admitted, so that each step
some outgrow theirs: as many as the churn while the clock runs, since those that end do not."""
MAX_TOKENS = 8192
"""Enough that no row comes to its end by itself: the rows that end are drawn."""
NUM_FRAMES = 65_536
"""Frames of each instance, more than an H200 has: 256 rows of the mix hold that much KV."""
ROW_START = b"p" * 48
"""About as long as an encoded row start."""


class StressPoint(NamedTuple):
    """One line of the table."""

    instances: int
    rows: int
    """Rows of each instance."""
    policy: str
    churn_per_step: float
    """Changes of each of the four kinds."""


def at_rest(instances: int, rows: int, policy: str) -> StressPoint:
    """The point at the churn that the claims are about."""
    return StressPoint(instances, rows, policy, round(instances * rows / STEPS_PER_LIFE, 3))


class StressedService:
    """Instances as the scheduler sees them: each reports every window, two windows later."""

    def __init__(self, point: StressPoint) -> None:
        file = load_cluster_file("h200x32-deepseek-v3")
        self._model = CostModel(
            replace(file, cluster=replace(file.cluster, num_instances=point.instances)), "fitted"
        )
        self._point = point
        bounds = replace(file.cluster.bounds, max_rows=2 * point.rows)
        cluster = replace(
            file.cluster, num_instances=point.instances, num_frames=NUM_FRAMES, bounds=bounds
        )
        config = scheduler_config(file, self._model, point.policy)
        promised = f"tokens:{_num_promised(point)}"
        self._scheduler = Scheduler(cluster, replace(config, growth_promise=promised))
        self._policy = _ExtraMoves(self._scheduler._policy)
        self._scheduler._policy = self._scheduler._rows._policy = self._policy
        self._random = Random(0)
        self._requests = Workload("issue-1", 1.0).requests(cluster.max_model_len - MAX_TOKENS)
        self._num_arrived = 0
        self._owed = 0.0
        self._live: list[int] = []
        self._answers: list[Event] = []
        self.num_changes = {"admitted": 0, "ended": 0, "re-bound": 0, "outgrown": 0}
        self._window = 0

    def fill(self) -> None:
        """Admit the rows, as many in each window."""
        total, num_windows = self._point.instances * self._point.rows, _num_promised(self._point)
        for window in range(num_windows):
            num = total * (window + 1) // num_windows - total * window // num_windows
            self._call(self._arrivals(num), [], 0)
        self._call([], [], 0)

    def step(self) -> tuple[int, Plan]:
        """One window under churn: nanoseconds of the call, and its answer."""
        self._owed += self._point.churn_per_step
        num = int(self._owed)
        self._owed -= num
        ended = []
        for _ in range(num):
            index = self._random.randrange(len(self._live))
            self._live[index], self._live[-1] = self._live[-1], self._live[index]
            ended.append(self._live.pop())
        elapsed_ns, plan = self._call(self._arrivals(num), ended, num)
        return elapsed_ns, plan

    def modelled_step_us(self) -> int:
        """What the step takes on the simulated cluster, by the paper's own microseconds."""
        state = self._scheduler._state
        instances = range(self._point.instances)
        loads = Loads(
            [state.kv_tokens(i) for i in instances],
            state.num_rows,
            state.committed.attention_rows,
            [state.committed.num_links(i) for i in instances],
            [0 for _ in instances],
        )
        return self._model.step(loads).step_us

    def _arrivals(self, num: int) -> list[Event]:
        first = self._num_arrived + 1
        self._num_arrived += num
        return [
            Arrival(request_id, next(self._requests).prompt_len, MAX_TOKENS, ROW_START)
            for request_id in range(first, first + num)
        ]

    def _call(self, arrivals: list[Event], ended: list[int], num_moves: int) -> tuple[int, Plan]:
        scheduler = self._scheduler
        events = [*self._reports(ended), *self._answers, *arrivals]
        linked = scheduler._state.linked.by_degree
        # Those with the fewest holders move first, as where a policy decides (4.2.1).
        drawn = sorted(self._random.choices(linked, k=4 * num_moves)) if linked else []
        self._policy.wanted = [request_id for _, request_id in dict.fromkeys(drawn)]
        self._policy.num_moves = num_moves
        num_outgrown = len(scheduler._rows._due.get(self._window, ()))
        began_ns = time.perf_counter_ns()
        plan = scheduler.plan_window(events, self._window)
        elapsed_ns = time.perf_counter_ns() - began_ns
        assert not plan.ended and not scheduler.num_waiting, (
            "the cluster holds every request at once"
        )
        self._window += plan.window is not None  # None: the first call has no row yet
        self._answers = [
            TransferDone(transfer.ticket, i)
            for transfer in plan.transfers
            for i in transfer.receivers
        ]
        self._live += [start.request_id for own in plan.instances for start in own.starts]
        if num_moves:
            counts = (len(arrivals), len(ended), self._policy.num_moved, num_outgrown)
            for name, count in zip(self.num_changes, counts, strict=True):
                self.num_changes[name] += count
        return elapsed_ns, plan

    def _reports(self, ended: list[int]) -> Iterator[WindowDone]:
        """Every instance reports the window before the last; a row ends on its own instance."""
        window = self._window - MAX_WINDOWS_IN_FLIGHT
        if window < 0:
            return
        finished: list[list[Finished]] = [[] for _ in range(self._point.instances)]
        for request_id in ended:
            row = Finished(request_id, 10, FinishReason.STOP)
            finished[self._scheduler._state.requests[request_id].moe_binding].append(row)
        for instance, rows in enumerate(finished):
            yield WindowDone(instance, window, tuple(rows), 40_000, 1_000)


class _ExtraMoves:
    """The policy, with as many more re-bindings as make up the churn.

    They go to the member with the fewest rows.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.wanted: list[int] = []
        self.num_moves = 0
        self.num_moved = 0

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        return self._policy.place(state, arrival, window)

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        self.num_moved = 0
        for request, new in self._policy.rebindings(state, window):
            yield request, new
            self.num_moved += request.moe_binding == new
        for request_id in self.wanted:
            request = state.requests.get(request_id)
            if self.num_moved >= self.num_moves or request is None:
                continue
            old = request.moe_binding
            new = min((i for i in request.pages_on if i != old), key=state.num_rows.__getitem__)
            yield request, new
            self.num_moved += request.moe_binding != old

    def moves(self, state: ClusterState, window: int) -> Iterator[tuple[Request, range, int]]:
        return self._policy.moves(state, window)

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        return self._policy.holder(state, request, window)


def _num_promised(point: StressPoint) -> int:
    lives = at_rest(point.instances, point.rows, point.policy).churn_per_step / point.churn_per_step
    return round(STEPS_PER_PROMISE * lives)
