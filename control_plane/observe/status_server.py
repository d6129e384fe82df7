"""The status port: /metrics for Prometheus and /cluster for people, in its own threads.

The page asks for a key, and sends it with requests for data.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.resources import files
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest

logger = logging.getLogger(__name__)

SnapshotJson = Callable[[], bytes]
"""Makes a snapshot. Raises TimeoutError, with a sentence, if there is none."""
RequestsJson = Callable[[str], bytes | None]
"""Explains the time of requests of a name; None if none is known."""
Change = Callable[[bytes | None, str], bytes]
"""Answers for /cluster/seats and others: the present state, or, for a body, the changed one.

The second argument names the operator. Raises ValueError, with a sentence, if it is impossible,
RuntimeError if the change failed.
"""


class Operators(Protocol):
    """Checks who may see and change the cluster, by the headers, named in lower case."""

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether metrics and the cluster's data may be read."""

    def who(self, headers: Mapping[str, str]) -> str | None:
        """Return the name of the operator who may change the cluster; None for others."""


DATA_PATHS = ("/metrics", "/cluster/snapshot.json")
"""Paths with data of the service."""
REQUESTS_PATH = "/cluster/requests.json"
"""Data for `nanocp why`, with `?name=`; at the status port only."""

SEATS_PATH = "/cluster/seats"
"""For GET and POST, at the status port only."""
LAYOUT_PATH = "/cluster/layout"
"""Stages' layers, for GET and POST, at the status port only."""
EXPERTS_PATH = "/cluster/experts"
"""Experts and their loads, for GET, at the status port only."""
ABORT_PATH = "/cluster/abort"
"""For POST, at the status port only."""
CONFIG_PATH = "/cluster/config"
"""For GET; POST changes the log's level. At the status port only."""
_MAX_BODY_BYTES = 1 << 16

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPERATOR_REQUIRED = (
    "an operator's key is required, as `Authorization: Bearer KEY` or `x-api-key: KEY`: one in the "
    "file service.operator_keys_file, without which nobody has one (service.public_status opens "
    "what is only read)"
)
_MAX_ANSWERS = 16
"""Most requests answered at a time; others get 503."""
_MAX_SILENT = 32
"""Most connections that have sent no request."""
_SOCKET_TIMEOUT_S = 30.0
"""A client that sends or reads nothing for this time is disconnected."""


def metrics_page(registry: CollectorRegistry) -> bytes:
    """Return the page at /metrics, always in Prometheus' text format (METRICS_CONTENT_TYPE).

    In OpenMetrics prometheus_client 0.26 writes the colon of `nanocp:` as an underscore, and
    dashboards would not find such names.
    """
    return generate_latest(registry)


def cluster_page() -> bytes:
    """Return the page at /cluster: HTML in UTF-8, without its data (/cluster/snapshot.json)."""
    return files("control_plane.observe").joinpath("cluster_page.html").read_bytes()


def start_page() -> bytes:
    """Return the page at / of the HTTP API: HTML in UTF-8, with links."""
    return files("control_plane.observe").joinpath("start_page.html").read_bytes()


