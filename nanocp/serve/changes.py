"""What operators change of a service that runs: its seats, and the layers of its stages.

Enters: bodies of the status port, and who sends them. Leaves: how it is then, as JSON, and lines of
the log that name the operator. Does not know: HTTP, keys, how a change is made.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanocp.serve.service import Service

logger = logging.getLogger(__name__)


def answer_seats(service: Service, num_seats: int, body: bytes | None, who: str) -> bytes:
    """See status_server.Change. The body names the seats."""
    if body is None:
        now = service.want_seats(None)
    else:
        seats, is_new = _numbers(body, "seats", "[0, 1, 2]")
        what = f"instances {seats} are to serve"
        if is_new:
            what += ", with the installed program"
            # A spare would bring the old one.
            service.launcher.end_spares()
        with _logged(who, what):
            now = service.want_seats(seats)
    values = asdict(now) | {"num_seats": num_seats, "ready_spares": service.num_ready_spares}
    return json.dumps(values).encode()


def answer_layout(service: Service, body: bytes | None, who: str) -> bytes:
    """See status_server.Change. The body names the layers of each stage."""
    if body is None:
        stages = service.want_layout(None)
    else:
        split, _ = _numbers(body, "split", "[7, 5]")
        with _logged(who, f"stages are to have {split} layers"):
            stages = service.want_layout(split)
    return json.dumps({"stages": stages}).encode()


def _numbers(body: bytes, key: str, example: str) -> tuple[list[int], bool]:
    """What the body has below the key, and whether it asks for the installed program."""
    try:
        asked = json.loads(body)
        return [int(number) for number in asked[key]], bool(asked.get("new_program"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f'the body must be JSON such as {{"{key}": {example}}}') from None


@contextmanager
def _logged(who: str, what: str) -> Iterator[None]:
    """Lines of the log around a change: who asked for it, and that it is made, or why not."""
    logger.info("change asked for by %s: %s", who, what)
    try:
        yield
    except BaseException as error:
        logger.warning(
            "change not made: %s (%s): %s", what, who, str(error) or type(error).__name__
        )
        raise
    logger.info("change made: %s (%s)", what, who)
