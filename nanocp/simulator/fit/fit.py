"""Fits the CP-degree table and the cost constants of `serve` and `simulate` to measured steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from data_plane.graph.buckets import BucketTable, powers_of_two
from data_plane.model.config import ModelConfig
from data_plane.model.sizes import item_bytes
from data_plane.profiling.batch import Batch
from data_plane.profiling.phase_clock import PhaseTimes
from nanocp.config.choices import PROFILED, marks_of
from nanocp.config.cluster import ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.file import UNRELIABLE
from nanocp.config.passes import PassesConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.costs.cluster_file import ClusterFile, Costs, ModelShape, WireForm
from nanocp.simulator.costs.cost import CostModel, Loads

CONSTANTS = "fitted"


@dataclass(frozen=True, slots=True)
class Point:
    """A batch and the mean times of its phases over equally loaded instances."""

    batch: Batch
    times: PhaseTimes


Sweep = Mapping[int, Mapping[int, float]]
"""Length -> degree -> microseconds per layer of attention and exchange, for one request alone."""


def degree_table(sweep: Sweep) -> tuple[tuple[tuple[int, int], ...], int]:
    """(cp_degree_buckets, cp_degree_max): the fastest degree for each length.

    A degree counts from the length above which no smaller one is faster, despite noise.
    """
    lengths = sorted(sweep)
    degrees = [
        min(sweep[length], key=lambda degree: (sweep[length][degree], degree)) for length in lengths
    ]
    degrees = list(itertools.accumulate(reversed(degrees), min))[::-1]
    changes = zip(lengths[1:], degrees, degrees[1:], strict=False)
    buckets = tuple((length, below) for length, below, degree in changes if below != degree)
    return buckets, degrees[-1]


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through measured microseconds."""

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    """(fitted - measured) / measured of each point."""

    @property
    def median(self) -> float:
        """Median of the absolute errors."""
        return median(map(abs, self.errors))

    @property
    def worst(self) -> float:
        """The error that is furthest from 0."""
        return max(self.errors, key=abs)


_NO_EXPERTS = Fit((0.0, 0.0), ())
_MOST_MEDIAN, _MOST_WORST = 0.2, 0.75
"""Largest errors of a fit on an idle machine."""
_LEAST_SPEED = 1e-3


def fit(loads: Sequence[Sequence[float]], measured_us: Sequence[float]) -> Fit:
    """Least squares of relative errors, without negative coefficients.

    loads: one row per point, one column per coefficient.
    """
    measured = np.asarray(measured_us)
    relative = np.asarray(loads, dtype=np.float64) / measured[:, None]
    num_columns = relative.shape[1]
    best: tuple[float, np.ndarray] | None = None
    # A column that would be negative in the optimum is 0 in it: with three columns, all sets of
    # them are soon tried.
    for size in range(1, num_columns + 1):
        for columns in map(list, itertools.combinations(range(num_columns), size)):
            found, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(measured)))
            if (found < 0).any():
                continue
            coefficients = np.zeros(num_columns)
            coefficients[columns] = found
            loss = float(((relative @ coefficients - 1) ** 2).sum())
            if best is None or loss < best[0] - 1e-12:
                best = loss, coefficients
    assert best is not None, (
        "a line through positive numbers has a positive slope in one column at least"
    )
    return Fit(tuple(best[1].tolist()), tuple((relative @ best[1] - 1).tolist()))


@dataclass(frozen=True, slots=True)
class Fitted:
    """The measured cluster file for `simulate`, and the errors of its costs."""

    file: ClusterFile
    fits: Mapping[str, Fit]


