"""The process of an instance: drives it by the controller's messages, sends its tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty
from typing import Any, Protocol

from data_plane.instance.interface import Instance, TermStart
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.page_ring import PageRing
from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.heartbeat import Heartbeat
from data_plane.member.lifetime import (
    Make,
    MemberSpec,
    meet,
    run_under_controllers,
    running,
    segments_of,
    whole_percents,
)
from data_plane.member.term_loop import TermLoop, wake
from data_plane.member.token_streams import TokenStreams
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig
from nanocp.values.commands import ChangeExperts, ExpectPages, Join, RefusePages, SendPages
from nanocp.values.members import Beat, Hello, Left, Loading, Peer, Ready
from nanocp.values.plan import Fetch, InstancePlan, Stow, TargetRun

logger = logging.getLogger(__name__)

_JOIN_S = 10.0
_RING_WAIT_MS = 1000


class ClusterInstance(Instance, Protocol):
    """An instance whose peers are other processes."""

    @property
    def selected(self) -> list[str]:
        """The selections at start-up with reasons, one sentence each."""

    @property
    def rings(self) -> Sequence[PageRing]:
        """The rings of the prefill's writers in this term, one each."""

    @property
    def copier(self) -> PageCopier | None:
        """The copier of pages between frames and slots; None without kv_offload."""

    @property
    def awaited(self) -> int | None:
        """The instance that blocks a wait now, for any thread."""

    def enter(self, start: TermStart) -> int:
        """Join a term together with the peers; returns the number of graphs."""


MakeLoop = Callable[[Any, ControllerLink, TokenStreams, Segments, LimitsConfig], TermLoop]


def run_instance(
    spec: MemberSpec, make: Make | None = None, make_loop: MakeLoop | None = None
) -> None:
    """Run the instance or stage until the controller asks for a shutdown.

    `spec.factory`: callable(config, instance, segments, checkpoint, progress); `make_loop` drives
    its product. make: a factory that has loaded much already. Raises FailureReported or
    ControllerLost if the instance failed, after releasing everything.
    """
    assert spec.instance is not None
    limits = spec.config.limits
    with running(spec) as (link, held):
        loading = whole_percents(lambda percent: link.send(Loading(percent)))
        segments = segments_of(spec, link.term)
        held.callback(segments.close)
        instance: Any = (make or spec.make)(
            spec.config, spec.instance, segments, spec.checkpoint, loading
        )
        tokens = TokenStreams(spec.instance, limits, spec.metadata, broke=lambda: wake(link))
        loop = (make_loop or DecodeLoop)(instance, link, tokens, segments, limits)
        held.callback(loop.join)
        held.callback(tokens.close)
        held.callback(instance.close)
        hello = Hello(spec.instance, Peer(segments.node, segments.address))
        link.send(hello)
        held.callback(Heartbeat(lambda: link.send(Beat(instance.awaited)), limits).close)
        greet = partial(_greet_again, link, hello, instance)
        run_under_controllers(spec, link, loop, greet)


def _greet_again(link: ControllerLink, hello: Hello, instance: Instance) -> None:
    kept = tuple(
        (run.request_id, TargetRun(run.first_page, run.num_pages, hello.instance, run.frame))
        for run in instance.kept_pages()
    )
    experts = instance.experts.slots.held()
    link.send(replace(hello, kept=kept, restarts=tuple(instance.restarts()), experts=experts))


