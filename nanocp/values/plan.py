"""Values that planes share: the events that the scheduler gets, and the plan that it answers.

Paper sections refer to the NanoCP paper (arXiv 2605.21100).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from nanocp.values.offload import Fetch as Fetch
from nanocp.values.offload import Stow as Stow
from nanocp.values.offload import TransferMissed as TransferMissed
from nanocp.values.offload import WrittenPage as WrittenPage
from nanocp.values.table_changes import CARRY_PAGE as CARRY_PAGE
from nanocp.values.table_changes import PAGE_SIZE as PAGE_SIZE
from nanocp.values.table_changes import TableChanges
from nanocp.values.table_changes import TargetRun as TargetRun
from nanocp.values.terms import ClusterLost as ClusterLost
from nanocp.values.terms import InstanceLost as InstanceLost
from nanocp.values.terms import Regrouped as Regrouped
from nanocp.values.terms import Resubmitted as Resubmitted
from nanocp.values.terms import SeatsWanted as SeatsWanted
from nanocp.values.terms import TermEnded as TermEnded


class FinishReason(Enum):
    """Why a request ended; the instance reports the first two."""

    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """max_tokens tokens were generated."""
    ABORTED = "aborted"
    """The client aborted or went away."""
    REFUSED = "refused"
    """RESOURCE_EXHAUSTED: a cap was reached."""
    INVALID = "invalid"
    """INVALID_ARGUMENT: this cluster can never hold the request, or its grammar leads nowhere."""
    FAILED = "failed"
    """UNAVAILABLE or INTERNAL: an instance was lost or prefill failed."""
    FATAL = "fatal"
    """INTERNAL: instances were lost in its first window again and again."""
    EXPIRED = "expired"
    """DEADLINE_EXCEEDED: it still waited when its deadline passed."""


# --- Events: what the scheduler gets


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request enters the waiting queue."""

    request_id: int
    """Positive, in order of arrival, never used twice."""
    prompt_len: int
    """Tokens of prompt, at least 1; the first decode step writes the last one's KV."""
    max_tokens: int
    """Most tokens to generate, at least 1."""
    row_start: bytes = b""
    """Last token, sampling parameters and front end, unread by the scheduler."""
    needs_prefill: bool = True
    """False: the KV of the first prompt_len - 1 tokens needs no transfer."""
    priority: int = 0
    """The request's class: a lower number goes first."""
    deadline_us: int | None = None
    """Controller's time at which a waiting request ends with EXPIRED; None: no limit."""
    resumes: bool = False
    """A preempted request comes back: prompt_len includes its generated tokens, max_tokens does
    not."""
    attempt: int = 0
    """Earlier submissions; lengths count as if the request resumed. The latest attempt counts."""
    is_recomputed: bool = False
    """Prefill even if pages exist: log probabilities of the prompt are missing."""
    page_hashes: tuple[bytes, ...] = ()
    """A hash of the prompt up to each full page of its first prompt_len - 1 tokens: equal hashes
    mean equal KV, which may be shared."""
    client_id: str = ""
    """The client's id, for logs only."""
    tenant: str = ""
    """Within a class the least served tenant goes first."""
    sampler_work: int = 0
    """Bits of passes.SamplerWork, for predictions."""

    @property
    def names(self) -> tuple[str, ...]:
        """The request's number and the client's id, over HTTP also without our prefix."""
        rest = re.sub(r"^(cmpl-|chatcmpl-|msg_|resp_\d+_)", "", self.client_id)
        names = (str(self.request_id), self.client_id, rest)
        return tuple(dict.fromkeys(filter(None, names)))


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The client wants the request to end; unknown and ended ids are ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The receiver `instance` has copied every page of the ticket."""

    ticket: int
    instance: int


@dataclass(frozen=True, slots=True)
class TransferFenced:
    """`instance` refuses every page of the ticket from now on; copied pages stay written."""

    ticket: int
    instance: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The prefill gave the ticket up; receivers are fenced before a frame is freed."""

    ticket: int
    message: str


