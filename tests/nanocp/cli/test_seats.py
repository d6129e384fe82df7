"""`nanocp drain`, `scale` and `upgrade`: what they ask of a service, and what they say of it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.programs.command_line import nanocp
from nanocp.cli.operate import seats

NOW = {"serving": [0, 1, 2], "num_seats": 4}


class Status(BaseHTTPRequestHandler):
    """A status port that remembers what it was asked, and answers changes by its server's rule."""

    def do_GET(self):
        self._say(200, json.dumps(NOW))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self._say(*self.server.answer())

    def _say(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def status():
    with ThreadingHTTPServer(("127.0.0.1", 0), Status) as server:
        server.asked, server.answer = [], lambda: (200, json.dumps(NOW))
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


def ask(status, *words):
    return nanocp(*words, "--target", f"127.0.0.1:{status.server_port}")


def test_a_change_says_who_asks_for_it(status):
    assert ask(status, "drain", "2").exit_code == 0
    assert ask(status, "scale", "4").output == "instances 0, 1, 2 serve\n"
    assert [(each["seats"], each["by"]) for each in status.asked] == [
        ([0, 1], "nanocp drain 2"),
        ([0, 1, 2, 3], "nanocp scale 4"),
    ]


def test_another_servers_answer_is_no_sentence(status):
    status.answer = lambda: (404, '{"error": {"message": "Not found: /cluster/abort."}}')
    assert ask(status, "abort", "x").output == (
        "nanocp abort: HTTP status 404; --target is the metrics address that `nanocp serve` "
        "prints\n"
    )


def test_a_change_is_undone(status):
    assert ask(status, "scale", "--undo").exit_code == 0
    assert status.asked == [{"undo": True}]
    for words in (["scale"], ["scale", "3", "--undo"]):
        done = ask(status, *words)
        assert done.exit_code == 2 and "give a number of instances, or --undo" in done.output


def test_a_change_that_takes_long_goes_on_and_the_command_says_how_to_watch_and_undo_it(
    status, monkeypatch
):
    sentence = 'not done after 150 s; "nanocp scale --undo" undoes it'
    status.answer = lambda: (409, sentence)
    done = ask(status, "drain", "1")
    assert (done.exit_code, done.output) == (1, f"nanocp drain: {sentence}\n")
    over = threading.Event()
    status.answer = lambda: (over.wait(60), (200, json.dumps(NOW)))[1]
    monkeypatch.setattr(seats, "_TIMEOUT_S", 0.5)
    done = ask(status, "drain", "1")
    over.set()
    assert done.exit_code == 1
    for what in ("goes on with the change", '"nanocp top" shows it'):
        assert what in done.output
