"""`nanocp top`: the picture shows the snapshot, and an absent service is a sentence."""

import json
import re
import socket
import threading

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from control_plane.frontend.access.api_keys import OperatorKeys
from control_plane.observe.status_server import StatusServer
from nanocp.cli.main import app
from nanocp.config.service import ServiceConfig


def instance(number, **others):
    return {
        "instance": number,
        "node": 0,
        "kv_tokens": 640 * (1 + number),
        "rows": 2,
        "attention_rows": 3,
        "frames_free": 20,
        "frames_quarantined": 4,
        "frames_committed": 16,
        "other_pages": 0,
        "step_ms": 12.5,
        "exchange_ms": 2.25,
    } | others


def request(number, pages_on, **others):
    return {
        "id": number,
        "state": "running",
        "moe_binding": 0,
        "num_tokens": 1200,
        "pages_on": pages_on,
        "promised_on": [],
        "timeline": [],
    } | others


SNAPSHOT = {
    "policy": "dual_balanced", "page_size": 64, "num_frames": 40, "num_running": 3,
    "num_prefilling": 2, "num_queued": 1,
    "instances": [instance(0), instance(1, step_ms=None, exchange_ms=None)],
    "requests": [request(3, [[1, 16], [0, 10]], promised_on=[[0, 3]]),
                 request(4, [[0, 6]]),
                 request(55, [[0, 0], [1, 0]])],
    "waiting": [{"id": 5, "age_s": 7.25}], "ended": [],
    "recovery": {"term": 1, "lost": 0, "recovers_for_s": None, "held": 0, "seats": ["serving"] * 2,
                 "spares": 0},
    "engines": [{"url": "http://a:8000", "is_up": True, "problem": "", "tokens_in_flight": 4096,
                 "done": 7, "failed": 0},
                {"url": "http://b:8000", "is_up": False, "problem": "it hangs",
                 "tokens_in_flight": 0, "done": 1, "failed": 2}],
    "tpot_ms": [None, 5.0, 10.0], "tokens_per_s": [0.0, 100.0, 50.0],
}  # fmt: skip


@pytest.fixture
def address():
    server = StatusServer(
        CollectorRegistry(), lambda: json.dumps(SNAPSHOT).encode(), OperatorKeys(ServiceConfig())
    )
    yield f"127.0.0.1:{server.serve('127.0.0.1', 0)}"
    server.close()


def run(*arguments, columns=80):
    # 80 columns leave 40 for a bar: a frame each.
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": str(columns)})


def test_a_picture_of_the_cluster(address):
    result = run("--target", address, "--once")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert "running 3   prefilling 2   queue 1, first 7.2 s" in lines[1]
    assert "KV 0.75, rows 1.00" in lines[2]
    assert "token to token 10.0 ms ▅█" in lines[3] and "tokens/s 50 ▁█▅" in lines[3]
    bars = {line.split()[0]: line.split() for line in lines[6:8]}
    assert bars["0"][1:] == [
        "D" * 7 + "+" * 3 + "▓" * 6 + "░" * 4 + "·" * 20, "20", "2", "12.5", "2.2",
    ]  # fmt: skip
    assert bars["1"][1:] == ["D" * 16 + "░" * 4 + "·" * 20, "20", "2", "-", "-"]
    assert "+ promised, no KV yet" in lines[9]
    cells = ["D", "3", "running", "1,200", "2", "0", "0:10", "1:16"]
    assert any(line.split() == cells for line in lines)
    assert any(line.split()[:2] == ["E", "55"] for line in lines), "a letter of its own"
    text = " ".join(result.stdout.split())
    assert "prefill http://a:8000: up, 4,096 tokens in flight, 7 prompts done, 0 failed" in text
    assert "prefill http://b:8000: down (it hangs), 0 tokens in flight" in text


BUSY = SNAPSHOT | {
    "recovery": {
        "term": 3,
        "lost": 2,
        "recovers_for_s": 4.2,
        "held": 5,
        "seats": ["serving"] * 30 + ["loading", "empty"],
        "spares": 1,
    },
    "num_frames": 16384,
    "num_running": 8191,
    "num_prefilling": 128,
    "num_queued": 4096,
    "instances": [instance(number, rows=255, frames_free=12288) for number in range(32)],
    "requests": [
        request(123456 + number, [[instance, 999] for instance in range(10, 14)], num_tokens=999999)
        for number in range(3)
    ],
    "waiting": [{"id": 5, "age_s": 1234.5}],
    "tpot_ms": [1234.5] * 240,
    "tokens_per_s": [99999.0] * 240,
}


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("snapshot", [SNAPSHOT, BUSY])
def test_60_and_80_columns_are_enough(monkeypatch, columns, snapshot):
    monkeypatch.setattr("nanocp.cli.operate.top.fetch", lambda *_: snapshot)
    output = run("--once", columns=columns).stdout
    lines = output.splitlines()
    assert all(len(line.rstrip()) <= columns for line in lines) and "…" not in output
    assert lines[1].startswith("running") and "queue" in lines[1] and lines[1].rstrip()[-1] == "s"
    told = "term 3, 2 members lost, recovers for 4.2 s, 5 requests held"
    seats = "seats: 30 serving, 1 loading, 1 empty, 1 spare"
    assert (told in output, seats in output) == (snapshot is BUSY, snapshot is BUSY)
    assert lines[2].startswith("balance") and lines[3].startswith("token to token")
    num = len(snapshot["instances"])
    assert {len(line.split()) for line in lines[6 : 6 + num]} == {6}, "no column is cut"
    pages = [f"{one}:{count}" for each in snapshot["requests"] for one, count in each["pages_on"]]
    if snapshot is BUSY:
        assert re.findall(r"\d+:\d+", output.partition("MoE")[2]) == pages, "wrapped, not cut"