class Finished(NamedTuple):
    """A row that stopped by itself."""

    request_id: int
    num_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class WindowDone:
    """An instance has run every step of the window; each answers each window with one."""

    instance: int
    window: int
    finished: tuple[Finished, ...] = ()
    """Rows that stopped in this window."""
    step_us: int = 0
    """Mean wall time of a step. Telemetry: no decision reads it."""
    exchange_us: int = 0
    """Mean wait for the exchange in a step. Telemetry, like every field below."""
    num_tokens: int = 0
    """Sampled tokens with accepted drafts; deferral reads it too."""
    num_rows: int = 0
    """Rows of the instance."""
    num_received: int = 0
    """Attention rows received from others in each step."""
    bucket_rows: int = 0
    """Rows of the replayed captured step, with padding."""
    bucket_received: int = 0
    """Received attention rows of the captured step, with padding."""
    route_bytes: int = 0
    """Bytes put into other instances' memory by Q-route and Res-route."""
    expert_bytes: int = 0
    """Bytes put into other instances' memory by dispatch and combine."""
    mask_us: int = 0
    """Mean wait for masks of structured output in a step."""
    waits_us: tuple[int, ...] = ()
    """A stage's waits since the pass before, by passes.WAIT_CAUSES."""
    written: tuple[WrittenPage, ...] = ()
    """Pages that rows of this instance have filled; none without kv_offload."""
    hidden_us: int = 0
    """Mean time of a step in which only one lane waited."""
    advanced: tuple[int, ...] = ()
    """Running requests of this instance, once for each accepted draft."""
    drafts: tuple[tuple[int, int], ...] = ()
    """(checked drafts, accepted ones), by their offset from 1."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """This controller replaces a lost one; its first event."""

    newest_ticket: int
    """No ticket of an earlier controller is newer."""
    kept: tuple[tuple[int, tuple[TargetRun, ...]], ...] = ()
    """(request, its pages) on the instances; empty if one was lost too."""
    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): positions at which rows may go on with kept states."""


Event = (
    Arrival
    | AbortRequested
    | TransferDone
    | TransferFenced
    | TransferFailed
    | TransferMissed
    | WindowDone
    | InstanceLost
    | TermEnded
    | Regrouped
    | Resubmitted
    | SeatsWanted
    | ClusterLost
    | TookOver
)


# --- The plan: what the scheduler answers


class RowStart(NamedTuple):
    """A request whose row state begins here with this window."""

    request_id: int
    position: int
    """Position of the first input token: prompt_len - 1 for a new request."""
    max_tokens: int
    row_start: bytes
    """`Arrival.row_start`, which the scheduler has not read."""


class HandOff(NamedTuple):
    """State of a row that changes its MoE binding before this window (protocol.md, hand-offs)."""

    request_id: int
    peer: int
    """The new MoE binding if it leaves, else the old one."""


class InstancePlan(NamedTuple):
    """One instance's share of a window: its changes since the window before (4.2.4).

    Every instance gets one for every window.
    """

    instance: int
    window: int
    """Counts from 0 without gaps."""
    first_step: int
    """The window's first step, from 0 at the cluster's start."""
    num_steps: int
    base_digest: int
    """Table digest before the changes (protocol.md, table digests)."""
    result_digest: int
    """Digest of the table after the changes."""
    is_full: bool = False
    """A resync: `changes` build this window's table from nothing."""
    changes: TableChanges = TableChanges()
    starts: tuple[RowStart, ...] = ()
    hand_offs_out: tuple[HandOff, ...] = ()
    hand_offs_in: tuple[HandOff, ...] = ()
    ends: tuple[int, ...] = ()
    """Requests whose row state this MoE binding drops first."""
    two_lanes: int = 0
    """Number of the order of two lanes, or 0; equal in a window's plans."""
    num_drafts: int = 0
    """Most drafts of a row in a step; equal in a window's plans."""
    experts: int = 0
    """Number of the expert table, of this term; equal in a window's plans."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV of the first `num_tokens` positions may be written under this ticket (MIGRATE, 3)."""

    ticket: int
    request_id: int
    num_tokens: int
    targets: tuple[TargetRun, ...]
    """Ascending by page, without gaps; page p has tokens 64p .. min(64p + 64, num_tokens) - 1.
    Pages of the state come last."""
    source: int | None = None
    """The instance that sends the full pages. None: prefill writes them."""

    @property
    def receivers(self) -> tuple[int, ...]:
        """Instances that get a page, ascending."""
        return tuple(sorted({target.instance for target in self.targets}))

    def tokens_in(self, page: int) -> int:
        """Written tokens of a page; 0: a page of the state."""
        return max(min(self.num_tokens - page * PAGE_SIZE, PAGE_SIZE), 0)

    def frames_at(self, instance: int) -> dict[int, int]:
        """page -> frame of one instance's pages."""
        return {
            run.first_page + index: run.frame + index
            for run in self.targets
            if run.instance == instance
            for index in range(run.num_pages)
        }

    def instances(self) -> dict[int, int]:
        """page -> instance, ascending by page."""
        return {
            run.first_page + index: run.instance
            for run in self.targets
            for index in range(run.num_pages)
        }


