"""Metrics of a pipeline's run: latencies, attainment, bubbles by cause, moved KV."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Latency, Slo, latency_of, percentile
from nanocp.simulator.pipeline.stages import SimulatedStage


@dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """Metrics of a run. Requests that arrive after the warm-up are judged, each to its end."""

    num_judged: int
    num_refused: int
    attainment: float
    ttft_ms_mean: float
    ttft_ms_p99: float
    tpot_ms_mean: float
    tpot_ms_p99: float
    e2el_ms_mean: float
    e2el_ms_p99: float
    tokens_per_s: float
    """Generated tokens, over the whole run."""
    bubbles: tuple[dict[str, float], ...]
    """Idle share of each stage by cause, while a pass was in flight."""
    split: tuple[int, ...]
    num_frames: int
    num_passes: int
    num_preempted: int
    num_changes: int
    num_moved_layers: int
    moved_mb: float
    stall_ms: float
    """Time that stages waited for moved KV, summed over stages."""
    mean_r: float
    """Mean ratio of sampling to a layer after the warm-up."""
    layer_error: float
    """Mean relative error of the predicted layer time."""
    sampling_error: float

    @property
    def bubble(self) -> float:
        """Idle share of the stages, on average."""
        return fmean(sum(causes.values()) for causes in self.bubbles)


class PipelineRecorder:
    """Collects a run's events and computes its PipelineOutcome."""

    def __init__(self, warm_up_us: int, slo: Slo) -> None:
        self._warm_up_us, self._slo = warm_up_us, slo
        self._latencies: list[tuple[Latency, float]] = []
        self._num_met = 0
        self.num_refused = 0
        self.num_tokens = 0
        self.num_preempted = 0
        self.num_moved_layers = 0
        self.num_moved_bytes = 0
        self._ratios: list[float] = []
        self._layer_errors: list[float] = []
        self._sampling_errors: list[float] = []
        self.num_passes = 0

    def passed(
        self, now_us: float, actual_us: tuple[float, float], predicted_us: tuple[float, float]
    ) -> None:
        """Record a pass with the times of a layer and of sampling."""
        self.num_passes += 1
        self._layer_errors.append(abs(predicted_us[0] / actual_us[0] - 1))
        if actual_us[1]:
            self._sampling_errors.append(abs(predicted_us[1] / actual_us[1] - 1))
            if now_us >= self._warm_up_us:
                self._ratios.append(actual_us[1] / actual_us[0])

    def finished(self, request: WorkloadRequest, first_us: float, last_us: float) -> None:
        """Record a request's last token."""
        if request.arrival_us < self._warm_up_us:
            return
        latency = latency_of(request, first_us, last_us)
        self._num_met += latency.meets(self._slo)
        self._latencies.append((latency, last_us - request.arrival_us))

    def refused(self, request: WorkloadRequest) -> None:
        """Record a request that the scheduler ended."""
        self.num_refused += request.arrival_us >= self._warm_up_us

    def outcome(
        self,
        now_us: float,
        stages: list[SimulatedStage],
        split: tuple[int, ...],
        num_frames: int,
        num_changes: int,
        stall_us: float,
    ) -> PipelineOutcome:
        """The metrics of a run that has ended."""
        ttfts = sorted(latency.ttft_us for latency, _ in self._latencies)
        tpots = sorted(one.tpot_us for one, _ in self._latencies if one.tpot_us is not None)
        e2els = sorted(us for _, us in self._latencies)
        num_judged = len(self._latencies) + self.num_refused
        return PipelineOutcome(
            num_judged=num_judged,
            num_refused=self.num_refused,
            attainment=self._num_met / max(num_judged, 1),
            ttft_ms_mean=_mean(ttfts) / 1e3,
            ttft_ms_p99=percentile(ttfts, 99) / 1e3,
            tpot_ms_mean=_mean(tpots) / 1e3,
            tpot_ms_p99=percentile(tpots, 99) / 1e3,
            e2el_ms_mean=_mean(e2els) / 1e3,
            e2el_ms_p99=percentile(e2els, 99) / 1e3,
            tokens_per_s=self.num_tokens / max(now_us / 1e6, 1e-9),
            bubbles=tuple(_shares(stage) for stage in stages),
            split=split,
            num_frames=num_frames,
            num_passes=self.num_passes,
            num_preempted=self.num_preempted,
            num_changes=num_changes,
            num_moved_layers=self.num_moved_layers,
            moved_mb=self.num_moved_bytes / 1e6,
            stall_ms=stall_us / 1e3,
            mean_r=_mean(self._ratios),
            layer_error=_mean(self._layer_errors),
            sampling_error=_mean(self._sampling_errors),
        )


def _shares(stage: SimulatedStage) -> dict[str, float]:
    total_us = stage.busy_us + sum(stage.idle_us.values())
    return {cause: us / max(total_us, 1e-9) for cause, us in stage.idle_us.items()}


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0
