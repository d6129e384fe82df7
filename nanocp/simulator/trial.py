"""A question to the simulator: a cluster, a policy, a load, a duration and an SLO.

All programs ask through a Trial, so that equal questions have equal answers.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from math import inf
from operator import mul
from pathlib import Path
from statistics import fmean

from control_plane.scheduler.explanation import Explainer
from nanocp.simulator.costs.cluster_file import ClusterFile
from nanocp.simulator.costs.cost import CostModel, Loads
from nanocp.simulator.loads.workload import STATIC, Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Outcome, Recorder, Run, Slo, measure_us_at
from nanocp.simulator.simulation import FLUID, Mechanisms, Simulation, make_simulation
from nanocp.values.plan import PAGE_SIZE

WARM_UP_US = 40_000_000
_STATIC_US = 60_000_000
_PILOT = Run(warm_up_us=200_000, measure_us=600_000)
_NUM_PILOTS = 3
_STATIC_ROWS = 64
"""Rows of an instance that favour static CP's wire form."""
_SAMPLE = 4
_SLOWEST = 2
"""Initial requests have at most this many times the SLO's time per token."""
_MOST_TIMES = 1e4
_GRID_US = 1_000_000
_FULL = 0.95
"""A cluster begins with at most this share of its frames or rows in use."""


