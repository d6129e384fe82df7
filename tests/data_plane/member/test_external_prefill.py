"""The loop that asks engines: a scripted controller and probe, an engine that never answers."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import parse_headers

import pytest

from data_plane.member.lifetime import ShutdownRequested
from data_plane.prefill.completions import EngineAnswer, EngineOutcome
from data_plane.prefill.connector.ticket import EngineTicket
from data_plane.prefill.external_prefill import ExternalLoop
from harness.members.member_fakes import LIMITS, Link
from harness.waits import until
from nanocp.config.prefill import PrefillConfig
from nanocp.values.commands import CancelPrefill, Join, PrefillRequest, Shutdown
from nanocp.values.members import EnginesNow, Envelope, Ready
from nanocp.values.plan import TargetRun, Transfer, TransferFailed

HOUR_S = 3601.0
PASSED = EngineAnswer(EngineOutcome.SENT, engine="process")


class Prober:
    """Answers probes as it is asked to; a ticket is only its number."""

    def __init__(self):
        self.answer = PASSED
        self.limits_ms = []

    def join(self, term, peers):
        """Nothing is needed of the instances."""

    def ticket(self, writer, process, ticket, num_tokens, targets):
        where = {"cluster": "c", "term": 1, "peers": {}, "timeout_ms": 1000, "page_backend": "auto"}
        kind = {"kv_dtype": "auto", "num_layers": 2, "fingerprint": {}, "engine": process}
        return EngineTicket(
            ticket=ticket, num_tokens=num_tokens, targets=targets, writer=writer, **where, **kind
        )

    def run(self, writer, url, limit_ms):
        self.limits_ms.append(limit_ms)
        return self.answer


class Clock:
    """The time, and how far a test has put it forward."""

    forward_s = 0.0

    def __call__(self):
        return time.monotonic() + self.forward_s


@pytest.fixture
def silent_engine():
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def running(link, prober, clock, url, limits=LIMITS):
    prefill = PrefillConfig(engines=(url,), timeout_ms=10_000_000)
    loop = ExternalLoop(prefill, limits, link, prober, clock)

    def run():
        with pytest.raises(ShutdownRequested), contextlib.closing(loop):
            loop.run()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        link.inbox.put(Envelope(Join(), 1))
        try:
            yield
        finally:
            link.inbox.put(Envelope(Shutdown("enough")))
            done.result(60)


def prompt(ticket, num_tokens=100):
    transfer = Transfer(ticket, ticket, num_tokens, (TargetRun(0, 2, 0, 0),))
    return Envelope(PrefillRequest(transfer, [1] * num_tokens, front_end="f"))


def reports(link, kind):
    return [sent.message for sent in link.sent if isinstance(sent.message, kind)]


def engine_of(link):
    states = reports(link, EnginesNow)
    return states[-1].engines[0] if states else None


def wake(link):
    """Have the loop look at its clock."""
    link.inbox.put(Envelope(CancelPrefill(1 << 40)))


@pytest.mark.parametrize(
    ("answer", "is_up"),
    [(PASSED, True),
     (EngineAnswer(EngineOutcome.BUSY, "no time"), True),
     (EngineAnswer(EngineOutcome.MISMATCH, "other KV"), False)],
    ids=["passed", "busy", "other KV"],
)  # fmt: skip
def test_an_engine_that_serves_is_probed_after_an_hour(silent_engine, answer, is_up):
    """What it was asked for goes on, unless its KV has become another model's."""
    link, prober, clock = Link(), Prober(), Clock()
    with running(link, prober, clock, silent_engine):
        until(lambda: reports(link, Ready))
        link.inbox.put(prompt(7))
        until(lambda: engine_of(link) and engine_of(link).tokens_in_flight == 100)
        prober.answer, clock.forward_s = answer, HOUR_S
        wake(link)
        until(lambda: len(prober.limits_ms) == 2)
        assert prober.limits_ms[1] > prober.limits_ms[0], "prompts under way come first"
        if is_up:
            clock.forward_s += 1.0
            link.inbox.put(prompt(8))
            until(lambda: engine_of(link).tokens_in_flight == 200)
            assert engine_of(link).is_up and not reports(link, TransferFailed)
        else:
            until(lambda: not engine_of(link).is_up)
            (failure,) = reports(link, TransferFailed)
            assert failure.ticket == 7
            assert failure.message == f"prefill failed: {silent_engine}: other KV"


def test_an_engine_with_a_cache_of_its_own_gets_the_salt():
    link = Link()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as held:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        held.enter_context(running(link, Prober(), Clock(), url))
        for number, salt, told in ((7, b"", None), (8, b"\x01\xff", "01ff")):
            asked = prompt(number)
            link.inbox.put(asked._replace(message=replace(asked.message, salt=salt)))
            request = held.enter_context(listener.accept()[0].makefile("rb"))
            request.readline()
            length = int(parse_headers(request)["Content-Length"])
            assert json.loads(request.read(length))["cache_salt"] == told


def test_a_loop_with_an_engine_that_is_up_sleeps(silent_engine):
    link, prober, clock = Link(), Prober(), Clock()
    with running(link, prober, clock, silent_engine):
        until(lambda: engine_of(link) and engine_of(link).is_up)
        times_s = []
        for _ in range(3):  # threads that other tests have left may work in one of them
            before_s = time.process_time()
            time.sleep(0.5)
            times_s.append(time.process_time() - before_s)
        assert min(times_s) < 0.1


def test_what_a_start_waits_for_is_said_at_once_and_every_10_s(silent_engine, caplog):
    """A wrong address, and one that takes connections and is silent."""
    link, prober, clock = Link(), Prober(), Clock()
    prober.answer = EngineAnswer(EngineOutcome.FAILED, "ConnectionRefusedError: refused")
    prober.limits_ms = said = []
    limits = replace(LIMITS, start_timeout_ms=100_000)

    def lines():
        return [each.getMessage() for each in caplog.records if "not ready" in each.getMessage()]

    with running(link, prober, clock, silent_engine, limits):
        until(lambda: said and len(lines()) == 1)
        assert lines()[0].startswith(
            f"not ready: {silent_engine}: ConnectionRefusedError: refused; asking again, 7"
        )
        assert "nanocp prefill-flags" in lines()[0]
        clock.forward_s = 11
        wake(link)
        until(lambda: len(lines()) == 2)
        prober.answer = PASSED
        clock.forward_s = 22
        wake(link)
        until(lambda: reports(link, Ready))
    assert len(lines()) <= 3
