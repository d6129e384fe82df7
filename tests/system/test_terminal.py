"""What an operator sees who presses Ctrl-C in a terminal."""

import json
import os
import pty
import re
import select
import socket
import subprocess
import time

import pytest

from harness.paths import ROOT
from harness.services.serve_process import ENVIRONMENT, NANOCP, SMALL, Serve

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


class Terminal:
    """A command in the foreground of a terminal of its own: its text, and the keyboard."""

    def __init__(self, *command):
        self._master, slave = pty.openpty()
        # A session of its own with this terminal: then the terminal turns Ctrl-C into SIGINT.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=slave, stdout=slave, stderr=slave,
            env=ENVIRONMENT | {"COLUMNS": "100"}, cwd=ROOT,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def wait_for(self, pattern, timeout_s=150):
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline and self._read(), self.text

    def press_ctrl_c(self):
        os.write(self._master, b"\x03")

    def ended(self, timeout_s=150):
        """The exit status; the text is whole then."""
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, self.text
        return self.process.wait(60)

    def _read(self):
        """Take what there is within a second; False at the end."""
        if select.select([self._master], [], [], 1.0)[0]:
            try:
                data = os.read(self._master, 65_536)
            except OSError:  # Linux's end of a terminal that nobody holds.
                return False
            self.text += data.decode(errors="replace")
            return bool(data)
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.parametrize("backend", ["openai", "grpc"])
def test_ctrl_c_ends_a_benchmark_and_keeps_what_was_measured(backend, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http_port = str(probe.getsockname()[1])
    arguments = list(SMALL)
    arguments[arguments.index("--http-port") + 1] = http_port
    with Serve(*arguments, factory="build_slow") as service:
        grpc_port = service.address.rpartition(":")[2]
        port = http_port if backend == "openai" else grpc_port
        path = tmp_path / "result.json"
        options = ["--backend", backend, "--port", port, "--num-prompts", "500"]
        options += [
            "--random-input-len",
            "30",
            "--random-output-len",
            "20",
            "--set",
            "random_vocab_size=90",
        ]
        options += ["--max-concurrency", "4", "--save-result", "--result-filename", str(path)]
        with Terminal(*NANOCP, "bench", "serve", *options) as terminal:
            terminal.wait_for(r"[1-9][0-9]*/500")
            terminal.press_ctrl_c()
            assert terminal.ended() == 130, terminal.text
            printed = terminal.text
    completed = int(re.search(r"Successful requests: +(\d+)", printed)[1])
    assert 0 < completed < 500, printed
    assert re.search(r"stopped after \d+ of 500 requests", printed)
    assert "Traceback" not in printed
    result = json.loads(path.read_text())
    assert result["completed"] == completed and result["median_ttft_ms"] > 0