def test_another_program_at_the_port_is_a_sentence():
    """Port 50051 is gRPC's: what it answers is no HTTP/1."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00")

        thread = threading.Thread(target=answer)
        thread.start()
        result = run("--target", "{}:{}".format(*server.getsockname()), "--once")
        thread.join()
    assert result.exit_code == 2
    assert result.stderr.startswith("nanocp top: no NanoCP answers at http://127.0.0.1:")
    assert (
        "(what answers there is not HTTP)" in result.stderr and result.stderr.strip().isprintable()
    )


def test_the_snapshot_itself_for_scripts(address):
    result = run("--target", address, "--json")
    assert json.loads(result.stdout) == SNAPSHOT


def test_a_service_with_keys_is_asked_with_one(tmp_path):
    (tmp_path / "keys").write_text("first\nann second\n")
    keys = OperatorKeys(ServiceConfig(operator_keys_file=str(tmp_path / "keys")))
    server = StatusServer(CollectorRegistry(), lambda: json.dumps(SNAPSHOT).encode(), keys)
    address = f"127.0.0.1:{server.serve('127.0.0.1', 0)}"
    asks = f"nanocp top: http://{address}/cluster/snapshot.json asks for an operator's key"
    for key, sentence in (
        ("", f"{asks}: give --operator-key, or set NANOCP_OPERATOR_KEY"),
        ("third", f"{asks}, and the one given is not valid"),
    ):
        result = run("--target", address, "--json", "--operator-key", key)
        assert result.exit_code == 2 and result.stderr.startswith(sentence)
    assert (
        json.loads(run("--target", address, "--json", "--operator-key", "second").stdout)
        == SNAPSHOT
    )
    server.close()


def test_an_absent_service_is_a_sentence():
    result = run("--target", "127.0.0.1:1", "--once")
    assert result.exit_code == 2 and "no NanoCP answers at http://127.0.0.1:1/" in result.output


@pytest.mark.parametrize(
    ("snapshot", "said", "status"),
    [(SNAPSHOT, "degraded: prefill http://b:8000 is down (it hangs); 2 of 2 instances serve", 1),
     (SNAPSHOT | {"engines": []}, "whole; 2 of 2 instances serve, 3 requests run, 2 prefill", 0),
     (BUSY | {"engines": []},
      "degraded: it recovers for 4.2 s; 5 requests held for another attempt; 1 seats "
      "loading; 30 of 32 instances serve",
      1)],
    ids=["an engine", "whole", "recovers"],
)  # fmt: skip
def test_a_line_says_what_is_degraded(monkeypatch, snapshot, said, status):
    monkeypatch.setattr("nanocp.cli.operate.top.fetch", lambda *_: snapshot)
    done = CliRunner().invoke(app, ["status"])
    assert done.exit_code == status and done.stdout.startswith(said)
    assert len(done.stdout.splitlines()) == 1


def test_a_service_that_is_not_there_has_no_status():
    done = CliRunner().invoke(app, ["status", "--target", "127.0.0.1:1"])
    assert done.exit_code == 2 and "no NanoCP answers at http://127.0.0.1:1/" in done.stderr


def test_who_holds_the_memory_is_listed_with_short_requests_too(monkeypatch):
    """Those with the most pages first, and from 130 columns on with the client's id."""
    more = [request(100 + n, [[1, 1]], client_id=f"cmpl-{n}") for n in range(30)]
    full = SNAPSHOT | {"requests": [*SNAPSHOT["requests"], *more], "num_running": 40}
    monkeypatch.setattr("nanocp.cli.operate.top.fetch", lambda *_: full)
    lines = run("--once", columns=140).stdout.splitlines()
    listed = [line.split()[1] for line in lines if " running " in line and ":" in line.split()[-1]]
    assert listed[:3] == ["3", "4", "100"] and len(listed) == 33
    assert any("cmpl-29" in line for line in lines)
    assert any("9 more, with fewer pages" in line for line in lines)
