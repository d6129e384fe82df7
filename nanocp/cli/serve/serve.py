"""`nanocp serve`: a checkpoint on a cluster of instances, until a signal.

Exit status: 0 after a clean drain, 1 after a loss or cut requests, 2 without a start.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.cli.options.typed import FieldOptions, Option, config_option, with_options
from nanocp.cli.options.vllm_flags import said_of_environment

if TYPE_CHECKING:
    from rich.console import Console

    from control_plane.launchers.launcher import Launcher
    from nanocp.config.service import ServiceConfig
    from nanocp.config.whole import Config
    from nanocp.serve.service import Served, Service
    from nanocp.values.members import Member

logger = logging.getLogger(__name__)

_AWAKE_EVERY_S = 1.0

CONFIG_OPTIONS = FieldOptions(
    [
        config_option("cluster.num_instances", name="instances"),
        config_option("cluster.layout"),
        config_option("cluster.instances_per_node"),
        config_option("cluster.num_frames"),
        config_option("cluster.max_model_len"),
        config_option("cluster.bounds.max_rows"),
        config_option("scheduler.policy"),
        config_option("data_plane.device"),
        config_option("data_plane.dtype"),
        config_option("service.host"),
        config_option("service.grpc_port"),
        config_option("service.http_port"),
        config_option("service.front_ends"),
        config_option("service.controller_process"),
        config_option("service.metrics_port"),
        config_option("service.served_model_name"),
        config_option("service.api_keys", name="api_key", metavar="KEY"),
        config_option("service.api_keys_file", metavar="FILE"),
        config_option("service.operator_keys_file", metavar="FILE"),
        config_option("service.tool_call_parser"),
        config_option("service.reasoning_parser"),
        config_option("prefill.engines", name="prefill", metavar="URL"),
        config_option("service.event_log", metavar="FILE"),
        config_option("service.log_format"),
        config_option("service.log_level"),
    ]
)


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Sources of settings, and where instances start."""

    config: Option[Path | None] = None
    """A YAML file of sections and keys; flags override it."""
    address: Option[str | None] = None
    """Join the Ray cluster at this address (auto: the one here) instead of a local one."""
    ray: Option[bool] = True
    """Start instances as Ray actors, or as plain subprocesses."""
    given: Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE")] = field(
        default_factory=list
    )
    """Any key that `nanocp config` prints. May be given again."""
    print_config: Annotated[bool, typer.Option("--print-config")] = False
    """Print the configuration, and where it is from, and exit."""
    drain_timeout_s: Annotated[float | None, typer.Option(show_default="30")] = None
    """Time that running requests get to finish after a signal. (limits.drain_timeout_ms)"""
    speculative_config: Annotated[str | None, typer.Option(metavar="JSON")] = None
    """Let the model's MTP layer draft tokens, as vLLM's option of this name: {"method": "mtp",
    "num_speculative_tokens": 1}. (scheduler.num_drafts)"""

    def settings(self) -> dict[str, Any]:
        """Keys that these options set. Raises ValueError."""
        from nanocp.config.file import settings
        from nanocp.config.speculative import num_drafts_of

        if self.address is not None and not self.ray:
            raise ValueError("--address names a Ray cluster, which --no-ray does not use")
        found: dict[str, Any] = {}
        if self.drain_timeout_s is not None:
            found["limits.drain_timeout_ms"] = round(self.drain_timeout_s * 1000)
        if self.speculative_config is not None:
            found["scheduler.num_drafts"] = num_drafts_of(self.speculative_config)
        return found | settings(self.given)


@with_options
def serve(
    context: typer.Context,
    checkpoint: Annotated[
        Path, typer.Argument(help="A Hugging Face folder of a model that docs/use/models.md lists.")
    ],
    flags: Annotated[dict[str, Any], CONFIG_OPTIONS],
    start: StartOptions,
) -> None:
    """Serve a checkpoint until Ctrl-C, SIGTERM or SIGHUP.

    The first signal lets running requests finish, a second one stops at once. A SIGHUP that is
    ignored at start, as below nohup, stays ignored. In parentheses is the key of the configuration
    file that an option overrides.
    """
    # gRPC's C core writes to the terminal what is reported here as a sentence. No process forks
    # here and goes on with gRPC.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from nanocp.cli.serve.vllm_sizes import with_sizes
    from nanocp.config.file import doubts_in, origins
    from nanocp.config.yaml import config_yaml
    from nanocp.serve.served import with_model_len

    flags |= start.settings() | context.obj.sets
    loaded, flags = with_sizes(start.config, flags, checkpoint)
    sources = origins(start.config, flags)
    if start.print_config:
        print(config_yaml(loaded, sources), end="")
        return
    for doubt in doubts_in(profile := loaded.scheduler.profile):
        print(f"{profile}: {doubt}", file=sys.stderr)
    is_given = "cluster.max_model_len" in sources
    if not is_given and (checkpoint / "config.json").exists():  # else `run` says that
        loaded = with_model_len(loaded, checkpoint)
    if "gpu_memory_utilization" in context.obj.sets and loaded.data_plane.device == "cpu":
        context.obj.said.append(
            "--gpu-memory-utilization changes nothing on CPUs: an instance has "
            f"{loaded.cluster.num_frames} frames of 64 tokens (--num-frames)"
        )
    raise typer.Exit(run(loaded, checkpoint, start.address, start.ray, context.obj.said))