class DecodeLoop(TermLoop):
    """Drives one instance by the controller's messages, term after term."""

    def __init__(
        self,
        instance: ClusterInstance,
        link: ControllerLink,
        tokens: TokenStreams,
        segments: Segments,
        limits: LimitsConfig,
    ) -> None:
        """segments: the instance's own, whose term this loop sets."""
        super().__init__(link, tokens, segments, limits)
        self._instance = instance
        self._plans: deque[InstancePlan] = deque()
        """Plans of coming windows, at most two."""
        self._full_plan: InstancePlan | None = None
        self._pages_reported = threading.Event()
        self._watchers: list[threading.Thread] = []
        if instance.pages.copier is not None:
            instance.pages.copier.wake = self._pages_came
        instance.experts.slots.wake = self._pages_came

    def _renew(self) -> None:
        self._instance.leave()

    def _join(self, join: Join) -> Ready:
        meet(self._segments, join)
        num_graphs = self._instance.enter(_term_start(join))
        self._watchers = [watcher for watcher in self._watchers if watcher.is_alive()]
        for ring in self._instance.pages.rings:
            watcher = threading.Thread(
                target=self._watch_ring, args=(ring,), name="ring watcher", daemon=True
            )
            watcher.start()
            self._watchers.append(watcher)
        return Ready((*self._instance.selected, f"graphs: {num_graphs} prepared"))

    def _work(self) -> None:
        while True:
            while not self._plans:
                # Unbounded on purpose: an idle instance waits as long as its stream is open, which
                # keepalive proves. But pages from another instance send no message, so it looks
                # again each tick.
                is_moving = self._instance.pages.is_moving_pages
                self._await_message(self._limits.tick_ms / 1000 if is_moving else None)
                self._between_steps()
            self._run_window(self._plans.popleft())

    def _leave(self) -> None:
        self._instance.leave()
        self._plans.clear()
        self._full_plan = None

    def _left(self) -> Left:
        return Left(tuple(self._instance.restarts()))

    def join(self) -> None:
        """Wait for the rings' watchers, which closing the instance ends.

        A thread that outlives the interpreter would abort the process inside C++ code.
        """
        for watcher in self._watchers:
            watcher.join(_JOIN_S)

    def _run_window(self, plan: InstancePlan) -> None:
        needed = self._instance.begin(plan)
        if needed is not None:
            logger.warning("window %d: %s; asking for the full table", plan.window, needed.reason)
            self._send(needed)
            needed = self._instance.begin(self._await_full_plan(plan.window))
            if needed is not None:
                raise RuntimeError(
                    f"the full table of window {plan.window} was refused: {needed.reason}"
                )
        for _ in range(plan.num_steps):
            self._instance.run_step()
            self._deliver()
            self._between_steps()

    def _await_full_plan(self, window: int) -> InstancePlan:
        """Wait for this window's full table, and handle tickets (protocol.md, table digests)."""
        limit_ms = self._limits.plan_timeout_ms
        deadline = time.monotonic() + limit_ms / 1000
        while self._full_plan is None:
            try:
                self._take(self._link.inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                raise ControllerLost(
                    f"the full table of window {window} did not come in {limit_ms} ms"
                ) from None
        plan, self._full_plan = self._full_plan, None
        assert plan.window == window, (
            f"asked for the full table of window {window}, got that of {plan.window}"
        )
        return plan

    def _between_steps(self) -> None:
        """Take messages, copy and send pages: allowed only between steps."""
        self._take_all()
        self._pages_reported.clear()
        self._instance.pages.copy_arrived_pages()
        self._instance.pages.send_pages()
        self._deliver()

    def _take_work(self, message: Any) -> None:
        match message:
            case InstancePlan():
                if message.is_full:
                    self._full_plan = message
                else:
                    self._plans.append(message)
            case ChangeExperts(number, table):
                self._instance.experts.change(number, table)
            case ExpectPages(transfer):
                self._instance.pages.expect(transfer)
            case SendPages(transfer):
                self._instance.pages.send(transfer)
            case Stow():
                self._instance.pages.stow(message)
            case Fetch():
                self._instance.pages.fetch(message)
            case RefusePages(ticket):
                self._instance.pages.fence(ticket)
            case _:
                raise AssertionError(f"the controller sent {message} to a running instance")

    def _deliver(self) -> None:
        polled = self._instance.poll()
        self._deliver_tokens(polled.tokens)
        for event in polled.events:
            self._send(event)

    def _watch_ring(self, ring: PageRing) -> None:
        while ring.is_open:
            if ring.wait(_RING_WAIT_MS):
                self._pages_came()

    def _pages_came(self) -> None:
        if not self._pages_reported.is_set():
            self._pages_reported.set()
            wake(self._link)


def _term_start(join: Join) -> TermStart:
    return TermStart(join.seats, join.experts, join.newest_ticket, join.keeps_rows)
