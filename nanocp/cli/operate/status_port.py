"""The status port for commands: its options and answers."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

Target = Annotated[
    str, typer.Option(help="HOST:PORT of the service's /metrics and /cluster, or their https://.")
]
OperatorKey = Annotated[
    str,
    typer.Option(
        help="For a service with keys: one of its service.operator_keys_file.",
        envvar="NANOCP_OPERATOR_KEY",
        metavar="KEY",
    ),
]
KEY_HINT = "give --operator-key, or set NANOCP_OPERATOR_KEY"

_METRICS_ADDRESS = "the metrics address that `nanocp serve` prints"
_TIMEOUT_S = 5.0


class Refused(ValueError):
    """The service refused, for the reason in the message."""


def fetch_json(
    target: str, path: str, key: str = "", body: bytes | None = None, timeout_s: float = _TIMEOUT_S
) -> Any:
    """The status port's answer to a body, if any.

    Raises ValueError with a sentence without an answer, Refused for an error.
    """
    base = re.sub(r"(/cluster|/metrics)?/*$", "", target)
    url = (base if "://" in base else f"http://{base}") + path
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            wrong = ", and the one given is not valid" if key else ""
            raise Refused(f"{url} asks for an operator's key{wrong}: {KEY_HINT}") from error
        has_sentence = body is not None or error.code in (404, 503)
        said = error.read().decode(errors="replace").strip() if has_sentence else ""
        if not said or said[0] in "{<":  # another server's answer
            said = f"HTTP status {error.code}; --target is {_METRICS_ADDRESS}"
        raise Refused(said if body else f"{url}: {said}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)).strip()
        if not reason.isprintable():  # gRPC's first frame, for one
            reason = "what answers there is not HTTP"
        raise ValueError(
            f"no NanoCP answers at {url} ({reason}); --target is {_METRICS_ADDRESS}"
        ) from error
