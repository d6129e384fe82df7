"""What leaves the members' coordinator is done: streams, processes, time, log."""

import asyncio
import functools
import logging
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from control_plane.coordinator.flights.transfers import Transfers
from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.terms import Standing
from control_plane.ports.controller_interface import Submission
from control_plane.shell.members_shell import MembersShell, wait_for
from harness.members.member_cluster import FIRST, LIMITS, SECOND, Cluster
from harness.waits import WAIT_S
from nanocp.config.limits import LimitsConfig
from nanocp.values.commands import Join, Leave, RefusePages
from nanocp.values.members import Failure, Hello, Left, Peer, Ready
from nanocp.values.plan import Arrival, InstanceLost, TargetRun, TermEnded, Transfer, WindowDone


def in_a_loop(test):
    """Run the test as the controller's event loop would."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return run


class Shell(MembersShell):
    """The shell of a small cluster that serves, and whose processes do what the test wants."""

    def __init__(self, limits=LIMITS, **prefill):
        self.members = Cluster(limits, **prefill).members
        self.events, self.calls, self.reports = [], [], []
        self.obey = lambda *call: None
        processes = SimpleNamespace(
            kill=lambda member: self.call("kill", member),
            start=lambda member, number, term: self.call("start", member, number, term),
        )
        super().__init__(self.members, processes, self.take_up, self.take_report, Deadlines())
        for member in self.members.expected:
            self.attach(member, Hello(member.instance, Peer()))
        for member in self.members.expected:
            self.received(member, Ready(), 1)
        self.streams = dict(self._streams)
        for stream in self.streams.values():
            stream.take()

    def take_up(self, event):
        self.events.append(event)

    def take_report(self, member, report):
        self.reports.append(report)

    def call(self, *call):
        self.obey(*call)
        self.calls.append(call)

    def kinds(self, member):
        return [each and type(each.message) for each in self.streams[member].take()]

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)


@in_a_loop
async def test_a_member_that_reads_nothing_is_lost_once_all_that_goes_with_it_is_sent():
    shell = Shell(synthetic_kv=True)
    shell.streams[FIRST].max_messages = 2
    for _ in range(4):
        shell.members.send(FIRST, RefusePages(1))
    shell.members.send(SECOND, RefusePages(1))
    assert shell.events == []
    shell.settle()
    assert shell.events == [TermEnded(), InstanceLost(0)], "it is lost once"
    assert shell.members.end.last_loss == "instance 0 left 2 messages unread"
    assert shell.kinds(FIRST) == [RefusePages, RefusePages, None]
    assert shell.kinds(SECOND) == [RefusePages, Leave]


@in_a_loop
async def test_a_stream_that_is_full_in_the_middle_of_a_ticket_leaves_no_ticket_open():
    """The loss ends the term: a ticket that was begun before may not come into the empty table."""
    shell = Shell()
    transfers = Transfers(shell.members)
    shell._take_up = lambda event: event == TermEnded() and transfers.end_term()
    shell.streams[FIRST].max_messages = 0
    on_both = (TargetRun(0, 2, 0, 5), TargetRun(2, 1, 1, 0))
    transfer, submission = Transfer(1, 1, 190, on_both), Submission(Arrival(1, 191, 8), range(191))
    assert transfers.start(transfer, submission) is None
    assert transfers.num_prefilling == 1, "the term goes on until the plan is carried out"
    shell.settle()
    assert (transfers.num_prefilling, transfers.num_pages_awaited) == (0, 0), (
        "they were of the term"
    )
    assert shell.members.terms.those(Standing.ABSENT) == [FIRST]


@in_a_loop
async def test_what_goes_down_goes_to_the_stream_of_its_process_and_nothing_follows_its_end():
    shell = Shell(synthetic_kv=True)
    shell.within(shell.members.exited, SECOND, 0, "its process ended")
    assert shell.kinds(SECOND) == [None] and shell.streams[SECOND].closed
    assert shell.events == [TermEnded(), InstanceLost(1)]
    shell.received(FIRST, Left(), 1)
    stream = shell.attach(SECOND, Hello(1, Peer()))
    assert [type(each.message) for each in stream.take()] == [Join]
    assert shell.kinds(FIRST) == [Leave, Join]


@in_a_loop
async def test_the_processes_of_a_member_end_and_start_in_order_and_those_of_others_do_not_wait():
    shell, go_on = Shell(synthetic_kv=True), threading.Event()
    shell.obey = lambda kind, member, *rest: member == SECOND and go_on.wait(WAIT_S)
    for member in (SECOND, FIRST):
        shell.within(shell.members.exited, member, 0, "its process ended")
    await shell.until(lambda: ("start", FIRST, 1, 2) in shell.calls)
    assert shell.calls == [("kill", FIRST), ("start", FIRST, 1, 2)]
    go_on.set()
    await shell.until(lambda: ("start", SECOND, 1, 2) in shell.calls)
    assert shell.calls[2:] == [("kill", SECOND), ("start", SECOND, 1, 2)]


@pytest.mark.parametrize(
    ("error", "sentence"), [(OSError("no room"), "no room"), (KeyError("spec"), "KeyError: 'spec'")]
)
@in_a_loop
async def test_a_process_that_cannot_be_started_is_known_to_the_coordinator(error, sentence):
    shell = Shell(synthetic_kv=True)

    def refuse(kind, *rest):
        if kind == "start":
            raise error

    shell.obey = refuse
    shell.within(shell.members.exited, SECOND, 0, "its process ended")
    await shell.until(shell.members.end.failure.done)
    assert shell.members.end.failure.result(0) == (
        f"instance 1: its process ended; no process could take its place: {sentence}"
    )


@in_a_loop
async def test_the_coordinator_is_woken_when_its_time_is_up():
    shell = Shell(LimitsConfig(recovery_timeout_ms=50), synthetic_kv=True)
    shell.deadlines.start("the controller's own", 20, lambda: shell.calls.append("due"))
    shell.within(shell.members.exited, SECOND, 0, "its process ended")
    await shell.until(shell.members.end.failure.done)
    assert "recovery_timeout_ms (50 ms)" in shell.members.end.failure.result(0)
    assert "due" in shell.calls


@in_a_loop
async def test_a_coordinator_that_fails_ends_the_service_and_not_in_silence(caplog):
    """Else nobody would notice, say, that silent members are not lost any more."""
    shell = Shell(LimitsConfig(suspect_ms=300), synthetic_kv=True)

    def fail():
        raise KeyError("instance 9")

    shell.within(shell.members.begin)
    shell.members._heartbeats.tick = fail
    await shell.until(shell.members.end.failure.done)
    assert shell.members.end.failure.result(0) == "the controller failed: KeyError: 'instance 9'"
    assert "the coordinator of members failed" in caplog.text


@in_a_loop
async def test_a_report_that_cannot_be_meant_is_refused_and_the_log_says_what_happens(caplog):
    shell = Shell(synthetic_kv=True)
    shell.received(FIRST, WindowDone(0, 0), 1)
    assert shell.reports == [WindowDone(0, 0)]
    with pytest.raises(ValueError, match="instance 0 says Failure"):
        shell.received(FIRST, Failure("late"), 1)
    with caplog.at_level(logging.INFO):
        shell.within(shell.members.exited, SECOND, 0, "its process ended")
        shell.within(shell.members.end.fail, "the end")
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "instance 1: its process ended; another process takes its place"),
        ("INFO", "the end"),
    ]


@in_a_loop
async def test_what_takes_too_long_is_waited_for_no_more():
    done = Future()
    with pytest.raises(TimeoutError, match="not done after 0 s; the cluster goes on"):
        await wait_for(done, 0.02, "the cluster goes on")
    assert done.cancelled()
