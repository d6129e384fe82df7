"""`nanocp simulate replay`: an event log again, with equal plans or not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanocp.cli.simulate.explain import (
    Explain,
    check_explained,
    explained,
    explainer,
    show_stories,
)
from nanocp.cli.simulate.options import AsJson

if TYPE_CHECKING:
    from nanocp.simulator.replay import Difference, Replayed


def replay(
    log: Annotated[
        Path,
        typer.Argument(
            help="What `nanocp serve --event-log` or `nanocp simulate --event-log` wrote."
        ),
    ],
    explain: Explain = [],  # noqa: B006 (typer copies it)
    as_json: AsJson = False,
) -> None:
    """Play an event log again and check that every plan is the same, byte for byte.

    The exit status is 1 if one differs.
    """
    from rich import progress

    from control_plane.shell.event_log import LogReader, log_lines
    from nanocp.cli.options.console import output, terminal
    from nanocp.simulator.replay import replay as replay_log

    try:
        notes = explainer(explain, 0)
        lines = log_lines(
            log,
            lambda part: progress.open(
                part, "rb", description="replay", transient=True, console=terminal()
            ),
        )
        reader = LogReader(lines, str(log))
        played = replay_log(reader, notes if explain else None)
    except OSError as error:
        raise ValueError(f"the event log {log} cannot be read: {error.strerror}") from error
    if as_json:
        print(json.dumps(asdict(played) | ({"explained": explained(notes)} if explain else {})))
    else:
        print(_story(played))
        show_stories(output(), "", notes, reader.header.cluster.instances_per_node)
    check_explained(explain, notes)
    raise typer.Exit(1 if played.difference else 0)


def _story(played: Replayed) -> str:
    sentences = [
        f"{played.num_calls:,} calls, {played.num_windows:,} windows, {played.num_requests:,} "
        f"requests in {played.span_us / 1e6:.1f} s on {played.num_instances} instances, policy "
        f"{played.policy}"
    ]
    if played.is_truncated:
        sentences.append("the last record is cut off: its call is not counted")
    if played.failure:
        sentences.append(
            "the scheduler fails in the last call, as it did when it was recorded: "
            f"{played.failure}"
        )
    sentences.append(
        _what_differs(played.difference)
        if played.difference
        else "every plan is the same, byte for byte"
    )
    return "\n".join(sentences)


def _what_differs(difference: Difference) -> str:
    where = f"call {difference.call:,} (now_us {difference.now_us}) differs"
    if difference.replayed is None:
        return f"{where}: the scheduler fails, and did not when it was recorded: {difference.error}"
    if difference.recorded is None:
        return f"{where}: the scheduler failed when it was recorded, and does not now"
    recorded, replayed = difference.recorded, difference.replayed
    parts = [
        f"{name} was {recorded.get(name, 'none')} and is {replayed.get(name, 'none')}"
        for name in difference.fields
    ]
    return f"{where}: " + ", ".join(parts)