def run(
    config: Config, checkpoint: Path, address: str | None, ray: bool, said: Sequence[str] = ()
) -> int:
    """Serve until a signal or a failure; returns the exit status.

    said: notes on the command line. Raises ValueError for an unusable configuration or checkpoint.
    """
    from rich.console import Console

    from control_plane.frontend.access.descriptors import max_connections, raise_limit
    from nanocp.logs import configure
    from nanocp.serve.served import policy_in_words
    from nanocp.serve.service import Service, open_checkpoint

    configure(config.service.log_format, config.service.log_level)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    output = Output(config.service, console)
    raise_limit()
    most = max_connections(config.service, config.cluster.num_instances)
    if most < config.limits.max_http_connections:
        output.say(f"at most {most} connections at each API of a front end, by ulimit -n")
    for sentence in said:
        output.say(sentence)
    for sentence in said_of_environment(os.environ):
        logger.warning("%s", sentence)
    served = open_checkpoint(config, checkpoint)
    _warn_of_open_ports(config.service)
    output.say(
        f"checkpoint {served.checkpoint}: accepted, at most {served.limits.max_model_len} tokens "
        "per request"
    )
    groups = _groups(config) if address is not None else ()
    if groups and config.cluster.spares:
        raise ValueError(
            f"cluster.spares is {config.cluster.spares}, and instances are on {len(groups)} nodes "
            f"(--address, --host {config.service.host}); spares stand on one node: take 0"
        )
    launcher = _launcher(config, address, ray, groups)
    place = _place(config, address, ray, groups)
    num = config.cluster.num_instances
    what = "stage" if config.cluster.layout == "pipeline" else "instance"
    output.say(f"{num} {what}{'s' * (num != 1)} as {place}, policy {policy_in_words(config)}")
    if config.service.controller_process:
        return _supervise(config, served, launcher, output)
    return serve_until_end(Service(config, served, launcher), served, output)


def serve_until_end(
    service: Service, served: Served, output: Output, opened: Callable[[], None] = lambda: None
) -> int:
    """Start the service and serve until a signal or a failure; returns the exit status.

    opened: called when it serves.
    """
    try:
        status = _serve(service, served, output, opened)
    finally:
        # A signal does not interrupt the cleaning up.
        _on_signals(signal.SIG_IGN)
        service.stop()
    if status != 2:
        output.say("stopped")
    return status


def _warn_of_open_ports(service: ServiceConfig) -> None:
    from control_plane.ports.addresses import is_loopback

    if is_loopback(service.host):
        return
    if not service.has_keys:
        logger.warning(
            "host is %s and no keys are set: whoever reaches this machine may use the service, and "
            "drain and scale it (--api-keys-file, --operator-keys-file)",
            service.host,
        )
    elif not service.operator_keys_file:
        logger.warning(
            "no operators' keys are set: nobody may read the status port%s, or drain and scale "
            "(--operator-keys-file)",
            " but what public_status opens" if service.public_status else "",
        )


def _supervise(config: Config, served: Served, launcher: Launcher, output: Output) -> int:
    """Serve with a controller in a process of its own, restarted when lost."""
    from nanocp.serve.supervisor import Supervisor

    _on_signals(_interrupt)
    try:
        supervisor = Supervisor(config, served, launcher=launcher)
    except (KeyboardInterrupt, SystemExit):
        output.say("stopped before serving")
        launcher.stop(0.0)
        return 0
    except RuntimeError as error:
        output.fail(error)
        launcher.stop(0.0)
        return 2
    _on_signals(lambda number, frame: supervisor.signal(number))
    return supervisor.run()


class Output:
    """Output of `serve`: sentences on a terminal, or lines of a JSON log."""

    def __init__(self, service: ServiceConfig, console: Console) -> None:
        self.console = console
        self._is_text = service.log_format == "text"

    def say(self, sentence: str) -> None:
        """Say what happens."""
        if self._is_text:
            self.console.print(sentence, markup=False)
        else:
            logger.info("%s", sentence)

    def fail(self, error: object) -> None:
        """Say what ends the service."""
        if self._is_text:
            print(f"nanocp serve: {error}", file=sys.stderr)
        else:
            logger.error("%s", error)


