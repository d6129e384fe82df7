"""`nanocp plan`: fit of a model and gain of a load on a cluster.

Exit status: 1 if the model does not fit, 2 if something cannot be.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanocp.cli.options.typed import Option
from nanocp.cli.plan.memory import Hardware, report_folder
from nanocp.cli.simulate.options import AsJson, Judged

_LONGEST = 1e9

if TYPE_CHECKING:
    from nanocp.simulator.loads.request_logs import RequestLog
    from nanocp.simulator.trial import Trial


@dataclass(frozen=True, slots=True)
class LogOptions(Judged):
    """Present requests to a service."""

    log: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None
    """A log of requests: of vLLM's benchmark, guidellm, AIPerf, Dynamo, NanoCP, Mooncake, Azure, or
    other JSON lines or CSV; /dev/stdin too."""
    fields: Option[str] = ""
    """The log's names: arrival=T,prompt=P,output=O."""
    time_unit: Option[str] = ""
    """Unit of the log's times: s, ms, us or ns. Default: what they show."""
    gauges: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None
    """Answers of the ranks' /metrics, once or often, or a range query of Prometheus: how uneven
    they are."""
    rate: Option[float | None] = None
    """Requests a second. Default: the log's."""
    quick: Annotated[bool, typer.Option("--quick")] = False
    """Rates to 5%, in a minute; no numbers of GPUs."""
    html: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None
    """Write the page with pictures there."""

    def trial(self, log: RequestLog, cluster: str, instances: int | None) -> Trial:
        """The log's load on a cluster, at the log's rate or that of --rate.

        Raises ValueError for a bad cluster or number.
        """
        from nanocp.simulator.costs.cluster_file import load_cluster_file
        from nanocp.simulator.loads.workload import Workload
        from nanocp.simulator.sweep import MAX_RATE, MIN_RATE
        from nanocp.simulator.trial import Trial

        file = load_cluster_file(cluster)
        file.costs_of(self.constants)
        # A cluster need not hold a request that is longer than all of the log.
        longest = max(
            math.ceil(self.length_scale * one.prompt_len) + one.output_len for one in log.requests
        )
        most = min(file.cluster.max_model_len, max(longest, 2))
        file = replace(file, cluster=replace(file.cluster, max_model_len=most))
        file = file.of_size(instances or file.cluster.num_instances)
        for name in ("slo_tpot_ms", "slo_ttft_ms"):
            value = getattr(self, name)
            if not 0 < value <= _LONGEST:
                raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must be positive")
        rate = log.rate_per_s if self.rate is None else self.rate
        if not MIN_RATE <= rate <= MAX_RATE:
            raise ValueError(
                f"the rate is {rate:.3g} requests/s; give --rate from {MIN_RATE} to {MAX_RATE:g}"
            )
        workload = Workload("log", rate, length_scale=self.length_scale, given=log.requests)
        return Trial(
            file,
            "cost_aware",
            workload,
            constants=self.constants or file.default_constants,
            slo=self.slo,
        )


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder (its config.json is enough), or a cluster of `nanocp "
            "simulate`: a name, or a .yaml file."
        ),
    ],
    hardware: Hardware,
    load: LogOptions,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits, and with --log what per-request CP would give your requests."""
    fits = True
    if load.log is not None:
        _analyse(model, hardware, load, as_json)
    else:
        _check_no_log(load, as_json)
        fits = _report(model, hardware)
        if load.gauges is not None:
            from nanocp.cli.plan.page import gauges_sentence
            from nanocp.simulator.analyser.rank_gauges import read_gauges

            typer.echo(gauges_sentence(read_gauges(load.gauges)))
    raise typer.Exit(0 if fits else 1)


def _check_no_log(load: LogOptions, as_json: bool) -> None:
    plain = replace(LogOptions(), gauges=load.gauges)
    if load != plain or as_json:
        raise ValueError(
            "--log is missing; --fields, --time-unit, --rate, --slo-tpot-ms, --slo-ttft-ms, "
            "--quick, --html, --json, length_scale and constants say how a log is looked at"
        )


def _is_cluster(model: str) -> bool:
    from nanocp.simulator.costs.cluster_file import shipped_names

    path = Path(model)
    if path.exists():
        return not path.is_dir()
    is_name = len(path.parts) == 1 and difflib.get_close_matches(model, shipped_names(), n=1)
    return bool(is_name) or path.suffix in (".yaml", ".yml")


def _report(model: str, hardware: Hardware) -> bool:
    if not _is_cluster(model):
        return report_folder(Path(model), hardware)
    from nanocp.cli.plan.page import cluster_sentences
    from nanocp.simulator.costs.cluster_file import load_cluster_file

    if hardware != replace(Hardware(), instances=hardware.instances):
        raise ValueError(f"{model} says what it runs on; only --instances may be given with it")
    for sentence in cluster_sentences(load_cluster_file(model, hardware.instances)):
        typer.echo(sentence)
    return True


def _analyse(model: str, hardware: Hardware, load: LogOptions, as_json: bool) -> None:
    from nanocp.cli.options.console import said
    from nanocp.cli.plan.page import show
    from nanocp.simulator.analyser.analysis import analyse, check_enough
    from nanocp.simulator.analyser.rank_gauges import read_gauges
    from nanocp.simulator.loads.request_logs import read_log

    assert load.log is not None
    pairs = [pair.partition("=") for pair in load.fields.split(",") if pair]
    log = read_log(load.log, {what: name for what, _, name in pairs}, load.time_unit)
    check_enough(len(log.requests))
    gauges = None if load.gauges is None else read_gauges(load.gauges)
    known = replace(Hardware(), instances=hardware.instances, device=hardware.device)
    if hardware != known:
        raise ValueError("--log is played with --instances and --device, no other hardware")
    cluster = model if _is_cluster(model) else _cluster_of(Path(model), hardware)
    trial = load.trial(log, cluster, hardware.instances)
    if load.html is not None:
        import nanocp.simulator.reports.html  # noqa: F401 (its packages are missed before the work)

        load.html.touch()
    with said() as say:
        analysis = analyse(trial, log.requests, load.quick, say)
    show(analysis, trial, log, load.log, gauges, load.html, as_json)


def _cluster_of(folder: Path, hardware: Hardware) -> str:
    """The name of a shipped cluster with the checkpoint's model. Raises ValueError."""
    from data_plane.model.config import ModelConfig
    from nanocp.simulator.costs.cluster_file import load_cluster_file, shipped_names

    model = ModelConfig.from_folder(folder)
    names = [name for name in shipped_names() if name.startswith(f"{hardware.device.value}x")]
    for name in names:
        shape = load_cluster_file(name).model
        if (shape.num_layers, shape.num_experts, shape.experts_per_token) == (
            model.num_layers,
            model.num_experts,
            model.num_experts_per_token,
        ):
            return name
    raise ValueError(
        f"the costs of this model on --device {hardware.device.value} are not known; known are "
        f"{', '.join(shipped_names())}. Describe the cluster in a .yaml file like these "
        "(nanocp/simulator/clusters), or measure it with `nanocp profile`, and give that file"
    )
