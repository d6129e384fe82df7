"""Clusters with a scheduler each, behind a router that balances by stale loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from queue import Queue
from threading import Thread

from nanocp.simulator.loads.workload_request import QuietUntil, Upcoming
from nanocp.simulator.outcome import Outcome, Recorder
from nanocp.simulator.trial import Trial
from nanocp.values.group_load import GroupLoad

STALE_US = 5_000_000


class _Group(Iterator[Upcoming]):
    """One cluster in a thread that waits while the router reads its load."""

    def __init__(self, trial: Trial, standing: Queue[None]) -> None:
        self._trial = trial
        self._standing = standing
        self._sent: deque[Upcoming] = deque()
        self._more: Queue[list[Upcoming] | None] = Queue()
        self._simulation = trial.simulation(Recorder(trial.run))
        self.row_tokens = self._simulation.model.in_tokens().dispatch_tokens_per_row
        self.outcome: Outcome | BaseException | None = None
        self.thread = Thread(target=self._play, daemon=True)

    def __next__(self) -> Upcoming:
        while not self._sent:
            self._standing.put(None)
            if (more := self._more.get()) is None:
                raise StopIteration
            self._sent.extend(more)
        return self._sent.popleft()

    def go_on(self, requests: list[Upcoming] | None) -> None:
        """Play these requests, then wait; None: no more."""
        self._more.put(requests)

    @property
    def load_tokens(self) -> float:
        max_rows = self._trial.file.cluster.bounds.max_rows
        loads = self._simulation.scheduler.requests.loads()
        return GroupLoad.of(loads, max_rows, self.row_tokens).load_tokens

    def _play(self) -> None:
        try:
            self.outcome = self._simulation.run(self)
        except BaseException as error:  # it is raised again where the outcome is read
            self.outcome = error
        self._standing.put(None)


def play_groups(trial: Trial, num_groups: int, stale_us: int = STALE_US) -> list[Outcome]:
    """The outcomes of num_groups clusters like the trial's, which share its rate."""
    share = trial.at_rate(trial.workload.rate_per_s / num_groups).filled()
    steady_us, end_us = share.workload.steady_tpot_us, trial.run.end_us
    workload = replace(trial.workload, steady_tpot_us=steady_us)
    requests = workload.requests(trial.file.cluster.max_model_len)
    standing: Queue[None] = Queue()
    groups = [_Group(trial, standing) for _ in range(num_groups)]
    for group in groups:
        group.thread.start()
    row_tokens = groups[0].row_tokens
    num_instances = trial.file.cluster.num_instances
    upcoming = next(requests, None)
    until_us = 0  # first what runs at the beginning
    try:
        playing = groups
        while upcoming is not None and until_us < end_us + stale_us:
            for _ in playing:  # each stands still or ends, once
                standing.get()
            playing = [group for group in playing if group.outcome is None]
            loads = [group.load_tokens for group in groups]
            sent: list[list[Upcoming]] = [[] for _ in groups]
            while upcoming is not None and upcoming.arrival_us <= until_us:
                least = min(range(num_groups), key=loads.__getitem__)
                loads[least] += (upcoming.prompt_len + row_tokens) / num_instances
                sent[least].append(upcoming)
                upcoming = next(requests, None)
            for group, mine in zip(groups, sent, strict=True):
                group.go_on([*mine, QuietUntil(until_us)])
            until_us += stale_us
    finally:
        for group in groups:
            group.go_on(None)
    outcomes = []
    for group in groups:
        group.thread.join()
        if not isinstance(group.outcome, Outcome):
            raise group.outcome or RuntimeError("a group was not played")
        outcomes.append(group.outcome)
    return outcomes
