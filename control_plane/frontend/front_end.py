"""A front end: the servers for clients and for delivered tokens, in one event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from control_plane.frontend.access.api_keys import ApiKeys
from control_plane.frontend.access.descriptors import max_connections
from control_plane.frontend.access.tls import server_credentials
from control_plane.frontend.grpc.admission import AdmitCalls
from control_plane.frontend.grpc.servicers import (
    ControlServicer,
    InferenceServicer,
    TokenSinkServicer,
)
from control_plane.frontend.http.server import HttpServer
from control_plane.frontend.open_requests import OpenRequests
from control_plane.frontend.streams import ClientStreams
from control_plane.frontend.text.tokenizer import Tokenizer
from control_plane.frontend.validation import ModelLimits
from control_plane.observe.observer import Observer
from control_plane.ports import members_port
from control_plane.ports.addresses import advertised_host, join
from control_plane.ports.controller_interface import ControllerEvents, ControllerInterface
from control_plane.ports.members_port import MemberSecrets
from nanocp.config.whole import Config
from nanocp.values.plan import ClusterLoad, Ended, Placement, Preempted
from nanocp.wire.keepalive import keepalive_options
from nanocp.wire.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CONTROL = inference_pb2.DESCRIPTOR.services_by_name["Control"].full_name

_DRAIN_REPORT_S = 5.0
_DRAIN_LATE_S = 10.0
"""Longest wait for the answer to a drain whose time is over."""
_LAST_WORD_S = 1.0
"""Longest wait for clients to take the status that ends their requests."""
_CLOSE_GRACE_S = 0.2
"""Longest wait for streams that others end (an instance's tokens) before they are cut."""
_THREAD_TIMEOUT_S = 10.0
"""Longest wait for the front end's own thread to bind or to end."""

_Serving = health_pb2.HealthCheckResponse


class FrontEnd(ControllerEvents):
    """One front end of a service, usable from any thread: start, open, drain, stop."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        member_secrets: MemberSecrets,
        observer: Observer,
        http: HttpServer | None = None,
        index: int = 0,
        is_remote: bool = False,
    ) -> None:
        """Without a tokenizer, text prompts are refused and responses have token ids only.

        member_secrets: of members that deliver tokens. index: its number in service.front_ends.
        is_remote: see ClientStreams.
        """
        self._is_remote = is_remote
        self._config = config
        self._tokenizer = tokenizer
        self._limits = limits
        self._member_secrets = member_secrets
        self._observer = observer
        self._http = http
        self.http_address = ""
        """host:port of the HTTP API, once started; empty without HTTP."""
        self.members_address = ""
        """host:port where members deliver tokens, once started."""
        self._index = index
        self._losing: set[int] = set()
        """Requests that have lost tokens, and will be submitted again."""
        self._address: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="front end", daemon=True)

    # --- start and end ---

    def start(self) -> str:
        """Bind the ports, each + index; return `address`. Requests get UNAVAILABLE until `open`.

        Raises OSError, naming the port, if one cannot be bound.
        """
        self._thread.start()
        return self.address

    @property
    def address(self) -> str:
        """Host:port for gRPC clients."""
        return self._address.result(_THREAD_TIMEOUT_S)

    @property
    def events(self) -> ControllerEvents:
        """The receiver of the controller's callbacks."""
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address, of the only front end of a service."""
        return (self.address,)

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """The address of the HTTP API, once started."""
        return (self.http_address,)

    def open(
        self,
        controller: ControllerInterface,
        load: Callable[[], ClusterLoad] = ClusterLoad,
        front_ends: Sequence[str] = (),
        first_id: int = 0,
    ) -> None:
        """Accept requests from now on, and send them to the controller.

        `load` may be called from its thread. first_id: number of the first request.
        """
        self._call(lambda: self._open(controller, load, front_ends or (self.address,), first_id))

    def drain(self, report: Callable[[int, float], None] = lambda num_open, left_s: None) -> bool:
        """Refuse new requests and wait for the open ones; True if all have ended.

        Waits at most limits.drain_timeout_ms. `report` gets the number of open requests and the
        seconds left.
        """
        if not self._thread.is_alive():
            return True
        timeout_s = self._config.limits.drain_timeout_ms / 1000
        drain = asyncio.run_coroutine_threadsafe(self._drain(timeout_s), self._loop)
        return await_drains([drain], timeout_s, lambda s: report(self.num_open, s))

    @property
    def num_open(self) -> int:
        """The choices that have not ended, or that a client still reads."""
        return self._open_requests.num_open if self._address.done() else 0

    def stop(self, reason: str = "the service is stopping") -> None:
        """End every open request with UNAVAILABLE, close the ports, end the thread. Idempotent."""

        def request() -> None:
            if not self._stop_requested.done():
                self._stop_requested.set_result(reason)

        if self._thread.is_alive():
            self._call(request)
            self._thread.join(_THREAD_TIMEOUT_S)

    # --- the controller's callbacks ---

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        self._call(lambda: self._streams.placed(placement, num_cached))

    def preempted(self, preempted: Preempted) -> None:
        self._call(lambda: self._streams.preempted(preempted))

    def interrupted(self, cause: str = "term") -> int:
        """Submit every open request again. cause: see Observer.on_token."""
        self._call(lambda: self._streams.interrupted(cause))
        return 1

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        self._call(lambda: self._tokens_lost(request_id, sentence))

    def ended(self, ended: Ended) -> None:
        self._call(lambda: self._streams.ended(ended))

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The loop has ended, and with it every request.
            logger.debug("the front end has stopped; a call was dropped")

    # --- the thread ---

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            if self._address.done():
                raise
            self._address.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_requested: asyncio.Future[str] = self._loop.create_future()
        service = self._config.service
        if self._http:
            self.http_address = self._http.bind(self._index)
        options = _server_options(self._limits.max_model_len, self._config)
        keys = ApiKeys(service.api_keys, service.api_keys_file, service.cache_salt_by_key)
        server = grpc.aio.server(interceptors=(AdmitCalls(keys),), options=options)
        port = members_port.add_port(
            server,
            service.host,
            service.grpc_port + self._index if service.grpc_port else 0,
            "(service.host, service.grpc_port)",
            server_credentials(service),
        )
        address = join(advertised_host(service), port)
        # The controller has the first port for members.
        members, self.members_address = members_port.bind(
            service, self._member_secrets, 1 + self._index
        )
        await self._add_services(server, keys)
        sink = TokenSinkServicer(self._streams, self._config.cluster)
        members.add_generic_rpc_handlers((sink.methods(),))
        await server.start()
        await members.start()
        if self._http:
            await self._http.start(
                self._open_requests, _max_request_bytes(self._limits.max_model_len), keys
            )
        self._address.set_result(address)
        try:
            reason = await self._stop_requested
            self._open_requests.closed_because = reason
            await self._health.enter_graceful_shutdown()
            self._streams.end_all(reason)
            await self._wait_idle(_LAST_WORD_S)
        finally:
            if self._http:
                await self._http.stop()
            # A server that is not stopped before its loop ends hangs the process at exit.
            await asyncio.gather(server.stop(_CLOSE_GRACE_S), members.stop(_CLOSE_GRACE_S))

    async def _add_services(self, server: grpc.aio.Server, keys: ApiKeys) -> None:
        limits = self._config.limits
        cluster = self._config.cluster
        self._streams = ClientStreams(
            self.members_address,
            limits.max_undelivered_tokens,
            self._observer,
            id_step=self._config.service.front_ends,
            steps_per_window=self._config.scheduler.steps_per_window,
            is_remote=self._is_remote,
            hashes_output=self._config.has_slots,
        )
        # A request that is not queued holds at least one frame, so no more than this can be open.
        max_open = (
            self._config.scheduler.max_queued_requests + cluster.num_instances * cluster.num_frames
        )
        self._open_requests = OpenRequests(self._streams, self._limits, self._tokenizer, max_open)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(self._open_requests, keys), server
        )
        dtype, policy = self._config.data_plane.dtype, self._config.scheduler.policy
        self._control = ControlServicer(cluster, dtype, policy, self._open_requests, self._streams)
        inference_pb2_grpc.add_ControlServicer_to_server(self._control, server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (INFERENCE, CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, _clients_schema())
        await self._set_health(_Serving.NOT_SERVING)
        await self._health.set(CONTROL, _Serving.SERVING)

    async def _set_health(self, status: int) -> None:
        """Control serves while the port is open, so its health is left out."""
        await self._health.set(health.OVERALL_HEALTH, status)
        await self._health.set(INFERENCE, status)

    def _tokens_lost(self, request_id: int, sentence: str) -> None:
        """Wait until the instance may open another stream, so as not to lose tokens again."""
        if request_id in self._losing:
            return

        def try_again() -> None:
            self._losing.discard(request_id)
            self._streams.tokens_lost(request_id, sentence)

        self._losing.add(request_id)
        self._loop.call_later(self._config.limits.retry_ms / 1000, try_again)

    def _open(
        self,
        controller: ControllerInterface,
        load: Callable[[], ClusterLoad],
        front_ends: Sequence[str],
        first_id: int,
    ) -> None:
        self._streams.connect(controller, first_id)
        self._control.opened(load, front_ends)
        self._open_requests.closed_because = ""
        if self._http:
            self._http.opened()
        self._opening = self._loop.create_task(self._set_health(_Serving.SERVING))

    async def _drain(self, timeout_s: float) -> bool:
        self._open_requests.closed_because = "the service is draining; it takes no new requests"
        await self._set_health(_Serving.NOT_SERVING)
        return await self._wait_idle(timeout_s)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._open_requests.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def await_drains(
    drains: Sequence[Future[bool]], timeout_s: float, report: Callable[[float], None]
) -> bool:
    """Wait until front ends have drained, within timeout_s; True if all requests have ended.

    `report` gets the seconds left now and then.
    """
    until_s = time.monotonic() + timeout_s
    while wait(drains, _DRAIN_REPORT_S).not_done:
        if (left_s := until_s - time.monotonic()) <= -_DRAIN_LATE_S:
            return False
        report(max(left_s, 0.0))
    return all(drain.result() for drain in drains)


def _clients_schema() -> DescriptorPool:
    pool = DescriptorPool()
    for module in (inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return pool


def _max_request_bytes(max_model_len: int) -> int:
    """Prompt ids take at most 8 bytes each and texts rarely more."""
    return max(4 << 20, 16 * max_model_len)


def _server_options(max_model_len: int, config: Config) -> tuple[tuple[str, int], ...]:
    most = max_connections(config.service, config.cluster.num_instances)
    return (
        ("grpc.max_allowed_incoming_connections", most),
        # Until then a client that says nothing holds one of these.
        ("grpc.server_handshake_timeout_ms", config.limits.http_request_timeout_ms),
        ("grpc.max_receive_message_length", _max_request_bytes(max_model_len)),
        # Two services on one port would share its connections at random.
        ("grpc.so_reuseport", 0),
        # A dead network is noticed, and the requests of its clients are aborted, within 90 s.
        *keepalive_options(every_ms=30_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    )
