"""Processes of fake engines, which a test starts, stops and kills."""

import json
import socket
import time

from harness.programs.forks import FORKS
from nanocp.serve.process import free_port


class EngineProcess:
    """A server of engine_server.py; `options` are those of EngineServer."""

    def __init__(self, **options):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        self.start(**options)

    def start(self, **options):
        """Start it, on the same port as before."""
        words = [str(self.port), json.dumps(options)]
        self.process = FORKS.popen(
            "harness.vllm.engine_server:main", words, ["harness.vllm.engine_server"]
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.05)

    def kill(self):
        """End it as a failure would."""
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
