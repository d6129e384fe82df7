"""A local `nanocp serve` as a process of its own: addresses, metrics, members, leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanocp.serve.free_ports import free_ports

START_TIMEOUT_S = 300
"""Longer than the service's own limits, so that its error comes first."""
STOP_TIMEOUT_S = 60
IDLE_TIMEOUT_S = 30.0
HELD_FRAMES = ("nanocp:frames_committed", "nanocp:frames_quarantined")
PROGRAM = (sys.executable, "-m", "nanocp.cli.main")
_SEGMENT = re.compile(r"/dev/shm/(nanocp-[A-Za-z0-9_.]+-)t[0-9]+-")


class NotServing(RuntimeError):
    """The service has ended, or is not ready in time."""

    def __init__(self, message: str, status: int) -> None:
        """status: the exit status; 1 if it still runs."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Serving:
    """A service that is ready."""

    target: str
    """host:port for clients."""
    metrics_port: int
    http_port: int
    """0: no HTTP."""
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """The process of `nanocp serve`."""
        return self.process.pid

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, label engine or "") -> value of every sample of /metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10
        ) as reply:
            text = reply.read().decode()
        return {
            (sample.name, sample.labels.get("engine", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }

    def frames_not_back(self) -> int:
        """Frames still taken after idling at most IDLE_TIMEOUT_S: 0, or they leaked."""
        return self.settled(*HELD_FRAMES)

    def settled(self, *names: str) -> int:
        """Sum of these metrics over all instances, once 0 or after IDLE_TIMEOUT_S."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            held = sum(value for (name, _), value in self.metrics().items() if name in names)
            if not held or time.monotonic() > deadline_s:
                return round(held)
            time.sleep(0.2)

    def member_pids(self) -> dict[str, int]:
        """Processes of the service by name, without Ray.

        The name ends the command line, or is the process's own if it was a spare.
        """
        named = {}
        for children in Path(f"/proc/{self.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    own = Path(f"/proc/{pid}/comm").read_text().strip()
                    name = words[-2].decode() if len(words) > 1 else ""
                    named[own if own.startswith("instance ") else name] = int(pid)
        return {
            name: pid
            for name, pid in sorted(named.items())
            if re.match("instance|prefill|front end|controller", name)
        }

    def instance_pids(self) -> list[int]:
        """Processes of the instances, in order, without Ray."""
        pids = self.member_pids()
        return [pids[name] for name in sorted(pids, key=len) if name.startswith("instance")]

    def segment_prefix(self) -> str:
        """Prefix of this service's segments in /dev/shm; empty if it has none."""
        for pid in self.member_pids().values():
            if found := _SEGMENT.search(Path(f"/proc/{pid}/maps").read_text()):
                return found[1]
        return ""

    def stop(self) -> int:
        """Stop the service and return its exit status. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    instances: int,
    settings: Mapping[str, object],
    *flags: str,
    ray: bool = True,
    synthetic_kv: bool = True,
    http: bool = False,
    program: Sequence[str] = PROGRAM,
) -> Iterator[Serving]:
    """`nanocp serve` from ready to stopped. settings: keys such as "data_plane.dtype".

    Raises RuntimeError with the end of its log if it does not start.
    """
    num_front_ends = int(str(settings.get("service.front_ends", 1)))
    port, metrics_port = free_ports(num_front_ends), free_port()
    http_port = free_ports(num_front_ends) if http else 0
    command = [*program, "serve", str(checkpoint), *flags]
    command += ["--set", "prefill.synthetic_kv=true"] if synthetic_kv else []
    command += ["--instances", str(instances), "--grpc-port", str(port)]
    command += ["--metrics-port", str(metrics_port), "--http-port", str(http_port)]
    command += [] if ray else ["--no-ray"]
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=_environment(settings), stdout=log, stderr=log)
        path = Path(log.name)
        service = Serving(f"127.0.0.1:{port}", metrics_port, http_port, server, path)
        try:
            try:
                wait_until_serving(server, port)
            except NotServing as error:
                raise RuntimeError(
                    f"{' '.join(command)} did not start:\n{path.read_text()[-2000:]}"
                ) from error
            yield service
        finally:
            service.stop()


def _environment(settings: Mapping[str, object]) -> dict[str, str]:
    # A variable that is left in the user's shell must not change what is measured.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("NANOCP_")
    }
    for key, value in settings.items():
        environment["NANOCP_" + key.upper().replace(".", "__")] = (
            value if isinstance(value, str) else json.dumps(value)
        )
    return environment


def free_port() -> int:
    """A free port of the loopback interface."""
    return free_ports()


def wait_until_serving(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the health service says SERVING. Raises NotServing."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if server.poll() is not None:
                sentence = f"the service ended with status {server.returncode}"
                raise NotServing(sentence, server.returncode or 1)
            with contextlib.suppress(grpc.RpcError):
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
    raise NotServing(f"the service at 127.0.0.1:{port} was not ready in {START_TIMEOUT_S} s", 1)
