"""Options that the commands of `nanocp simulate` share, and the trials they make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanocp.cli.options.typed import Option
from nanocp.config.choices import at_least, between
from nanocp.config.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from nanocp.simulator.outcome import Slo
    from nanocp.simulator.trial import Trial

_LONGEST = 10**9

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")]


@dataclass(frozen=True, slots=True)
class Judged:
    """Targets of a load, and costs to judge it by."""

    slo_tpot_ms: Option[float] = 50.0
    """Most milliseconds for a token after the first (TPOT)."""
    slo_ttft_ms: Option[float] = 500.0
    """Most milliseconds from arrival to the first token (TTFT)."""
    length_scale: float = 1.0
    """Factor on prompt lengths."""
    constants: str = ""
    """Cost constants of the cluster file: operators, peak, fitted. Default: operators, else fitted.
    """

    @property
    def slo(self) -> Slo:
        """Raises ValueError, naming the option, for a bad time."""
        self.check_times("slo_tpot_ms", "slo_ttft_ms")
        from nanocp.simulator.outcome import Slo

        return Slo(round(1e3 * self.slo_tpot_ms), round(1e3 * self.slo_ttft_ms))

    def check_times(self, *names: str) -> None:
        """Raises ValueError, naming the option, for a bad time."""
        for name in names:
            value: float | None = getattr(self, name)
            if value is not None and not 0 <= value <= _LONGEST:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is {value:g}; it must be from 0 to {_LONGEST:g}")


@dataclass(frozen=True, slots=True)
class Scenario(Judged):
    """A simulated load and cluster, without its rate."""

    cluster: Option[str] = "h200x32-deepseek-v3"
    """A cluster that ships, or a .yaml file."""
    workload: Option[str] = "issue-1"
    """issue-0, -1, -5, -100 (percent of long requests); static-1, -3, -5, -7 (long requests per
    node, all present from the start, no rate); mooncake:FILE or azure:FILE (traces)."""
    policy: Option[list[str]] = field(default_factory=lambda: [SchedulerConfig().policy])
    """A policy, or fluid, the bound; repeatable."""
    seconds: Option[float | None] = None
    """Simulated seconds that are measured. Default: the time of 2,200 arrivals, at least 60."""
    seed: Option[int] = 0
    """Seed of arrivals and lengths."""
    warm_up: Annotated[float, between(0, _LONGEST)] = 40.0
    """Simulated seconds before those that are measured."""
    instances: Annotated[int | None, at_least(1)] = None
    """Number of instances. Default: the cluster file's."""
    wire_form: str = ""
    """Form between instances: latent or absorbed. Default: the cheaper one."""
    ingest_tail_share: float | None = None
    """Share of a prompt's KV to come at the request's arrival. Default: the cluster file's, 1."""
    ttft_target_ms: Annotated[int | None, at_least(1)] = None
    """Target from placement to KV of a prompt, for policy cost_aware. Default: the cluster file's,
    none."""
    tpot_target_ms: Annotated[int | None, at_least(0)] = None
    """While tokens take longer, a few long prompts wait; 0: none. Default: the cluster file's,
    none."""
    experts: str = ""
    """How unevenly rows choose experts: lognormal:1.2, zipf:1.1, or what `nanocp experts --json`
    wrote. Default: the cluster file's, evenly."""
    begin_empty: bool = False
    """Begin with an empty cluster instead of running requests."""
    steps_per_window: int = 1
    """Steps that one plan covers."""
    speculate: str = ""
    """D:SHARE. Rows have up to D drafts, this share of them right: 1:.85, or by offset
    3:.85,.75,.65. With :always in every window, else where they pay. Not for fluid, nor with lanes
    or schedule."""
    lanes: bool = False
    """Run windows in two lanes where they pay. Not for fluid."""
    schedule: Path | None = None
    """Run layers by the schedule in this file (nanocp overlap search --cluster) where shorter. Not
    for fluid, nor with lanes."""

    @property
    def set_of_constants(self) -> str:
        """The name of the constants, or of the cluster file's default."""
        from nanocp.simulator.costs.cluster_file import load_cluster_file

        return self.constants or load_cluster_file(self.cluster).default_constants

    def trials(self, rate: float) -> dict[str, Trial]:
        """A trial of each policy at a rate (requests/s), not filled yet.

        Raises ValueError for an option without a meaning and an unusable cluster file.
        """
        from nanocp.simulator.costs.cluster_file import load_cluster_file
        from nanocp.simulator.drafted_rows import Speculation
        from nanocp.simulator.loads.expert_loads import expert_imbalance
        from nanocp.simulator.loads.workload import Workload
        from nanocp.simulator.trial import Trial

        self.check_times("seconds")
        file = load_cluster_file(self.cluster, self.instances)
        constants = self.constants or file.default_constants
        if self.ingest_tail_share is not None:
            file = replace(file, ingest_tail_share=self.ingest_tail_share)
        if self.ttft_target_ms is not None:
            if "cost_aware" not in self.policy:
                raise ValueError(
                    f"ttft_target_ms is for policy cost_aware; given are {', '.join(self.policy)}"
                )
            file = replace(file, ttft_targets=((0, self.ttft_target_ms),))
        if self.tpot_target_ms is not None:
            file = replace(file, tpot_target_ms=self.tpot_target_ms)
        if self.experts:
            num_instances = file.cluster.num_instances
            imbalance = expert_imbalance(self.experts, file.model, num_instances)
            file = replace(file, expert_imbalance=imbalance)
        schedule = None
        if self.speculate and (self.lanes or self.schedule is not None):
            raise ValueError("speculate is timed without lanes and schedule; give one")
        if self.schedule is not None:
            if self.lanes:
                raise ValueError("schedule and lanes are two orders of a layer; give one")
            from nanocp.simulator.costs.cost import CostModel
            from nanocp.simulator.costs.nano_batches import read

            model = CostModel(file, constants, wire_form=self.wire_form)
            schedule = read(self.schedule, self.cluster, constants, model)
        workload = Workload(
            self.workload,
            rate,
            self.seed,
            length_scale=self.length_scale,
            num_instances=file.cluster.num_instances,
            instances_per_node=file.cluster.instances_per_node,
        )
        return {
            policy: Trial(
                file,
                policy,
                workload,
                constants=constants,
                slo=self.slo,
                warm_up_us=round(self.warm_up * 1e6),
                measure_us=None if self.seconds is None else round(self.seconds * 1e6),
                steps_per_window=self.steps_per_window,
                wire_form=self.wire_form,
                begins_empty=self.begin_empty,
                lanes=self.lanes,
                schedule=schedule,
                speculation=Speculation.read(self.speculate) if self.speculate else None,
            )
            for policy in self.policy
        }


@dataclass(frozen=True, slots=True)
class Reports:
    """Files that a run leaves."""

    plots: Annotated[Path | None, typer.Option(metavar="DIR", file_okay=False)] = None
    """Write pictures there: latency, balance, queue, layers, scheduler, CP."""
    event_log: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """Write every call of the scheduler to this file, for `replay`."""

    def prepare(self) -> None:
        """Make the folder before the run. Raises ValueError, naming the option."""
        try:
            if self.plots:
                self.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--plots {self.plots} cannot be written: {error.strerror}") from error
