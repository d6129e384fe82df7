"""Explanations of placements: what the scheduler saw and compared for chosen requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from control_plane.scheduler.policies.cp_degree import cp_degree
from control_plane.scheduler.policies.layout import obstacle
from control_plane.scheduler.policies.policy import Explains, Explanation, Policy
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Layout, Proposal
from control_plane.scheduler.state.request import Request, State
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE, Arrival, Event, Plan, WindowDone

_MAX_REASONS = 16
"""Most reasons to wait that a story keeps in a row: the first ones and the last."""

PlanWindow = Callable[[Sequence[Any], int], Plan]


class NodeLoad(NamedTuple):
    """The sum of the loads of a node's instances."""

    num_rows: int
    kv_tokens: int
    frames_free: int


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement, and the cluster as the policy saw it."""

    nodes: tuple[NodeLoad, ...]
    """Loads before the request was placed."""
    proposal: Proposal
    pages_on: dict[int, int]
    """Pages by instance, with those promised for coming tokens."""
    explanation: Explanation


class Note(NamedTuple):
    """An event of a request, and its reason."""

    now_us: int
    text: str
    decision: Decision | None = None


@dataclass(slots=True)
class Story:
    """The events of one request, in order."""

    arrival: Arrival
    notes: list[Note] = field(default_factory=list)
    is_waiting: bool = True
    reason: str = ""
    """Reason for waiting, as one word; empty if the request does not wait."""
    num_reasons: int = 0

    def tell(self, now_us: int, text: str, decision: Decision | None = None) -> None:
        """Add a note, and end the wait."""
        self.reason, self.num_reasons = "", 0
        self.notes.append(Note(now_us, text, decision))

    def waits(self, now_us: int, reason: str, text: str) -> None:
        """Note that the request waits, if the reason differs from the last one."""
        if reason == self.reason:
            return
        self.reason = reason
        self.num_reasons += 1
        if (untold := self.num_reasons - _MAX_REASONS) > 0:
            self.notes.pop()
            text += f" ({untold:,} reasons before this one are left out)"
        self.notes.append(Note(now_us, f"waits: {text}"))


class Explainer(Policy):
    """Takes notes between one scheduler and its policy."""

    def __init__(self, names: Collection[str], first_long_from_us: int | None = None) -> None:
        """names: the requests to explain, by number or by the client's id.

        first_long_from_us: also explain the first later request whose CP degree is above 1.
        """
        self.stories: dict[int, Story] = {}
        """By request id, in order of arrival."""
        self.last_request_id = 0
        """The highest that has arrived."""
        self._names = frozenset(names)
        self.first_long_from_us = first_long_from_us
        """None: the request has arrived, or it is not wanted."""
        self._now_us = 0
        self._tried: list[int] = []
        """Requests that this call tried to place, in order."""
        self.deferred: Container[int] = ()
        """Ids of deferred requests, set by the scheduler."""
        self._away: set[int] = set()

    def watch(self, policy: Policy, state: ClusterState, config: SchedulerConfig) -> Policy:
        """Wrap `policy`, so that its answers to the scheduler are noted."""
        self._policy, self._state, self._config = policy, state, config
        return self

    def around(self, plan_window: PlanWindow) -> PlanWindow:
        """Wrap the scheduler's plan_window, so that its events and plans are noted."""

        def plan_and_note(events: Sequence[Event], now_us: int) -> Plan:
            self._now_us = now_us
            for event in events:
                self._take(event)
            self._tried = []
            plan = plan_window(events, now_us)
            self._read(plan)
            return plan

        return plan_and_note

    # --- what the scheduler asks its policy

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        return self._policy.place(state, arrival, window)

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        for request, new in self._policy.rebindings(state, window):
            old, num_rows = request.moe_binding, tuple(state.loads.num_rows)
            yield request, new
            if new == request.moe_binding != old:
                text = f"is re-bound from instance {old} with {num_rows[old]:,} rows to {new} with"
                self._tell(request.request_id, f"{text} {num_rows[new]:,}; its pages stay")

    def moves(self, state: ClusterState, window: int) -> Iterator[tuple[Request, range, int]]:
        for request, pages, destination in self._policy.moves(state, window):
            before = request.move
            old = request.runs[request.run_of(pages.start * PAGE_SIZE)].instance
            loads = _instance_load(state, old), _instance_load(state, destination)
            yield request, pages, destination
            move = request.move
            if move is not None and move is not before:
                text = f"{move.num_pages:,} of its pages move from instance {old} with {loads[0]}"
                text += f" to {destination} with {loads[1]}; its row runs on"
                self._tell(request.request_id, text)

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        holder = self._policy.holder(state, request, window)
        if story := self.stories.get(request.request_id):
            free = ", ".join(f"{i}: {state.frames[i].num_free:,}" for i in request.pages_on)
            if holder is None:
                text = (
                    f"no instance can take its page {request.num_pages:,}; it parks (free frames: "
                    f"{free})"
                )
                story.waits(self._now_us, "parked", text)
            elif holder not in request.pages_on:
                text = f"its KV binding grows by instance {holder} for page {request.num_pages:,}"
                story.tell(self._now_us, f"{text} (free frames before: {free})")
            elif story.reason == "parked":
                story.tell(
                    self._now_us,
                    f"instance {holder} has a frame for its next page: its row goes on",
                )
        return holder

    # --- what the scheduler tells

    def tried(
        self,
        arrival: Arrival,
        proposal: Proposal,
        num_growth: int,
        layout: Layout | None,
    ) -> None:
        """Note a proposal, with num_growth pages to promise for coming tokens.

        layout: the one to carry out; None if the cluster cannot hold the pages now.
        """
        self._tried.append(arrival.request_id)
        story = self.stories.get(arrival.request_id)
        if story is None:
            return
        if layout is None:
            story.waits(self._now_us, *obstacle(self._state, proposal, num_growth))
            return
        state, policy = self._state, self._policy
        shared, proposal = layout.shared, layout.proposal
        if shared.runs:
            where = ", ".join(f"{i}: {count:,}" for i, count in sorted(shared.pages_on.items()))
            text = (
                f"its first {shared.num_pages:,} pages are in the cluster and are shared "
                f"(instance: pages; {where})"
            )
            explanation = Explanation((text, "WaterFill over those instances for the others"))
        elif isinstance(policy, Explains):
            explanation = policy.explain(state, arrival, proposal)
        else:
            paragraphs = (inspect.getdoc(policy.place) or "").split("\n\n")
            explanation = Explanation(tuple(" ".join(each.split()) for each in paragraphs))
        nodes = tuple(_node_load(state, node) for node in state.nodes)
        story.is_waiting = False
        text = (
            f"is placed: MoE binding {proposal.moe_binding}, CP degree "
            f"{len({**shared.pages_on, **proposal.shares})}"
        )
        story.tell(
            self._now_us, text, Decision(nodes, proposal, dict(layout.pages_on), explanation)
        )

    # --- what goes in and out

    def _take(self, event: Event) -> None:
        match event:
            case Arrival(request_id) if event.resumes:
                self._away.discard(request_id)
                if story := self.stories.get(request_id):
                    story.arrival, story.is_waiting = event, True
                    story.tell(
                        self._now_us, f"comes back to the queue with {event.prompt_len:,} tokens"
                    )
            case Arrival(request_id):
                self.last_request_id = max(self.last_request_id, request_id)
                if self._names.isdisjoint(event.names) and not self._is_first_long(event):
                    return
                story = self.stories[request_id] = Story(event)
                text = (
                    f"arrives: {event.prompt_len:,} tokens of prompt, at most {event.max_tokens:,} "
                    "to come"
                )
                story.tell(self._now_us, text)
            case WindowDone():
                for request_id, num_tokens, reason in event.finished:
                    text = f"has ended after {num_tokens:,} tokens: {reason.value}"
                    self._tell(request_id, text)

    def _tell(self, request_id: int, text: str) -> None:
        if story := self.stories.get(request_id):
            story.tell(self._now_us, text)

    def _is_first_long(self, arrival: Arrival) -> bool:
        config = self._config
        if self.first_long_from_us is None or self._now_us < self.first_long_from_us:
            return False
        if cp_degree(arrival.prompt_len, config.cp_degree_buckets, config.cp_degree_max) == 1:
            return False
        self.first_long_from_us = None
        return True

    def _read(self, plan: Plan) -> None:
        for instance in plan.instances:
            for start in instance.starts:
                self._tell(start.request_id, f"its row runs from window {plan.window} on")
        for ended in plan.ended:
            self._away.discard(ended.request_id)
            if story := self.stories.get(ended.request_id):
                story.is_waiting = False
                story.tell(self._now_us, f"has ended: {ended.message}")
        for request_id, num_tokens in plan.preempted:
            self._away.add(request_id)
            text = f"is preempted with {num_tokens:,} tokens: every row is parked"
            self._tell(request_id, f"{text}, and it is the newest of the lowest class")
        for request_id, story in self.stories.items():
            if story.is_waiting and request_id not in self._tried:
                self._say_who_is_before(story)

    def _say_who_is_before(self, story: Story) -> None:
        if story.arrival.request_id in self.deferred:
            text = "deferred: its prompt is long, and tokens would take longer than tpot_target_ms"
            story.waits(self._now_us, "deferred", text)
        elif self._tried:
            text = (
                f"behind request {self._tried[-1]}, which cannot be placed; nobody behind it is "
                "tried"
            )
            story.waits(self._now_us, f"behind {self._tried[-1]}", text)
        elif parked := [
            request for request in self._state.requests.values() if request.state is State.PARKED
        ]:
            text = (
                f"{len(parked):,} parked rows go before it, that of request {parked[0].request_id} "
                "among them"
            )
            story.waits(self._now_us, "behind parked rows", text)
        elif self._away:
            text = (
                f"{len(self._away):,} preempted requests go before it, request {min(self._away)} "
                "among them"
            )
            story.waits(self._now_us, "behind preempted requests", text)


def _instance_load(state: ClusterState, instance: int) -> str:
    num_links = state.committed.num_links(instance)
    return f"{state.loads.kv_tokens(instance):,} KV tokens and {num_links:,} links"


def _node_load(state: ClusterState, node: range) -> NodeLoad:
    rows = sum(state.loads.num_rows[i] for i in node)
    return NodeLoad(
        rows, state.loads.kv_tokens_on(node), sum(state.frames[i].num_free for i in node)
    )
