"""No request is lost while a service restarts, with one and with two (docs/use/restart.md)."""

import itertools
import re
import shutil
import signal
import subprocess
import threading
import time

import httpx
import openai
import pytest

from harness.paths import ROOT
from harness.services.hash_service import expected, prompt
from harness.services.serve_process import SMALL, WAIT_S, Serve
from harness.waits import until
from nanocp.serve.process import free_port

NUM_TOKENS = 40


def serve(port):
    options = list(SMALL)
    options[options.index("--http-port") + 1] = str(port)
    return Serve(*options, "--drain-timeout-s", "60", factory="build_slow")


class Clients:
    """Threads that ask one request after another until the test ends; what they got."""

    def __init__(self, ask, count=3):
        self._ask = ask
        self._stop = threading.Event()
        self.answers, self.errors = [], []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number):
        for seed in itertools.count(100 * number + 1):
            if self._stop.is_set():
                return
            try:
                self.answers.append((seed, self._ask(seed)))
            except Exception as error:
                self.errors.append(error)
                return

    def wait_for(self, more):
        count = len(self.answers) + more
        until(lambda: len(self.answers) >= count or self.errors)

    def end(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert self.errors == []
        for seed, token_ids in self.answers:
            assert token_ids == expected(prompt(40, seed), NUM_TOKENS)


def body(seed):
    return {"prompt": prompt(40, seed), "max_tokens": NUM_TOKENS, "temperature": 0, "seed": 1}


def test_the_official_client_loses_nothing_while_one_service_restarts():
    port = free_port()
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=100, timeout=120
    )

    def ask(seed):
        answer = client.completions.create(
            model="", **body(seed), extra_body={"return_token_ids": True}
        )
        return answer.choices[0].token_ids

    with serve(port) as first:
        assert first.address
        clients = Clients(ask)
        try:
            clients.wait_for(3)
            first.end()
            with serve(port) as second:
                assert second.address
                clients.wait_for(6)
                clients.end()
        finally:
            clients._stop.set()


@pytest.mark.system
def test_two_services_take_turns_and_nobody_waits():
    ports = free_port(), free_port()
    refused = []

    def ask(seed):
        """Ask as a load balancer does: the next service if one refuses."""
        for port in itertools.islice(itertools.cycle(ports), 8):
            url = f"http://127.0.0.1:{port}/v1/completions"
            try:
                answer = httpx.post(url, json=body(seed) | {"return_token_ids": True}, timeout=120)
            except httpx.ConnectError:
                refused.append("connection")
                continue
            if answer.status_code == 503:
                assert answer.headers["Retry-After"] == "1"
                refused.append(503)
                continue
            return answer.json()["choices"][0]["token_ids"]
        raise AssertionError("neither service answers")

    with serve(ports[0]) as first, serve(ports[1]) as other:
        assert first.address and other.address
        clients = Clients(ask)
        try:
            clients.wait_for(3)
            first.end(signal.SIGHUP)
            clients.wait_for(3)
            with serve(ports[0]) as again:
                assert again.address
                other.end()
                clients.wait_for(3)
                clients.end()
        finally:
            clients._stop.set()
    assert "connection" in refused


@pytest.fixture
def haproxy(tmp_path):
    """The load balancer of deploy/haproxy at other ports: the ports, and the running process."""
    if not shutil.which("haproxy"):
        pytest.skip("no haproxy; it is Debian's package of this name")
    ports = {number: free_port() for number in (8080, 8000, 8001)}
    config = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    config = re.sub(r":(80\d\d)\b", lambda found: f":{ports[int(found[1])]}", config)
    (tmp_path / "haproxy.cfg").write_text(config)
    balancer = subprocess.Popen(["haproxy", "-db", "-f", str(tmp_path / "haproxy.cfg")])
    yield ports, balancer
    balancer.kill()
    balancer.wait()


def becomes_ready(port):
    """Wait until the service answers /ready with 200, as the page says."""

    def is_ready():
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    until(is_ready, WAIT_S)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_two_services_behind_haproxy_restart_in_turn_and_no_client_retries(haproxy):
    """Clients retry nothing themselves: what one service refuses, haproxy sends to the other."""
    ports, balancer = haproxy
    started = []
    base_url = f"http://127.0.0.1:{ports[8080]}/v1"
    client = openai.OpenAI(base_url=base_url, api_key="EMPTY", max_retries=0, timeout=120)

    def ask(seed):
        fields = {**body(seed), "extra_body": {"return_token_ids": True}}
        if seed % 2:
            return client.completions.create(model="", **fields).choices[0].token_ids
        chunks = client.completions.create(model="", stream=True, **fields)
        return [token for chunk in chunks for token in chunk.choices[0].token_ids]

    with serve(ports[8000]) as first, serve(ports[8001]) as second:
        becomes_ready(ports[8000])
        becomes_ready(ports[8001])
        time.sleep(3)  # The balancer asks once a second.
        clients = Clients(ask, count=6)
        try:
            clients.wait_for(6)
            for number, service, signal_number in (
                (8000, first, signal.SIGHUP),
                (8001, second, signal.SIGTERM),
            ):
                service.end(signal_number)
                clients.wait_for(6)
                again = serve(ports[number])
                started.append(again)
                becomes_ready(ports[number])
                time.sleep(3)
                clients.wait_for(6)
            clients.end()
        finally:
            clients._stop.set()
            for again in started:
                again.__exit__()
    assert balancer.poll() is None
