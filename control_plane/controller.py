"""The loop: drain events -> plan_window -> push plans -> collect. It decides nothing.

Enters: submissions and aborts from the front end, events from the members. Leaves: plans, tickets
and fences to the members, placements and ends to the front end. Does not know: tokens, models, how
a member's process was started.

A member is an instance or the prefill. The brain is called once per window while two are in flight,
else at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import grpc

from control_plane.addresses import advertised_host, join
from control_plane.event_log import EventLog
from control_plane.frontend.controller_interface import ControllerEvents, Submission
from control_plane.links import PREFILL, SERVER_OPTIONS, Link, MemberServicer, instance_name
from control_plane.observe.cluster_view import ClusterView
from control_plane.observe.metrics import Metrics
from control_plane.scheduler.scheduler import MAX_WINDOWS_IN_FLIGHT, Scheduler
from control_plane.windows import WindowsInFlight
from nanocp.config import Config
from nanocp.plan import (
    AbortRequested,
    Arrival,
    Ended,
    Event,
    Fence,
    FinishReason,
    InstanceLost,
    InstancePlan,
    Plan,
    Transfer,
    TransferDone,
    TransferFailed,
    TransferFenced,
    WindowDone,
)
from nanocp.wire import convert
from nanocp.wire.v1 import cluster_pb2 as pb
from nanocp.wire.v1 import cluster_pb2_grpc as rpc

logger = logging.getLogger(__name__)

_STREAMS_GRACE_S = 1.0
"""Longest wait for the members' streams to take their last message."""
_THREAD_TIMEOUT_S = 10.0
"""Longest wait for the controller's thread to end."""


class StartError(RuntimeError):
    """The cluster cannot start; the message says which member and why."""


