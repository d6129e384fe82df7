"""The controller's port for front ends in processes of their own.

Requests of a lost front end run on until clients resume them elsewhere, for
scheduler.held_timeout_us at most.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc

from control_plane.frontend.remote.attendance import Attendance
from control_plane.frontend.remote.messages import (
    FROM_FRONT_END,
    FRONT_END_PORT,
    PAGE,
    PAGE_REQUEST,
    TO_FRONT_END,
    AllSubmitted,
    Drain,
    Drained,
    FrontEndHello,
    Interrupted,
    IssuedSecret,
    Observed,
    OpenFrontEnd,
    Page,
    PageRequest,
    Placed,
    RequestLostTokens,
    Stop,
)
from control_plane.frontend.remote.observations import replay
from control_plane.observe.observer import Observer
from control_plane.ports.controller_interface import (
    ControllerEvents,
    ControllerInterface,
    Submission,
)
from control_plane.ports.members_port import MemberSecrets, bind, caller
from nanocp.config.service import ServiceConfig
from nanocp.values.commands import RefuseBlocks
from nanocp.values.plan import AbortRequested, ClusterLoad, Ended, Placement, Preempted

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 1 << 16
"""Messages down that a front end may leave unread."""
_LOAD_S = 1.0
_THREAD_TIMEOUT_S = 10.0

MakePage = Callable[[], bytes]
"""Makes a page. Raises TimeoutError, with a sentence."""


def name_of(index: int) -> str:
    """Return the name of a front end."""
    return f"front end {index}"


class _Attached:
    def __init__(self, index: int, hello: FrontEndHello) -> None:
        self.index = index
        self.hello = hello
        self._loop = asyncio.get_running_loop()
        self.messages: asyncio.Queue[Any] = asyncio.Queue(_MAX_MESSAGES)
        self.is_open = False
        """Whether it may submit requests."""
        self.num_owed = 0
        """Terms for which it has yet to submit its open requests again."""
        self.drained: Future[bool] = Future()
        self.accepts: Future[None] = Future()
        """Done when it accepts requests, or is lost."""

    def send(self, message: Any) -> None:
        """Queue a message, from any thread; a full queue loses the front end."""
        with suppress(RuntimeError):  # The port is closed.
            self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: Any) -> None:
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            logger.error("%s left %d messages unread", name_of(self.index), _MAX_MESSAGES)
            self.close()

    def close(self) -> None:
        if self.messages.full():
            self.messages.get_nowait()
        self.messages.put_nowait(None)


class FrontEndPort(ControllerEvents):
    """Serves front ends, and is them all for the controller (ControllerEvents)."""

    def __init__(
        self,
        service: ServiceConfig,
        held_timeout_us: int,
        member_secrets: MemberSecrets,
        observer: Observer,
        pages: Mapping[str, MakePage],
        lost: Callable[[int, int], None],
        controller_number: int = 1,
    ) -> None:
        """lost: called with a front end and its pid when its stream has ended; it may block.

        controller_number: see Attendance.
        """
        self.secrets = MemberSecrets()
        """One for each front end's process."""
        self._service, self._attended_s = service, held_timeout_us / 1e6
        self._member_secrets = member_secrets
        self._observer = observer
        self._pages = pages
        self._lost = lost
        self._controller: ControllerInterface | None = None
        self._load: Callable[[], ClusterLoad] = ClusterLoad
        num = service.front_ends
        self._attendance = Attendance(num, controller_number)
        self._attached: dict[int, _Attached] = {}
        self.hellos: list[Future[FrontEndHello]] = [Future() for _ in range(num)]
        """The first hello of each front end."""
        self._lock = threading.Lock()
        self._bound: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="front ends", daemon=True
        )

    # --- start and end ---

    def start(self) -> str:
        """Bind the port behind those of the front ends; return host:port.

        Raises OSError naming the port.
        """
        self._thread.start()
        return self._bound.result()

    def open(
        self, controller: ControllerInterface, load: Callable[[], ClusterLoad]
    ) -> list[Future[None]]:
        """Let every front end accept requests; each future is done when one does."""
        with self._lock:
            self._controller, self._load = controller, load
            for front_end in self._attached.values():
                self._open(front_end)
            return [front_end.accepts for front_end in self._attached.values()]

    @property
    def num_open(self) -> int:
        """The choices that have not ended, or that a client still reads."""
        return self._attendance.num_open

    def begin_drain(self) -> list[Future[bool]]:
        """Ask all to refuse new requests; each future tells if all have ended."""
        with self._lock:
            for front_end in self._attached.values():
                front_end.send(Drain())
            return [front_end.drained for front_end in self._attached.values()]

    def ask_to_stop(self, reason: str) -> None:
        """Ask all to end every request with UNAVAILABLE, and to leave."""
        with self._lock:
            for front_end in self._attached.values():
                front_end.send(Stop(reason))

    def stop(self) -> None:
        """Close the port and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_THREAD_TIMEOUT_S)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            server, address = bind(self._service, self.secrets, 1 + self._service.front_ends)
        except OSError as error:
            self._bound.set_exception(error)
            return
        attach = grpc.stream_stream_rpc_method_handler(
            self._converse, FROM_FRONT_END.decode, TO_FRONT_END.encode
        )
        read_page = grpc.unary_unary_rpc_method_handler(
            self._read_page, PAGE_REQUEST.decode, PAGE.encode
        )
        methods = {"Attach": attach, "ReadPage": read_page}
        handlers = grpc.method_handlers_generic_handler(FRONT_END_PORT, methods)
        server.add_generic_rpc_handlers((handlers,))
        await server.start()
        self._member_secrets.watch(lambda *issued: self._send_to_all(IssuedSecret(*issued)))
        self._bound.set_result(address)
        while not self._stopping.is_set():
            self._send_to_all(self._load())
            try:
                await asyncio.wait_for(self._stopping.wait(), _LOAD_S)
            except TimeoutError:
                continue
        await server.stop(0)

    # --- front ends ---

    async def _converse(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        index = int(caller(context).rpartition(" ")[2])
        first = await anext(aiter(requests), None)
        hello = first if isinstance(first, FrontEndHello) else FrontEndHello()
        if not self.hellos[index].done():
            self.hellos[index].set_result(hello)
        elif hello.failure:
            logger.error("%s cannot serve: %s", name_of(index), hello.failure)
        else:
            logger.info("%s serves again", name_of(index))
        if hello.failure or hello is not first:
            return
        front_end = self._attach(index, hello)
        reader = asyncio.create_task(self._read(front_end, requests))
        try:
            while (message := await front_end.messages.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._end(front_end)
            # It may be stopped, and would keep the place of the next one.
            await asyncio.to_thread(self._lost, index, hello.pid)

    async def _read_page(self, request: PageRequest, context: Any) -> Page:
        try:
            return Page(await asyncio.to_thread(self._pages[request.name]))
        except TimeoutError as error:
            return Page(failure=str(error))

    def _attach(self, index: int, hello: FrontEndHello) -> _Attached:
        if before := self._attached.get(index):
            self._end(before)
        front_end = _Attached(index, hello)
        if hello.newest_id:
            self._attendance.used(hello.newest_id)
        with self._lock:
            self._attached[index] = front_end
            for name, secret in self._member_secrets.issued().items():
                front_end.send(IssuedSecret(name, secret))
            if self._controller is not None:
                self._open(front_end)
        return front_end

    def _open(self, front_end: _Attached) -> None:
        addresses = [each.hello.grpc_address for _, each in sorted(self._attached.items())]
        first_id = self._attendance.first_ids[front_end.index]
        front_end.is_open = True
        front_end.send(self._load())
        front_end.send(OpenFrontEnd(first_id, tuple(addresses)))

    async def _read(self, front_end: _Attached, requests: AsyncIterator[Any]) -> None:
        try:
            async for message in requests:
                if self._attached.get(front_end.index) is not front_end:
                    return
                self._take(front_end, message)
        except grpc.aio.InternalError as error:
            logger.debug("the connection of %s was cut: %s", name_of(front_end.index), error)
        except Exception:
            logger.exception("a message of %s could not be handled", name_of(front_end.index))
        front_end.close()

    def _take(self, front_end: _Attached, message: Any) -> None:
        controller = self._controller
        match message:
            case Observed(calls):
                for ended in replay(calls, self._observer):
                    self._attendance.ended(ended.request_id)
            case Drained(is_complete):
                if not front_end.drained.done():
                    front_end.drained.set_result(is_complete)
            case Submission() if controller is not None:
                self._submitted(front_end, message, controller)
            case AbortRequested(request_id) if controller is not None:
                controller.abort(request_id)
            case RefuseBlocks(blocks) if controller is not None:
                controller.refuse_blocks(blocks)
            case AllSubmitted() if not front_end.accepts.done():
                # It has come to this controller, and has submitted its requests unasked.
                front_end.accepts.set_result(None)
            case AllSubmitted() if controller is not None and front_end.num_owed:
                with self._lock:
                    front_end.num_owed -= 1
                controller.resubmitted()

    def _submitted(
        self, front_end: _Attached, submission: Submission, controller: ControllerInterface
    ) -> None:
        number = submission.request_id
        if self._attendance.owner(number) != front_end.index:
            raise ValueError(f"{name_of(front_end.index)} submitted request {number}")
        # The client has resumed it here.
        for unattended in self._attendance.submitted(number, submission.arrival.client_id):
            controller.abort(unattended)
        controller.submit(submission)

    def _end(self, front_end: _Attached) -> None:
        front_end.close()
        with self._lock:
            if self._attached.get(front_end.index) is not front_end:
                return
            del self._attached[front_end.index]
            num_owed, front_end.num_owed = front_end.num_owed, 0
        requests = self._attendance.lost(front_end.index)
        if not front_end.drained.done():
            front_end.drained.set_result(not requests)
        if not front_end.accepts.done():
            front_end.accepts.set_result(None)
        if self._controller is None:
            return
        for _ in range(num_owed):
            self._controller.resubmitted()
        if requests:
            logger.warning(
                "%s is lost; its %d requests run on for %.0f s; any front end resumes them",
                name_of(front_end.index),
                len(requests),
                self._attended_s,
            )
            self._loop.call_later(self._attended_s, self._release, requests)

    def _release(self, requests: Mapping[int, str]) -> None:
        assert self._controller is not None
        for number in self._attendance.released(requests):
            self._controller.abort(number)

    # --- controller_interface.ControllerEvents ---

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        self._send_to(placement.request_id, Placed(placement, num_cached))

    def preempted(self, preempted: Preempted) -> None:
        self._send_to(preempted.request_id, preempted)

    def interrupted(self) -> int:
        with self._lock:
            answering = [each for each in self._attached.values() if each.is_open]
            for front_end in answering:
                front_end.num_owed += 1
                front_end.send(Interrupted())
        return len(answering)

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        self._send_to(request_id, RequestLostTokens(request_id, sentence))

    def ended(self, ended: Ended) -> None:
        self._send_to(ended.request_id, ended)

    # --- messages down ---

    def _send_to(self, request_id: int, message: Any) -> None:
        with self._lock:
            front_end = self._attached.get(self._attendance.owner(request_id))
        if front_end is not None:
            front_end.send(message)

    def _send_to_all(self, message: Any) -> None:
        with self._lock:
            for front_end in self._attached.values():
                front_end.send(message)
