"""`nanocp serve`: a checkpoint on a cluster of instances, until a signal.

Enters: options. Leaves: progress on standard error; exit status 0 after a clean drain, 1 if the
service was lost or requests were cut off, 2 if it could not start. Does not know: what a member
does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from control_plane.launchers import Launcher
    from control_plane.links import Member
    from nanocp.config import Config
    from nanocp.serve.service import Served, Service


def serve(
    checkpoint: Annotated[
        Path, typer.Argument(help="A Hugging Face folder of a DeepSeek-V3 or V2 model.")
    ],
    instances: Annotated[int | None, typer.Option(help="cluster.num_instances")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of sections and keys; flags override it.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Join the Ray cluster at this address (auto: the one here) instead of a local one."
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option(help="Start instances as Ray actors, or as plain subprocesses.")
    ] = True,
    instances_per_node: Annotated[
        int | None,
        typer.Option(help="cluster.instances_per_node: with --address, how many one machine gets."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="scheduler.policy")] = None,
    host: Annotated[str | None, typer.Option(help="service.host")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="service.grpc_port; 0 picks a free one.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="service.http_port; 0 picks a free one.")
    ] = None,
    front_ends: Annotated[
        int | None, typer.Option(help="service.front_ends, at ports in a row.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="service.metrics_port; 0 picks a free one.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="service.served_model_name")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="service.api_keys: a key that clients send; repeatable. `ps` shows it, a file does not."
        ),
    ] = None,
    synthetic_kv: Annotated[
        bool | None,
        typer.Option("--synthetic-kv", help="prefill.synthetic_kv: noise instead of prefill."),
    ] = None,
    event_log: Annotated[
        str | None,
        typer.Option(
            help="service.event_log: a file for `nanocp simulate replay`.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Serve a checkpoint. SIGINT and SIGTERM let running requests end; a second one does not."""
    # gRPC's C core writes to the terminal what is said here in a sentence. Nobody forks here to go
    # on with gRPC.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from nanocp.config_file import load_config

    flags = {
        "cluster.num_instances": instances,
        "cluster.instances_per_node": instances_per_node,
        "scheduler.policy": policy,
        "service.host": host,
        "service.grpc_port": grpc_port,
        "service.http_port": http_port,
        "service.front_ends": front_ends,
        "service.metrics_port": metrics_port,
        "service.served_model_name": served_model_name,
        "service.api_keys": api_key or None,
        "prefill.synthetic_kv": synthetic_kv,
        "service.event_log": event_log,
    }
    try:
        if address is not None and not ray:
            raise ValueError("--address is of a Ray cluster and has no meaning with --no-ray")
        loaded = load_config(config, flags)
        status = run(loaded, checkpoint, address, ray)
    except (ValueError, OSError) as error:
        print(f"nanocp serve: {error}", file=sys.stderr)
        status = 2
    raise typer.Exit(status)


def run(config: Config, checkpoint: Path, address: str | None, ray: bool) -> int:
    """Serve until a signal or a failure; returns the exit status. Raises ValueError for what the
    user got wrong."""
    from rich.console import Console

    from nanocp.serve.service import Service, open_checkpoint

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    served = open_checkpoint(config, checkpoint)
    console.print(
        f"checkpoint {served.checkpoint}: accepted, {served.limits.max_model_len} tokens a request at most"
    )
    groups = _groups(config) if address is not None else ()
    service = Service(config, served, _launcher(config, address, ray, groups))
    place = _place(config, address, ray, groups)
    console.print(
        f"{config.cluster.num_instances} instances as {place}, policy {config.scheduler.policy}"
    )
    try:
        return _serve(service, served, console)
    finally:
        # What is being cleaned up is cleaned up, whoever is in a hurry.
        _on_signals(signal.SIG_IGN)
        service.stop()


def _serve(service: Service, served: Served, console: Console) -> int:
    from control_plane.members import StartError

    _on_signals(_interrupt)
    try:
        ready = _start(service, console)
    except (KeyboardInterrupt, SystemExit):
        # Ray's own handler exits, while Ray starts.
        console.print("stopped before it served")
        return 0
    except (StartError, RuntimeError) as error:
        print(f"nanocp serve: {error}", file=sys.stderr)
        return 2
    failure = ""
    try:
        # Inside: whoever reads the last line may signal before it is done.
        _describe(service, served, ready, console)
        failure = service.failure.result()
        print(f"nanocp serve: {failure}", file=sys.stderr)
    except KeyboardInterrupt:
        console.print(
            "draining: running requests may end, new ones are refused; once more to stop at once"
        )
    return _drained(service, console, failure)


def _start(service: Service, console: Console) -> dict[Member, tuple[str, ...]]:
    """On a terminal, a line for what is being done and a bar for the weights of each member."""
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


def _drained(service: Service, console: Console, failure: str) -> int:
    try:
        is_clean = service.drain()
    except KeyboardInterrupt:
        is_clean = False
    if not is_clean:
        console.print("not every request had ended")
    return 0 if is_clean and not failure else 1


def _describe(
    service: Service, served: Served, ready: Mapping[Member, tuple[str, ...]], console: Console
) -> None:
    """One line for every choice that members made alike, and one for each that differs."""
    seen: dict[str, list[Member]] = {}
    for member, choices in ready.items():
        for choice in choices:
            seen.setdefault(choice, []).append(member)
    for choice, members in seen.items():
        console.print(choice if len(members) > 1 else f"{members[0]}: {choice}")
    if served.tokenizer is None:
        console.print("no tokenizer.json: prompts are token ids")
    console.print(
        f"metrics at http://{service.metrics_address}/metrics, the cluster at /cluster beside them"
    )
    console.print(
        f"OpenAI API at {', '.join(f'http://{address}/v1' for address in service.http_addresses)}"
    )
    console.print(f"serving {served.checkpoint} at {', '.join(service.addresses)}")


def _groups(config: Config) -> Sequence[Sequence[Member]]:
    """The instances of each node of the plan; none at a loopback address, which only this machine
    reaches."""
    from control_plane.addresses import advertised_host, is_loopback
    from control_plane.links import Member

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
    return f"actors of the Ray at {address}, on this node (--host {config.service.host} is a loopback address)"


def _launcher(
    config: Config, address: str | None, ray: bool, groups: Sequence[Sequence[Member]]
) -> Launcher:
    from control_plane.launchers import NodeGroups, ProcessLauncher, RayLauncher
    from nanocp.serve.service import member_environment

    environment = member_environment(config)
    if not ray:
        return ProcessLauncher([sys.executable, "-m", "data_plane.member.process"], environment)
    if address is None:
        # A local Ray of our own is nobody else's: no token in the home directory, no report to
        # anybody.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from data_plane.member.ray_actor import MemberActor, release_node

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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
