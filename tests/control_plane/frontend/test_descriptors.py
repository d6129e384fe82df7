"""What is left when clients hold every connection: health, metrics, and one warning a second."""

import logging
import resource
import socket
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from prometheus_client import CollectorRegistry

from control_plane.frontend.access import descriptors
from control_plane.frontend.access.api_keys import OperatorKeys
from control_plane.frontend.access.descriptors import Listener, max_connections, raise_limit
from control_plane.observe.status_server import StatusServer
from harness.services.frontend_fakes import make_config, running
from harness.services.openai_service import MODEL
from nanocp.config.service import ServiceConfig

CONFIG = make_config()
NUM_INSTANCES = CONFIG.cluster.num_instances
NEEDED = 128 + 8 * NUM_INSTANCES


def is_closed(client: socket.socket) -> bool:
    client.settimeout(10)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_health_is_answered_while_idle_clients_hold_every_connection():
    with running(make_config(max_http_connections=2), model=MODEL) as service, ExitStack() as stack:
        host, port = service.url.removeprefix("http://").split(":")
        held = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(50)]
        for path in ("/health", "/ping", "/ready"):
            answer = httpx.get(f"{service.url}{path}")
            assert (answer.status_code, answer.headers["Connection"]) == (200, "close")
        assert httpx.get(f"{service.url}/v1/models").status_code == 503
        # The two within the limit stay; of the others only the latest do.
        assert all(map(is_closed, held[2:10]))
        held[0].sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert held[0].recv(100).startswith(b"HTTP/1.1 200")


def test_metrics_are_answered_while_silent_clients_hold_threads():
    server = StatusServer(CollectorRegistry(), bytes, OperatorKeys(ServiceConfig()))
    port = server.serve("127.0.0.1", 0)
    with ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(50)
        ]
        assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
        assert all(map(is_closed, held[:10]))
    server.close()


def test_a_connection_that_would_take_the_last_descriptors_is_closed_and_said_once(
    caplog, monkeypatch
):
    monkeypatch.setattr(descriptors, "_SAY_S", 1000.0)
    with Listener() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(20)

        def client() -> socket.socket:
            return stack.enter_context(socket.create_connection(listener.getsockname()))

        for _ in range(20):
            refused = client()
            with pytest.raises(ConnectionAbortedError):
                listener.accept()
            assert is_closed(refused)
        (said,) = caplog.records
        assert said.levelno == logging.WARNING and "raise ulimit -n" in said.getMessage()
        listener.keep_for(CONFIG.service, NUM_INSTANCES)
        client()
        listener.accept()[0].close()


@pytest.mark.parametrize(("limit", "service", "expected"), [
    (1024, {}, (1024 - NEEDED) // 2),
    (1024, {"ssl_certfile": "a.pem", "ssl_keyfile": "a.key"}, (1024 - NEEDED) // 3),
    (1024, {"front_ends": 3}, (1024 - NEEDED) // 2),
    (NEEDED + 2, {}, 1),
])  # fmt: skip
def test_the_apis_share_what_the_limit_leaves(
    limit: int, service: dict, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert max_connections(replace(CONFIG.service, **service), NUM_INSTANCES) == expected


def test_a_limit_that_leaves_nothing_is_refused_with_what_is_needed(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    with pytest.raises(
        ValueError, match=rf"100 files .* \(ulimit -n\); the service needs {NEEDED + 2}"
    ):
        max_connections(CONFIG.service, NUM_INSTANCES)


@pytest.mark.parametrize(
    ("before", "after"),
    [((1024, 5000), (5000, 5000)), ((1024, 10**9), (65536, 10**9)), ((10**6, 10**6), None)],
)
def test_the_process_takes_what_the_system_allows(before, after, monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    raise_limit()
    assert asked == ([after] if after else [])


def test_grpc_has_its_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.frontend.front_end.max_connections", lambda *of: 3)
    with running(CONFIG, model=MODEL) as service, ExitStack() as stack:
        host, port = service.front_end.address.split(":")
        held = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        assert sum(map(is_closed, held)) >= 8 - 3
