"""A service whose /dev/shm has room for its term alone: a scale without room, then a loss."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.paths import TESTS
from harness.services.hash_service import expected, generate, prompt
from harness.services.serve_process import ENVIRONMENT, NANOCP, SMALL, descendants, seats
from harness.waits import until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
]


class Served:
    """A service of four HashInstances where /dev/shm is a tmpfs of its own."""

    def __init__(self):
        script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
        program = [sys.executable, str(TESTS / "harness/services/hash_serve.py"), "build_instance"]
        self.process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", *program, "serve", "no-checkpoint", *SMALL],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | {"NANOCP_CLUSTER__REDUNDANT_EXPERTS": "5"},
        )
        self.lines = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        self.lines += map(str.rstrip, self.process.stderr)

    def said(self, pattern):
        """What the first line that fits has, once there is one."""
        found = []

        def is_there():
            assert self.process.poll() is None, self.lines[-20:]
            found[:] = filter(None, (re.search(pattern, line) for line in self.lines))
            return found

        until(is_there)
        return found[0][1]

    def answers(self):
        address = self.said(r"serving no-checkpoint at (.+)")
        return generate(address, prompt(200, 1), 20) == expected(prompt(200, 1), 20)

    def leave_free(self, num_bytes):
        """Give /dev/shm a size at which so much of it is free."""
        folder = Path(f"/proc/{self.process.pid}/root/dev/shm")
        used = sum(each.stat().st_blocks * 512 for each in folder.iterdir())
        enter = ["nsenter", "-t", str(self.process.pid), "-m"]
        size = (used + num_bytes) // 1024
        subprocess.run(
            [*enter, "mount", "-o", f"remount,size={size}k", "/dev/shm"], check=True, timeout=60
        )
        return used


@pytest.fixture
def service():
    served = Served()
    yield served
    served.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        served.process.wait(60)
    served.process.kill()


def nanocp(*words):
    done = subprocess.run([*NANOCP, *words], capture_output=True, text=True, timeout=400)
    return done.returncode, done.stderr


def test_a_loss_and_a_scale_without_room_leave_the_service_alive(service):
    assert service.answers()
    target = service.said(r"metrics at http://(.+?)/")
    assert nanocp("scale", "3", "--target", target) == (0, "")
    service.leave_free(4096)
    status, said = nanocp("scale", "4", "--target", target)
    assert status == 1 and re.fullmatch(
        r"nanocp scale: .*room for 1 more: needed are [\d.]+ MiB of /dev/shm, which has 0\.0 MiB "
        r"free: enlarge it .*\n",
        said,
    ), said
    assert seats(target)["serving"] == [0, 1, 2] and service.answers()
    (first,) = [
        pid
        for pid in descendants(service.process.pid)
        if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"instance 0\0")
    ]
    os.kill(first, signal.SIGKILL)
    service.said(r"(term \d+ serves with instance 0, instance 1, instance 2)")
    until(lambda: seats(target)["is_serving"] and seats(target)["serving"] == [0, 1, 2])
    assert service.answers()
    terms = [line for line in service.lines if re.search(r"term \d+ serves", line)]
    assert len(terms) == 2, "one without the seats that left, one after the loss"
