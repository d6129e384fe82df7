"""What a move costs the moved request: the service's event log beside the arrivals of tokens.

Enters: an event log; prompts and when their tokens arrived. Leaves: every gap between two tokens of
a request, what was moved of the request meanwhile, and what that cost it. Does not know: services,
models.

A window gives every row in it one token, so the gap before a token has two fair references: the
gaps of the others in the same window, for what the request itself loses; and the request's own gaps
just before, in windows in which nothing was moved, for what all lose with it. Both are
taken within a second, so a machine that drifts does not show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from control_plane.frontend.page_hashes import page_hashes
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.state.request import RUNNING, Request
from control_plane.shell.event_log import LogReader, digest
from nanocp.values.plan import PAGE_SIZE, Arrival

MIN_PROMPT_LEN = PAGE_SIZE + 1
"""The log knows a request by the hash of its prompt's first page, which must be full."""
RE_BINDING, EXTENSION, RE_LEVELLING = MOVES = ("re-binding", "extension", "re-levelling")
"""A new MoE binding; pages that go to an instance that is new to the KV binding; pages that go to
another of it."""
ANY, RESUMED, NOTHING = "any move", "nothing, after a preemption", "nothing"
PARKING, PREEMPTION = "parking", "preemption"
"""The row stood still for a while: it waited for a frame, or gave its frames away."""
NUM_BEFORE, MAX_WINDOWS_BEFORE = 4, 16
"""Own gaps that one is compared with, and how far back they may lie."""


class Turn(NamedTuple):
    """A window with the request's row in it."""

    window: int
    kinds: frozenset[str]
    """What was begun, under way or finished of the request since its turn before."""
    is_resumed: bool
    """It was preempted before."""


class Gap(NamedTuple):
    """The time from a request's token to its next."""

    prompt_hash: bytes
    turn: Turn
    """The next token's."""
    seconds: float


class _Row:
    """What the scheduler says of a request, window by window."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.is_resumed = False
        self._is_away = False

    def preempt(self) -> None:
        self.is_resumed = self._is_away = True

    def run(self, window: int, request: Request) -> None:
        moving = set()
        if request.move is not None:
            moving = {RE_LEVELLING if request.move.destination in request.pages_on else EXTENSION}
        kinds = set()
        if self._is_away:
            kinds = {PREEMPTION}
        elif self.turns:
            kinds = moving | self._moving
            kinds |= {RE_BINDING} if request.moe_binding != self._moe_binding else set()
            kinds |= {EXTENSION} if request.pages_on.keys() - self._kv_binding else set()
            kinds |= {PARKING} if request.since_step != self._since_step else set()
        self.turns.append(Turn(window, frozenset(kinds), self.is_resumed))
        self._moving, self._moe_binding, self._kv_binding = (
            moving,
            request.moe_binding,
            set(request.pages_on),
        )
        self._since_step, self._is_away = request.since_step, False


def turns_of(log: Path) -> dict[bytes, list[Turn]]:
    """Hash of the prompt's first page -> the windows that gave the request its tokens, in order.

    Raises ValueError for a damaged log, and for one of another scheduler or of windows of several
    steps.
    """
    prompt_hashes: dict[int, bytes] = {}
    rows: defaultdict[int, _Row] = defaultdict(_Row)
    with log.open("rb") as lines:
        reader = LogReader(lines, str(log))
        if reader.header.scheduler.steps_per_window != 1:
            raise ValueError(f"{log} is of windows of several steps; a token must tell its window")
        scheduler = Scheduler(reader.header.cluster, reader.header.scheduler)
        state, _ = scheduler.decided
        for call in reader:
            events = [event for _, event in call.events]
            for event in events:
                if isinstance(event, Arrival) and not event.resumes:
                    prompt_hashes[event.request_id] = event.page_hashes[0]
            plan = scheduler.plan_window(events, call.now_us)
            if digest(plan) != call.plan:
                raise ValueError(f"{log} is of another scheduler: plans differ at {call.now_us} us")
            for preempted in plan.preempted:
                rows[preempted.request_id].preempt()
            if plan.window is not None:
                for request in state.requests.values():
                    if request.state is RUNNING:
                        rows[request.request_id].run(plan.window, request)
    return {prompt_hashes[request_id]: row.turns for request_id, row in rows.items()}


def gaps_of(log: Path, outputs: Iterable[tuple[Sequence[int], Sequence[float]]]) -> list[Gap]:
    """Find the gaps of outputs that ended: (ids of the prompt, when each token arrived)."""
    turns_by_prompt = turns_of(log)
    gaps = []
    for prompt_ids, arrivals_s in outputs:
        prompt_hash = page_hashes(prompt_ids)[0]
        turns = turns_by_prompt[prompt_hash]
        assert len(turns) == len(arrivals_s), (
            f"{len(arrivals_s)} tokens came of {len(turns)} windows"
        )
        for index in range(1, len(turns)):
            gaps.append(Gap(prompt_hash, turns[index], arrivals_s[index] - arrivals_s[index - 1]))
    return gaps


def costs(gaps: Collection[Gap]) -> list[dict[str, Any]]:
    """Compare gaps with their references: how many, their mean, each reference's mean, the ratios.

    There is an entry for each kind of move, for any of them, for a request that goes on after its
    preemption, and for none, as a control. Gaps that lack a reference are left out.
    """
    by_window: defaultdict[int, list[Gap]] = defaultdict(list)
    for gap in gaps:
        by_window[gap.turn.window].append(gap)
    still: defaultdict[bytes, dict[int, float]] = defaultdict(dict)
    for window, beside in by_window.items():
        if not any(gap.turn.kinds for gap in beside):
            for gap in beside:
                still[gap.prompt_hash][window] = gap.seconds
    compared: dict[str, list[tuple[float, float, float]]] = {
        kind: [] for kind in (*MOVES, ANY, RESUMED, NOTHING)
    }
    for gap in gaps:
        window, kinds, is_resumed = gap.turn
        others = [
            o.seconds
            for o in by_window[window]
            if o.prompt_hash != gap.prompt_hash and not o.turn.kinds
        ]
        own = still[gap.prompt_hash]
        before = [
            own[w] for w in range(window - 1, window - 1 - MAX_WINDOWS_BEFORE, -1) if w in own
        ][:NUM_BEFORE]
        if not others or len(before) < NUM_BEFORE or kinds - set(MOVES):
            continue
        labels = [*kinds, ANY] if kinds else [NOTHING, RESUMED][: 1 + is_resumed]
        for label in labels:
            compared[label].append((gap.seconds, fmean(others), fmean(before)))
    return [_cost(kind, found) for kind, found in compared.items() if found]


def _cost(kind: str, compared: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    own, beside, before = (1e3 * fmean(column) for column in zip(*compared, strict=True))
    return {
        "kind": kind,
        "gaps": len(compared),
        "ms": round(own, 2),
        "ms_others": round(beside, 2),
        "ms_before": round(before, 2),
        "ratio_others": round(own / beside, 3),
        "ratio_before": round(own / before, 3),
    }


def waits_ms(gaps: Iterable[Gap]) -> list[float]:
    """From the last token before a preemption to the first after it, ascending."""
    return sorted(1e3 * gap.seconds for gap in gaps if PREEMPTION in gap.turn.kinds)