def _serve(service: Service, served: Served, output: Output, opened: Callable[[], None]) -> int:
    from control_plane.coordinator.members.start import StartError

    _on_signals(_interrupt)
    try:
        ready = _start(service, output.console)
    except (KeyboardInterrupt, SystemExit):
        # While Ray starts, its own signal handler raises SystemExit.
        output.say("stopped before serving")
        return 0
    except (StartError, RuntimeError) as error:
        output.fail(error)
        return 2
    failure = ""
    try:
        # Inside the try: a program that reads the last line may signal before this returns.
        _describe(service, served, ready, output)
        opened()
        failure = _failure_of(service)
        output.fail(failure)
    except KeyboardInterrupt:
        num_open = service.num_open
        finishing = f"finishing {_requests(num_open)}" if num_open else "no request is open"
        output.say(f"draining: {finishing}, refusing new ones; Ctrl-C again to stop now")
    return _drained(service, output, failure)


def _failure_of(service: Service) -> str:
    while True:
        # The kernel may give a signal to any thread; its handler runs when this one is awake.
        with suppress(TimeoutError):
            return service.failure.result(_AWAKE_EVERY_S)


def _requests(num: int) -> str:
    return f"{num} request{'s' * (num != 1)}"


def _start(service: Service, console: Console) -> dict[Member, tuple[str, ...]]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        step_bar = bars.add_task("starting", total=None)
        member_bars: dict[Member, Any] = {}

        def loading(member: Member, percent: int) -> None:
            if member not in member_bars:
                member_bars[member] = bars.add_task(f"{member}: weights", total=100)
            bars.update(member_bars[member], completed=percent)

        return service.start(lambda step: bars.update(step_bar, description=step), loading)


def _drained(service: Service, output: Output, failure: str) -> int:
    def report(num_open: int, left_s: float) -> None:
        output.say(f"draining: {_requests(num_open)} left; they are cut off in {left_s:.0f} s")

    try:
        is_clean = service.drain(report)
    except KeyboardInterrupt:
        is_clean = False
    if not is_clean:
        output.say(f"{_requests(service.num_open)} cut off")
    return 0 if is_clean and not failure else 1


def _describe(
    service: Service, served: Served, ready: Mapping[Member, tuple[str, ...]], output: Output
) -> None:
    seen: dict[str, list[Member]] = {}
    for member, selections in ready.items():
        for selection in selections:
            seen.setdefault(selection, []).append(member)
    for selection, members in seen.items():
        output.say(selection if len(members) > 1 else f"{members[0]}: {selection}")
    if served.tokenizer is None:
        output.say("no tokenizer.json: prompts are token ids")
    output.say(
        f"metrics at http://{service.metrics_address}/metrics, the cluster at /cluster beside them"
    )
    output.say(
        f"OpenAI API at "
        f"{', '.join(f'{service.http_scheme}://{one}/v1' for one in service.http_addresses)}"
    )
    output.say(f"serving {served.checkpoint} at {', '.join(service.addresses)}")


def _groups(config: Config) -> Sequence[Sequence[Member]]:
    """Instances of each node; none at a loopback address, which only this machine reaches."""
    from control_plane.ports.addresses import advertised_host, is_loopback
    from nanocp.values.members import Member

    if is_loopback(advertised_host(config.service)):
        return ()
    instances, size = range(config.cluster.num_instances), config.cluster.instances_per_node
    return [
        [Member("instance", i) for i in instances[first : first + size]]
        for first in instances[::size]
    ]


def _place(
    config: Config, address: str | None, ray: bool, groups: Sequence[Sequence[Member]]
) -> str:
    if not ray:
        return "plain subprocesses"
    if address is None:
        return "actors of a local Ray"
    if groups:
        size = config.cluster.instances_per_node
        return f"actors of the Ray at {address} ({len(groups)} nodes, {size} at most on each)"
    return (
        f"actors of the Ray at {address}, on this node (--host {config.service.host} is a "
        "loopback address)"
    )


def _launcher(
    config: Config, address: str | None, ray: bool, groups: Sequence[Sequence[Member]]
) -> Launcher:
    from control_plane.launchers.processes import ProcessLauncher
    from control_plane.launchers.ray_actors import NodeGroups, RayLauncher
    from nanocp.serve.service import member_environment

    environment = member_environment(config)
    if not ray:
        return ProcessLauncher([sys.executable, "-m", "data_plane.programs.process"], environment)
    # Ray writes what it says of a lost actor, and much more, beside the lines of our log.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    if address is None:
        # A local Ray serves this process alone: no token in the home directory, no usage report.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from data_plane.programs.ray_actor import MemberActor, release_node

    resources = {"CPU": float(config.data_plane.threads_per_instance)}
    if config.data_plane.device == "cuda":
        resources["GPU"] = 1.0
    nodes = (
        NodeGroups(groups, resources, release_node, config.limits.start_timeout_ms / 1000)
        if groups
        else None
    )
    return RayLauncher(MemberActor, address, environment, nodes)


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What `nohup` has started is to outlive its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