def fit_cluster(
    cluster: ClusterConfig,
    data_plane: DataPlaneConfig,
    model: ModelConfig,
    degrees: Sequence[int],
    points: Sequence[Point],
    ingest_gb_per_s: float,
) -> Fitted:
    """Fit every constant of the cost model to points with and without links."""
    bounds, num_instances = cluster.bounds, cluster.num_instances
    linked = [point for point in points if loads_of(point.batch, num_instances).links[0]]

    def fit_phase(phase: str, chosen: Sequence[Point], *names: str) -> Fit:
        loads = [loads_of(point.batch, num_instances) for point in chosen]
        columns = [[1, *(getattr(load, name)[0] for name in names)] for load in loads]
        return fit(columns, [getattr(point.times, phase) for point in chosen])

    fits = {
        "attention": fit_phase("attention_us", points, "kv_tokens", "attention_rows"),
        "exchange": fit_phase("exchange_us", linked, "links"),
        "other": fit_phase("other_us", points, "rows"),
        "once a step": fit_phase("step_us", points),
    }
    shape = _shape(data_plane, model)
    if shape.num_moe_layers:
        fits["dispatch + combine"] = fit_phase("dispatch_combine_us", points, "rows")
        fits["experts"] = fit_phase("expert_us", points, "rows")
    file = ClusterFile(
        cluster=replace(cluster, max_model_len=min(cluster.max_model_len, model.max_len)),
        model=shape,
        costs={CONSTANTS: _costs(fits, num_instances, shape)},
        ingest_gb_per_s=rounded(ingest_gb_per_s),
        cp_degrees=tuple(sorted(degrees)),
        row_buckets=BucketTable(
            bounds.max_rows, bounds.max_attention_rows, data_plane.row_buckets
        ).rows[1:],
        attention_row_buckets=powers_of_two(bounds.max_attention_rows),
    )
    cost_model = CostModel(file, CONSTANTS)
    predicted_us = [
        cost_model.step(loads_of(point.batch, num_instances)).step_us for point in points
    ]
    errors = [
        us / step_us(model, point.times) - 1 for us, point in zip(predicted_us, points, strict=True)
    ]
    return Fitted(file, {**fits, "the whole step": Fit((), tuple(errors))})


def _costs(fits: Mapping[str, Fit], num_instances: int, shape: ModelShape) -> Costs:
    attention_us, token_us, attention_row_us = fits["attention"].coefficients
    exchange_us, link_us = fits["exchange"].coefficients
    dispatch_us, dispatch_row_us = fits.get("dispatch + combine", _NO_EXPERTS).coefficients
    expert_us, expert_row_us = fits.get("experts", _NO_EXPERTS).coefficients
    other_us, other_row_us = fits["other"].coefficients
    link_bytes = shape.wire_form("").bytes_per_link
    gb_per_s = rounded(link_bytes / 1e3 / max(link_us, 1e-3))
    local_mb = shape.expert_mb * shape.num_experts / num_instances
    row_mflop = shape.expert_mflop * shape.experts_per_token
    return Costs(
        attention_us=rounded(attention_us),
        attention_ps_per_token=rounded(token_us * 1e6),
        attention_ns_per_row=rounded(attention_row_us * 1e3),
        exchange_us=rounded(exchange_us),
        exchange_gb_per_s_within_node=gb_per_s,
        # One machine has no other node: links between nodes cost here what those within one do.
        exchange_gb_per_s_between_nodes=gb_per_s,
        exchange_us_between_nodes=0.0,
        dispatch_combine_us=rounded(dispatch_us),
        dispatch_combine_us_at_128_rows=(
            (num_instances, rounded(dispatch_us + 128 * dispatch_row_us)),
        ),
        weights_gb_per_s=rounded(max(1e3 * local_mb / max(expert_us, 1e-3), _LEAST_SPEED)),
        gemm_tflops=rounded(max(row_mflop / max(expert_row_us, 1e-3), _LEAST_SPEED)),
        other_us=rounded(other_us),
        other_ns_per_row=rounded(other_row_us * 1e3),
        step_us=rounded(fits["once a step"].coefficients[0]),
    )


def _shape(data_plane: DataPlaneConfig, model: ModelConfig) -> ModelShape:
    weights = 3 * model.hidden_size * model.expert_size
    return ModelShape(
        num_layers=model.num_layers,
        num_moe_layers=model.num_layers - model.num_dense_layers,
        kv_bytes_per_token=kv_bytes(data_plane, model),
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_token,
        expert_mb=weights * item_bytes(data_plane) / 1e6,
        expert_mflop=2 * weights / 1e6,
        # What a holder projects is in the measured time of a link.
        wire_forms={data_plane.wire_form: WireForm(_link_bytes(data_plane, model))},
    )