@dataclass(frozen=True, slots=True)
class Fence:
    """Each of `instances` must refuse the ticket and answer TransferFenced."""

    ticket: int
    instances: tuple[int, ...]


class Placement(NamedTuple):
    """Instances that hold a request, for its front end; sent at each change (4.2.3)."""

    request_id: int
    moe_binding: int
    num_tokens: int
    """Tokens of KV at that time, or about to come."""
    holders: tuple[tuple[int, int], ...]
    """(first page, instance), ascending: the holder of the pages up to the next entry."""
    begins: tuple[int, int] | None = None
    """With drafts: least and most tokens of KV when the row's first window at its MoE binding
    begins. None: num_tokens."""

    def kv_split(self, num_tokens: int | None = None) -> tuple[tuple[int, int], ...]:
        """(instance, pages), ascending, of `num_tokens` tokens.

        A MoE binding without pages is absent.
        """
        num_pages = -(-(self.num_tokens if num_tokens is None else num_tokens) // PAGE_SIZE)
        split: dict[int, int] = {}
        end = num_pages
        for first_page, instance in reversed(self.holders):
            if first_page < end:
                split[instance] = split.get(instance, 0) + end - first_page
                end = first_page
        return tuple(sorted(split.items()))

    @property
    def cp_degree(self) -> int:
        """Instances that held KV of the request."""
        return len(self.kv_split())


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that the scheduler ended; rows that stop by themselves have none."""

    request_id: int
    reason: FinishReason
    message: str = ""


class Preempted(NamedTuple):
    """A request gave up its frames: it comes back as an Arrival that `resumes`, or is aborted."""

    request_id: int
    num_tokens: int
    """Tokens of its prompt and output; their KV is gone."""


class InstanceLoad(NamedTuple):
    """The load that the scheduler has decided for one instance."""

    kv_tokens: int
    """Tokens that attention reads: resident or in transfer."""
    num_rows: int
    frames_free: int
    """0 for an instance that is to leave or has left."""
    frames_quarantined: int
    frames_committed: int
    """Frames of requests and coming tokens; others are free or quarantined."""

    @property
    def num_frames(self) -> int:
        """Frames of the instance: 0 for an unused seat."""
        return self.frames_free + self.frames_quarantined + self.frames_committed


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """The load that the scheduler has decided for the cluster."""

    num_running: int = 0
    """Requests that decode."""
    num_waiting: int = 0
    """Requests that wait in the queue or prefill."""
    instances: tuple[InstanceLoad, ...] = ()
    num_prefilling: int = 0
    """Placed requests whose KV is to come."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to `plan_window`, which the controller carries out."""

    window: int | None
    """None: no window now (no runnable row, or two in flight)."""
    instances: tuple[InstancePlan, ...] = ()
    """One for each instance; empty without a window."""
    transfers: tuple[Transfer, ...] = ()
    fences: tuple[Fence, ...] = ()
    placements: tuple[Placement, ...] = ()
    ended: tuple[Ended, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    stows: tuple[Stow, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    """Pages of `transfers` that come from slots."""
    is_settled: bool = False
    """SeatsWanted may be carried out: no window or ticket is open until Regrouped."""
