"""Plain processes of members, and spares that become one."""

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from control_plane.launchers.processes import ProcessLauncher
from data_plane.member.lifetime import MemberSpec
from harness.paths import ROOT
from harness.waits import until
from nanocp.config.whole import Config
from nanocp.values.members import PREFILL, Member

MAIN = """
import pickle, sys, time
from pathlib import Path
from control_plane.launchers.processes import ProcessLauncher
from nanocp.values.members import Member
member, pid_file, spec = pickle.load(sys.stdin.buffer)
program = (
    "import os, signal, sys; os.kill(os.getpid(), signal.SIGSTOP);"
    "from data_plane.programs.process import main; sys.exit(main())"
)
launcher = ProcessLauncher([sys.executable, "-c", program], {})
launcher.start({member: spec}, print)
Path(pid_file).write_text(str(launcher.pid(member)))
time.sleep(600)
"""
FIRST, SECOND = Member("instance", 0), Member("instance", 1)
PROGRAM = """
import pickle, sys, time
spec = pickle.load(sys.stdin.buffer)
if spec == "fails":
    sys.exit("there is nothing to prepare")
if spec == "spare":
    print("ready", flush=True)
    spec = pickle.load(sys.stdin.buffer)
sys.stderr.write(f"{spec} ends\\n")
sys.exit(3 if spec == "ends" else time.sleep(600))
"""


@pytest.fixture
def launcher():
    launcher = ProcessLauncher([sys.executable, "-S", "-c", PROGRAM], {})
    launcher.exits, launcher.spare_ends = [], []
    launcher.start({}, lambda *exit: launcher.exits.append(exit))
    yield launcher
    for member in list(launcher._processes):
        launcher.kill(member)
    launcher.stop(10)


def ready_spare(launcher, spec="spare"):
    launcher.start_spare("spare 0", spec, lambda *end: launcher.spare_ends.append(end))
    until(lambda: launcher.spares == [True])
    return launcher._spares[0].process.pid


def test_a_spare_becomes_an_instances_process_and_its_end_is_the_instances(launcher):
    spare = ready_spare(launcher)
    launcher.start_one(PREFILL, 0, "runs")
    assert launcher.spares == [True], "a spare is for instances"
    launcher.start_one(SECOND, 4, "ends")
    assert (launcher.pid(SECOND), launcher.spares) == (spare, [])
    until(lambda: launcher.exits)
    assert launcher.exits == [(SECOND, 4, "its process ended with status 3: ends ends")]
    assert not launcher.spare_ends
    launcher.start_one(FIRST, 0, "runs")
    assert launcher.pid(FIRST) != spare, "without a spare there is a new process"


def test_what_a_process_wrote_last_is_no_reason_for_a_kill(launcher, capsys):
    launcher.start_one(FIRST, 0, "runs")
    written = []
    until(lambda: written.append(capsys.readouterr().err) or "runs ends" in "".join(written))
    launcher.kill(FIRST)
    until(lambda: launcher.exits)
    assert launcher.exits == [(FIRST, 0, "its process was ended by SIGKILL")]


def test_a_spare_that_is_stopped_goes_on_once_it_has_a_seat(launcher):
    spare = ready_spare(launcher)
    os.kill(spare, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{spare}/stat").read_text().split()[2] == "T")
    launcher.start_one(FIRST, 1, "ends")
    until(lambda: launcher.exits)
    assert launcher.exits[0][:2] == (FIRST, 1)


def test_a_spare_that_ends_says_so_and_takes_no_seat(launcher):
    launcher.start_spare("spare 0", "fails", lambda *end: launcher.spare_ends.append(end))
    until(lambda: launcher.spare_ends)
    sentence = "its process ended with status 1: there is nothing to prepare"
    assert (launcher.spare_ends, launcher.spares) == ([(sentence, False)], [])
    spare = ready_spare(launcher)
    os.kill(spare, signal.SIGKILL)
    until(lambda: len(launcher.spare_ends) == 2)
    assert launcher.spare_ends[1] == ("its process was ended by SIGKILL", True)
    launcher.start_one(FIRST, 0, "runs")
    assert launcher.pid(FIRST) != spare


def test_one_that_is_ready_is_taken_before_one_that_is_not(launcher):
    launcher.start_spare("spare 0", "slow", lambda *end: None)
    launcher.start_spare("spare 1", "spare", lambda *end: None)
    until(lambda: launcher.spares == [False, True])
    ready = launcher._spares[1].process.pid
    launcher.start_one(FIRST, 0, "runs")
    assert launcher.pid(FIRST) == ready and launcher.spares == [False]


def test_spares_end_with_the_service_and_when_the_program_is_another(launcher):
    first = ready_spare(launcher)
    launcher.end_spares()
    assert launcher.spares == []
    second = ready_spare(launcher)
    launcher.stop(1)
    for pid in (first, second):
        assert (
            not Path(f"/proc/{pid}/cmdline").exists()
            or not Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    assert not launcher.spare_ends, "they were ended on purpose"
    with pytest.raises(RuntimeError, match="the service is stopping"):
        launcher.start_spare("spare 2", "spare", lambda *end: None)


@pytest.mark.parametrize("member", [FIRST, Member("node", 0)], ids=str)
def test_a_member_that_was_stopped_at_its_start_ends_though_its_service_was_killed(
    member, tmp_path
):
    pid_file = tmp_path / "pid"
    seat = {member.kind: 0}
    address = "127.0.0.1:1"
    checkpoint = Path("no-checkpoint")
    spec = MemberSpec("no:factory", Config(), "cluster", address, "secret", checkpoint, **seat)
    with subprocess.Popen(
        [sys.executable, "-c", MAIN], stdin=subprocess.PIPE, cwd=ROOT, stderr=subprocess.DEVNULL
    ) as main:
        pickle.dump((member, str(pid_file), spec), main.stdin)
        main.stdin.close()
        until(lambda: pid_file.exists() and pid_file.read_text())
        pid = int(pid_file.read_text())
        until(lambda: state(pid) == "T")
        main.kill()
    os.kill(pid, signal.SIGCONT)
    try:
        until(lambda: state(pid) in "Z-")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def state(pid):
    """The letter of the process's state; - if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "-"
