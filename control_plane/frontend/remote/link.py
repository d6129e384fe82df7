"""The stream to the controller from a front end in its own process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Full, Queue
from typing import Any

import grpc

from control_plane.frontend.front_end import FrontEnd
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
    PageRequest,
    Placed,
    RequestLostTokens,
    Stop,
)
from control_plane.frontend.remote.observations import Observations
from control_plane.ports.controller_interface import ControllerInterface, Submission
from control_plane.ports.members_port import SERVER_OPTIONS, MemberSecrets
from nanocp.parent import starter
from nanocp.values.commands import RefuseBlocks
from nanocp.values.plan import AbortRequested, ClusterLoad, Ended, Preempted
from nanocp.values.remote_blocks import RemoteBlocks
from nanocp.wire.members import why_broken

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 1 << 16
"""Longest queue up; it fills only if the controller takes nothing for seconds."""
_OBSERVE_S = 0.2
_PAGE_TIMEOUT_S = 5.0
_REDIAL_S = 0.3


class RemoteController(ControllerInterface):
    """The controller, as a front end in another process has it (ControllerInterface)."""

    def __init__(
        self,
        address: str,
        metadata: Sequence[tuple[str, str]],
        observations: Observations,
        orphan_ms: float = 0,
    ) -> None:
        """address: host:port of the controller's port for front ends. metadata: of every call.

        orphan_ms: the wait for another controller after a loss.
        """
        self._address = address
        self._metadata = metadata
        self._observations = observations
        self._orphan_s = orphan_ms / 1000
        self._why_broken = ""
        self._load = ClusterLoad()
        self._newest_id = 0
        """Number of the newest submitted request; 0: none."""
        self._has_heard = False
        """Whether the present controller has said anything."""
        self._is_over = threading.Event()
        self._outbox: Queue[Any] = Queue(_MAX_MESSAGES)

    def _dial(self, hello: FrontEndHello) -> None:
        """Attach to a controller. Messages for an earlier one are dropped."""
        outbox: Queue[Any] = Queue(_MAX_MESSAGES)
        outbox.put(hello)
        before, self._outbox = self._outbox, outbox
        with suppress(Full):
            before.put_nowait(None)
        self._has_heard = False
        self._channel = grpc.insecure_channel(self._address, options=SERVER_OPTIONS)
        attach = self._channel.stream_stream(
            f"/{FRONT_END_PORT}/Attach", FROM_FRONT_END.encode, TO_FRONT_END.decode
        )
        self._call = attach(iter(outbox.get, None), metadata=self._metadata)

    def submit(self, submission: Submission) -> None:
        self._newest_id = max(self._newest_id, submission.request_id)
        self._send(submission)

    def resubmitted(self) -> None:
        self._send(AllSubmitted())

    def abort(self, request_id: int) -> None:
        self._send(AbortRequested(request_id))

    def refuse_blocks(self, blocks: RemoteBlocks) -> None:
        self._send(RefuseBlocks(blocks))

    def load(self) -> ClusterLoad:
        """Return the cluster's load, at most a second old."""
        return self._load

    def page(self, name: str) -> bytes:
        """Return a page of the controller's process. Raises TimeoutError, with a sentence."""
        read_page = self._channel.unary_unary(
            f"/{FRONT_END_PORT}/ReadPage", PAGE_REQUEST.encode, PAGE.decode
        )
        try:
            page = read_page(PageRequest(name), timeout=_PAGE_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise TimeoutError(f"the controller does not answer: {error.code().name}") from error
        if page.failure:
            raise TimeoutError(page.failure)
        return bytes(page.content)

    def fail(self, message: str) -> None:
        """Report why the front end cannot serve, instead of `converse`."""
        self._dial(FrontEndHello(failure=message))
        self._send(None)
        for _ in self._call:
            pass
        self._channel.close()

    def converse(self, front_end: FrontEnd, secrets: MemberSecrets) -> str:
        """Say hello, then pass on messages until the controller ends it; return the reason.

        Another controller that replaces it gets every open request again.
        """
        threading.Thread(target=self._observe_for_ever, name="observations", daemon=True).start()
        left_s, parent = 0.0, starter()
        while True:
            reason = self._converse(front_end, secrets)
            if reason is not None:
                return reason
            if self._has_heard:
                left_s = self._orphan_s
                if self._orphan_s:
                    logger.warning(
                        "the controller is lost; another one is waited for, %.0f s at most",
                        self._orphan_s,
                    )
            if left_s <= 0 or os.getppid() != parent:
                return "the controller is lost"
            self._channel.close()
            # A process that was stopped has not waited meanwhile.
            time.sleep(_REDIAL_S)
            left_s -= _REDIAL_S

    def _converse(self, front_end: FrontEnd, secrets: MemberSecrets) -> str | None:
        """Serve one controller; return its reason to end, or None if it is lost."""
        hello = FrontEndHello(
            grpc_address=front_end.address,
            http_address=front_end.http_address,
            pid=os.getpid(),
            newest_id=self._newest_id,
        )
        self._dial(hello)
        try:
            for message in self._call:
                self._has_heard = True
                if isinstance(message, Stop):
                    return message.reason
                self._take(message, front_end, secrets)
        except grpc.RpcError as error:
            why = why_broken(error)
            if why != self._why_broken:  # it is dialled again and again
                logger.info("the controller's stream broke: %s", why)
            self._why_broken = why
        return None

    def close(self) -> None:
        """Send all queued messages and end the stream."""
        self._is_over.set()
        self._observe()
        self._send(None)
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            logger.debug("the controller took no last word: %s", error)
        self._channel.close()

    def _take(self, message: Any, front_end: FrontEnd, secrets: MemberSecrets) -> None:
        match message:
            case OpenFrontEnd(first_id, front_ends):
                front_end.open(self, self.load, front_ends, first_id)
                front_end.interrupted("controller")
            case IssuedSecret(name, secret):
                secrets.take(name, secret)
            case Placed(placement, num_cached):
                front_end.placed(placement, num_cached)
            case Preempted():
                front_end.preempted(message)
            case Interrupted():
                front_end.interrupted()
            case RequestLostTokens(request_id, sentence):
                front_end.tokens_lost(request_id, sentence)
            case Ended():
                front_end.ended(message)
            case ClusterLoad():
                self._load = message
            case Drain():
                threading.Thread(target=self._drain, args=(front_end,), daemon=True).start()

    def _drain(self, front_end: FrontEnd) -> None:
        is_complete = front_end.drain()
        self._send(Drained(is_complete))

    def _observe_for_ever(self) -> None:
        while not self._is_over.wait(_OBSERVE_S):
            self._observe()

    def _observe(self) -> None:
        self._send(Observed(self._observations.take()))

    def _send(self, message: Any) -> None:
        try:
            self._outbox.put_nowait(message)
        except Full:
            # The stream ends, and the front end with it.
            logger.error("the controller left %d messages unread", _MAX_MESSAGES)
            self._call.cancel()
