"""The HTTP server and its socket, in the front end's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from control_plane.frontend.access.api_keys import ApiKeys, OperatorKeys
from control_plane.frontend.access.descriptors import Listener, max_connections
from control_plane.frontend.access.tls import renew_for_ever, uvicorn_options
from control_plane.frontend.client_request import UNREAD_TIMEOUT_S
from control_plane.frontend.http.app import ApiParts, build_app
from control_plane.frontend.http.bounded_protocol import BoundedProtocol, Crowd
from control_plane.frontend.http.middleware import OnResponse
from control_plane.frontend.http.responses_api.store import ResponseStore
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.open_requests import OpenRequests
from control_plane.observe.status_server import SnapshotJson
from nanocp.config.limits import LimitsConfig
from nanocp.config.service import ServiceConfig

logger = logging.getLogger(__name__)

_KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 5, 2
_KEEPALIVE_IDLE_S = UNREAD_TIMEOUT_S - _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES
"""A dead network is noticed as soon as a client that stopped reading."""
_SEND_BUFFER_BYTES = 256 << 10
"""Small, so that unread output waits as tokens, which are counted, and not in the kernel."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection (the openai client 5 s), so none uses a closed
one."""
_STOP_GRACE_S = 1


class HttpServer:
    """The HTTP server of a front end, used in its event loop, except bind."""

    def __init__(
        self,
        service: ServiceConfig,
        limits: LimitsConfig,
        num_instances: int,
        model: ServedModel,
        metrics: Callable[[], bytes],
        snapshot_json: SnapshotJson,
        on_response: OnResponse = lambda endpoint, method, status: None,
    ) -> None:
        self._service, self._limits, self._num_instances = service, limits, num_instances
        self._model, self._metrics = model, metrics
        self._snapshot_json = snapshot_json
        self._on_response = on_response
        self._has_served = False
        self._renewing: asyncio.Task[None] | None = None

    def bind(self, index: int = 0) -> str:
        """Bind service.http_port + index, or a free port for 0; return host:port.

        Raises OSError naming the port.
        """
        host, port = self._service.host, self._service.http_port
        port += index if port else 0
        self._index = index
        self._socket = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.keep_for(self._service, self._num_instances)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What is accepted inherits all these.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        self._socket.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_S * 1000
        )
        try:
            self._socket.bind((host, port))
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            raise OSError(
                f"cannot listen on port {port} of {host}: {error.strerror} (service.http_port)"
            ) from error
        port = self._socket.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self, open_requests: OpenRequests, max_body_bytes: int, keys: ApiKeys) -> None:
        """Answer requests. Those for tokens get 503 until the cluster has opened."""
        limits = self._limits
        most = min(limits.max_http_connections, max_connections(self._service, self._num_instances))
        parts = ApiParts(
            open_requests,
            self._model,
            self._metrics,
            self._snapshot_json,
            lambda: self._has_served,
            self._on_response,
            OperatorKeys(self._service),
            ResponseStore(self._service.responses_store_mib << 20, self._index),
        )
        protocol: Any = partial(
            BoundedProtocol,
            request_timeout_s=limits.http_request_timeout_ms / 1000,
            crowd=Crowd(most, self._socket.began),
        )
        config = uvicorn.Config(
            build_app(parts, max_body_bytes, keys, self._service.cors_origins),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            **uvicorn_options(self._service),
            timeout_graceful_shutdown=_STOP_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        config.load()
        if config.ssl is not None:
            renewing = renew_for_ever(self._service, config.ssl)
            self._renewing = asyncio.create_task(renewing)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    def opened(self) -> None:
        """Record that the cluster is ready for the first time."""
        if not self._has_served:
            unknown = "none that is known (--tool-call-parser names one)"
            logger.info("form of calls of tools: %s", self._model.call_form or unknown)
        self._has_served = True

    async def stop(self) -> None:
        """Close the port. Responses that have begun get a moment to end."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._server.should_exit = True
        await self._serving
