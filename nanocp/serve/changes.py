"""Changes of a running service by operators: seats, layers of stages, requests, its log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from control_plane.coordinator.members.seats import SeatsNow
from nanocp.config.choices import check_one_of
from nanocp.config.service import LOG_LEVELS
from nanocp.logs import get_level, set_level

logger = logging.getLogger("nanocp.changes")

_SEATS, _SPLIT = '{"seats": [0, 1, 2]}', '{"split": [7, 5]}'
_REQUEST, _LEVEL = '{"request": "ID"}', '{"log_level": "debug"}'


def answer_seats(
    want: Callable[[Sequence[int] | None, str], SeatsNow],
    undo: Callable[[], SeatsNow],
    end_spares: Callable[[], None],
    counts: Callable[[], tuple[int, int]],
    body: bytes | None,
    who: str,
) -> bytes:
    """Answer for /cluster/seats. The body names seats and their reason, or undoes the change.

    counts: seats there are, and ready spares.
    """
    asked = None if body is None else _read(body, _SEATS)
    if asked is None:
        now = want(None, "")
    elif asked.get("undo") is True:
        with _logged(who, "the change of seats that is under way is to be undone"):
            now = undo()
    else:
        seats = _numbers(asked, "seats", _SEATS)
        what = f"instances {seats} are to serve"
        if asked.get("new_program"):
            what += ", with the installed program"
            # A spare would bring the old one.
            end_spares()
        with _logged(who, what):
            command = asked.get("by")
            now = want(seats, f"{command!s:.60} by {who}" if command else who)
    num_seats, ready_spares = counts()
    values = asdict(now) | {"num_seats": num_seats, "ready_spares": ready_spares}
    return json.dumps(values).encode()


def answer_layout(
    want: Callable[[Sequence[int] | None], list[dict[str, int]]], body: bytes | None, who: str
) -> bytes:
    """Answer for /cluster/layout; the body names each stage's layers."""
    if body is None:
        stages = want(None)
    else:
        split = _numbers(_read(body, _SPLIT), "split", _SPLIT)
        with _logged(who, f"stages are to have {split} layers"):
            stages = want(split)
    return json.dumps({"stages": stages}).encode()


def answer_abort(end: Callable[[str], list[int]], body: bytes | None, who: str) -> bytes:
    """Answer for /cluster/abort; the body has the client's id or the request's number."""
    name = str(_read(body or b"", _REQUEST).get("request", ""))
    with _logged(who, f"request {name!r:.80} is to end"):
        if not (numbers := end(name)):
            raise ValueError(f"no open request is known as {name!r:.80}")
    return json.dumps({"ended": numbers}).encode()


def answer_config(as_yaml: Callable[[str], str], body: bytes | None, who: str) -> bytes:
    """Answer for /cluster/config; the body has this process' new log level.

    as_yaml: writes the configuration with this log level.
    """
    if body is not None:
        level = str(_read(body, _LEVEL).get("log_level", ""))
        check_one_of(LOG_LEVELS, log_level=level)
        with _logged(who, f"the log's level is to be {level}"):
            set_level(level)
    return json.dumps({"yaml": as_yaml(get_level())}).encode()


def _read(body: bytes, example: str) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise ValueError(f"the body must be JSON such as {example}")
    return asked


def _numbers(asked: Mapping[str, Any], key: str, example: str) -> list[int]:
    try:
        return [int(number) for number in asked[key]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"the body must be JSON such as {example}") from None


@contextmanager
def _logged(who: str, what: str) -> Iterator[None]:
    logger.info("change asked for by %s: %s", who, what)
    try:
        yield
    except BaseException as error:
        logger.warning(
            "change not made: %s (%s): %s", what, who, str(error) or type(error).__name__
        )
        raise
    logger.info("change made: %s (%s)", what, who)
