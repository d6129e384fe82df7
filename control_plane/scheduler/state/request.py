"""A placed request: where its pages are, where its row is, how far it has come.

Enters: an Arrival and the decisions about it. Leaves: the record that the scheduler's other parts
read and change. Does not know: tokens, windows in flight, other requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from nanocp.values.plan import PAGE_SIZE, Arrival, Placement, TargetRun


class PageMove(NamedTuple):
    """Full pages on their way from one instance to another.

    Until they are there, those of the source are read.
    """

    first_page: int
    num_pages: int
    source: int
    destination: int
    targets: tuple[TargetRun, ...]
    is_stopped: bool = False
    """Whether its row is stopped: then pages may be written in part or not at all, and they count
    where they are read."""


class State(Enum):
    """What a placed request waits for or does.

    A request that is not placed yet is in the waiting queue; one that has ended is gone.
    """

    TRANSFERRING = "transferring"
    """Frames are allocated and a ticket is out; some receiver has not confirmed."""
    RUNNABLE = "runnable"
    """The KV is in place; the row starts with the next window."""
    RUNNING = "running"
    """The row is in every window issued since it started or came back."""
    PARKED = "parked"
    """The row waits for a frame (protocol.md, pages ahead).

    The request keeps frames, MoE binding, row state and its place under every bound.
    """
    HELD = "held"
    """The request has no row: a term ended, and its front end has not submitted its next attempt.

    It keeps frames, MoE binding and its place under every bound.
    """


TRANSFERRING, RUNNABLE, RUNNING, PARKED, HELD = State
# A name of the module is looked up four times as fast as a member of an Enum (Python 3.11), and
# every change looks.


def num_pages(num_tokens: int) -> int:
    """Pages that hold num_tokens tokens."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(slots=True, eq=False)
