"""The scheduler's record of a placed request: its pages, its row and its position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from nanocp.values.plan import PAGE_SIZE, Arrival, Placement, TargetRun


class PageMove(NamedTuple):
    """Full pages on their way between instances; the source is read."""

    first_page: int
    num_pages: int
    source: int
    destination: int
    targets: tuple[TargetRun, ...]
    is_stopped: bool = False
    """The row is stopped: pages may be written in part or not at all, and count at the source."""


class State(Enum):
    """The state of a placed request."""

    TRANSFERRING = "transferring"
    """Frames are allocated and a ticket is issued; some receiver has not confirmed."""
    RUNNABLE = "runnable"
    """The KV is in place; the row starts in the next window."""
    RUNNING = "running"
    """The row is in every window issued since it last started."""
    PARKED = "parked"
    """The row waits for a frame (protocol.md, pages ahead).

    The request keeps frames, MoE binding, row state and its place under every bound.
    """
    HELD = "held"
    """The request has no row: a term ended and its next attempt has not come.

    It keeps frames, MoE binding and its place under every bound.
    """


TRANSFERRING, RUNNABLE, RUNNING, PARKED, HELD = State
# A name of the module is looked up four times as fast as a member of an Enum (Python 3.11), and
# every change looks.


def num_pages(num_tokens: int) -> int:
    """Return the number of pages that hold num_tokens tokens."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(slots=True, eq=False)
