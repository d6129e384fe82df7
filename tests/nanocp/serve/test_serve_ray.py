"""`nanocp serve` on a local Ray of its own, HashInstances inside."""

import os
import signal

import pytest

from harness.hash_service import expected, generate, prompt
from harness.serve_process import Serve, assert_nothing_is_left, descendants, segments_of

OPTIONS = ["--instances", "4", "--grpc-port", "0", "--metrics-port", "0", "--http-port", "0"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_four_actors_serve_and_nothing_is_left(end):
    """SIGTERM is for the service, which drains; SIGKILL for one actor, which ends the service."""
    with Serve(*OPTIONS) as serve:
        address = serve.address
        processes = descendants(serve.process.pid)
        actors = [
            pid for pid in processes if any("-exchange-" in name for name in segments_of(pid))
        ]
        segments = set().union(*map(segments_of, processes))
        assert len(actors) == 4
        assert generate(address, prompt(300, 1), 30) == expected(prompt(300, 1), 30)
        os.kill(serve.process.pid if end is signal.SIGTERM else actors[2], end)
        assert serve.wait(60) == (0 if end is signal.SIGTERM else 1), serve.lines
        if end is signal.SIGKILL:
            assert any(line.startswith("nanocp serve: instance") for line in serve.lines), (
                serve.lines
            )
        assert_nothing_is_left(processes, segments)
        assert len(serve.lines) <= 10, serve.lines
