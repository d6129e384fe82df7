"""The values that cross rooms: what the brain is told, and what it answers.

Enters: nothing. Leaves: frozen values that the brain, the shells, the wire, the simulator and the instances share.
Does not know: sockets, clocks, tensors, tokens (a request's parameters travel as opaque bytes).

Vocabulary: docs/vocabulary.md. Paper sections refer to the NanoCP paper (arXiv 2605.21100).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

PAGE_SIZE = 64
"""Tokens in a page, and in the frame that holds it (FlashMLA's page size)."""


class FinishReason(Enum):
    """Why a request ended. The first two are ordinary ends; the instance reports them."""

    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """max_tokens tokens were generated."""
    ABORTED = "aborted"
    """The client aborted or went away."""
    REFUSED = "refused"
    """RESOURCE_EXHAUSTED: a cap named in the message was reached."""
    INVALID = "invalid"
    """INVALID_ARGUMENT: no state of this cluster could ever hold the request."""
    FAILED = "failed"
    """UNAVAILABLE or INTERNAL: an instance was lost or prefill failed; the message says which."""


# --- Events: what the brain is told -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request enters the waiting queue."""

    request_id: int
    """Positive, unique for the life of the cluster, assigned in order of arrival."""
    prompt_len: int
    """Tokens of prompt, at least 1. The KV of the last one is written by the first decode step."""
    max_tokens: int
    """Most tokens to generate, at least 1."""
    row_start: bytes = b""
    """Last token, sampling parameters and front end, encoded by the front end for the instance. Never read here."""
    needs_prefill: bool = True
    """False: the KV of the first prompt_len - 1 tokens needs no transfer (a one-token prompt never needs one)."""


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The client wants the request to end. Unknown and ended ids are ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Instance `instance` has copied every page of the ticket into its frames: the receiver's word."""

    ticket: int
    instance: int


@dataclass(frozen=True, slots=True)
class TransferFenced:
    """Instance `instance` refuses every page of the ticket from now on; a page it had copied before stays written."""

    ticket: int
    instance: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The writer of the ticket (prefill) gave up. Its receivers are fenced before a frame is freed."""

    ticket: int
    message: str


class Finished(NamedTuple):
    """A row that stopped by itself."""

    request_id: int
    num_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class WindowDone:
    """An instance has run every step of the window. Every instance answers every window with one, rows or not."""

    instance: int
    window: int
    finished: tuple[Finished, ...] = ()
    """Rows of this instance that stopped in this window."""
    step_us: int = 0
    """Mean wall time of the window's steps. Telemetry: no decision reads it."""
    exchange_us: int = 0
    """Mean time of a step spent waiting for the exchange. Telemetry."""


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The instance is gone. Membership is fixed for now, so every request ends with FAILED."""

    instance: int


Event = Arrival | AbortRequested | TransferDone | TransferFenced | TransferFailed | WindowDone | InstanceLost


# --- Changes to an instance's table -----------------------------------------------------------------------------------
# `None` clears an entry. Rows and slots are dense: only the last entry of a list is ever cleared, after a move.


class RowChange(NamedTuple):
    """Row `row` of this instance belongs to the request from this window on."""

    row: int
    request_id: int | None


class RouteChange(NamedTuple):
    """Slot `slot` between this instance and `peer` belongs to the request from this window on.

    In the Q-route of instance i with peer j: i sends the request's row to slot `slot` of i's region at j.
    In the Res-route of j with peer i: what arrives there is that request, and its partial returns to the same slot of
    j's region at i. So q_route[i][j] == res_route[j][i], always: one is the transpose of the other (4.2.4).
    """

    peer: int
    slot: int
    request_id: int | None


class PageChange(NamedTuple):
    """Page `page` (token positions 64*page .. 64*page + 63) of the request lives in frame `frame` of this instance."""

    request_id: int
    page: int
    frame: int


class HolderChange(NamedTuple):
    """The MoE binding learns which instance holds a page that its row will append to."""

    request_id: int
    page: int
    instance: int


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What changes in one instance's table. Applied in the order of the fields."""

    forgotten: tuple[int, ...] = ()
    """Requests whose pages and holders leave this table."""
    rows: tuple[RowChange, ...] = ()
    q_route: tuple[RouteChange, ...] = ()
    res_route: tuple[RouteChange, ...] = ()
    pages: tuple[PageChange, ...] = ()
    holders_forgotten: tuple[int, ...] = ()
    """Requests whose holders (not pages) leave this table: their MoE binding moved away."""
    holders: tuple[HolderChange, ...] = ()


# --- The plan: what the brain answers ---------------------------------------------------------------------------------


class RowStart(NamedTuple):
    """A request whose row state begins at this instance with this window."""

    request_id: int
    position: int
    """Position of the token that the first step takes as input: prompt_len - 1 for a new request."""
    max_tokens: int
    row_start: bytes
    """`Arrival.row_start`, unread."""


class HandOff(NamedTuple):
    """Row state that moves between MoE bindings at the edge before this window, through the exchange's mailbox."""

    request_id: int
    peer: int
    """The new MoE binding (outgoing) or the old one (incoming)."""


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance's share of a window: what changed since the window before (4.2.4).

    Every instance gets one for every window, an empty one if nothing changed.
    """

    instance: int
    window: int
    """Counts from 0 without gaps."""
    first_step: int
    """Step number of the window's first step: counts from 0 over the life of the cluster."""
    num_steps: int
    base_digest: int
    """Digest of the table before the changes (rule 7)."""
    result_digest: int
    """Digest of the table after the changes."""
    is_full: bool = False
    """True: a resync; `changes` build this window's table from an empty one. All other fields are as in the delta."""
    changes: TableChanges = field(default_factory=TableChanges)
    starts: tuple[RowStart, ...] = ()
    hand_offs_out: tuple[HandOff, ...] = ()
    hand_offs_in: tuple[HandOff, ...] = ()
    ends: tuple[int, ...] = ()
    """Requests whose row state this instance (their MoE binding) drops before the window's first step."""


class PageTarget(NamedTuple):
    """Where a page goes."""

    page: int
    instance: int
    frame: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Frames are allocated: KV of the first `num_tokens` positions may be written under this ticket (3, MIGRATE)."""

    ticket: int
    request_id: int
    num_tokens: int
    targets: tuple[PageTarget, ...]
    """Ascending by page; page p gets tokens 64p .. min(64p + 64, num_tokens) - 1."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Each of `instances` must refuse the ticket from now on and answer TransferFenced."""

    ticket: int
    instances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request lives, told to its front end when it is placed and whenever it changes (4.2.3)."""

    request_id: int
    moe_binding: int
    kv_split: tuple[tuple[int, int], ...]
    """(instance, pages) of each instance that holds KV, ascending. A MoE binding without a page is absent."""

    @property
    def cp_degree(self) -> int:
        """Instances that hold KV of the request."""
        return len(self.kv_split)


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that the brain ended (a row that stopped by itself is told to the front end by its last token)."""

    request_id: int
    reason: FinishReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What the brain has decided for one instance; nothing in it is observed."""

    kv_tokens: int
    """Tokens resident or in transfer: what attention reads."""
    num_rows: int
    frames_used: int
    frames_free: int
    frames_quarantined: int
    frames_committed: int
    """Allocated, plus promised growth: what admission compares with the capacity."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to one `plan_window` call. The shell carries it out; it decides nothing."""

    window: int | None
    """None: no window now (no runnable row, or two are in flight)."""
    instances: tuple[InstancePlan, ...] = ()
    """One for each instance if `window` is not None, else empty."""
    transfers: tuple[Transfer, ...] = ()
    fences: tuple[Fence, ...] = ()
    placements: tuple[Placement, ...] = ()
    ended: tuple[Ended, ...] = ()
