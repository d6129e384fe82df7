"""`nanocp why`: where the time of one request went.

Exit status: 2 if the request or the service is unknown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from nanocp.cli.operate.status_port import OperatorKey, Target, fetch_json

if TYPE_CHECKING:
    from rich.console import Console

_ADVICE = {
    "queue": "frames or rows were short: see NanoCPHeadOfLineWaits in docs/use/operate.md",
    "prefill": "the prefill was busy, or the prompt is long: see NanoCPSlowFirstToken in "
    "docs/use/operate.md",
    "start": "the cluster was slow to start a window: see NanoCPSchedulerSlow in "
    "docs/use/operate.md",
    "decode": "divide it by the tokens: see NanoCPSlowTokens in docs/use/operate.md if a step is "
    "slow",
    "away": "its frames went to other requests: see NanoCPPreempts in docs/use/operate.md",
}


def why(
    request: Annotated[
        str, typer.Argument(help="The request: the client's id, or the cluster's number.")
    ],
    target: Target = "127.0.0.1:9464",
    event_log: Annotated[
        Path | None,
        typer.Option(help="Ask this log of `nanocp serve --event-log` instead of a service."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    operator_key: OperatorKey = "",
) -> None:
    """Say where the time of a request went: queue, prefill, decode, preemptions, losses.

    A running service knows the latest 4,096 requests; an event log knows all.
    """
    if event_log is None:
        path = f"/cluster/requests.json?name={quote(request, safe='')}"
        found: list[dict[str, Any]] = fetch_json(target, path, operator_key)
    else:
        found = _replayed(event_log, request)
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for one in found:
        show(console, one)


def _replayed(path: Path, request: str) -> list[dict[str, Any]]:
    from control_plane.observe.request_values import request_values
    from control_plane.observe.timelines import Timelines
    from control_plane.shell.event_log import LogReader, log_lines
    from nanocp.simulator.replay import replay

    last_us = 0

    def watch(now_us: int, events: Any, plan: Any, noted: Any) -> None:
        nonlocal last_us
        last_us = now_us
        timelines.planned(now_us, events, plan, noted)

    try:
        reader = LogReader(log_lines(path), str(path))
        timelines = Timelines(reader.header.cluster.num_frames, most=1 << 30)
        replay(reader, watch=watch)
    except OSError as error:
        raise ValueError(f"the event log {path} cannot be read: {error.strerror}") from error
    found = timelines.find(request, last_us)
    if not found:
        raise ValueError(f"{path} has no request that is known as {request!r}")
    return [request_values(one, reader.header.wall_us) for one in found]


def show(console: Console, one: dict[str, Any]) -> None:
    """Print a request's times and timeline."""
    from rich.table import Table

    seconds: dict[str, float] = one["seconds"]
    total = sum(seconds.values())
    client_id = f", the client's id {one['client_id']}" if one["client_id"] else ""
    end = f"ended: {one['reason']}" if one["reason"] else f"now: {one['state']}"
    console.print(f"request {one['number']}{client_id}: {total:.3f} s, {end}")
    if one["message"]:
        console.print(f"  {one['message']}")
    arrived = f"arrived {one['arrived']}, " if one["arrived"] else ""
    generated = "" if one["num_generated"] is None else f"; {one['num_generated']:,} generated"
    console.print(
        f"  {arrived}{one['prompt_len']:,} tokens of prompt, at most {one['max_tokens']:,} to "
        f"generate{generated}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right")
    for part, spent in seconds.items():
        share = f"{100 * spent / total:.0f}%" if total else ""
        table.add_row(f"  {part}", f"{spent:.3f} s", share, _about(part, one))
    console.print(table)
    if one["obstacle"]:
        console.print(f"  kept in the queue by {one['obstacle']}")
    events = ", ".join(
        f"{one[key]} {name}{'s' * (one[key] != 1)}"
        for key, name in (
            ("num_moves", "page move"),
            ("num_rebindings", "re-binding"),
            ("num_preemptions", "preemption"),
            ("num_resubmissions", "loss"),
        )
        if one[key]
    ).replace("losss", "losses")
    console.print(f"  {events or 'no page moved; it was not re-bound, preempted or lost'}")
    if total:
        most = max(seconds, key=lambda part: seconds[part])
        console.print(f"  most of the time went into {most}: {_ADVICE[most]}")
    for at_s, title, detail in one["timeline"]:
        console.print(f"  {at_s:12.6f} s  {title}: {detail}")


def _about(part: str, one: dict[str, Any]) -> str:
    match part:
        case "queue":
            return f"{one['num_queued_before']:,} requests were in the queue when it arrived"
        case "prefill":
            return f"{one['num_prefilling_before']:,} others were prefilling when it was placed"
        case "start" if one["cp_degree"]:
            return "KV was there; waiting for a window"
        case "decode" if one["num_windows"]:
            where = f"CP degree {one['cp_degree']}, MoE binding {one['moe_binding']}"
            return f"{one['num_windows']:,} windows, {one['step_ms']:.1f} ms a step; {where}"
        case "away":
            return f"preempted {one['num_preemptions']} times"
    return ""
