"""`nanocp top` and `nanocp status`: the cluster page in a terminal, and in a line."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.cli.operate.status_port import OperatorKey, Target, fetch_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_PERIOD_S = 0.5
_MAX_SHOWN = 20
_WIDE = 80
"""Columns of a terminal with room for every title."""
_WIDEST = 130
"""Columns with room for clients' ids too."""
_PAGES = "instance:pages"
_WIDE_TITLES = ("state", "tokens", "CP degree", "MoE binding", _PAGES)
_NARROW_TITLES = ("tokens", "CP", "MoE", _PAGES)
_PROMISED = "+"
_LEGEND = (
    "a letter: a request on several instances\n"
    f"▓ on one   {_PROMISED} promised, no KV yet   ░ quarantined   · free"
)
_AWAITED = {"fill": "rows", "tail": "tokens", "kv": "moved layers", "work": "a pass"}
"""Words for the causes of a stage's waits (nanocp.values.passes.WAIT_CAUSES)."""
_SPARKS = "▁▂▃▄▅▆▇█"
_KEYS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_COLOURS = (
    "dodger_blue1",
    "dark_orange",
    "spring_green3",
    "hot_pink",
    "gold1",
    "medium_purple1",
    "turquoise2",
    "red1",
)

Snapshot = dict[str, Any]
"""The JSON of /cluster/snapshot.json (control_plane/observe/cluster_view.py)."""


def top(
    target: Target = "127.0.0.1:9464",
    once: Annotated[bool, typer.Option(help="Print one picture and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the snapshot itself, as JSON, and exit.")
    ] = False,
    operator_key: OperatorKey = "",
) -> None:
    """Show where every request's KV lives, live."""
    try:
        snapshot = fetch(target, operator_key)
        if as_json:
            print(json.dumps(snapshot))
        elif once:
            from rich.console import Console

            console = Console()
            console.print(picture(snapshot, console.width, len(snapshot["requests"])))
        else:
            _live(target, operator_key, snapshot)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def status(target: Target = "127.0.0.1:9464", operator_key: OperatorKey = "") -> None:
    """Say in one line how the service is. Exit status 0: whole, 1: it is not, 2: none answers."""
    try:
        snapshot = fetch(target, operator_key)
    except ValueError as error:
        is_closed = getattr(error.__cause__, "code", None) == 503  # it starts or stops
        print(f"nanocp status: {error}", file=sys.stderr)
        raise typer.Exit(1 if is_closed else 2) from None
    problems = _problems(snapshot)
    seats = Counter(snapshot["recovery"]["seats"])
    taken = sum(each["frames_committed"] for each in snapshot["instances"])
    frames = snapshot["num_frames"] * max(seats["serving"], 1)
    print(
        f"{'degraded: ' + '; '.join(problems) if problems else 'whole'}; {seats['serving']} of "
        f"{seats.total()} instances serve, {snapshot['num_running']} requests run, "
        f"{snapshot['num_prefilling']} prefill, {snapshot['num_queued']} wait, "
        f"{taken / frames:.0%} of the frames taken"
    )
    raise typer.Exit(1 if problems else 0)


def _problems(snapshot: Snapshot) -> list[str]:
    recovery = snapshot["recovery"]
    problems = []
    if recovery["recovers_for_s"] is not None:
        problems.append(f"it recovers for {recovery['recovers_for_s']:.1f} s")
    if recovery["held"]:
        problems.append(f"{recovery['held']} requests held for another attempt")
    for state in ("loading", "draining"):
        if number := recovery["seats"].count(state):
            problems.append(f"{number} seats {state}")
    problems += [
        f"prefill {each['url']} is down ({each['problem']})"
        for each in snapshot["engines"]
        if not each["is_up"]
    ]
    return problems


def fetch(target: str, key: str = "") -> Snapshot:
    """The service's snapshot. Raises ValueError with a sentence if there is none."""
    snapshot: Snapshot = fetch_json(target, "/cluster/snapshot.json", key)
    return snapshot


