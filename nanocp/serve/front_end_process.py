"""A front end as a process of its own: `python -m nanocp.serve.front_end_process NAME`.

Reads a pickled FrontEndSpec. Exit status: 0 at the controller's end, 1 if it cannot serve.
"""

from __future__ import annotations

import logging
import pickle
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from control_plane.frontend.front_end import FrontEnd
from control_plane.frontend.http.served_model import open_model
from control_plane.frontend.http.server import HttpServer
from control_plane.frontend.remote.link import RemoteController
from control_plane.frontend.remote.observations import Observations
from control_plane.frontend.text.tokenizer import load_tokenizer
from control_plane.frontend.validation import ModelLimits
from control_plane.ports.members_port import MemberSecrets
from nanocp.config.whole import Config
from nanocp.logs import configure
from nanocp.wire.member_metadata import member_metadata

logger = logging.getLogger(__name__)

FRONT_END_COMMAND = (sys.executable, "-m", "nanocp.serve.front_end_process")


@dataclass(frozen=True, slots=True)
class FrontEndSpec:
    """The data of a front end's process."""

    config: Config
    limits: ModelLimits
    checkpoint: Path
    has_tokenizer: bool
    index: int
    """Index in service.front_ends."""
    name: str
    secret: str
    """Shown at the controller's port, with its name."""
    controller: str
    """host:port for front ends."""


def run_front_end(spec: FrontEndSpec) -> int:
    """Serve clients until the controller ends it, or is gone; returns the exit status."""
    service = spec.config.service
    observations, secrets = Observations(), MemberSecrets()
    orphan_ms = spec.config.limits.orphan_ms if service.controller_process else 0
    controller = RemoteController(
        spec.controller, member_metadata(spec.name, spec.secret), observations, orphan_ms
    )
    model = open_model(
        spec.checkpoint,
        service.served_model_name,
        service.tool_call_parser,
        service.reasoning_parser,
    )
    http = HttpServer(
        service,
        spec.config.limits,
        spec.config.cluster.num_instances,
        model,
        partial(controller.page, "metrics"),
        partial(controller.page, "snapshot"),
        observations.http_responded,
    )
    front_end = FrontEnd(
        spec.config,
        load_tokenizer(spec.checkpoint) if spec.has_tokenizer else None,
        spec.limits,
        secrets,
        observations,
        http,
        spec.index,
        is_remote=True,
    )
    try:
        front_end.start()
    except OSError as error:
        controller.fail(str(error))
        return 1
    reason = controller.converse(front_end, secrets)
    front_end.stop(reason)
    controller.close()
    return 0


def main() -> int:
    """Read the spec and run the front end; returns the exit status."""
    spec: FrontEndSpec = pickle.load(sys.stdin.buffer)
    configure(spec.config.service.log_format, spec.config.service.log_level, spec.name)
    # The service drains first; then the controller ends its front ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return run_front_end(spec)


if __name__ == "__main__":
    sys.exit(main())
