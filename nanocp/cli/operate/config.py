"""`nanocp config`: every key of the configuration, by default or of a running service."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from nanocp.cli.operate.status_port import OperatorKey, Refused, fetch_json
from nanocp.config.service import LOG_LEVELS


def config(
    target: Annotated[
        str, typer.Option(help="HOST:PORT of a service's /metrics: print what it runs with.")
    ] = "",
    log_level: Annotated[
        str,
        typer.Option(help=f"With --target: log from this level on, {', '.join(LOG_LEVELS)}."),
    ] = "",
    operator_key: OperatorKey = "",
) -> None:
    """Print every key that a configuration file may have, as YAML with its defaults.

    Copy the lines that you change into a file for `nanocp serve --config`. An environment variable
    sets a key too: NANOCP_CLUSTER__NUM_FRAMES=512. Flags go before it, and it before the file.
    With --target print what a service runs with, its keys hidden.
    """
    from nanocp.config.whole import Config
    from nanocp.config.yaml import config_yaml

    if not target:
        if log_level:
            raise ValueError("--log-level changes a service: name it with --target")
        print(config_yaml(Config()), end="")
        return
    body = json.dumps({"log_level": log_level}).encode() if log_level else None
    try:
        print(fetch_json(target, "/cluster/config", operator_key, body)["yaml"], end="")
    except ValueError as error:
        print(f"nanocp config: {error}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, Refused) else 2) from None