class StatusServer:
    """The server of the status port. It serves until `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        snapshot_json: SnapshotJson,
        operators: Operators,
        requests_json: RequestsJson = lambda name: None,
        changes: Mapping[str, Change] = MappingProxyType({}),
    ) -> None:
        """changes: the answers for SEATS_PATH and others."""
        self._changes = changes
        self._requests_json = requests_json
        self._registry = registry
        self._snapshot_json = snapshot_json
        self._operators = operators
        self._answers = threading.BoundedSemaphore(_MAX_ANSWERS)
        self._server: WSGIServer | None = None

    def serve(self, host: str, port: int) -> int:
        """Bind, and answer in a thread; return the port. Raises OSError naming the port."""
        try:
            self._server = make_server(
                host, port, self._answer, _Server6 if ":" in host else _Server, _Handler
            )
        except OSError as error:
            raise OSError(
                f"cannot listen on port {port} of {host}: {error.strerror} (service.metrics_port)"
            ) from error
        threading.Thread(
            target=self._server.serve_forever, name="status server", daemon=True
        ).start()
        return int(self._server.server_port)

    def close(self) -> None:
        """Close the port. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "").rstrip("/") or "/"
        if path in (*DATA_PATHS, REQUESTS_PATH) and not self._operators.admit(_keys_of(environ)):
            return _say(start_response, "401 Unauthorized", f"{OPERATOR_REQUIRED}\n")
        if path in self._changes:
            return self._answer_change(environ, start_response, self._changes[path])
        if not self._answers.acquire(blocking=False):
            return _say(
                start_response,
                "503 Service Unavailable",
                f"{_MAX_ANSWERS} requests are being answered",
            )
        try:
            if path == "/metrics":
                return _say(
                    start_response, "200 OK", metrics_page(self._registry), METRICS_CONTENT_TYPE
                )
            if path in ("/", "/cluster"):
                return _say(start_response, "200 OK", cluster_page(), "text/html; charset=utf-8")
            if path == "/cluster/snapshot.json":
                return _say(start_response, "200 OK", self._snapshot_json(), "application/json")
            if path == REQUESTS_PATH:
                return self._requests(environ, start_response)
            return _say(
                start_response,
                "404 Not Found",
                f"Not found: {path}. There are /metrics, /cluster and /cluster/snapshot.json.",
            )
        except TimeoutError as error:
            return _say(start_response, "503 Service Unavailable", str(error))
        finally:
            self._answers.release()

    def _answer_change(
        self, environ: dict[str, Any], start_response: Any, change: Change
    ) -> Iterable[bytes]:
        # It takes no place among the answers: a change takes minutes, and one is made at a time.
        body: bytes | None = None
        if environ.get("REQUEST_METHOD") == "POST":
            try:
                num_bytes = max(0, int(environ.get("CONTENT_LENGTH") or 0))
                body = environ["wsgi.input"].read(min(num_bytes, _MAX_BODY_BYTES))
            except (ValueError, OSError):
                sentence = (
                    "Content-Length must say how long the body is, and all of it must come within "
                    f"{_SOCKET_TIMEOUT_S:.0f} s"
                )
                return _say(start_response, "400 Bad Request", sentence)
        headers = _keys_of(environ)
        who = self._operators.who(headers)
        if who is None and (body is not None or not self._operators.admit(headers)):
            return _say(start_response, "401 Unauthorized", f"{OPERATOR_REQUIRED}\n")
        if body is not None and environ.get("CONTENT_TYPE") != "application/json":
            # A page of another origin cannot send this type without being asked first.
            sentence = "Content-Type must be application/json"
            return _say(start_response, "415 Unsupported Media Type", sentence)
        try:
            asker = f"{who or 'an operator'} at {environ.get('REMOTE_ADDR')}"
            return _say(start_response, "200 OK", change(body, asker), "application/json")
        except ValueError as error:
            return _say(start_response, "400 Bad Request", str(error))
        except (RuntimeError, TimeoutError) as error:
            return _say(start_response, "409 Conflict", str(error) or "the controller is silent")

    def _requests(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        name = parse_qs(environ.get("QUERY_STRING", "")).get("name", [""])[-1]
        known = self._requests_json(name)
        if known is None:
            sentence = (
                f"no request is known as {name!r}: only the latest are kept; ask by number or by "
                "the client's id"
            )
            return _say(start_response, "404 Not Found", sentence)
        return _say(start_response, "200 OK", known, "application/json")


def _keys_of(environ: Mapping[str, Any]) -> dict[str, str]:
    names = ("authorization", "x-api-key")
    return {name: environ.get(f"HTTP_{name.upper().replace('-', '_')}", "") for name in names}


def _say(
    start_response: Any, status: str, body: bytes | str, kind: str = "text/plain; charset=utf-8"
) -> list[bytes]:
    content = body.encode() if isinstance(body, str) else body
    headers = [
        ("Content-Type", kind),
        ("Content-Length", str(len(content))),
        ("Cache-Control", "no-store"),
    ]
    if status.startswith("401"):
        headers.append(("WWW-Authenticate", "Bearer"))
    start_response(status, headers)
    return [content]


class _Server(ThreadingMixIn, WSGIServer):
    """Gives each connection a thread, and closes the oldest of too many silent ones."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.silent: dict[socket.socket, None] = {}
        """Connections without a request, the oldest first."""

    def process_request(self, request: Any, client_address: Any) -> None:
        self.silent[request] = None
        if len(self.silent) > _MAX_SILENT:
            oldest = next(iter(self.silent))
            self.silent.pop(oldest, None)
            with suppress(OSError):  # it may have ended
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.silent.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            logger.exception("a request to the status port failed")


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _SOCKET_TIMEOUT_S

    def parse_request(self) -> bool:
        self.server.silent.pop(self.connection, None)  # type: ignore[attr-defined]
        return super().parse_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""