@dataclass(frozen=True, slots=True)
class Trial(Mechanisms):
    """The simulated system, its load and its SLO."""

    file: ClusterFile
    policy: str
    workload: Workload
    constants: str = ""
    """Name of a set in the cluster file. Empty: its default."""
    slo: Slo = field(default_factory=Slo)
    warm_up_us: int = WARM_UP_US
    measure_us: int | None = None
    """None: as long as a verdict needs at the workload's rate (`measure_us_at`)."""
    begins_empty: bool = False
    """Whether `filled` leaves the cluster empty."""

    @property
    def run(self) -> Run:
        measure_us = self.measure_us
        if measure_us is None:
            is_static = self.workload.name in STATIC
            measure_us = _STATIC_US if is_static else measure_us_at(self.workload.rate_per_s)
        return Run(self.warm_up_us, measure_us, self.slo)

    @property
    def form(self) -> str:
        """The named wire form, or the cheaper one; all rows of static CP have links."""
        num_others = self.file.cluster.instances_per_node - 1
        num_links = _STATIC_ROWS * num_others if self._is_static else 0
        model = CostModel(
            self.charged, self.constants, wire_form=self.wire_form, num_links=num_links
        )
        return model.wire_form

    @property
    def _is_static(self) -> bool:
        return self.policy.startswith("uniform_cp:")

    @property
    def charged(self) -> ClusterFile:
        """The cluster file with the costs that its policy is charged by.

        Static CP pays both hops, and attention once.
        """
        if not self._is_static:
            return self.file
        name = self.constants or self.file.default_constants
        costs = replace(self.file.costs_of(name), hides_queries=False)
        return replace(self.file, costs={**self.file.costs, name: costs})

    def at_rate(self, rate_per_s: float) -> Trial:
        return replace(self, workload=replace(self.workload, rate_per_s=rate_per_s))

    def busiest(self, least: int) -> Trial:
        """The part of a trace's measured time with the most tokens, at least half of it.

        least: mean number of requests that arrive in it.
        """
        run, rate = self.run, self.workload.rate_per_s
        measure_us = min(run.measure_us, max(run.measure_us // 2, round(1e6 * least / rate)))
        asked = [*takewhile(lambda each: each.arrival_us < run.end_us, self.requests())]
        mean_len = fmean(each.prompt_len for each in asked)
        work = (each.output_len * (1 + each.prompt_len / mean_len) for each in asked)
        at_us, sums = [each.arrival_us for each in asked], [0.0, *accumulate(work)]

        def work_from(begin_us: int) -> float:
            return sums[bisect(at_us, begin_us + measure_us)] - sums[bisect(at_us, begin_us)]

        # What is judged in a whole run may have come before its measured time.
        warm_up_us = run.warm_up_us // 2
        last_us = run.end_us - measure_us
        begin_us = max(range(warm_up_us, last_us + 1, _GRID_US), key=work_from)
        workload = replace(self.workload, begins_us=begin_us - warm_up_us)
        return replace(self, workload=workload, warm_up_us=warm_up_us, measure_us=measure_us)

    @property
    def likely_rate(self) -> float:
        """Requests a second at which a balanced step takes the SLO's time per token."""
        return self.workload.rate_per_s * _Population(self).most_times

    def requests(self) -> Iterator[WorkloadRequest]:
        """The workload's requests, none longer than the model allows."""
        return self.workload.requests(self.file.cluster.max_model_len)

    def simulation(
        self,
        recorder: Recorder | None = None,
        event_log: Path | None = None,
        explainer: Explainer | None = None,
    ) -> Simulation:
        """A simulation of the trial, with the arguments and errors of `make_simulation`."""
        return make_simulation(
            self.charged,
            self.constants,
            self.policy,
            self.run,
            replace(self, wire_form=self.form),
            recorder,
            event_log,
            explainer,
        )

    def play(self, recorder: Recorder | None = None) -> Outcome:
        return self.simulation(recorder).run(self.requests())

    def filled(self) -> Trial:
        """The trial with the initial load of a steady state at its rate (Little's law).

        The cost model times a balanced step, short pilots add the policy's excess. The static
        scenario is unchanged.
        """
        if self.begins_empty or self.workload.name in STATIC:
            return self
        population = _Population(self)
        excess_us = [0.0]
        if self.policy != FLUID:
            for number in range(_NUM_PILOTS):
                tpot_us = population.tpot_us(fmean(excess_us))
                pilot = self._beginning(tpot_us, self.workload.seed + number)._pilot()
                load = pilot.kv_tokens_mean, pilot.num_rows_mean
                balanced_us, num_tokens = population.balanced(*load)
                piloted_us = 1e3 * pilot.step_ms_mean / num_tokens
                excess_us = [*excess_us[number == 0 :], piloted_us - balanced_us]
        return self._beginning(population.tpot_us(fmean(excess_us)), self.workload.seed)

    def _beginning(self, tpot_us: int, seed: int) -> Trial:
        workload = replace(self.workload, steady_tpot_us=tpot_us, seed=seed)
        return replace(self, workload=workload)

    def _pilot(self) -> Outcome:
        pilot = replace(self, warm_up_us=_PILOT.warm_up_us, measure_us=_PILOT.measure_us)
        return pilot.play()


class _Population:
    """Running requests as a function of the time per token, and their balanced step time."""

    def __init__(self, trial: Trial) -> None:
        cluster = trial.file.cluster
        self._model = CostModel(trial.file, trial.constants, cluster.num_instances, trial.wire_form)
        self._shares = trial.speculation.shares if trial.speculation else ()
        # As many as would run at a time per token far too long: few of them would be chance.
        sample_us = _SAMPLE * trial.slo.tpot_us
        sample = trial._beginning(sample_us, trial.workload.seed)
        running = list(takewhile(lambda request: request.is_running, sample.requests()))
        self._rows_per_us = len(running) / sample_us
        self._kv_tokens_per_us = sum(request.prompt_len for request in running) / sample_us
        frames = sum(-(-(r.prompt_len + r.max_tokens) // PAGE_SIZE) for r in running)
        used = max(
            frames / (cluster.num_instances * cluster.num_frames),
            len(running) / (cluster.num_instances * cluster.bounds.max_rows),
        )
        self._slo_us = trial.slo.tpot_us
        self._full_us = _FULL * sample_us / used if used else inf
        self._most_us = min(self._full_us, _SLOWEST * self._slo_us)

    @property
    def most_times(self) -> float:
        """The highest sustained load of a balanced cluster over the trial's, to 1%."""
        times, slo_us = min(self._full_us / self._slo_us, _MOST_TIMES), self._slo_us
        kv_tokens, rows = slo_us * self._kv_tokens_per_us, slo_us * self._rows_per_us
        while (
            times > 1 / _MOST_TIMES and self.balanced(times * kv_tokens, times * rows)[0] > slo_us
        ):
            times /= 1.01
        return times

    def balanced(self, kv_tokens: float, rows: float) -> tuple[float, float]:
        """(microseconds a token, tokens a step) of that load on balanced instances.

        A step yields one token of a row, or all drafts where these pay.
        """
        kv, num = round(kv_tokens), round(rows)
        loads = Loads([kv], [num], [num], [0], [0])
        steps = [(self._model.step(loads).step_us, 1.0)]
        if self._shares:
            us = self._model.step_with_drafts(loads, len(self._shares)).step_us
            steps.append((us, 1 + sum(accumulate(self._shares, mul))))
        us, num_tokens = min(steps, key=lambda step: step[0] / step[1])
        return us / num_tokens, num_tokens

    def tpot_us(self, excess_us: float) -> int:
        """Find the least time per token that equals its balanced step plus the excess."""
        low, high = 0.0, self._most_us
        for _ in range(20):
            tpot_us = (low + high) / 2
            balanced_us, _ = self.balanced(
                self._kv_tokens_per_us * tpot_us, self._rows_per_us * tpot_us
            )
            if balanced_us + excess_us > tpot_us:
                low = tpot_us
            else:
                high = tpot_us
        return max(1, round(high))
