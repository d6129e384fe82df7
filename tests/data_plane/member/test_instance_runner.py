"""The loop around an instance, with a scripted controller and a scripted instance."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_plane.instance.interface import Polled, ResyncNeeded
from data_plane.member.controller_link import ControllerLost
from data_plane.member.instance_runner import DecodeLoop
from data_plane.member.lifetime import ShutdownRequested
from data_plane.member.token_streams import TokenStreams
from harness.member_fakes import LIMITS, WAIT_S, Link
from nanocp.plan import InstancePlan, TargetRun, Transfer, TransferDone, TransferFenced, WindowDone
from nanocp.wire.convert import instance_plan_to_wire, transfer_to_wire
from nanocp.wire.v1 import cluster_pb2 as pb

SHUTDOWN = pb.ToInstance(shutdown=pb.Shutdown(reason="enough"))


class Instance:
    """An instance that records its calls; it refuses the first `mismatches` plans."""

    rings = ()

    def __init__(self, mismatches=0):
        self.calls = []
        self.mismatches = mismatches
        self.events = []

    def begin(self, plan):
        self.calls.append(("begin", plan.window, plan.is_full))
        if self.mismatches:
            self.mismatches -= 1
            return ResyncNeeded(plan.window, "digest 1, not 2")
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
    return pb.ToInstance(
        plan=instance_plan_to_wire(InstancePlan(0, window, window, num_steps, 0, 0, is_full))
    )


def expect(ticket):
    return pb.ToInstance(expect=transfer_to_wire(Transfer(ticket, 9, 10, (TargetRun(0, 1, 0, 0),))))


def run(link, instance, error=ShutdownRequested):
    with pytest.raises(error) as raised:
        DecodeLoop(instance, link, TokenStreams(0, LIMITS), LIMITS).run()
    return str(raised.value)


def test_tickets_are_handled_between_steps_and_windows_in_order():
    link = Link(plan(0, 2), plan(1), expect(5), pb.ToInstance(fence=5), SHUTDOWN)
    instance = Instance()
    assert run(link, instance) == "enough"
    assert instance.calls == [
        *[("expect", 5), ("fence", 5)],
        *[("begin", 0, False), "step", "step"],
        *[("begin", 1, False), "step"],
    ]
    assert link.kinds() == ["transfer_fenced", "window_done", "window_done"]


def test_tickets_are_handled_between_the_steps_of_a_long_window():
    class Interrupted(Instance):
        """A ticket comes while its second step runs."""

        def run_step(self):
            super().run_step()
            if self.steps == 2:
                link.inbox.put(expect(5))
                link.inbox.put(pb.ToInstance(fence=5))

    link = Link(plan(0, num_steps=4), SHUTDOWN)
    instance = Interrupted()
    run(link, instance)
    assert instance.calls == [
        *[("begin", 0, False), "step", "step"],
        *[("expect", 5), ("fence", 5)],
        *["step", "step"],
    ]
    assert link.kinds() == ["transfer_fenced", "window_done"]


def test_an_idle_instance_looks_again_while_pages_move_between_instances():
    class Mover(Instance):
        is_moving_pages = True
        num_looks = 0

        def send_pages(self):
            self.num_looks += 1
            if self.num_looks == 4:
                self.is_moving_pages = False
                link.inbox.put(SHUTDOWN)

    link = Link(pb.ToInstance(send=expect(3).expect))
    instance = Mover()
    assert run(link, instance) == "enough"
    assert instance.calls == [("send", 3)] and instance.num_looks >= 4


def test_a_shutdown_waits_for_the_windows_that_were_sent():
    instance = Instance()
    run(Link(SHUTDOWN, None, plan(0), plan(1)), instance)
    assert instance.calls == [("begin", 0, False), "step", ("begin", 1, False), "step"]


def test_no_thread_is_left_when_the_instance_is_closed(ring):
    instance = Instance()
    instance.rings = [ring]
    loop = DecodeLoop(instance, Link(SHUTDOWN), TokenStreams(0, LIMITS), LIMITS)
    with pytest.raises(ShutdownRequested):
        loop.run()
    assert "ring watcher" in {thread.name for thread in threading.enumerate()}
    ring.close()
    loop.join()
    assert "ring watcher" not in {thread.name for thread in threading.enumerate()}


def test_a_stream_that_ends_ends_the_loop():
    assert run(Link(plan(0), None), Instance(), ControllerLost) == "the controller's stream ended"


def test_a_mismatch_is_answered_by_the_full_plan_whatever_came_before_it():
    link = Link(plan(0), plan(1), expect(3), plan(0, is_full=True), SHUTDOWN)
    instance = Instance(mismatches=1)
    run(link, instance)
    assert [call for call in instance.calls if call != "step"] == [
        ("expect", 3),
        ("begin", 0, False),
        ("begin", 0, True),
        ("begin", 1, False),
    ]
    assert link.kinds() == ["resync", "window_done", "window_done"]
    assert (link.sent[0].resync.window, link.sent[0].resync.reason) == (0, "digest 1, not 2")


def test_a_full_plan_that_is_refused_is_a_failure():
    message = run(Link(plan(0), plan(0, is_full=True)), Instance(mismatches=2), RuntimeError)
    assert message == "the full table of window 0 was refused: digest 1, not 2"


def test_a_full_plan_that_does_not_come_has_a_limit():
    began = time.monotonic()
    message = run(Link(plan(0)), Instance(mismatches=1), ControllerLost)
    assert message == "the full table of window 0 did not come in 300 ms"
    assert 0.3 <= time.monotonic() - began < 10


def test_pages_wake_an_idle_instance(ring, writer):
    class Receiver(Instance):
        def copy_arrived_pages(self):
            for page in ring.arrived():
                self.events.append(TransferDone(page.ticket, 0))

    instance = Receiver()
    instance.rings = [ring]
    link = Link()
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(run, link, instance)
        for page in range(5):
            assert writer.write(
                ticket=7, page=page, num_tokens=64, payload=bytes(64), timeout_ms=20_000
            )
        deadline = time.monotonic() + WAIT_S
        while len(link.sent) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        link.inbox.put(SHUTDOWN)
        loop.result(WAIT_S)
    assert link.kinds() == ["transfer_done"] * 5
