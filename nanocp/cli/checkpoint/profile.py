"""`nanocp profile`: measure this machine's steps, for `nanocp serve` and `nanocp simulate`."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.cli.options.typed import FieldOptions, Option, config_option, with_options

if TYPE_CHECKING:
    from rich.console import Console

    from data_plane.model.config import ModelConfig
    from data_plane.profiling.batch import Batch
    from nanocp.config.scheduler import SchedulerConfig
    from nanocp.config.whole import Config
    from nanocp.simulator.fit.fit import Fitted, Point, Sweep
    from nanocp.simulator.fit.lanes import LaneTable

_MIN_LEN = 512
_NUM_STEPS = 5
_NUM_LANE_STEPS = 15
_NUM_ROUNDS = 3
"""Rounds of measurements; each batch's fastest one counts."""
_QUICK_MAX_LEN = 4096
_WIDTH = 110


CONFIG_OPTIONS = FieldOptions(
    [config_option("cluster.num_instances", name="instances"), config_option("cluster.layout")]
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Batches to measure, and the folder of the files."""

    out: Option[Path] = Path("profile")
    """Folder for the files; made if absent."""
    overlap: Option[bool] = False
    """Measure two lanes too; serve.yaml runs them where they pay."""
    quick: Annotated[
        bool, typer.Option(help=f"One round, no request above {_QUICK_MAX_LEN} tokens.")
    ] = False
    max_len: int | None = None
    """Longest request of the sweep, tokens; by default the checkpoint's."""
    degree: list[int] = field(default_factory=list)
    """A CP degree of the sweep, repeatable. By default 1, 2, 4, ..."""

    def longest(self, model_max_len: int) -> int:
        """Tokens of the longest request. Raises ValueError if too few."""
        default = min(model_max_len, _QUICK_MAX_LEN) if self.quick else model_max_len
        max_len = default if self.max_len is None else self.max_len
        if max_len < _MIN_LEN:
            raise ValueError(f"max_len is {max_len}; it must be at least {_MIN_LEN}")
        return max_len

    def make_folder(self) -> None:
        """Make the folder of the files. Raises ValueError."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.out} cannot be a folder: {error.strerror}") from error


@with_options
def profile(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face folder, as serve takes it.")],
    flags: Annotated[dict[str, Any], CONFIG_OPTIONS],
    measurement: Measurement,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file of sections and keys, as serve reads it: what is to be profiled."
        ),
    ] = None,
) -> None:
    """Measure decode steps on this machine, while nothing else runs on it, and write three files.

    profile.yaml, for the key scheduler.profile: which CP degree a length gets, and what the
    exchange costs, which policy cost_aware weighs.

    serve.yaml, for `nanocp serve --config`: what was profiled, with this profile.

    cluster.yaml, for `nanocp simulate --cluster`: this machine as a simulated cluster.

    With data_plane.device cuda in --config GPUs are measured.

    With scheduler.num_drafts in --config steps with drafts are measured too, and the profile says
    how many pay in a window.

    With --layout pipeline passes are measured, and the profile has what a layer and sampling cost.
    """
    from rich.console import Console

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=_WIDTH, highlight=False)
    try:
        from nanocp.config.file import load_config

        run(load_config(config, flags), checkpoint, measurement, console)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"nanocp profile: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def run(config: Config, checkpoint: Path, measurement: Measurement, console: Console) -> None:
    """Measure, fit, show and write. Raises ValueError and RuntimeError."""
    is_gpu = config.data_plane.device == "cuda"
    if is_gpu and (measurement.overlap or config.scheduler.num_drafts):
        raise ValueError(
            "data_plane.device is cuda; --overlap and scheduler.num_drafts need cpu: two lanes and "
            "drafts are not measured on GPUs yet"
        )
    if config.cluster.layout == "pipeline":
        _run_pipeline(config, checkpoint, measurement, console)
        return
    if measurement.overlap:
        import nanocp.overlap.search  # noqa: F401 - before anything is measured
    from data_plane.model.config import ModelConfig
    from nanocp.simulator.fit.fit import as_measured, cluster_yaml, doubts, fit_cluster
    from nanocp.simulator.fit.lanes import with_lane_table

    num_instances = config.cluster.num_instances
    if num_instances < 2:
        raise ValueError(
            f"instances is {num_instances}; it must be at least 2, or no exchange can be measured"
        )
    degrees = _degrees(measurement.degree, num_instances)
    model = ModelConfig.from_folder(checkpoint)
    if model.delta is not None:
        raise ValueError(
            "the model has linear attention layers, whose time is not measured yet; serve it by "
            "the default costs"
        )
    max_len = measurement.longest(model.max_len)
    measurement.make_folder()
    sweep, points, ingest_gb_per_s, gpu = _measure(
        config, model, checkpoint, max_len, degrees, measurement.quick, console
    )
    if measurement.overlap:
        table = _measure_lanes(config, checkpoint)
        config = replace(config, scheduler=with_lane_table(config.scheduler, table))
    if config.scheduler.num_drafts:
        config = replace(config, scheduler=_measure_drafts(config, checkpoint))
    fitted = fit_cluster(config.cluster, config.data_plane, model, degrees, points, ingest_gb_per_s)
    about, out = [*_about(config, checkpoint, gpu), *doubts(fitted)], measurement.out
    config = replace(config, scheduler=as_measured(config.scheduler, fitted, sweep))
    _write(config, model, out, about)
    (out / "cluster.yaml").write_text(cluster_yaml(fitted, about))
    _show(sweep, fitted, console)
    for doubt in doubts(fitted):
        print(f"nanocp profile: {doubt}", file=sys.stderr)
    console.print(f"nanocp serve {checkpoint} --config {out / 'serve.yaml'}", soft_wrap=True)
    console.print(f"nanocp simulate --cluster {out / 'cluster.yaml'}", soft_wrap=True)


def _run_pipeline(
    config: Config, checkpoint: Path, measurement: Measurement, console: Console
) -> None:
    from rich.table import Table

    from data_plane.model.config import ModelConfig
    from nanocp.config.pipeline import PipelineConfig
    from nanocp.simulator.fit.pipeline import KINDS, errors, measure, num_first_dense
    from nanocp.simulator.pipeline.fit import fit_costs

    if measurement.max_len or measurement.degree or measurement.overlap:
        raise ValueError("max_len, degree and --overlap have no meaning with layout pipeline")
    model = ModelConfig.from_folder(checkpoint)
    PipelineConfig.of(config.pipeline, config.cluster.num_instances, model.num_layers)
    measurement.make_folder()
    layers = model.num_experts, model.num_experts_per_token, num_first_dense(model)
    kinds = ("greedy", "mixed") if measurement.quick else tuple(KINDS)
    passes, apart = measure(
        checkpoint, kinds, is_quick=measurement.quick, data_plane=config.data_plane
    )
    every = [one for all_ in passes.values() for one in all_]
    costs = fit_costs("ours", every, *layers)
    config = replace(config, pipeline=replace(config.pipeline, costs=costs))
    path = _write(config, model, measurement.out, _about(config, checkpoint))
    table = Table(title=f"{len(every)} passes: mean error on a held-out third")
    for column in ("form", "layer", "dense layer", *(f"sampling, {kind}" for kind in passes)):
        table.add_column(column)
    rows = errors(passes, *layers) | {"two plays of a pass differ by": apart}
    for form, found in rows.items():
        sampling = [f"{error.sampling:.1%}" for error in found.values()]
        layer, dense = (
            f"{fmean(each):.1%}"
            for each in zip(*((one.layer, one.dense) for one in found.values()), strict=True)
        )
        table.add_row(form, layer, dense if costs.dense_layers else "none", *sampling)
    console.print(table)
    console.print(f"nanocp serve {checkpoint} --config {path}", soft_wrap=True)


def _write(config: Config, model: ModelConfig, out: Path, about: Sequence[str]) -> Path:
    from nanocp.config.yaml import changed
    from nanocp.simulator.fit.fit import profile_yaml, serve_yaml

    section = config.pipeline if config.cluster.layout == "pipeline" else config.scheduler
    profile, path = out / "profile.yaml", out / "serve.yaml"
    measured_on = {"device": config.data_plane.device, "model": model.in_words}
    profile.write_text(profile_yaml(section, measured_on, about))
    tree = changed(config)
    tree.setdefault("cluster", {})["num_instances"] = config.cluster.num_instances
    path.write_text(serve_yaml(tree, profile, about))
    return path


def _degrees(given: Sequence[int] | None, num_instances: int) -> list[int]:
    degrees = sorted(set(given or [1 << power for power in range(num_instances.bit_length())]))
    if degrees[0] < 1 or degrees[-1] > num_instances:
        wrong = degrees[0] if degrees[0] < 1 else degrees[-1]
        raise ValueError(
            f"degree is {wrong}; it must be from 1 to the number of instances ({num_instances})"
        )
    return degrees


# --- measuring


def _measure(
    config: Config,
    model: ModelConfig,
    checkpoint: Path,
    max_len: int,
    degrees: Sequence[int],
    quick: bool,
    console: Console,
) -> tuple[Sweep, list[Point], float, str]:
    """The sweep, points to fit, the speed of ingest, and the GPU's name."""
    from rich.console import Console as ErrorConsole
    from rich.progress import Progress

    from data_plane.profiling.batch import alone, linked_batches, local_batches, num_frames
    from data_plane.profiling.cluster import measuring
    from data_plane.profiling.phase_clock import PhaseTimes
    from nanocp.serve.service import member_environment
    from nanocp.simulator.fit.fit import Point, step_us

    num_instances, bounds = config.cluster.num_instances, config.cluster.bounds
    alone_batches = {
        (length, degree): alone(length, degree)
        for length in _lengths(max_len)
        for degree in degrees
    }
    batches = [
        *local_batches(num_instances, bounds.max_rows, max_len),
        *linked_batches(num_instances, bounds, max_len),
    ]
    frames = [
        max(num_frames(batch, instance) for batch in (*alone_batches.values(), *batches))
        for instance in range(num_instances)
    ]
    if not any(len(batch[0].kv_binding) > 1 for batch in batches):
        raise ValueError(
            f"max_attention_rows is {bounds.max_attention_rows}; it must be at least 2, or no "
            "exchange can be measured"
        )
    is_gpu = config.data_plane.device == "cuda"
    if not is_gpu:
        _check_memory(config, model, max_len, sum(frames))
    cluster = replace(config.cluster, num_frames=max(frames), max_model_len=max_len)
    sweep: dict[int, dict[int, float]] = {length: {} for length in _lengths(max_len)}
    best: dict[int, PhaseTimes] = {}
    num_rounds = 1 if quick else _NUM_ROUNDS
    with Progress(console=ErrorConsole(stderr=True), transient=True) as progress:
        total = num_rounds * (len(alone_batches) + len(batches))
        task = progress.add_task(f"starting {num_instances} instances", total=total)
        with measuring(
            replace(config, cluster=cluster), checkpoint, member_environment(config)
        ) as measured:
            for _ in range(num_rounds):
                for (length, degree), batch in alone_batches.items():
                    progress.update(
                        task, description=f"one request of {length} tokens at degree {degree}"
                    )
                    times = measured.measure(batch, _NUM_STEPS)[0]
                    us = times.attention_us + times.exchange_us
                    sweep[length][degree] = min(us, sweep[length].get(degree, us))
                    progress.advance(task)
                for number, batch in enumerate(batches):
                    progress.update(task, description=_describe(batch, num_instances))
                    by_phase = zip(*measured.measure(batch, _NUM_STEPS), strict=True)
                    times = PhaseTimes(*(sum(values) / num_instances for values in by_phase))
                    best[number] = min(
                        times, best.get(number, times), key=lambda times: step_us(model, times)
                    )
                    progress.advance(task)
            ingest_gb_per_s = measured.ingest_gb_per_s()
            gpu = measured.device_name() if is_gpu else ""
    return (
        sweep,
        [Point(batch, best[number]) for number, batch in enumerate(batches)],
        ingest_gb_per_s,
        gpu,
    )


def _measure_lanes(config: Config, checkpoint: Path) -> LaneTable:
    from data_plane.profiling.cluster import measuring
    from nanocp.cli.options.console import progress
    from nanocp.serve.service import member_environment
    from nanocp.simulator.fit.lanes import candidates, lane_batches, lane_point

    scheduler = replace(config.scheduler, lanes="always", lane_table=())
    batches, table = [*lane_batches(config.cluster)], []
    site = replace(config, scheduler=scheduler), checkpoint, member_environment(config)
    with measuring(*site) as measured, progress() as bar:
        for rows, links, batch in bar.track(batches, description="orders of two lanes"):
            ((*_, whole),), ((*_, half),) = (
                measured.measure_lanes(part, _NUM_STEPS, orders=()) for part in (batch, batch[::2])
            )
            orders = candidates(whole, half)
            times = measured.measure_lanes(batch, _NUM_LANE_STEPS, orders=orders)
            table.append(lane_point(rows, links, times, orders))
    return tuple(sorted(table))


def _measure_drafts(config: Config, checkpoint: Path) -> SchedulerConfig:
    from data_plane.profiling.cluster import measuring
    from nanocp.serve.service import member_environment
    from nanocp.simulator.fit.drafts import with_draft_table

    one_lane = replace(config, scheduler=replace(config.scheduler, lanes="off"))
    with measuring(one_lane, checkpoint, member_environment(config)) as measured:
        return with_draft_table(
            config.scheduler,
            config.cluster,
            lambda batch, drafts: measured.measure_drafts(batch, drafts, _NUM_LANE_STEPS),
        )


def _lengths(max_len: int) -> Iterator[int]:
    length = _MIN_LEN
    while length < max_len:
        yield length
        length *= 2
    yield max_len


def _describe(batch: Batch, num_instances: int) -> str:
    degree = len(batch[0].kv_binding)
    return f"{len(batch) // num_instances} x {batch[0].length} tokens each, degree {degree}"


def _check_memory(config: Config, model: ModelConfig, max_len: int, num_frames: int) -> None:
    import psutil

    from nanocp.simulator.fit.fit import kv_bytes
    from nanocp.values.plan import PAGE_SIZE

    needed = num_frames * PAGE_SIZE * kv_bytes(config.data_plane, model)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"max_len is {max_len}: the KV of all instances takes {needed / 2**30:.1f} GiB, and "
            f"this machine has {free / 2**30:.1f} GiB free; choose a smaller max_len"
        )


