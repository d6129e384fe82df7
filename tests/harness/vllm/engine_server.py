"""A server like vLLM's around a FakeVllm, in a process of its own: POST /v1/completions.

Arguments are the port and options, such as '{"block_size": 16, "fault": ""}'.
Faults: `garbage` (KV of another model), `mute` (answers, and sends no page), `hang` (no answer),
`plain` (no connector), `slow` (a step takes 50 ms), `deaf` (each prompt fails with 500), `probed`
(mute for all but probes), `mtp` (none: it has KV of the model's MTP layer too). api_key: as vLLM's
--api-key; a request without it gets 401.
"""

import json
import select
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data_plane.prefill.connector.rings import PageWriters
from data_plane.prefill.connector.ticket import KEY
from harness.hash_clusters.hash_model import HashModel
from harness.services.hash_members import MODEL, HashProbe
from harness.vllm.fake_vllm import FakeVllm

PROBE_TOKENS = 65


class MutePlaces:
    """Takes every page and sends none; with `only_prompts`, probes are sent."""

    def __init__(self, only_prompts):
        self._writers = PageWriters(()) if only_prompts else None

    def write(self, ticket, instance, **page):
        if self._writers is not None and ticket.num_tokens == PROBE_TOKENS:
            return self._writers.write(ticket, instance, **page)
        return True

    def close(self):
        pass


class EngineServer:
    """The engine's loop, and the handlers that wait for it."""

    def __init__(self, block_size=16, fault="", seed=0, preempted_share=0.05, api_key=""):
        self.fault = fault
        self.api_key = api_key
        is_mute = fault in ("mute", "probed")
        self.engine = FakeVllm(
            block_size, MutePlaces(fault == "probed") if is_mute else PageWriters(()), seed,
            (20, 120), preempted_share, OtherModel() if fault == "garbage" else MODEL,
            HashProbe.fingerprint, has_mtp=fault == "mtp",
        )  # fmt: skip
        self._wake = threading.Event()
        self._numbers = iter(range(1 << 30))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            self._wake.wait()
            self._wake.clear()
            while self.engine.is_busy:
                self.engine.step()
                if self.fault == "slow":
                    time.sleep(0.05)

    def complete(self, body, is_gone):
        """The answer to a prompt; None if its client has gone."""
        answer, done = [], threading.Event()

        def ended(params):
            answer.append(params)
            done.set()

        request_id = f"r{next(self._numbers)}"
        params = None if self.fault == "plain" else body.get("kv_transfer_params")
        self.engine.add(request_id, body["prompt"], params, ended)
        self._wake.set()
        while not done.wait(0.02) or self.fault == "hang":
            if is_gone():
                self.engine.abort(request_id)
                self._wake.set()
                return None
        return {"choices": [{"text": "?"}], "kv_transfer_params": answer[0]}


class OtherModel(HashModel):
    """A model of the same shape with other weights."""

    def prefill(self, token_ids, num_tokens, has_mtp=False):
        return super().prefill([token + 1 for token in token_ids], num_tokens, has_mtp)


def handler_of(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions" and KEY in body["kv_transfer_params"]
            if server.api_key and self.headers["Authorization"] != f"Bearer {server.api_key}":
                self._send(401, {"error": "Unauthorized"})
                return
            if server.fault == "deaf" and len(body["prompt"]) != PROBE_TOKENS:
                self._send(500, {"error": "the engine is dead"})
                return
            answer = server.complete(body, self._is_gone)
            if answer is not None:
                self._send(200, answer)

        def _is_gone(self):
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

        def _send(self, status, answer):
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    return Handler


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main():
    port, options = int(sys.argv[1]), json.loads(sys.argv[2])
    Listener(("127.0.0.1", port), handler_of(EngineServer(**options))).serve_forever()