def _live(target: str, key: str, snapshot: Snapshot) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(
        picture(snapshot, console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(_PERIOD_S)
            live.update(picture(fetch(target, key), console.width), refresh=True)


def picture(snapshot: Snapshot, width: int, most: int = _MAX_SHOWN) -> RenderableType:
    """The snapshot for a terminal of `width` columns, with at most `most` requests."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    long = [request for request in snapshot["requests"] if len(request["pages_on"]) > 1]
    keys = _keys(sorted(request["id"] for request in long))
    instances = Table(box=None, pad_edge=False, padding=(0, 1))
    bar_width = max(16, min(width - 40, 120))
    for title in ("", f"KV of {snapshot['num_frames']} frames", "free", "rows", "step ms", "waits"):
        instances.add_column(
            title, justify="left" if title.startswith("KV") else "right", no_wrap=True
        )
    for one in snapshot["instances"]:
        ms = (
            ("-", "-")
            if one["step_ms"] is None
            else (f"{one['step_ms']:.1f}", f"{one['exchange_ms']:.1f}")
        )
        bar = _bar(snapshot, one, keys, bar_width)
        instances.add_row(str(one["instance"]), bar, str(one["frames_free"]), str(one["rows"]), *ms)
    parts: list[RenderableType] = [*_head(snapshot, width), Text(""), instances]
    parts.append(Text(_LEGEND, style="dim"))
    if snapshot["requests"]:
        parts += [Text(""), *_requests(snapshot, keys, width, most)]
    parts += _stages(snapshot.get("stages", []))
    parts += _tenants(snapshot.get("tenants", []))
    if snapshot["engines"]:
        parts += [Text(""), *(_engine(engine) for engine in snapshot["engines"])]
    parts += _recovery(snapshot["recovery"])
    return Group(*parts)


def _requests(
    snapshot: Snapshot, keys: dict[int, int], width: int, most: int
) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    is_wide, is_widest = width >= _WIDE, width >= _WIDEST
    titles = ("", "request", *(["client's id"] if is_widest else []))
    for title in (*titles, *(_WIDE_TITLES if is_wide else _NARROW_TITLES)):
        is_left = title in ("state", "client's id", _PAGES)
        table.add_column(title, justify="left" if is_left else "right", no_wrap=title != _PAGES)
    held = [(sum(count for _, count in one["pages_on"]), one) for one in snapshot["requests"]]
    held.sort(key=lambda pair: (-pair[0], pair[1]["id"]))
    for _, request in held[:most]:
        key = keys.get(request["id"])
        pages = " ".join(f"{instance}:{count}" for instance, count in sorted(request["pages_on"]))
        table.add_row(
            Text("▓", style="grey62") if key is None else Text(_KEYS[key], style=_style(key)),
            str(request["id"]),
            *([request.get("client_id", "")] if is_widest else []),
            *([request["state"]] if is_wide else []),
            f"{request['num_tokens']:,}",
            str(len(request["pages_on"])),
            str(request["moe_binding"]),
            pages,
        )
    num_more = snapshot["num_running"] + snapshot["num_prefilling"] - len(held[:most])
    if num_more <= 0:
        return [table]
    return [table, Text(f"{num_more:,} more, with fewer pages", style="dim")]


def _stages(stages: list[dict[str, Any]]) -> list[Text]:
    from rich.text import Text

    if not stages:
        return []
    lines = [Text("")]
    for one in stages:
        last = one["first_layer"] + one["num_layers"] - 1
        times = ""
        if one["pass_ms"] is not None:
            shares = [f"{share:.0%} for {_AWAITED[cause]}" for cause, share in one["waits"].items()]
            times = f": a pass {one['pass_ms']:.1f} ms; it waits {', '.join(shares)}"
        lines.append(Text(f"stage {one['stage']} has layers {one['first_layer']}-{last}{times}"))
    moving = ", layers are moving" if stages[0]["is_moving"] else ""
    return [*lines, Text(f"layout changes {stages[0]['layout_changes']}{moving}")]


def _tenants(tenants: list[dict[str, Any]]) -> list[Text]:
    from rich.text import Text

    if not any(one["tenant"] for one in tenants):
        return []
    lines = [
        Text(
            f"tenant {one['tenant'] or '(none)'}: {one['placed']} placed, {one['queued']} queued, "
            f"{one['kv_tokens']:,} KV tokens"
        )
        for one in tenants
    ]
    return [Text(""), *lines]


def _recovery(recovery: dict[str, Any]) -> list[Text]:
    """A line on terms and losses after the first term; one on seats with spares or empty seats."""
    from rich.text import Text

    lines = []
    recovers_for_s = recovery["recovers_for_s"]
    if recovery["term"] > 1 or recovery["lost"] or recovers_for_s is not None:
        pause = "" if recovers_for_s is None else f", recovers for {recovers_for_s:.1f} s"
        held = f", {recovery['held']} requests held" if recovery["held"] else ""
        said = f"term {recovery['term']}, {recovery['lost']} members lost"
        lines.append(Text.assemble(said, (pause, "bold red"), held))
    states = Counter(recovery["seats"]) + Counter(spare=recovery["spares"])
    if states.keys() - {"serving"}:
        lines.append(Text("seats: " + ", ".join(f"{n} {state}" for state, n in states.items())))
    return [Text(""), *lines] if lines else []


def _engine(engine: dict[str, Any]) -> Text:
    from rich.text import Text

    state = "up" if engine["is_up"] else f"down ({engine['problem']})"
    return Text(
        f"prefill {engine['url']}: {state}, {engine['tokens_in_flight']:,} tokens in flight, "
        f"{engine['done']:,} prompts done, {engine['failed']:,} failed"
    )


def _keys(request_ids: list[int]) -> dict[int, int]:
    """A letter for each request by its id, stable for most, distinct while there are enough."""
    keys: dict[int, int] = {}
    for request_id in request_ids:
        free = [key for key in range(len(_KEYS)) if key not in keys.values()] or range(len(_KEYS))
        keys[request_id] = min(free, key=lambda key: (key - request_id) % len(_KEYS))
    return keys


def _head(snapshot: Snapshot, width: int) -> list[Text]:
    from rich.text import Text

    frames = ("frames_free", "frames_quarantined", "frames_committed")
    serving = [one for one in snapshot["instances"] if any(one[name] for name in frames)]
    kv = _balance([one["kv_tokens"] for one in serving])
    rows = _balance([one["rows"] for one in serving])
    tpots = [ms for ms in snapshot["tpot_ms"] if ms is not None]
    rates = snapshot["tokens_per_s"] or [0.0]
    num_sparks = max(4, min((width - 50) // 2, 30))
    waits = f", first {snapshot['waiting'][0]['age_s']:.1f} s" if snapshot["waiting"] else ""
    title = Text.assemble(("NanoCP", "bold"), f"  policy {snapshot['policy']}")
    tpot = f"{tpots[-1]:.1f} ms" if tpots else "-"
    lines = (
        f"running [bold]{snapshot['num_running']}[/]   prefilling "
        f"[bold]{snapshot['num_prefilling']}[/]   queue [bold]{snapshot['num_queued']}[/]{waits}",
        f"balance, mean / max: KV [bold]{kv:.2f}[/], rows [bold]{rows:.2f}[/]",
        f"token to token [bold]{tpot}[/] {_sparks(tpots, num_sparks)}   "
        f"tokens/s [bold]{rates[-1]:.0f}[/] {_sparks(rates, num_sparks)}",
    )
    return [title, *map(Text.from_markup, lines)]


def _bar(snapshot: Snapshot, one: dict[str, Any], keys: dict[int, int], width: int) -> Text:
    from rich.text import Text

    parts: list[tuple[int, str, str]] = []
    num_short = one["other_pages"]
    for request in sorted(snapshot["requests"], key=lambda request: request["id"]):
        pages = dict(request["pages_on"]).get(one["instance"], 0)
        if request["id"] in keys:
            key = keys[request["id"]]
            promised = dict(request["promised_on"]).get(one["instance"], 0)
            parts.append((pages - promised, _KEYS[key], _style(key)))
            parts.append((promised, _PROMISED, _style(key)))
        else:
            num_short += pages
    parts += [
        (num_short, "▓", "grey62"),
        (one["frames_quarantined"], "░", "grey50"),
        (one["frames_free"], "·", "grey37"),
    ]
    bar, end = Text(), 0
    for frames, sign, style in parts:
        begin, end = end, end + frames
        bar.append(
            sign
            * (width * end // snapshot["num_frames"] - width * begin // snapshot["num_frames"]),
            style,
        )
    return bar


def _style(key: int) -> str:
    return f"black on {_COLOURS[key % len(_COLOURS)]}"


def _sparks(values: list[float], count: int) -> str:
    latest = values[-count:]
    if not (high := max(latest, default=0.0)):
        return ""
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[min(int(value / high * len(_SPARKS)), last)] for value in latest)


def _balance(values: list[int]) -> float:
    return sum(values) / len(values) / max(values) if any(values) else 1.0