class Request:
    """A placed request."""

    request_id: int
    """Copied from the arrival, since everything reads it."""
    arrival: Arrival
    """Attempt that its row belongs to."""
    kv_len_max: int
    """Most tokens of KV; the last generated token has none."""
    moe_binding: int
    state: State = RUNNABLE
    runs: list[TargetRun] = field(default_factory=list)
    """The request's pages, ascending without gaps, with those for coming tokens."""
    num_pages: int = 0
    """Pages in all runs."""
    page_hashes: tuple[bytes, ...] = ()
    """`Arrival.page_hashes`, if its pages may be shared."""
    num_shared: int = 0
    """Pages at the front that were in the cluster before it was placed."""
    pages_on: dict[int, int] = field(default_factory=dict)
    """Pages by instance, each at least 1; the keys are the KV binding."""
    position: int = 0
    """Position of the next input token; at step `since_step` if the row is running."""
    since_step: int = 0
    """Step at which the row last started."""
    holders: tuple[tuple[int, int], ...] = ()
    """(first page, instance) of neighbouring runs on one instance, ascending."""
    linked_key: tuple[int, int] | None = None
    """Key (CP degree, id) in LinkedRows, while it is there."""
    tail: int = 0
    """Index of the run that the row appends to."""
    told_holder: int = 0
    """Holder of coming pages that the MoE binding was told last."""
    ever_bound: dict[int, int] = field(default_factory=dict)
    """By instance that was in its binding in a sent window: digest of its pages there."""
    holder_digest: int = 0
    """Digest of the request's holders in the MoE binding's table."""
    first_window: int | None = None
    """Window, or pass, with its RowStart; None before one is made."""
    last_window: int | None = None
    """While parked, the last sent window that contains it; while running, the last issued one."""
    due_window: int = 0
    """Next window at whose planning its pages are examined."""
    exit_window: int = 0
    """First window that the row may be absent from: max_tokens may come before it."""
    ticket: int | None = None
    receivers: dict[int, int] = field(default_factory=dict)
    """Receivers of the ticket that have not confirmed, as an ordered set."""
    moved_step: int = 0
    """First step that reads its moved pages at their new place."""
    move: PageMove | None = None
    """One move under way, under the request's ticket until the pages have arrived."""
    carry: TargetRun | None = None
    """Place of its recurrent state at its MoE binding; None if the model has no such layers."""
    carry_source: TargetRun | None = None
    """Present place of a recurrent state that moves to `carry`; its row stands still."""
    restart: tuple[int, int] | None = None
    """While held: least and most position at which its row may go on with its recurrent state."""
    ran_at: int | None = None
    """MoE binding of its latest window, from a re-binding with a state until its row runs."""

    @classmethod
    def from_arrival(cls, arrival: Arrival, moe_binding: int) -> Request:
        """Make the record of an arrival that is being placed."""
        return cls(
            arrival.request_id,
            arrival,
            arrival.prompt_len + arrival.max_tokens - 1,
            moe_binding,
            position=arrival.prompt_len - 1,
        )

    def begin_attempt(self, arrival: Arrival) -> None:
        """Start a new row where the attempt says, over the pages that the request has."""
        assert arrival.prompt_len + arrival.max_tokens - 1 == self.kv_len_max, (
            f"attempt {arrival.attempt} of request {self.request_id} asks for another length"
        )
        self.arrival = arrival
        self.position = arrival.prompt_len - 1

    @property
    def order(self) -> tuple[int, int]:
        """The sort key by class, then by number; the lowest goes first."""
        return self.arrival.priority, self.request_id

    def lose_row(self) -> None:
        """Record that no instance has a row of it or a table entry."""
        self.ever_bound = {}
        self.holder_digest = 0
        self.first_window = self.last_window = self.ran_at = None

    @property
    def is_started(self) -> bool:
        """Return whether its RowStart is in a window that was sent or is being made."""
        return self.first_window is not None

    def is_row_of(self, window: int) -> bool:
        """Return whether its row in this window is the present one, not an earlier one."""
        return self.first_window is not None and self.first_window <= window

    def position_at(self, step: int) -> int:
        """Return the position of the row's input token at a step, if it runs."""
        return self.position + (step - self.since_step if self.state is RUNNING else 0)

    @property
    def span(self) -> tuple[int, ...]:
        """The instances with committed links: the KV binding, and the destination of a move."""
        if self.move is None or self.move.destination in self.pages_on:
            return tuple(self.pages_on)
        return (*self.pages_on, self.move.destination)

    @property
    def tail_end(self) -> int:
        """The first position after the run that the row appends to."""
        run = self.runs[self.tail]
        return (run.first_page + run.num_pages) * PAGE_SIZE

    def run_of(self, position: int) -> int:
        """Return the index of the run that holds the position."""
        if len(self.runs) == 1:
            return 0
        return bisect_right(self.runs, position // PAGE_SIZE, key=_first_page) - 1

    @property
    def held_runs(self) -> list[TargetRun]:
        """All its pages with a frame: KV, KV under way, and recurrent state."""
        runs = self.runs if self.move is None else [*self.runs, *self.move.targets]
        if self.carry is None:
            return runs
        return [*runs, *(run for run in (self.carry, self.carry_source) if run is not None)]

    def last_frame(self, instance: int) -> int:
        """Return the frame of its last page on an instance."""
        for run in reversed(self.runs):
            if run.instance == instance:
                return run.frame + run.num_pages - 1
        raise AssertionError(f"instance {instance} holds no page of request {self.request_id}")

    def add_runs(self, instance: int, frames: Iterable[tuple[int, int]]) -> list[TargetRun]:
        """Put the next pages into (first frame, number of frames); return the runs."""
        runs = runs_in(self.num_pages, instance, frames)
        if not self.runs or self.runs[-1].instance != instance:
            self.holders += ((self.num_pages, instance),)
        self.runs += runs
        self.num_pages = runs[-1].first_page + runs[-1].num_pages
        return runs

    def is_told(self, first_unknown_step: int) -> bool:
        """Return whether every instance surely knows the new place of its moved pages.

        first_unknown_step: the first step that some instance may not have run.
        """
        return self.moved_step == 0 or self.moved_step <= first_unknown_step

    def movable_pages(self, run: TargetRun, first_unknown_step: int) -> range:
        """Return the pages of one run that its holder could send while the request runs.

        They are full, surely written, and in its table by windows that have surely begun.
        """
        num_full = 0
        if self.is_told(first_unknown_step) and self.since_step <= first_unknown_step:
            num_full = self.position_at(first_unknown_step) // PAGE_SIZE
        end = min(run.first_page + run.num_pages, num_full)
        return range(run.first_page, max(end, run.first_page))

    def targets(self, num_tokens: int) -> tuple[TargetRun, ...]:
        """Return the places of num_tokens tokens' pages, unless shared, and recurrent state."""
        end = num_pages(num_tokens)
        targets = []
        for run in self.runs:
            if run.first_page < self.num_shared:
                continue
            if run.first_page >= end:
                break
            if run.first_page + run.num_pages >= end:
                num_left = end - run.first_page
                targets.append(TargetRun(run.first_page, num_left, run.instance, run.frame))
                break
            targets.append(run)
        if self.carry is not None:
            targets.append(self.carry)
        return tuple(targets)

    def placement(self, step: int, begins: tuple[int, int] | None = None) -> Placement:
        """Return the placement of the request when all steps before this one have run.

        begins: with drafts, (the latest window's first step, tokens that a row may have gained by
        then).
        """
        num_tokens = max(self.arrival.prompt_len, min(self.position_at(step), self.kv_len_max))
        if begins is not None:
            first_step, slack = begins
            least = self.position_at(max(first_step, self.since_step))
            begins = least, least + slack
        binding = self.moe_binding if self.ran_at is None else self.ran_at
        return Placement(self.request_id, binding, num_tokens, self.holders, begins)


def holders_of(runs: Iterable[TargetRun]) -> Iterator[tuple[int, int]]:
    """Yield (first page, instance) of neighbouring runs on one instance."""
    holder = None
    for run in runs:
        if run.instance != holder:
            holder = run.instance
            yield run.first_page, holder


# Every placement makes some; this way they cost half.
_target_run: Callable[[tuple[int, int, int, int]], TargetRun] = partial(tuple.__new__, TargetRun)


def runs_in(first_page: int, instance: int, frames: Iterable[tuple[int, int]]) -> list[TargetRun]:
    """Return pages from first_page on in (first frame, number of frames)."""
    runs = []
    for frame, num_pages in frames:
        runs.append(_target_run((first_page, num_pages, instance, frame)))
        first_page += num_pages
    return runs


def _first_page(run: TargetRun) -> int:
    return run.first_page
