"""docs/restart.md: no request is lost while a service restarts, with one service and with two."""

import itertools
import signal
import socket
import threading
import time

import httpx
import openai
import pytest

from harness.hash_service import expected, prompt
from harness.serve_process import SMALL, Serve

NUM_TOKENS = 40


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        deadline = time.monotonic() + 120
        while len(self.answers) < count and not self.errors:
            assert time.monotonic() < deadline
            time.sleep(0.05)

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
            first.process.send_signal(signal.SIGTERM)
            assert first.wait(150) == 0
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
            first.process.send_signal(signal.SIGHUP)
            assert first.wait(150) == 0
            clients.wait_for(3)
            with serve(ports[0]) as again:
                assert again.address
                other.process.send_signal(signal.SIGTERM)
                assert other.wait(150) == 0
                clients.wait_for(3)
                clients.end()
        finally:
            clients._stop.set()
    assert "connection" in refused
