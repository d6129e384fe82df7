"""The status port for commands: the options that name it, and what it answers.

Enters: HOST:PORT, a path, an operator's key. Leaves: JSON, or a ValueError with a sentence. Does
not know: what is asked.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

Target = Annotated[str, typer.Option(help="HOST:PORT of the service's /metrics and /cluster.")]
OperatorKey = Annotated[
    str,
    typer.Option(
        help="For a service with keys: one of its service.operator_keys_file.",
        envvar="NANOCP_OPERATOR_KEY",
        metavar="KEY",
    ),
]
KEY_HINT = "give --operator-key, or set NANOCP_OPERATOR_KEY"

_TIMEOUT_S = 5.0


def fetch_json(target: str, path: str, key: str = "") -> Any:
    """What the status port answers. Raises ValueError with a sentence if it does not."""
    url = f"http://{target}{path}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            wrong = ", and the one given is not valid" if key else ""
            raise ValueError(f"{url} asks for an operator's key{wrong}: {KEY_HINT}") from error
        said = (
            error.read().decode(errors="replace")
            if error.code in (404, 503)
            else f"HTTP status {error.code}"
        )
        raise ValueError(f"{url}: {said}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)).strip()
        if not reason.isprintable():  # gRPC's first frame, for one
            reason = "what answers there is not HTTP"
        raise ValueError(
            f"no NanoCP answers at {url} ({reason}); --target is the metrics address that "
            "`nanocp serve` prints"
        ) from error
