"""A placed request: where its pages are, where its row is, how far it has come.

Enters: an Arrival and the decisions about it. Leaves: the record that the brain's other parts read and change.
Does not know: tokens, windows in flight, other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nanocp.plan import PAGE_SIZE, Arrival, Placement


class State(Enum):
    """Where a placed request stands. A request that is not placed yet is in the waiting queue; an ended one is gone."""

    TRANSFERRING = "transferring"
    """Frames are allocated and a ticket is out; some receiver has not confirmed."""
    RUNNABLE = "runnable"
    """Its KV is in place; its row starts with the next window."""
    RUNNING = "running"
    """Its row is in every window issued since it started or came back."""
    PARKED = "parked"
    """Its row waits for a frame; it keeps frames, MoE binding, row state and its place under every bound (rule 4)."""


def num_pages(num_tokens: int) -> int:
    """Pages that hold num_tokens tokens."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(slots=True, eq=False)
class Request:
    """A placed request."""

    request_id: int
    prompt_len: int
    max_tokens: int
    row_start: bytes
    moe_binding: int
    state: State = State.RUNNABLE
    is_started: bool = False
    """Its RowStart is in a window that was sent (or is being made)."""
    pages: list[tuple[int, int]] = field(default_factory=list)
    """page -> (instance, frame)."""
    pages_on: dict[int, int] = field(default_factory=dict)
    """instance -> pages it holds, at least 1: the keys are the KV binding."""
    promised: dict[int, list[int]] = field(default_factory=dict)
    """instance -> frames committed for coming pages, descending (the next is the last), never empty."""
    position: int = 0
    """Position of the next input token, at step `since_step` if the row is running."""
    since_step: int = 0
    """Step at which the row started or came back."""
    tokens_on: dict[int, int] = field(default_factory=dict)
    """instance -> tokens counted there so far; the tail page of a running row also grows with the step."""
    grows_on: int = 0
    """Holder of the tail page of a running row."""
    grows_since: int = 0
    """First step whose token is in the growing count."""
    ever_bound: dict[int, None] = field(default_factory=dict)
    """Instances that were in its binding in some window sent (an ordered set)."""
    last_window: int | None = None
    """Last window sent that contains it, once it is parked; the last one issued while it runs."""
    exit_window: int = 0
    """First window that the row need not be in: max_tokens steps are planned before it."""
    ticket: int | None = None
    receivers: dict[int, None] = field(default_factory=dict)
    """Receivers of the ticket that have not confirmed (an ordered set)."""

    @classmethod
    def from_arrival(cls, arrival: Arrival, moe_binding: int) -> Request:
        """The record of an arrival that is being placed."""
        return cls(
            arrival.request_id,
            arrival.prompt_len,
            arrival.max_tokens,
            arrival.row_start,
            moe_binding,
            position=arrival.prompt_len - 1,
        )

    @property
    def span(self) -> tuple[int, ...]:
        """Instances that hold a page or are promised for one: what links and attention rows are committed for."""
        if self.promised.keys() <= self.pages_on.keys():
            return tuple(self.pages_on)
        return (*self.pages_on, *(instance for instance in self.promised if instance not in self.pages_on))

    @property
    def kv_len_max(self) -> int:
        """Tokens of KV it can ever have: the last generated token has none."""
        return self.prompt_len + self.max_tokens - 1

    def position_at(self, step: int) -> int:
        """Position of the row's input token at a step, if it has not stopped before."""
        return self.position + (step - self.since_step if self.state is State.RUNNING else 0)

    def last_frame(self, instance: int) -> int:
        """Frame of its last page on an instance of its KV binding."""
        return next(frame for holder, frame in reversed(self.pages) if holder == instance)

    def placement(self) -> Placement:
        """Where it lives now."""
        return Placement(self.request_id, self.moe_binding, tuple(sorted(self.pages_on.items())))
