"""The controller as a process of its own, from a pickled ControllerSpec on standard input.

`python -m nanocp.cli.serve.controller_process FD NAME`; FD: a pipe to the supervisor.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection

from rich.console import Console

from control_plane.frontend.text.tokenizer import load_tokenizer
from nanocp.cli.serve.serve import Output, serve_until_end
from nanocp.logs import configure
from nanocp.serve.launcher_pipe import Pipe, PipedLauncher
from nanocp.serve.service import Service
from nanocp.serve.supervisor import FRONT_ENDS, HUNG_S, MEMBERS, ControllerSpec

logger = logging.getLogger(__name__)


def run_controller(spec: ControllerSpec, pipe: Pipe) -> int:
    """Serve until a signal or a failure; returns the exit status."""
    config, served = spec.config, spec.served
    if spec.has_tokenizer:
        served = replace(served, tokenizer=load_tokenizer(served.checkpoint))
    output = Output(config.service, Console(stderr=True, highlight=False, soft_wrap=True))
    service = Service(
        config,
        served,
        PipedLauncher(MEMBERS, pipe, spec.living[MEMBERS]),
        PipedLauncher(FRONT_ENDS, pipe, spec.living[FRONT_ENDS]),
        spec.cluster_id,
        spec.number,
    )
    service.seats_changed = lambda seats: pipe.send("seats", seats)

    def opened() -> None:
        pipe.send("serving")
        if spec.seats is not None:
            threading.Thread(target=_want_again, args=(service, spec.seats), daemon=True).start()

    return serve_until_end(service, served, output, opened)


def _want_again(service: Service, seats: tuple[int, ...]) -> None:
    """Restore the seats of the lost controller: all have come back."""
    try:
        service.want_seats(seats, "the controller that was lost")
    except (ValueError, RuntimeError, TimeoutError) as error:
        logger.warning("seats %s, which were wanted, do not serve alone: %s", list(seats), error)


def _listen(pipe: Pipe) -> None:
    pipe.run()
    os._exit(1)  # The supervisor is gone: members and front ends notice that nobody is here.


def _beat(pipe: Pipe) -> None:
    while True:
        pipe.send("alive")
        threading.Event().wait(HUNG_S / 10)


def main() -> int:
    """Read the spec and run the controller; returns the exit status."""
    spec: ControllerSpec = pickle.load(sys.stdin.buffer)
    configure(spec.config.service.log_format, spec.config.service.log_level)
    pipe = Pipe(Connection(int(sys.argv[1])))
    for target in (_listen, _beat):
        threading.Thread(target=target, args=(pipe,), daemon=True).start()
    return run_controller(spec, pipe)


if __name__ == "__main__":
    sys.exit(main())