# --- showing


def _about(config: Config, checkpoint: Path, gpu: str = "") -> list[str]:
    import torch

    num_instances, threads = config.cluster.num_instances, config.data_plane.threads_per_instance
    cores = len(os.sched_getaffinity(0))
    about = [
        f"Measured by `{shlex.join(['nanocp', *sys.argv[1:]])}`: {checkpoint.name}, "
        f"{config.data_plane.dtype},",
        f"{num_instances} instances "
        f"{f'on {gpu}' if gpu else f'of {threads} thread(s) on {cores} cores of {_cpu()}'}, "
        f"torch {torch.__version__}.",
    ]
    needed, there = num_instances * threads, cores
    if gpu:
        needed, there = num_instances, torch.cuda.device_count()
    if needed > there:
        about.append(
            f"The instances share {'GPUs' if gpu else 'cores'}: a step that loads only some of "
            "them is shorter than these costs say."
        )
    return about


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _show(sweep: Sweep, fitted: Fitted, console: Console) -> None:
    from rich.table import Table

    from nanocp.simulator.fit.fit import degree_table

    console.print("one request alone: attention + exchange, us a layer")
    table = Table()
    table.add_column("tokens", justify="right")
    for degree in next(iter(sweep.values())):
        table.add_column(f"degree {degree}", justify="right")
    for length, times in sweep.items():
        best = min(times.values())
        table.add_row(
            f"{length:,}",
            *(f"[bold]{us:.0f}[/]" if us == best else f"{us:.0f}" for us in times.values()),
        )
    console.print(table)
    buckets, degree_max = degree_table(sweep)
    for length, degree in buckets:
        console.print(f"fewer than {length:,} tokens: degree {degree}")
    console.print(f"{'longer' if buckets else 'every length'}: degree {degree_max}")
    table = Table(title="cost model against the measured steps")
    for column in ("", "points", "median error", "worst"):
        table.add_column(column, justify="right" if column else "left")
    for name, fit in fitted.fits.items():
        table.add_row(name, str(len(fit.errors)), f"{fit.median:.0%}", f"{fit.worst:+.0%}")
    console.print(table)
