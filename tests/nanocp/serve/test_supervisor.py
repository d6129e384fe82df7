"""The supervisor and its launchers, with processes that do nothing."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Pipe as new_pipe

import pytest

from control_plane.launchers.processes import ProcessLauncher
from harness.services.hash_service import CONFIG, served
from harness.services.service_recovery import until
from nanocp.serve import supervisor as module
from nanocp.serve.launcher_pipe import LauncherHost, Pipe, PipedLauncher
from nanocp.serve.supervisor import Supervisor
from nanocp.values.members import Member

ONE, TWO = Member("instance", 1), Member("instance", 2)
SUPERVISED = replace(CONFIG, service=replace(CONFIG.service, controller_process=True))


@pytest.fixture
def host():
    program = "import sys, time; sys.stdin.buffer.read(); time.sleep(600)"
    host = LauncherHost("members", ProcessLauncher([sys.executable, "-c", program], {}))
    yield host
    host.stop(0.0)


def connected(host):
    """A controller's end of a pipe, with its launcher, as the supervisor serves it."""
    own, others = new_pipe()
    pipe, theirs = Pipe(own), Pipe(others)
    launcher = PipedLauncher("members", theirs, host.attach(pipe))

    def serve():
        while True:
            _, number, _, method, arguments = pipe.receive()
            pipe.answer(number, host, method, arguments)

    for target in (serve, theirs.run):
        threading.Thread(target=target, daemon=True).start()
    return launcher


def test_processes_outlive_a_controller_and_are_counted_anew(host):
    exits = []
    first = connected(host)
    first.start({ONE: "spec 1", TWO: "spec 2"}, lambda *exit: exits.append(exit))
    old = first.pid(ONE)
    os.kill(old, signal.SIGKILL)
    until(lambda: exits)
    assert exits == [(ONE, 0, "its process was ended by SIGKILL")]
    first.start_one(ONE, 1, "spec 3")
    again = first.pid(ONE)
    assert again != old
    second = connected(host)
    assert second.living == {ONE: "spec 3", TWO: "spec 2"}
    later = []
    second.start({ONE: "spec 4", TWO: "spec 5"}, lambda *exit: later.append(exit))
    assert second.pid(ONE) == again, "what lives is not started again"
    second.kill(ONE)
    until(lambda: later)
    assert later == [(ONE, 0, "its process was ended by SIGKILL")] and len(exits) == 1
    third = connected(host)
    assert third.living == {TWO: "spec 2"}
    assert third.stop(0.1) == [TWO]
    with pytest.raises(RuntimeError, match="stopping"):
        third.start_one(ONE, 0, "spec 6")


def test_a_process_that_was_never_started_does_not_live(host, monkeypatch):
    def fail(*arguments):
        raise OSError("no memory")

    first = connected(host)
    first.start({}, lambda *exit: None)
    monkeypatch.setattr(host._launcher, "start_one", fail)
    with pytest.raises(OSError, match="no memory"):
        first.start_one(ONE, 0, "spec 1")
    assert connected(host).living == {}


def test_spares_outlive_a_controller_and_take_seats_under_the_next():
    program = (
        "import pickle, sys, time; pickle.load(sys.stdin.buffer); print(1, flush=True); "
        "pickle.load(sys.stdin.buffer); time.sleep(600)"
    )
    host = LauncherHost("members", ProcessLauncher([sys.executable, "-c", program], {}))
    try:
        first, ends = connected(host), []
        first.start({}, lambda *exit: None)
        for name in ("spare 0", "spare 1"):
            first.start_spare(name, "spec", lambda *end: ends.append(end))
        until(lambda: first.spares == (True, True))
        second = connected(host)
        assert second.spares == (True, True) and second.living == {}
        spares = [each.process for each in host._launcher._spares]
        second.start({}, lambda *exit: None)
        second.start_one(ONE, 0, "seat")
        assert second.pid(ONE) in [process.pid for process in spares] and second.spares == (True,)
        first.start_spare("spare 2", "spec", lambda *end: ends.append(end))
        os.kill(host._launcher._spares[0].process.pid, signal.SIGKILL)
        until(lambda: len(second.spares) == 1)
        assert ends == [], "the first controller is gone"
        second.start_spare("spare 3", "spec", lambda *end: ends.append(end))
        until(lambda: second.spares == (True, True))
        os.kill(host._launcher._spares[0].process.pid, signal.SIGKILL)
        until(lambda: ends)
        assert ends == [("its process was ended by SIGKILL", True)]
        second.end_spares()
        assert second.spares == ()
    finally:
        host.stop(0.0)