class Controller:
    """The shell around one brain, in a thread of its own.

    Public methods may be called from any thread; the front end's callbacks come from the
    controller's.
    """

    def __init__(
        self,
        config: Config,
        cluster_id: str,
        front_end: ControllerEvents,
        metrics: Metrics,
        view: ClusterView,
    ) -> None:
        """`cluster_id` prefixes every shared-memory name of the cluster. With synthetic KV there is
        no prefill.

        Raises ValueError for an unknown policy, OSError if the event log cannot be written.
        """
        self._config = config
        self._cluster_id = cluster_id
        self._front_end = front_end
        self._metrics = metrics
        self._view = view
        self._scheduler = Scheduler(config.cluster, config.scheduler)
        event_log = config.service.event_log
        self._event_log = (
            EventLog(Path(event_log), config.cluster, config.scheduler) if event_log else None
        )
        self._windows = WindowsInFlight(config.cluster.num_instances)
        self._events: list[Event] = []
        self._submitted: dict[int, Submission] = {}
        """By request, from submit until its prompt is on its way to the prefill."""
        self._transfers: dict[int, set[int]] = {}
        """By ticket: the instances that have not answered for it."""
        self._links: dict[str, Link] = {}
        self._lost: set[str] = set()
        self._ready: dict[str, tuple[str, ...]] = {}
        self._overdue: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._num_queued = 0
        """Submissions that the controller's thread has not taken."""
        self._lock = threading.Lock()
        self._stopping: str | None = None
        """Why every member is told to leave."""
        self._bound: Future[str] = Future()
        self._started: Future[None] = Future()
        self.failure: Future[str] = Future()
        """Done when a running cluster can no longer serve: the sentence that says why."""
        self.is_planning = True
        """False: the brain itself failed, and no running request will end by itself."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="controller", daemon=True
        )

    @property
    def members(self) -> list[str]:
        """Everybody who must be ready."""
        names = [instance_name(instance) for instance in range(self._config.cluster.num_instances)]
        return names if self._config.prefill.synthetic_kv else [*names, PREFILL]

    # --- life ---

    def start(self, progress: Callable[[str], None], loading: Callable[[str, int], None]) -> str:
        """Bind the door for members on a free port; returns its host:port. Raises OSError if that
        is impossible.

        `progress` is told of every member that is ready, `loading` of each percent of the weights
        that a member has loaded, from the controller's thread.
        """
        self._progress = progress
        self._loading = loading
        self._thread.start()
        return self._bound.result()

    def wait_ready(self) -> dict[str, tuple[str, ...]]:
        """Wait for every member; returns what each chose at start-up. Raises StartError naming who
        failed."""
        limit_ms = self._config.limits.start_timeout_ms
        try:
            self._started.result(limit_ms / 1000)
        except TimeoutError:
            absent = ", ".join(name for name in self.members if name not in self._ready)
            raise StartError(
                f"not ready after start_timeout_ms ({limit_ms} ms): {absent}"
            ) from None
        return {name: self._ready[name] for name in self.members}

    def member_exited(self, name: str, message: str) -> None:
        """The member's process has ended, expected or not."""
        self._call(self._lose, name, f"{name}: {message}")

    def leave(self, reason: str) -> None:
        """Plan no more and tell every member to leave, also those that attach from now on.
        Idempotent."""
        if self._thread.is_alive():
            self._call(self._leave, reason)

    def stop(self) -> None:
        """Close the door and end the thread. No member must be dialling any more: see `leave`.
        Idempotent."""
        if self._thread.is_alive():
            self._call(self._left.set)
            self._thread.join(_THREAD_TIMEOUT_S)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = asyncio.Event()
        self._left = asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_ControllerServicer_to_server(MemberServicer(self), server)
        host = self._config.service.host
        try:
            port = server.add_insecure_port(join(host, 0))
            await server.start()
        except (RuntimeError, OSError) as error:
            self._bound.set_exception(OSError(f"cannot listen on {host}: {error} (service.host)"))
            return
        self._bound.set_result(join(advertised_host(self._config.service), port))
        self._planner = asyncio.create_task(self._plan_for_ever())
        self._publisher = asyncio.create_task(self._view.publish_for_ever(self._scheduler))
        await self._left.wait()
        self._planner.cancel()
        await server.stop(_STREAMS_GRACE_S)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop has ended, and nobody is left to tell.
            logger.debug("the controller has stopped; a call was dropped")

    def _leave(self, reason: str) -> None:
        if self._stopping is not None:
            return
        self._stopping = reason
        self._planner.cancel()
        if self._event_log is not None:
            self._event_log.close()
        if self._overdue is not None:
            self._overdue.cancel()
        for link in self._links.values():
            self._shut_down(link, reason)

    def _shut_down(self, link: Link, reason: str) -> None:
        self._send(link, _kind(link.name)(shutdown=pb.Shutdown(reason=reason)))
        link.close()

    # --- the front end's door ---

    def submit(self, submission: Submission) -> None:
        """See controller_door.ControllerDoor."""
        limit = self._config.scheduler.max_queued_requests
        with self._lock:
            is_full = self._num_queued >= limit and not submission.resumes
            self._num_queued += not is_full
        if is_full:
            message = f"max_queued_requests ({limit}) requests wait for the controller itself"
            self._tell_ended(Ended(submission.request_id, FinishReason.REFUSED, message))
        else:
            self._call(self._take, submission)

    def abort(self, request_id: int) -> None:
        """See controller_door.ControllerDoor."""
        self._call(self._happened, AbortRequested(request_id))

    def _take(self, submission: Submission) -> None:
        with self._lock:
            self._num_queued -= 1
        self._submitted[submission.request_id] = submission
        arrival = Arrival(
            submission.request_id,
            submission.prompt_len,
            submission.max_tokens,
            submission.row_start,
            priority=submission.priority,
            deadline_us=None
            if submission.queue_timeout_us is None
            else _now_us() + submission.queue_timeout_us,
            resumes=submission.resumes,
            page_hashes=submission.page_hashes,
        )
        self._happened(arrival)

    # --- the loop ---

    def _happened(self, event: Event) -> None:
        """Keep the event for the brain, and call it if it could act on it now."""
        self._events.append(event)
        # After a loss nobody may report a window again, and whoever still comes must be told.
        if self._lost or len(self._windows) < MAX_WINDOWS_IN_FLIGHT:
            self._due.set()

    async def _plan_for_ever(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                self._plan()
            except Exception as error:
                # A brain that fails an assertion must not plan on; the streams must not wait for it
                # either.
                logger.exception("the controller's loop failed")
                self.is_planning = False
                self._fail(f"the controller failed: {type(error).__name__}: {error}")
                return

    def _plan(self) -> None:
        events, self._events = self._events, []
        began_ns = time.monotonic_ns()
        plan: Plan | None = None
        try:
            plan = self._scheduler.plan_window(events, began_ns // 1000)
            self._metrics.planned(
                (time.monotonic_ns() - began_ns) / 1e9, self._scheduler, plan.window is not None
            )
            self._view.planned(began_ns // 1000, events, plan)
            self._carry_out(plan)
        finally:
            # Nobody waits for the log: the plan is on its way. A call in which the brain fails is
            # written too.
            if self._event_log is not None:
                self._event_log.write(began_ns // 1000, events, plan)
        # What this plan did (a window sent, frames freed) may let the next call do more.
        if plan != _NOTHING and len(self._windows) < MAX_WINDOWS_IN_FLIGHT:
            self._due.set()

    def _carry_out(self, plan: Plan) -> None:
        for transfer in plan.transfers:
            self._start_transfer(transfer)
        for fence in plan.fences:
            self._fence(fence)
        if plan.window is not None:
            self._windows.sent(plan.instances)
            for instance_plan in plan.instances:
                self._send_plan(instance_plan)
            if len(self._windows) == 1:
                self._watch_window()
        for placement in plan.placements:
            if self._submitted.pop(placement.request_id, None) is not None:
                self._metrics.placed(placement.cp_degree)
            else:
                self._metrics.binding_changed()
            self._front_end.placed(placement)
        for preempted in plan.preempted:
            self._metrics.preempted()
            self._front_end.preempted(preempted)
        for ended in plan.ended:
            self._submitted.pop(ended.request_id, None)
            self._tell_ended(ended)
        self._watch_deadline()

    def _tell_ended(self, ended: Ended) -> None:
        self._metrics.ended(ended)
        self._front_end.ended(ended)

    def _send(self, link: Link, message: pb.ToInstance | pb.ToPrefill) -> None:
        if not link.send(message) and not link.closed:
            link.close()
            self._lose(link.name, f"{link.name} left {link.max_messages} messages unread")

    def _to_instance(self, instance: int, message: pb.ToInstance) -> None:
        self._send(self._links[instance_name(instance)], message)

    def _send_plan(self, plan: InstancePlan) -> None:
        self._to_instance(plan.instance, pb.ToInstance(plan=convert.instance_plan_to_wire(plan)))

    def _start_transfer(self, transfer: Transfer) -> None:
        """Tell each receiver its own pages and the prefill all of them.

        The two ways are not ordered: a receiver keeps a page in its ring until the ticket's
        `expect` has come.
        """
        for instance in transfer.receivers:
            own = tuple(target for target in transfer.targets if target.instance == instance)
            expect = convert.transfer_to_wire(replace(transfer, targets=own))
            self._to_instance(instance, pb.ToInstance(expect=expect))
        if transfer.source is not None:
            self._to_instance(
                transfer.source, pb.ToInstance(send=convert.transfer_to_wire(transfer))
            )
            self._metrics.moving(len(transfer.instances()))
            return
        self._transfers[transfer.ticket] = set(transfer.receivers)
        if self._config.prefill.synthetic_kv:
            return
        if PREFILL in self._lost:
            self._happened(TransferFailed(transfer.ticket, "the prefill was lost"))
            return
        submission = self._submitted[transfer.request_id]
        # What is told of a token needs the id behind it.
        num_ids = transfer.num_tokens + (submission.prompt_logprobs is not None)
        request = pb.PrefillRequest(
            transfer=convert.transfer_to_wire(transfer),
            token_ids=submission.prompt_ids[:num_ids],
            prompt_logprobs=submission.prompt_logprobs,
            front_end=submission.front_end,
        )
        self._send(self._links[PREFILL], pb.ToPrefill(prefill=request))

    def _fence(self, fence: Fence) -> None:
        for instance in fence.instances:
            self._to_instance(instance, pb.ToInstance(fence=fence.ticket))
        if PREFILL in self._links:
            self._send(self._links[PREFILL], pb.ToPrefill(cancel=fence.ticket))

    def _watch_deadline(self) -> None:
        """The brain is called again when the next waiting request expires, whatever else happens."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        deadline_us = self._scheduler.next_deadline_us
        if deadline_us is not None:
            self._deadline = self._loop.call_later(
                max(0, deadline_us - _now_us()) / 1e6, self._due.set
            )

    def _watch_window(self) -> None:
        """Bounded waits (docs/protocol.md): the oldest window has a limit. Instances find a dead
        peer first, and name it."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        if self._windows.oldest is not None:
            limits = self._config.limits
            limit_s = (limits.plan_timeout_ms + limits.exchange_timeout_ms) / 1000
            self._overdue = self._loop.call_later(limit_s, self._window_overdue, limit_s)

    def _window_overdue(self, limit_s: float) -> None:
        for instance in self._windows.missing():
            name = instance_name(instance)
            self._lose(
                name, f"{name} did not report window {self._windows.oldest} in {limit_s:.0f} s"
            )

    # --- members (links.Listener) ---

    def attach(self, name: str, where: pb.Peer | None = None) -> Link:
        """See links.Listener."""
        if name not in self.members:
            raise ValueError(f"this cluster has no {name}; it has {', '.join(self.members)}")
        if name in self._links:
            raise ValueError(f"{name} is attached already")
        link = self._links[name] = Link(name, where=where)
        welcome = pb.Welcome(
            num_instances=self._config.cluster.num_instances, cluster_id=self._cluster_id
        )
        self._send(link, _kind(name)(welcome=welcome))
        if self._stopping is not None:
            self._shut_down(link, self._stopping)
            return link
        if len(self._links) == len(self.members):
            connect = pb.Connect(
                peers=[self._links[name].where for name in self.members if name != PREFILL]
            )
            for member in self._links.values():
                self._send(member, _kind(member.name)(connect=connect))
        return link

    def loading(self, name: str, percent: int) -> None:
        """See links.Listener."""
        if name in self.members:
            self._loading(name, percent)

    def received(self, name: str, message: pb.FromInstance | pb.FromPrefill) -> None:
        """See links.Listener."""
        if isinstance(message, pb.FromPrefill):
            self._from_prefill(message)
        else:
            self._from_instance(int(name.split()[1]), message)

    def _from_prefill(self, message: pb.FromPrefill) -> None:
        match message.WhichOneof("message"):
            case "loading_percent":
                self.loading(PREFILL, message.loading_percent)
            case "ready":
                self._is_ready(PREFILL, (f"process {message.ready.pid}",))
            case _:
                self._happened(TransferFailed(message.failed.ticket, message.failed.message))

    def _from_instance(self, instance: int, message: pb.FromInstance) -> None:
        match message.WhichOneof("message"):
            case "ready":
                graphs = f"graphs: {message.ready.num_graphs} prepared"
                self._is_ready(instance_name(instance), (*message.ready.choices, graphs))
            case "window_done":
                self._window_done(convert.window_done_from_wire(instance, message.window_done))
            case "transfer_done":
                self._answered(TransferDone(message.transfer_done.ticket, instance))
            case "transfer_fenced":
                self._answered(TransferFenced(message.transfer_fenced.ticket, instance))
            case "resync":
                self._resync(instance, message.resync)
            case "tokens_lost":
                self._tokens_lost(instance, message.tokens_lost)
            case kind:
                raise ValueError(f"instance {instance} sent {kind}, which has no meaning here")

    def _is_ready(self, name: str, choices: tuple[str, ...]) -> None:
        self._ready[name] = choices
        self._progress(f"{len(self._ready)} of {len(self.members)} processes are ready")
        if len(self._ready) == len(self.members) and not self._started.done():
            self._started.set_result(None)

    def _window_done(self, done: WindowDone) -> None:
        is_complete = self._windows.reported(done.instance, done.window)
        self._metrics.stepped(done, is_complete)
        self._events.append(done)
        if is_complete:
            self._watch_window()
            self._due.set()

    def _answered(self, event: TransferDone | TransferFenced) -> None:
        receivers = self._transfers.get(event.ticket, set())
        receivers.discard(event.instance)
        if not receivers:
            self._transfers.pop(event.ticket, None)
        self._happened(event)

    def _resync(self, instance: int, request: pb.ResyncRequest) -> None:
        logger.warning(
            "instance %d needs the full table of window %d: %s",
            instance,
            request.window,
            request.reason,
        )
        self._metrics.resynced()
        self._send_plan(self._windows.full_plan(instance, request.window))

    def _tokens_lost(self, instance: int, lost: pb.TokensLost) -> None:
        """Ordered tokens (docs/protocol.md): the request is aborted, the step never waits. Its
        client is told even if its row has stopped."""
        for request_id in lost.request_ids:
            self._front_end.ended(
                Ended(request_id, FinishReason.FAILED, f"instance {instance}: {lost.reason}")
            )
            self._happened(AbortRequested(request_id))

    def failed(self, name: str | None, message: str) -> None:
        """See links.Listener."""
        if name is None:
            self._fail(message)
        else:
            self._lose(name, message)

    def _lose(self, name: str, message: str) -> None:
        """A member is gone for good; the cluster ends with it."""
        if self._stopping is not None or name in self._lost:
            return
        self._lost.add(name)
        self._fail(message)
        if name == PREFILL:
            for ticket in self._transfers:
                self._happened(TransferFailed(ticket, "the prefill was lost"))
        else:
            self._happened(InstanceLost(int(name.split()[1])))

    def _fail(self, message: str) -> None:
        if self._stopping is not None:
            return
        if not self._started.done():
            self._started.set_exception(StartError(message))
        elif not self.failure.done():
            logger.info("%s", message)
            self.failure.set_result(message)


_NOTHING = Plan(None)


def _now_us() -> int:
    """The brain's time."""
    return time.monotonic_ns() // 1000


def _kind(name: str) -> type[pb.ToInstance] | type[pb.ToPrefill]:
    return pb.ToPrefill if name == PREFILL else pb.ToInstance
