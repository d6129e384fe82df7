"""`nanocp drain`, `scale`, `upgrade`, `layout` and `abort`: changes of a running service.

Exit status: 1 if the change failed, 2 if the service cannot make it.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from nanocp.cli.operate.status_port import OperatorKey, Refused, Target, fetch_json

_TIMEOUT_S = 600.0
_GOES_ON = 'the service goes on with the change; "nanocp top" shows it'
_UNDO = '"nanocp scale --undo" undoes it'


def drain(
    seat: Annotated[int, typer.Argument(help="Number of the instance that is to leave.")],
    target: Target = "127.0.0.1:9464",
    operator_key: OperatorKey = "",
) -> None:
    """Let one instance leave: its requests move to the others, and no stream ends."""

    with _told("drain"):
        serving = set(_seats(target, operator_key)["serving"])
        if seat not in serving:
            raise Refused(f"instance {seat} does not serve; {_list(serving)} do")
        _want(target, operator_key, serving - {seat}, f"nanocp drain {seat}")


def scale(
    number: Annotated[
        int | None, typer.Argument(help="How many instances are to serve.", min=0)
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Undo the drain, scale or upgrade that is under way.")
    ] = False,
    target: Target = "127.0.0.1:9464",
    operator_key: OperatorKey = "",
) -> None:
    """Let so many instances serve, at most as many as the service was started with."""

    with _told("scale"):
        if undo == (number is not None):
            raise ValueError("give a number of instances, or --undo")
        if number is None:
            _change(target, operator_key, {"undo": True})
            return
        seats = _seats(target, operator_key)
        serving = sorted(seats["serving"])
        free = [seat for seat in range(seats["num_seats"]) if seat not in serving]
        if number > len(serving) + len(free):
            raise Refused(
                f"the service has {seats['num_seats']} seats (cluster.num_instances); it cannot "
                f"have {number} instances"
            )
        wanted = {*serving[:number], *free[: max(0, number - len(serving))]}
        _want(target, operator_key, wanted, f"nanocp scale {number}")


def upgrade(
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One instance after the other, while all serve.")
    ] = False,
    target: Target = "127.0.0.1:9464",
    operator_key: OperatorKey = "",
) -> None:
    """Let new processes, of the program as it is installed now, take all instances' seats."""

    with _told("upgrade"):
        if not rolling:
            raise Refused("give --rolling; to replace all at once, stop the service and start it")
        serving = set(_seats(target, operator_key)["serving"])
        for number, seat in enumerate(sorted(serving)):
            by = "nanocp upgrade"
            _want(target, operator_key, serving - {seat}, by, new_program=number == 0)
            _want(target, operator_key, serving, by)


def layout(
    split: Annotated[
        str | None,
        typer.Argument(help="The layers of each stage, such as 7,5; without it, print them."),
    ] = None,
    target: Target = "127.0.0.1:9464",
    operator_key: OperatorKey = "",
) -> None:
    """Let layers of a pipeline move to other stages: no stream ends, and policies are off then."""

    with _told("layout"):
        body = None
        if split is not None:
            if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", split):
                raise ValueError(f"the layout is {split!r}; it must be numbers of layers, as 7,5")
            body = json.dumps({"split": [int(count) for count in split.split(",")]}).encode()
        stages = _ask(target, operator_key, body, "/cluster/layout")["stages"]
        if not stages:
            raise Refused("this cluster has no stages: cluster.layout is not pipeline")
        layers = ", ".join(
            f"stage {one['stage']} has layers {one['first_layer']} to "
            f"{one['first_layer'] + one['num_layers'] - 1}"
            for one in stages
        )
        print(layers, flush=True)


def abort(
    request: Annotated[
        str, typer.Argument(help="The request: the client's id, or the cluster's number.")
    ],
    target: Target = "127.0.0.1:9464",
    operator_key: OperatorKey = "",
) -> None:
    """End a request, wherever it is: its client gets what there is, with finish_reason abort."""

    with _told("abort"):
        body = json.dumps({"request": request}).encode()
        ended = _ask(target, operator_key, body, "/cluster/abort")["ended"]
        print(f"ended: {', '.join(f'request {number}' for number in ended)}", flush=True)


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Prints a failure, and exits with its status."""
    try:
        yield
    except Refused as error:
        print(f"nanocp {name}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except ValueError as error:
        print(f"nanocp {name}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        undone = "" if name in ("layout", "abort") else f", and {_UNDO}"
        print(f"nanocp {name}: {_GOES_ON}{undone}", file=sys.stderr)
        raise typer.Exit(130) from None


def _want(target: str, key: str, seats: set[int], by: str, new_program: bool = False) -> None:
    _change(target, key, {"seats": sorted(seats), "by": by, "new_program": new_program})


def _change(target: str, key: str, wanted: dict[str, Any]) -> None:
    now = _ask(target, key, json.dumps(wanted).encode())
    print(f"instances {_list(now['serving'])} serve", flush=True)


def _seats(target: str, key: str) -> dict[str, Any]:
    seats: dict[str, Any] = _ask(target, key)
    return seats


def _ask(target: str, key: str, body: bytes | None = None, path: str = "/cluster/seats") -> Any:
    """The status port's answer. Raises Refused, also if a change takes long, or ValueError."""
    try:
        return fetch_json(target, path, key, body, _TIMEOUT_S)
    except ValueError as error:
        if not isinstance(error.__cause__, TimeoutError):
            raise
        sentence = f"no answer in {_TIMEOUT_S:.0f} s"
        raise Refused(f"{sentence}; {_GOES_ON}" if body else sentence) from None


def _list(seats: Any) -> str:
    return ", ".join(map(str, sorted(seats))) or "none"
