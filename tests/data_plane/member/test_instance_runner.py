"""The loop around an instance, with a scripted controller and a scripted instance."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_plane.instance.interface import Polled
from data_plane.member.controller_link import ControllerLost
from data_plane.member.instance_runner import DecodeLoop
from data_plane.member.lifetime import ShutdownRequested
from data_plane.member.token_streams import TokenStreams
from data_plane.transport.exchange import ExchangeTimeout, PeerLost, TermOver
from data_plane.transport.segments import Segments
from harness.members.member_fakes import CLUSTER_ID, LIMITS, Link
from harness.waits import WAIT_S
from nanocp.values.commands import ExpectPages, Join, Leave, RefusePages, SendPages, Shutdown
from nanocp.values.members import Envelope, Left, Ready, Resync, Suspect
from nanocp.values.plan import (
    InstancePlan,
    TargetRun,
    Transfer,
    TransferDone,
    TransferFenced,
    WindowDone,
)

SHUTDOWN = Envelope(Shutdown("enough"))
LEAVE = Envelope(Leave(), 1)


def join(term=1, newest_ticket=0):
    return Envelope(Join(newest_ticket=newest_ticket), term)


class Instance:
    """An instance that records its calls; it refuses the first `mismatches` plans."""

    rings = ()
    selected = ()
    copier = None

    def __init__(self, mismatches=0):
        self.pages = self.experts = self.slots = self
        self.calls = []
        self.mismatches = mismatches
        self.events = []

    def enter(self, start):
        self.calls.append(("enter", start.newest_ticket))
        return 3

    def leave(self):
        self.calls.append("leave")
        self.events.clear()

    def restarts(self):
        return ()

    def begin(self, plan):
        self.calls.append(("begin", plan.window, plan.is_full))
        if self.mismatches:
            self.mismatches -= 1
            return Resync(plan.window, "digest 1, not 2")
        self.plan, self.steps = plan, 0
        return None

    def run_step(self):
        self.calls.append("step")
        self.steps += 1
        if self.steps == self.plan.num_steps:
            self.events.append(WindowDone(0, self.plan.window))

    def expect(self, transfer):
        self.calls.append(("expect", transfer.ticket))

    def fence(self, ticket):
        self.calls.append(("fence", ticket))
        self.events.append(TransferFenced(ticket, 0))

    is_moving_pages = False

    def send(self, transfer):
        self.calls.append(("send", transfer.ticket))

    def send_pages(self):
        pass

    def copy_arrived_pages(self):
        pass

    def poll(self):
        polled = Polled(tuple(self.events))
        self.events.clear()
        return polled


def plan(window, num_steps=1, is_full=False):
    return Envelope(InstancePlan(0, window, window, num_steps, 0, 0, is_full), 1)


def transfer(ticket):
    return Transfer(ticket, 9, 10, (TargetRun(0, 1, 0, 0),))


def expect(ticket):
    return Envelope(ExpectPages(transfer(ticket)), 1)


def fence(ticket):
    return Envelope(RefusePages(ticket), 1)


def decode_loop(instance, link):
    return DecodeLoop(instance, link, TokenStreams(0, LIMITS), Segments(CLUSTER_ID), LIMITS)


def run(link, instance, error=ShutdownRequested):
    with pytest.raises(error) as raised:
        decode_loop(instance, link).run()
    return str(raised.value)


def calls_of(instance):
    """What was called in the first term, without how it began and ended."""
    assert instance.calls.pop(0) == ("enter", 0)
    return [call for call in instance.calls if call != "leave"]


def test_tickets_are_handled_between_steps_and_windows_in_order():
    link = Link(join(), plan(0, 2), plan(1), expect(5), fence(5), last=SHUTDOWN)
    instance = Instance()
    assert run(link, instance) == "enough"
    assert calls_of(instance) == [
        *[("expect", 5), ("fence", 5)],
        *[("begin", 0, False), "step", "step"],
        *[("begin", 1, False), "step"],
    ]
    assert link.kinds()[1:] == [TransferFenced, WindowDone, WindowDone]


def test_tickets_are_handled_between_the_steps_of_a_long_window():
    class Interrupted(Instance):
        """A ticket comes while its second step runs."""

        def run_step(self):
            super().run_step()
            if self.steps == 2:
                link.inbox.put(expect(5))
                link.inbox.put(fence(5))

    link = Link(join(), plan(0, num_steps=4), last=SHUTDOWN)
    instance = Interrupted()
    run(link, instance)
    assert calls_of(instance) == [
        *[("begin", 0, False), "step", "step"],
        *[("expect", 5), ("fence", 5)],
        *["step", "step"],
    ]
    assert link.kinds()[1:] == [TransferFenced, WindowDone]


def test_an_idle_instance_looks_again_while_pages_move_between_instances():
    class Mover(Instance):
        is_moving_pages = True
        num_looks = 0

        def send_pages(self):
            self.num_looks += 1
            if self.num_looks == 4:
                self.is_moving_pages = False
                link.inbox.put(SHUTDOWN)

    link = Link(join(), Envelope(SendPages(transfer(3)), 1))
    instance = Mover()
    assert run(link, instance) == "enough"
    assert calls_of(instance) == [("send", 3)] and instance.num_looks >= 4


def test_a_shutdown_does_not_wait_for_the_windows_that_were_sent():
    instance = Instance()
    assert run(Link(join(), plan(0), plan(1), SHUTDOWN), instance) == "enough"
    assert calls_of(instance) == []


def test_no_thread_is_left_when_the_instance_is_closed(ring):
    instance = Instance()
    instance.rings = [ring]
    loop = decode_loop(instance, Link(join(), SHUTDOWN))
    with pytest.raises(ShutdownRequested):
        loop.run()
    assert "ring watcher" in {thread.name for thread in threading.enumerate()}
    ring.close()
    loop.join()
    assert "ring watcher" not in {thread.name for thread in threading.enumerate()}


def test_a_stream_that_ends_ends_the_loop():
    assert (
        run(Link(join(), plan(0), None), Instance(), ControllerLost)
        == "the controller's stream ended"
    )


def test_a_mismatch_is_answered_by_the_full_plan_whatever_came_before_it():
    link = Link(join(), plan(0), plan(1), expect(3), plan(0, is_full=True), last=SHUTDOWN)
    instance = Instance(mismatches=1)
    run(link, instance)
    assert [call for call in calls_of(instance) if call != "step"] == [
        ("expect", 3),
        ("begin", 0, False),
        ("begin", 0, True),
        ("begin", 1, False),
    ]
    assert link.kinds()[1:] == [Resync, WindowDone, WindowDone]
    assert link.sent[1].message == Resync(0, "digest 1, not 2")


def test_a_full_plan_that_is_refused_is_a_failure():
    message = run(
        Link(join(), plan(0), plan(0, is_full=True)), Instance(mismatches=2), RuntimeError
    )
    assert message == "the full table of window 0 was refused: digest 1, not 2"


def test_a_full_plan_that_does_not_come_has_a_limit():
    began = time.monotonic()
    message = run(Link(join(), plan(0)), Instance(mismatches=1), ControllerLost)
    assert message == "the full table of window 0 did not come in 300 ms"
    assert 0.3 <= time.monotonic() - began < 10


def test_pages_wake_an_idle_instance(ring, writer):
    class Receiver(Instance):
        def copy_arrived_pages(self):
            for page in ring.arrived():
                self.events.append(TransferDone(page.ticket, 0))

    instance = Receiver()
    instance.rings = [ring]
    link = Link(join())
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(run, link, instance)
        for page in range(5):
            assert writer.write(
                ticket=7, page=page, num_tokens=64, payload=bytes(64), timeout_ms=20_000
            )
        deadline = time.monotonic() + WAIT_S
        while len(link.sent) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        link.inbox.put(SHUTDOWN)
        loop.result(WAIT_S)
    assert link.kinds()[1:] == [TransferDone] * 5


class Interrupted(Instance):
    """An instance whose second step raises, after messages have come."""

    def __init__(self, link, error, *messages):
        super().__init__()
        self.link, self.error, self.messages = link, error, messages

    def run_step(self):
        super().run_step()
        if self.calls.count("step") == 2:
            for message in self.messages:
                self.link.inbox.put(message)
            raise self.error


def test_a_term_that_ends_in_a_step_is_left_and_another_one_joined():
    link = Link(join(), plan(0, 3), plan(1), last=SHUTDOWN)
    late = (expect(5), LEAVE, plan(7), join(3, newest_ticket=8), plan(9))
    instance = Interrupted(link, TermOver("term 1 is over"), *late)
    run(link, instance)
    assert calls_of(instance) == [("begin", 0, False), "step", "step", ("enter", 8)]
    ready = Ready(("graphs: 3 prepared",))
    sent = [(ready, 1), (Left(), 1), (ready, 3)]
    assert link.sent == sent, "plan(9) is of term 1, and dropped"


def test_a_term_that_ends_between_two_steps_is_left_too():
    link = Link(join(), LEAVE, join(2), last=SHUTDOWN)
    run(link, Instance())
    assert link.kinds() == [Ready, Left, Ready]


def test_a_term_that_is_over_before_it_was_joined_is_left_at_once():
    link = Link(join(2), Envelope(Leave(), 2), join(3), last=SHUTDOWN)
    instance = Instance()
    loop = decode_loop(instance, link)
    loop._segments.term.end(2)
    with pytest.raises(ShutdownRequested):
        loop.run()
    assert [call for call in instance.calls if call != "leave"] == [("enter", 0)]
    assert [message.term for message in link.sent] == [2, 3]


@pytest.mark.parametrize(("kind", "is_gone"), [(PeerLost, True), (ExchangeTimeout, False)])
def test_a_peer_that_does_not_answer_is_reported_and_the_controller_ends_the_term(kind, is_gone):
    error = kind("instance 2 is alive but sent nothing", 2)
    link = Link(join(), plan(0, 3), last=SHUTDOWN)
    run(link, Interrupted(link, error, expect(5), LEAVE, join(2)))
    assert link.kinds() == [Ready, Suspect, Left, Ready]
    sentence = f"{kind.__name__}: instance 2 is alive but sent nothing"
    assert link.sent[1].message == Suspect(2, is_gone, sentence)


def test_a_term_that_the_controller_does_not_end_has_a_limit():
    error = PeerLost("instance 2 is gone")
    link = Link(join(), plan(0, 3))
    began = time.monotonic()
    assert run(link, Interrupted(link, error), PeerLost) == "instance 2 is gone"
    assert LIMITS.exchange_timeout_ms / 1000 <= time.monotonic() - began < 10
    assert link.kinds() == [Ready, Suspect]


def test_a_term_that_never_begins_has_a_limit():
    assert (
        run(Link(), Instance(), ControllerLost) == "no term began within start_timeout_ms (500 ms)"
    )
