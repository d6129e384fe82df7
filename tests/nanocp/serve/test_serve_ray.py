"""`nanocp serve` on a local Ray of its own, HashInstances inside."""

import os
import signal

import pytest

from harness.services.hash_service import expected, generate, prompt
from harness.services.serve_process import (
    Serve,
    Stream,
    assert_nothing_is_left,
    descendants,
    instances_of,
    is_running,
    seats,
    status_of,
)
from harness.waits import until

OPTIONS = ["--instances", "4", "--grpc-port", "0", "--metrics-port", "0", "--http-port", "0"]


def test_four_actors_serve_and_nothing_is_left():
    with Serve(*OPTIONS) as serve:
        address = serve.address
        processes, segments = serve.processes()
        assert len(instances_of(processes)) == 4
        assert generate(address, prompt(300, 1), 30) == expected(prompt(300, 1), 30)
        serve.end()
        assert_nothing_is_left(processes, segments)
        # A machine that is busy takes long enough for lines that come every few seconds.
        at_once = [line for line in serve.lines if " INFO load" not in line]
        at_once = [line for line in at_once if not line.startswith("draining")]
        assert len(at_once) <= 12, serve.lines


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
@pytest.mark.system
def test_a_lost_actor_is_replaced_and_the_stream_goes_on(number):
    with Serve(*OPTIONS, factory="build_slow") as serve:
        stream = Stream(serve.address, max_tokens=400)
        lost = instances_of(descendants(serve.process.pid))[2]
        os.kill(lost, number)
        serve.says("another process takes its place")
        stream.join()
        assert (stream.tokens, stream.error) == (expected(prompt(300, 1), 400), "")
        until(lambda: not is_running(lost))
        processes, segments = serve.processes()
        serve.end()
        assert_nothing_is_left(processes, segments)


@pytest.mark.system
def test_a_spare_actor_takes_the_seat_of_a_lost_one():
    spares = {"NANOCP_CLUSTER__SPARES": "1"}
    with Serve(*OPTIONS, factory="build_slow", environment=spares) as serve:
        address, target = serve.address, status_of(serve)
        until(lambda: seats(target)["ready_spares"] == 1)
        before = descendants(serve.process.pid)
        instances = instances_of(before)
        stream = Stream(address, max_tokens=400)
        os.kill(instances[2], signal.SIGKILL)
        stream.join()
        assert (stream.tokens, stream.error) == (expected(prompt(300, 1), 400), "")
        (spare,) = {*instances_of(descendants(serve.process.pid))} - {*instances}
        assert spare in before, "it was there before the loss"
        until(lambda: seats(target)["ready_spares"] == 1)
        serve.end()