def test_a_process_that_ends_before_its_next_controller_listens_is_reported(host):
    connected(host).start({ONE: "spec 1"}, lambda *exit: None)
    second = connected(host)
    second.kill(ONE)
    until(lambda: second._pipe._exits)
    exits = []
    second.start({}, lambda *exit: exits.append(exit))
    until(lambda: exits)
    assert exits == [(ONE, 0, "its process was ended by SIGKILL")]


SERVE = (
    "from multiprocessing.connection import Connection; pipe = Connection(int(sys.argv[1])); "
    "pipe.send(('serving',)); time.sleep(600)"
)
"""What a controller does that serves; a signal interrupts its sleep."""


def supervised(monkeypatch, tmp_path, program):
    """A supervisor of controllers that run the program, with their number in argv."""
    log = tmp_path / "log"
    log.touch()
    head = f"import os, signal, sys, time; log = open({str(log)!r}, 'a'); log.write('x'); "
    head += f"log.close(); number = os.path.getsize({str(log)!r}); "
    monkeypatch.setattr(module, "CONTROLLER_COMMAND", (sys.executable, "-c", head + program))
    supervisor = Supervisor(SUPERVISED, served())
    supervisor.has_served.set()
    return supervisor, log


KILLED = "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(("program", "has_served", "status", "number"), [
    (f"{KILLED} if number < 3 else sys.exit(7)", True, 7, 3),
    (KILLED, True, 1, 5),
    (KILLED, False, 2, 1),
], ids=["until one ends by itself", "five times", "not before one has served"])  # fmt: skip
def test_a_killed_controller_is_followed(
    program, has_served, status, number, monkeypatch, tmp_path
):
    supervisor, log = supervised(monkeypatch, tmp_path, program)
    if not has_served:
        supervisor.has_served.clear()
    assert supervisor.run() == status
    assert log.read_text() == "x" * number


def signalled(supervisor, log, times):
    """Run the supervisor, signal it so often once the second controller starts; its status."""

    def stop():
        until(lambda: log.read_text() == "xx")
        for _ in range(times):
            supervisor.signal(signal.SIGTERM)

    threading.Thread(target=stop).start()
    return supervisor.run()


def test_no_controller_follows_one_that_is_asked_to_stop_twice_while_it_starts(
    monkeypatch, tmp_path
):
    """Streams of the one before it are cut off."""
    program = "os.kill(os.getpid(), 9) if number < 2 else time.sleep(600)"
    supervisor, log = supervised(monkeypatch, tmp_path, program)
    assert signalled(supervisor, log, times=2) == 1
    assert log.read_text() == "xx"


def test_a_signal_waits_until_a_controller_serves_and_the_next_gets_it_if_that_is_lost(
    monkeypatch, tmp_path
):
    """The second controller is killed while it drains, the third one drains to the end."""
    end = "os.kill(os.getpid(), 9) if number < 3 else sys.exit(0)"
    drain = f"signal.signal(signal.SIGTERM, lambda *it: exec({end!r}))"
    program = f"os.kill(os.getpid(), 9) if number < 2 else {drain}; {SERVE}"
    supervisor, log = supervised(monkeypatch, tmp_path, program)
    assert signalled(supervisor, log, times=1) == 0
    assert log.read_text() == "xxx"


def test_the_first_controller_may_be_asked_to_stop_while_it_starts(monkeypatch, tmp_path):
    supervisor, log = supervised(monkeypatch, tmp_path, "time.sleep(600)")
    supervisor.has_served.clear()
    log.write_text("x")
    assert signalled(supervisor, log, times=1) == 0
    assert log.read_text() == "xx"


def test_a_controller_that_says_nothing_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "HUNG_S", 0.5)
    program = "time.sleep(600) if number < 2 else sys.exit(7)"
    supervisor, log = supervised(monkeypatch, tmp_path, program)
    limits = replace(supervisor.config.limits, start_timeout_ms=1)
    supervisor.config = replace(supervisor.config, limits=limits)
    began_s = time.monotonic()
    assert supervisor.run() == 7
    assert log.read_text().startswith("xx") and time.monotonic() - began_s < 100


def test_a_second_signal_ends_a_controller_that_does_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_FORCED_S", 0.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    supervisor, _ = supervised(monkeypatch, tmp_path, f"{deaf}; {SERVE}")
    supervisor.has_served.clear()

    def stop():
        assert supervisor.has_served.wait(60)
        supervisor.signal(signal.SIGTERM)
        supervisor.signal(signal.SIGTERM)

    threading.Thread(target=stop).start()
    began_s = time.monotonic()
    assert supervisor.run() == 1
    assert time.monotonic() - began_s < 300, "a controller that hangs is killed after minutes"


def test_every_port_is_known_before_the_first_controller_starts():
    service = Supervisor(SUPERVISED, served()).config.service
    assert service.members_port > 0 and service.metrics_port > 0
