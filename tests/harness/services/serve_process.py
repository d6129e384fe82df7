"""A `nanocp serve` of HashInstances in a process of its own, its clients, and what it leaves."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

from harness.paths import TESTS
from harness.programs.forks import FORKS
from harness.services.hash_service import PATIENT_MS, prompt
from harness.waits import until
from nanocp.client import Client, ServiceError

ENVIRONMENT = {
    **os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1",
}  # fmt: skip
NANOCP = [sys.executable, "-m", "nanocp.cli.main"]
SMALL = [
    "--no-ray",
    "--instances",
    "4",
    "--grpc-port",
    "0",
    "--metrics-port",
    "0",
    "--http-port",
    "0",
    *("--set", "service.check_invariants=true"),
]
EXIT_S = 25.0
"""Time in which a service that lost an instance exits: less than any timeout."""
WAIT_S = 150
"""Longest wait for what takes seconds on a machine that is not busy."""
IDLE_WAKES_PER_S = 60
"""An idle process wakes less often, its heartbeats included: gRPC's own threads about 25 times, a
loop that looks every 20 ms 50 times more."""


class Serve:
    """A `nanocp serve` of HashInstances in a process of its own."""

    def __init__(self, *options, factory="build_instance", environment=None):
        words = [factory, "serve", "no-checkpoint", *options]
        patient = {"NANOCP_LIMITS__SUSPECT_MS": str(PATIENT_MS)}
        environment = ENVIRONMENT | patient | (environment or {})
        if "--no-ray" in options:
            main, imports = "harness.services.hash_serve:main", ["nanocp.serve.service"]
            self.process = FORKS.popen(main, words, imports, [2], environment)
        else:
            self.process = subprocess.Popen(
                [sys.executable, str(TESTS / "harness/services/hash_serve.py"), *words],
                stderr=subprocess.PIPE,
                env=environment,
                cwd=TESTS.parent,
            )
        self.lines = []
        self.serving = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for raw in self.process.stderr:
            line = raw.decode()
            self.lines.append(line.rstrip())
            if "serving no-checkpoint" in line:
                self.serving.set()
        self.serving.set()  # It has ended: nobody waits for it any more.

    @property
    def address(self):
        assert self.serving.wait(WAIT_S), self.lines
        line = next((line for line in self.lines if "serving no-checkpoint" in line), "")
        assert line, f"the service has ended: {self.lines[-20:]}"
        return line.rstrip('"}').split()[-1]

    def wait(self, timeout_s=EXIT_S):
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended: {self.lines[-20:]}") from None
        self._reader.join()
        return status

    def end(self, number=signal.SIGTERM):
        """Ask it to end, and wait until it has ended well."""
        self.process.send_signal(number)
        assert self.wait(WAIT_S) == 0, self.lines

    def processes(self):
        """Every process of it, and the cluster's segments that they map."""
        processes = descendants(self.process.pid)
        return processes, set().union(*map(segments_of, processes))

    def says(self, words):
        """Wait for a line with these words."""
        until(lambda: any(words in line for line in self.lines))

    def refusal(self):
        """The one line that says what is wrong, when it has ended; beside it only progress."""
        assert self.wait(WAIT_S) == 2
        sentences = [line for line in self.lines if line.startswith("nanocp serve: ")]
        others = [line for line in self.lines if line not in sentences]
        expected = r"checkpoint .*: accepted|\d instances as plain subprocesses"
        assert len(sentences) == 1 and all(re.match(expected, line) for line in others), self.lines
        return sentences[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._reader.join()


def nanocp(*words, imports=()):
    """Run a command line to its end in a fork: (status, output, errors)."""
    process = FORKS.popen("nanocp.cli.main:app", words, imports, [1, 2], ENVIRONMENT)
    output, errors = process.stdout.read().decode(), process.stderr.read().decode()
    return process.wait(WAIT_S), output, errors


class Stream:
    """One request in a thread; made when its first tokens have come."""

    def __init__(self, address, max_tokens):
        self.tokens = []
        self.error = ""
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, max_tokens))
        self._thread.start()
        assert self._begun.wait(60)

    def _run(self, address, max_tokens):
        try:
            with Client(address) as client:
                for chunk in client.generate(
                    prompt(300, 1), max_tokens=max_tokens, seed=1, timeout_s=WAIT_S
                ):
                    self.tokens += chunk.token_ids
                    self._begun.set()
        except ServiceError as error:
            self.error = str(error)
        self._begun.set()

    def join(self):
        self._thread.join(WAIT_S)


def instances_of(processes):
    """Those which are instances."""
    return [pid for pid in processes if any("-exchange-" in name for name in segments_of(pid))]


def seats(target):
    """Which seats serve, as the status port says."""
    with urllib.request.urlopen(f"http://{target}/cluster/seats", timeout=60) as answer:
        return json.load(answer)


def status_of(serve):
    """host:port of the status port."""
    said = next(line for line in serve.lines if "metrics at http://" in line)
    return said.partition("http://")[2].partition("/")[0]


def descendants(pid):
    """Every process that this one started, itself or through others."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def segments_of(pid):
    """Names of the cluster's segments that the process maps."""
    try:
        return set(re.findall(r"/dev/shm/(nanocp-\S+)", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wakes_and_cpu_s(pid):
    """How often the process's threads have been woken, and how long they have run."""
    wakes, ran_ns = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that just ended
            wakes += int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)",
                                   (task / "status").read_text(), re.M)[1])  # fmt: skip
            ran_ns += int((task / "schedstat").read_text().split()[0])
    return wakes, ran_ns / 1e9


def assert_nothing_is_left(processes, segments, num_instances=4):
    assert len(segments) == num_instances + num_instances + num_instances * (num_instances - 1)
    assert not segments & set(os.listdir("/dev/shm"))
    until(lambda: not any(map(is_running, processes)))
