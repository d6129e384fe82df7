"""What an operator sees of `nanocp serve`: lines of its log, and how a drain goes."""

import json
import re
import signal
import time

import pytest

from harness.services.hash_service import prompt
from harness.services.serve_process import SMALL, Serve, Stream
from harness.waits import until
from nanocp.cli.serve.serve import _on_signals as on_signals
from nanocp.client import Client

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def test_each_request_is_a_line_with_the_clients_id():
    with Serve(*SMALL) as serve:
        with Client(serve.address) as client:
            client.generate_unary(prompt(300, 1), max_tokens=5, request_id="mine")
        serve.end()
    (line,) = [line for line in serve.lines if "request ended" in line]
    assert re.match(
        r"\S+Z INFO nanocp\.requests: request ended id=mine number=1 endpoint=GenerateUnary "
        r"reason=length tokens_in=300 tokens_out=5 queue_s=\S+ prefill_s=\S+ decode_s=\S+ "
        r"total_s=\S+ cp_degree=1 moe_binding=\d$",
        line,
    ), line


@pytest.mark.parametrize("at_start", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hang_up_that_is_ignored_at_start_stays_ignored(at_start):
    """So is it below nohup, and the terminal's end must not end the service."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, at_start)
        on_signals(signal.default_int_handler)
        handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    interrupts = [handler is signal.default_int_handler for handler in handlers]
    assert interrupts == [True, True, at_start == signal.SIG_DFL]


@pytest.mark.system
def test_a_hang_up_drains_and_says_how_many_are_left():
    options = [*SMALL, "--log-format", "json", "--drain-timeout-s", "7"]
    with Serve(*options, factory="build_slow") as serve:
        stream = Stream(serve.address, max_tokens=1700)
        serve.process.send_signal(signal.SIGHUP)
        assert serve.wait(60) == 1
        stream.join()
    lines = [json.loads(line) for line in serve.lines]
    said = [line["message"] for line in lines]
    assert any(re.match("draining: finishing 1 request, refusing new ones", one) for one in said)
    assert any(
        re.fullmatch("draining: 1 request left; they are cut off in [12] s", one) for one in said
    ), said
    assert "1 request cut off" in said
    assert [line["level"] for line in lines if line["message"] == "request ended"] == ["warning"]


@pytest.mark.system
def test_the_log_level_silences_requests():
    with Serve(*SMALL, "--log-level", "warning") as serve:
        stream = Stream(serve.address, max_tokens=3)
        stream.join()
        serve.end()
        serve.says("draining")
    assert not any("request ended" in line for line in serve.lines)


def test_the_event_log_is_on_disk_within_seconds_with_wall_time_and_the_clients_id(tmp_path):
    log = tmp_path / "log"
    with Serve(*SMALL, "--event-log", str(log)) as serve:
        with Client(serve.address) as client:
            client.generate_unary(prompt(300, 1), max_tokens=5, request_id="mine")
        ended_us = time.time_ns() / 1000
        until(lambda: '"client_id":"mine"' in log.read_text())
        header, *calls = [json.loads(line) for line in log.read_text().splitlines()]
        at_us = [header["wall_us"] + call["now_us"] for call in calls if call["events"]]
        assert abs(at_us[-1] - ended_us) < 5e6