def step_us(model: ModelConfig, times: PhaseTimes) -> float:
    """Microseconds of a step: the sum of its phases."""
    every_layer = times.attention_us + times.exchange_us + times.other_us
    moe_layer = times.dispatch_combine_us + times.expert_us
    num_moe_layers = model.num_layers - model.num_dense_layers
    return model.num_layers * every_layer + num_moe_layers * moe_layer + times.step_us


def loads_of(batch: Batch, num_instances: int) -> Loads:
    """The loads that a step of the batch puts on each instance."""
    loads = Loads(*([0] * num_instances for _ in fields(Loads)))
    received = [0] * num_instances
    for request in batch:
        loads.rows[request.moe_binding] += 1
        loads.links[request.moe_binding] += len(request.kv_binding) - 1
        for instance in request.kv_binding:
            loads.kv_tokens[instance] += request.tokens_of(instance)
            loads.attention_rows[instance] += 1
            received[instance] += instance != request.moe_binding
    loads.links = list(map(max, loads.links, received))
    return loads


def kv_bytes(data_plane: DataPlaneConfig, model: ModelConfig) -> int:
    """Bytes of a token's KV, all layers together."""
    return model.num_layers * model.attention.kv_width * item_bytes(data_plane)


def _link_bytes(data_plane: DataPlaneConfig, model: ModelConfig) -> int:
    num_heads = model.attention.num_heads
    q_width, res_width = model.attention.wire_widths(data_plane.wire_form)
    return (q_width + num_heads * res_width) * item_bytes(data_plane) + num_heads * 4


def rounded(value: float) -> float:
    """The value in four digits."""
    return float(f"{value:.4g}")


# --- Files


def doubts(fitted: Fitted) -> list[str]:
    """Warnings for both files if the fit is poor."""
    return [
        f"{UNRELIABLE}{name} of the fitted costs differ from measured steps by {fit.median:.0%} in "
        f"the median and {abs(fit.worst):.0%} at worst; {_MOST_MEDIAN:.0%} and {_MOST_WORST:.0%} "
        "are usual. Profile again while nothing else runs here."
        for name, fit in fitted.fits.items()
        if fit.errors and (fit.median > _MOST_MEDIAN or abs(fit.worst) > _MOST_WORST)
    ]


def as_measured(scheduler: SchedulerConfig, fitted: Fitted, sweep: Sweep) -> SchedulerConfig:
    """The scheduler's configuration with this machine's CP degrees, and costs of links and rows."""
    costs, estimates = CostModel(fitted.file, CONSTANTS).in_tokens(), CostConfig()
    # One machine has no other node. As cheap as near ones, far links would be taken for any prompt.
    costs = replace(
        costs,
        exchange_tokens_between_nodes=estimates.exchange_tokens_between_nodes,
        link_tokens_between_nodes=max(costs.link_tokens, estimates.link_tokens_between_nodes),
    )
    buckets, degree_max = degree_table(sweep)
    return replace(scheduler, cp_degree_buckets=buckets, cp_degree_max=degree_max, costs=costs)


def profile_yaml(
    section: SchedulerConfig | PassesConfig, measured_on: Mapping[str, str], about: Sequence[str]
) -> str:
    """The profile: every measured key of the section. measured_on: the device and the model."""
    name = "pipeline" if isinstance(section, PassesConfig) else "scheduler"
    measured = {
        key: getattr(section, key)
        for key, marks in marks_of(type(section)).items()
        if PROFILED in marks
    }
    measured |= {"costs": asdict(section.costs)}
    return _document({"measured_on": dict(measured_on), name: measured}, about)


def serve_yaml(tree: dict[str, Any], profile: Path, about: Sequence[str]) -> str:
    """The file for `nanocp serve --config`: the profile merged into the other keys."""
    tree.setdefault("scheduler", {})["profile"] = str(profile.resolve())
    return _document(tree, about)


def cluster_yaml(fitted: Fitted, about: Sequence[str]) -> str:
    """The file for `nanocp simulate --cluster`."""
    return _document(asdict(fitted.file), about)


def _document(tree: Mapping[str, Any], about: Sequence[str]) -> str:
    text: str = yaml.safe_dump(_plain(tree), sort_keys=False, default_flow_style=None, width=120)
    return "".join(f"# {line}\n" for line in about) + text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