class Request:
    """A placed request."""

    request_id: int
    """That of its arrivals, at hand because everything looks at it."""
    arrival: Arrival
    """The attempt of the row that it has or will have."""
    kv_len_max: int
    """Tokens of KV it can ever have: the last generated token has none."""
    moe_binding: int
    state: State = RUNNABLE
    runs: list[TargetRun] = field(default_factory=list)
    """The request's pages, ascending without gaps, those for coming tokens too."""
    num_pages: int = 0
    """Pages in all runs."""
    page_hashes: tuple[bytes, ...] = ()
    """`Arrival.page_hashes`, if its pages may be shared."""
    num_shared: int = 0
    """Pages at the front that were there when it was placed: they are not written for it."""
    pages_on: dict[int, int] = field(default_factory=dict)
    """instance -> pages it holds or will hold, at least 1: the keys are the KV binding."""
    position: int = 0
    """Position of the next input token, at step `since_step` if the row is running."""
    since_step: int = 0
    """Step at which the row started or came back."""
    holders: tuple[tuple[int, int], ...] = ()
    """(first page, instance) of neighbouring runs on one instance, ascending."""
    linked_key: tuple[int, int] | None = None
    """(CP degree, id) while it is in LinkedRows."""
    tail: int = 0
    """Index of the run that the row appends to."""
    told_holder: int = 0
    """Holder of the coming pages, as far as the MoE binding knows."""
    ever_bound: dict[int, int] = field(default_factory=dict)
    """Instances that were in its binding in some window sent -> digest of its pages in their table.
    """
    holder_digest: int = 0
    """Digest of the request's holders in the table of its MoE binding."""
    first_window: int | None = None
    """The window, or pass, that has its RowStart; None before one is made."""
    last_window: int | None = None
    """Last window sent that contains it, once it is parked; the last one issued while it runs."""
    due_window: int = 0
    """Window at whose planning its pages are looked at next."""
    exit_window: int = 0
    """First window that the row may not need to be in: max_tokens tokens may come before it."""
    ticket: int | None = None
    receivers: dict[int, int] = field(default_factory=dict)
    """Receivers of the ticket that have not confirmed (an ordered set)."""
    moved_step: int = 0
    """First step that reads pages of it at their new place."""
    move: PageMove | None = None
    """At most one at a time. Its ticket is the request's, until the pages have arrived."""
    carry: TargetRun | None = None
    """Where its state in linear attention layers is, or will be: at its MoE binding. None: the
    model has no such layers."""
    carry_source: TargetRun | None = None
    """Where its state is still, while it moves to `carry`; its row stands still."""
    restart: tuple[int, int] | None = None
    """While it is held: least and most position at which its row may go on with its state."""
    ran_at: int | None = None
    """The MoE binding of its latest window, from a re-binding with a state until its row runs."""

    @classmethod
    def from_arrival(cls, arrival: Arrival, moe_binding: int) -> Request:
        """The record of an arrival that is being placed."""
        return cls(
            arrival.request_id,
            arrival,
            arrival.prompt_len + arrival.max_tokens - 1,
            moe_binding,
            position=arrival.prompt_len - 1,
        )

    def begin_attempt(self, arrival: Arrival) -> None:
        """A new row starts where the attempt says, over the pages that the request has."""
        assert arrival.prompt_len + arrival.max_tokens - 1 == self.kv_len_max, (
            f"attempt {arrival.attempt} of request {self.request_id} asks for another length"
        )
        self.arrival = arrival
        self.position = arrival.prompt_len - 1

    @property
    def order(self) -> tuple[int, int]:
        """The lowest goes first: by class, then by number."""
        return self.arrival.priority, self.request_id

    def lose_row(self) -> None:
        """No instance has a row of it or an entry in its table any more."""
        self.ever_bound = {}
        self.holder_digest = 0
        self.first_window = self.last_window = self.ran_at = None

    @property
    def is_started(self) -> bool:
        """Whether a window that was sent, or is being made, has the request's RowStart."""
        return self.first_window is not None

    def is_row_of(self, window: int) -> bool:
        """Whether a row of the request in this window is its present one, not an earlier one's."""
        return self.first_window is not None and self.first_window <= window

    def position_at(self, step: int) -> int:
        """Position of the row's input token at a step, if it has not stopped before."""
        return self.position + (step - self.since_step if self.state is RUNNING else 0)

    @property
    def span(self) -> tuple[int, ...]:
        """What links and attention rows are committed for.

        It is the KV binding, and the instance that pages are on their way to.
        """
        if self.move is None or self.move.destination in self.pages_on:
            return tuple(self.pages_on)
        return (*self.pages_on, self.move.destination)

    @property
    def tail_end(self) -> int:
        """First position after the run that the row appends to."""
        run = self.runs[self.tail]
        return (run.first_page + run.num_pages) * PAGE_SIZE

    def run_of(self, position: int) -> int:
        """Index of the run that holds the position."""
        if len(self.runs) == 1:
            return 0
        return bisect_right(self.runs, position // PAGE_SIZE, key=_first_page) - 1

    @property
    def held_runs(self) -> list[TargetRun]:
        """All pages with a frame: of KV, also where they go if they move, and of its state."""
        runs = self.runs if self.move is None else [*self.runs, *self.move.targets]
        if self.carry is None:
            return runs
        return [*runs, *(run for run in (self.carry, self.carry_source) if run is not None)]

    def last_frame(self, instance: int) -> int:
        """Frame of its last page on an instance of its KV binding."""
        for run in reversed(self.runs):
            if run.instance == instance:
                return run.frame + run.num_pages - 1
        raise AssertionError(f"instance {instance} holds no page of request {self.request_id}")

    def add_runs(self, instance: int, frames: Iterable[tuple[int, int]]) -> list[TargetRun]:
        """Put the next pages into these (first frame, number of frames); returns the new runs."""
        runs = runs_in(self.num_pages, instance, frames)
        if not self.runs or self.runs[-1].instance != instance:
            self.holders += ((self.num_pages, instance),)
        self.runs += runs
        self.num_pages = runs[-1].first_page + runs[-1].num_pages
        return runs

    def is_told(self, first_unknown_step: int) -> bool:
        """Whether every instance surely knows where its pages moved last.

        first_unknown_step: the first step that some instance may not have run.
        """
        return self.moved_step == 0 or self.moved_step <= first_unknown_step

    def movable_pages(self, run: TargetRun, first_unknown_step: int) -> range:
        """Pages of one run that its holder could send now, while the request is running.

        They are full, written by steps that every instance has surely run, and announced in windows
        that every instance has surely begun: the sender finds them in its table.
        """
        num_full = 0
        if self.is_told(first_unknown_step) and self.since_step <= first_unknown_step:
            num_full = self.position_at(first_unknown_step) // PAGE_SIZE
        end = min(run.first_page + run.num_pages, num_full)
        return range(run.first_page, max(end, run.first_page))

    def targets(self, num_tokens: int) -> tuple[TargetRun, ...]:
        """Where pages of the first num_tokens tokens go, and the state after them.

        Shared pages are left out.
        """
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
        """Where the request is when all steps before this one have run.

        begins: (the latest window's first step, tokens that a row may have come further by then);
        None without drafts.
        """
        num_tokens = max(self.arrival.prompt_len, min(self.position_at(step), self.kv_len_max))
        if begins is not None:
            first_step, slack = begins
            least = self.position_at(max(first_step, self.since_step))
            begins = least, least + slack
        binding = self.moe_binding if self.ran_at is None else self.ran_at
        return Placement(self.request_id, binding, num_tokens, self.holders, begins)


def holders_of(runs: Iterable[TargetRun]) -> Iterator[tuple[int, int]]:
    """(first page, instance) of neighbouring runs on one instance."""
    holder = None
    for run in runs:
        if run.instance != holder:
            holder = run.instance
            yield run.first_page, holder


# Every placement makes some; this way they cost half.
_target_run: Callable[[tuple[int, int, int, int]], TargetRun] = partial(tuple.__new__, TargetRun)


def runs_in(first_page: int, instance: int, frames: Iterable[tuple[int, int]]) -> list[TargetRun]:
    """The pages from first_page on, in these (first frame, number of frames) of the instance."""
    runs = []
    for frame, num_pages in frames:
        runs.append(_target_run((first_page, num_pages, instance, frame)))
        first_page += num_pages
    return runs


def _first_page(run: TargetRun) -> int:
    return run.first_page
