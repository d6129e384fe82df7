"""The bound on clients' connections, so that descriptors are left for all else."""

from __future__ import annotations

import logging
import resource
import socket
import time
from contextlib import suppress
from typing import Any

from nanocp.config.choices import require
from nanocp.config.service import ServiceConfig

_WANTED = 65_536
"""Descriptors that are asked of the system."""
_RESERVED, _OF_MEMBER = 128, 8
"""Descriptors kept from clients: for the status port, files and logs, and for each instance."""
_SAY_S = 1.0

logger = logging.getLogger(__name__)


def raise_limit() -> None:
    """Raise the limit of open files of this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := min(hard, _WANTED)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections(service: ServiceConfig, num_instances: int) -> int:
    """Return the most connections at each API by the limit of open files.

    Raises ValueError if that leaves none.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_kinds = 3 if service.ssl_certfile else 2  # HTTP, gRPC, and those in a TLS handshake
    reserved = _reserved(num_instances)
    require(
        limit >= reserved + num_kinds,
        f"{limit} files may be open (ulimit -n); the service needs {reserved + num_kinds}",
    )
    return (limit - reserved) // num_kinds


def _reserved(num_instances: int) -> int:
    return _RESERVED + _OF_MEMBER * num_instances


class Listener(socket.socket):
    """Closes at once a connection that would take a reserved descriptor.

    Of too many connections that have not begun, such as TLS handshakes, the oldest is cut.
    """

    most = 0
    """A connection's descriptor must be below this: the lowest free number is taken."""
    _most_waiting = 0
    _said_s = float("-inf")

    def keep_for(self, service: ServiceConfig, num_instances: int) -> None:
        """Keep half of the reserve, and a share for connections that have not begun."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = limit - _reserved(num_instances) // 2
        self._most_waiting = max_connections(service, num_instances)
        self._waiting: dict[int, socket.socket] = {}

    def began(self, descriptor: int) -> None:
        """Stop counting this descriptor's connection as one that has not begun."""
        self._waiting.pop(descriptor, None)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, or raise ConnectionAbortedError, which event loops ignore."""
        connection, address = super().accept()
        if (descriptor := connection.fileno()) < self.most:
            self.began(descriptor)  # One that had it before is closed.
            self._waiting[descriptor] = connection
            if len(self._waiting) > self._most_waiting:
                oldest = self._waiting.pop(next(iter(self._waiting)))
                with suppress(OSError):  # It may be closed.
                    oldest.shutdown(socket.SHUT_RDWR)
            return connection, address
        connection.close()
        if (now_s := time.monotonic()) - self._said_s >= _SAY_S:
            self._said_s = now_s
            logger.warning(
                "connections are closed: %d files are open; raise ulimit -n, or lower "
                "limits.max_http_connections", self.most,
            )  # fmt: skip
        raise ConnectionAbortedError("no descriptor is left for it")
