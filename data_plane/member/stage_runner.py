"""The loop of a stage of a pipeline: drives it by the controller's messages, sends its tokens."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from data_plane.instance.stage_edge import StageEdge, StagePolled
from data_plane.member.controller_link import ControllerLink
from data_plane.member.lifetime import meet
from data_plane.member.term_loop import TermLoop
from data_plane.member.token_streams import TokenStreams
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig
from nanocp.values.commands import Join, StagePrompt
from nanocp.values.members import Ready, TokensLost
from nanocp.values.passes import WAIT_CAUSES, LayerMoves, PassDone, PassPlan
from nanocp.values.plan import WindowDone

_WAIT_MS = 2.0


class StageLoop(TermLoop):
    """Drives one stage, term after term."""

    def __init__(
        self,
        stage: StageEdge[Any],
        link: ControllerLink,
        tokens: TokenStreams,
        segments: Segments,
        limits: LimitsConfig,
    ) -> None:
        super().__init__(link, tokens, segments, limits)
        self._stage = stage
        self._items: deque[PassPlan | LayerMoves | StagePrompt] = deque()
        self._waits_ns = dict.fromkeys(WAIT_CAUSES, 0)
        """Since the last report, by cause."""

    def _join(self, join: Join) -> Ready:
        meet(self._segments, join)
        self._stage.connect()
        return Ready(tuple(self._stage.selected))

    def _renew(self) -> None:
        self._stage.leave()

    def _leave(self) -> None:
        self._stage.leave()
        self._items.clear()
        self._waits_ns = dict.fromkeys(WAIT_CAUSES, 0)

    def join(self) -> None:
        """Return: there are no other threads."""

    def _work(self) -> None:
        while True:
            while not self._items:
                # Unbounded on purpose: an idle stage waits as long as its stream is open, which
                # keepalive proves. KV that moves sends no message, so it looks again each tick.
                began_ns = time.perf_counter_ns()
                self._await_message(_WAIT_MS / 1000 if self._stage.layers.is_moving else None)
                self._waits_ns["work"] += time.perf_counter_ns() - began_ns
                self._stage.progress()
                self._deliver()
            item = self._items.popleft()
            if isinstance(item, StagePrompt):
                self._take_prompt(item)
            else:
                self._run(item)

    def _take_prompt(self, prompt: StagePrompt) -> None:
        request_id, token_ids = prompt.request_id, prompt.token_ids
        self._stage.requests.take_prompt(request_id, token_ids)
        if prompt.prompt_logprobs is not None:

            def lost(reason: str) -> None:
                self._send(TokensLost((request_id,), reason))

            num_top, front_end = prompt.prompt_logprobs, prompt.front_end
            wanted = self._tokens.prompt_logprobs(request_id, num_top, front_end, lost)
            self._stage.requests.ask_logprobs(request_id, token_ids, wanted)

    def _run(self, item: PassPlan | LayerMoves) -> None:
        began_ns, waited_ns = time.perf_counter_ns(), 0
        for _ in self._stage.run(item):
            # Unbounded on purpose: the controller bounds how long a pass takes, and its message
            # ends the wait.
            wait_ns = time.perf_counter_ns()
            self._stage.wait(_WAIT_MS)
            self._take_all()
            wait_ns = time.perf_counter_ns() - wait_ns
            self._waits_ns[self._stage.waits_for] += wait_ns
            waited_ns += wait_ns
        polled = self._deliver()
        if isinstance(item, PassPlan):
            done = next((each for each in polled.events if isinstance(each, PassDone)), None)
            report = WindowDone(
                instance=self._stage.number,
                window=item.number,
                finished=done.finished if done else (),
                step_us=(time.perf_counter_ns() - began_ns) // 1000,
                exchange_us=waited_ns // 1000,
                num_tokens=len(polled.tokens),
                num_rows=len(item.spans),
                waits_us=tuple(ns // 1000 for ns in self._waits_ns.values()),
            )
            self._waits_ns = dict.fromkeys(WAIT_CAUSES, 0)
            self._send(report)

    def _take_work(self, message: Any) -> None:
        assert isinstance(message, PassPlan | LayerMoves | StagePrompt), (
            f"the controller sent {message} to a running stage"
        )
        self._items.append(message)

    def _deliver(self) -> StagePolled:
        polled = self._stage.poll()
        self._deliver_tokens(polled.tokens)
        for event in polled.events:
            if not isinstance(event, PassDone):
                self._send(event)
        return polled
