"""deploy/autoscale.sh: what it asks for when requests wait, and when instances are idle."""

import http.server
import json
import os
import subprocess
import threading
import time

import pytest

from harness.paths import ROOT
from harness.waits import until


class Service:
    """A status port: metrics and seats as a service has them, and what it is asked to become."""

    def __init__(self, folder):
        self.waiting, self.usage, self.serving = 0, 0.9, [0, 1]
        self.folder, self.calls, self.key = folder, folder / "calls", "a key"
        self.num_looks = 0
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                service.num_looks += self.path == "/cluster/seats"
                body = service.seats() if self.path == "/cluster/seats" else service.metrics()
                self.send_response(200 if service.key in self.headers["Authorization"] else 401)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.target = f"127.0.0.1:{self.server.server_port}"

    def seats(self):
        return json.dumps({"serving": self.serving, "starting": [], "fewest": 1})

    def metrics(self):
        usages = [
            f'nanocp:kv_cache_usage_perc{{engine="{seat}"}} {self.usage}' for seat in self.serving
        ]
        return "\n".join([f"nanocp:num_requests_waiting {self.waiting}", *usages, ""])

    def said(self):
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def let_it_look(self, times=5):
        """Wait until the script has seen what is now so often: it decides after 3 or 20 looks."""
        looks, deadline = self.num_looks + times, time.monotonic() + 60
        while self.num_looks < looks:
            assert time.monotonic() < deadline, "it does not look"
            time.sleep(0.02)

    def until(self, num_calls):
        until(lambda: len(self.said()) >= num_calls)


@pytest.fixture
def service(tmp_path):
    """It is looked at each 20 ms instead of each 5 s."""
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.02\n")
    (tmp_path / "nanocp").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    for name in ("sleep", "nanocp"):
        (tmp_path / name).chmod(0o755)
    service = Service(tmp_path)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["NANOCP_OPERATOR_KEY"] = "a key"
    words = ["sh", ROOT / "deploy" / "autoscale.sh", service.target, "1", "3"]
    with (tmp_path / "errors").open("wb") as errors:
        script = subprocess.Popen(words, env=environment, stderr=errors)
    yield service
    script.kill()
    script.wait()
    service.server.shutdown()
    service.server.server_close()


def test_it_adds_an_instance_while_requests_wait_and_takes_one_back_while_none_do(service):
    service.let_it_look(25)
    assert service.said() == [], "nothing waits, and most frames are taken"
    service.waiting = 4
    service.until(1)
    assert service.said()[0] == f"scale 3 --target {service.target}"
    service.serving, service.waiting, service.usage = [0, 1, 2], 0, 0.1
    calls = len(service.said())
    service.until(calls + 1)
    assert service.said()[-1] == f"scale 2 --target {service.target}"


def test_a_key_that_is_not_valid_is_said(service):
    service.key, service.waiting = "another", 4
    said = f"autoscale.sh: {service.target} does not answer /metrics; a service with keys needs"
    until(lambda: said in (service.folder / "errors").read_text())
    assert service.said() == []
    service.key = "a key"
    service.until(1)
    assert service.said()[0] == f"scale 3 --target {service.target}"


def test_it_stays_within_its_bounds(service):
    service.serving, service.usage = [1], 0.0
    service.let_it_look(25)
    # The script reads one after the other: it must not see three instances and nobody waiting.
    service.usage = 1.0
    service.let_it_look()
    service.serving, service.waiting = [0, 1, 2], 9
    service.let_it_look()
    assert service.said() == []
