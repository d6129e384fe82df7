"""The status port and its keys: what operators, clients and strangers may see and change there."""

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from control_plane.frontend.access.api_keys import OperatorKeys
from control_plane.observe.status_server import DATA_PATHS, SEATS_PATH, StatusServer
from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, hash_service
from nanocp.config.service import ServiceConfig

CLIENT, OPERATOR = {"Authorization": "Bearer a key"}, {"Authorization": "Bearer another"}
SNAPSHOT = b'{"num_running": 41}'


@pytest.fixture
def operators_file(tmp_path: Path) -> str:
    file = tmp_path / "operators"
    file.write_text("# on call\nalice another\nunnamed\n")
    return str(file)


@pytest.fixture
def url(operators_file: str) -> Iterator[str]:
    keys = OperatorKeys(ServiceConfig(operator_keys_file=operators_file))
    server = StatusServer(CollectorRegistry(), lambda: SNAPSHOT, keys)
    yield f"http://127.0.0.1:{server.serve('127.0.0.1', 0)}"
    server.close()


def test_data_needs_an_operators_key(url):
    for path in (*DATA_PATHS, "/metrics/", "/%6Detrics", "/cluster/snapshot.json/"):
        for wrong in ("", "Bearer a key", "another", "Bearer alice"):
            answer = httpx.get(url + path, headers={"Authorization": wrong})
            assert answer.status_code == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert "an operator's key is required" in answer.text and "41" not in answer.text
        for headers, status in (
            (OPERATOR, 200),
            ({"x-api-key": "another"}, 200),
            (OPERATOR | {"x-api-key": "another"}, 200),
            (OPERATOR | {"x-api-key": "a key"}, 401),
            (CLIENT | {"x-api-key": "another"}, 401),
        ):
            assert httpx.get(url + path, headers=headers).status_code == status
    assert httpx.get(f"{url}/cluster/snapshot.json", headers=OPERATOR).content == SNAPSHOT


def test_the_page_itself_holds_no_data_and_asks_for_the_key(url):
    page = httpx.get(f"{url}/cluster")
    assert page.status_code == 200 and 'id="key_input" type="password"' in page.text
    assert httpx.get(f"{url}/elsewhere").status_code == 404


def test_a_key_has_the_name_before_it(operators_file):
    keys = OperatorKeys(ServiceConfig(operator_keys_file=operators_file, public_status=True))
    assert keys.who({"authorization": "Bearer another"}) == "alice"
    assert keys.who({"x-api-key": "another"}) == "alice"
    assert (keys.who({"x-api-key": "unnamed"}) or "").startswith("operator ")
    for wrong in ("", "Bearer alice", "Bearer alice another", "Bearer # on call", "another"):
        headers = {"authorization": wrong}
        assert keys.who(headers) is None and keys.admit(headers), "what is public is only read"
    with pytest.raises(ValueError, match=r"operator_keys_file .* must have a key in each line"):
        Path(operators_file).write_text("# nobody\n")
        OperatorKeys(ServiceConfig(operator_keys_file=operators_file))


def test_clients_that_go_away_leave_no_traceback(capfd, caplog):
    """A `nanocp scale` that is killed while the change is made goes so."""
    is_asked, is_gone = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def change(body: bytes | None, who: str) -> bytes:
        threads.append(threading.current_thread())
        is_asked.set()
        assert is_gone.wait(30) and body == b"{}"
        return b"x" * 10_000_000

    everyone = OperatorKeys(ServiceConfig())
    server = StatusServer(
        CollectorRegistry(), lambda: SNAPSHOT, everyone, changes={SEATS_PATH: change}
    )
    port = server.serve("127.0.0.1", 0)

    def post(length: str, *, resets: bool) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = f"POST {SEATS_PATH} HTTP/1.0\r\nContent-Type: application/json\r\n"
            body = "{}" * resets
            client.sendall(f"{head}Content-Length: {length}\r\n\r\n{body}".encode())
            if not resets:
                return client.makefile("rb").read()
            assert is_asked.wait(30)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return b""

    post("2", resets=True)
    is_gone.set()
    threads[0].join(30)
    assert not threads[0].is_alive()
    assert b"Content-Length must say how long the body is" in post("two", resets=False)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"GET /metr")
    assert httpx.get(f"http://127.0.0.1:{port}/cluster/snapshot.json").content == SNAPSHOT
    server.close()
    assert "Traceback" not in capfd.readouterr().err + caplog.text


KEYS_OF = [
    # settings, status of: an operator's reading, a client's, a stranger's, and of their changes.
    ({}, (200, 200, 200), (400, 400, 400)),
    ({"api_keys": ("a key",)}, (401, 401, 401), (401, 401, 401)),
    ({"api_keys": ("a key",), "public_status": True}, (200, 200, 200), (401, 401, 401)),
    ({"api_keys": ("a key",), "operators": True}, (200, 401, 401), (400, 401, 401)),
    ({"operators": True}, (200, 401, 401), (400, 401, 401)),
    ({"operators": True, "public_status": True}, (200, 200, 200), (400, 401, 401)),
]


@pytest.mark.parametrize(("settings", "reads", "changes"), KEYS_OF, ids=lambda one: str(one)[:60])
def test_who_may_read_and_who_may_change(settings, reads, changes, operators_file, caplog):
    """With keys of any kind, all of it is the operators', at both ports."""
    caplog.set_level(logging.INFO)
    settings = dict(settings)
    if settings.pop("operators", False):
        settings["operator_keys_file"] = operators_file
    with hash_service(configured(CONFIG, num_instances=1, **settings)) as service:
        seats = f"http://{service.metrics_address}{SEATS_PATH}"
        data = [f"http://{service.metrics_address}{path}" for path in DATA_PATHS]
        data += [f"http://{service.http_address}{path}" for path in DATA_PATHS]
        for headers, read, changed in zip((OPERATOR, CLIENT, {}), reads, changes, strict=True):
            answered = {each: httpx.get(each, headers=headers).status_code for each in data}
            assert set(answered.values()) == {read}, answered
            assert httpx.get(seats, headers=headers).status_code == read
            wrong = httpx.post(seats, json={"seats": [7]}, headers=headers)
            assert wrong.status_code == changed
        own = {"x-api-key": "another"}
        wrong = httpx.post(seats, json={"seats": [7]}, headers=own)
        assert wrong.status_code == changes[0]
        models = f"http://{service.http_address}/v1/models"
        is_open = "api_keys" not in settings
        for headers, is_client in ((OPERATOR, is_open), (CLIENT, True), ({}, is_open)):
            assert httpx.get(models, headers=headers).status_code == (200 if is_client else 401)
        who = {400: "alice" if "operator_keys_file" in settings else "an operator"}.get(changes[0])
        asked = f"change asked for by {who} at 127.0.0.1: instances [7] are to serve"
        assert (asked in caplog.text) == (who is not None)
        assert ("change not made: instances [7] are to serve" in caplog.text) == (who is not None)
