"""The values that cross rooms: the events that the scheduler gets, and the plan that it answers.

Enters: nothing. Leaves: frozen values that the scheduler, the controller, the wire, the simulator
and the instances share. Does not know: sockets, clocks, tensors, tokens (a request's parameters
travel as opaque bytes).

Vocabulary: docs/develop/vocabulary.md. Paper sections refer to the NanoCP paper (arXiv 2605.21100).
"""

from __future__ import annotations

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
    """Why a request ended. The first two are ordinary ends, which the instance reports."""

    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """max_tokens tokens were generated."""
    ABORTED = "aborted"
    """The client aborted or went away."""
    REFUSED = "refused"
    """RESOURCE_EXHAUSTED: a cap named in the message was reached."""
    INVALID = "invalid"
    """INVALID_ARGUMENT: no state of this cluster could ever hold the request, or the instance says
    that its grammar leads nowhere."""
    FAILED = "failed"
    """UNAVAILABLE or INTERNAL: an instance was lost or prefill failed; the message says which."""
    FATAL = "fatal"
    """INTERNAL: instances were lost in its first window again and again; it may be what ends them.
    """
    EXPIRED = "expired"
    """DEADLINE_EXCEEDED: it was still waiting to be placed when its deadline passed."""


# --- Events: what the scheduler gets


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request enters the waiting queue."""

    request_id: int
    """Positive, assigned in order of arrival, and never used twice by a cluster."""
    prompt_len: int
    """Tokens of prompt, at least 1. The KV of the last one is written by the first decode step."""
    max_tokens: int
    """Most tokens to generate, at least 1."""
    row_start: bytes = b""
    """Last token, sampling parameters and front end, encoded by the front end for the instance. The
    scheduler passes it on unread."""
    needs_prefill: bool = True
    """False: the KV of the first prompt_len - 1 tokens needs no transfer (a one-token prompt never
    needs one)."""
    priority: int = 0
    """The request's class: requests of a lower number go first."""
    deadline_us: int | None = None
    """In the controller's time: a request that still waits then ends with EXPIRED. None: it waits
    without a limit."""
    resumes: bool = False
    """A preempted request comes back: prompt_len includes the tokens that it has generated,
    max_tokens counts those that it may still generate."""
    attempt: int = 0
    """Counts the request's submissions, from 0. In later ones prompt_len and max_tokens are as if
    it resumed. A later one replaces an earlier one, wherever the request stands; an earlier one
    that comes late is ignored."""
    is_recomputed: bool = False
    """Whether the prompt is to be prefilled though its pages may be there: log probabilities of it
    are missing."""
    page_hashes: tuple[bytes, ...] = ()
    """For each full page of the first prompt_len - 1 tokens, a hash of the prompt up to the page's
    end: pages with equal hashes have equal KV and may be shared."""
    client_id: str = ""
    """The client's id of the request, for people who read logs. Nothing is decided by it."""
    tenant: str = ""
    """Whose request it is: within a class the tenant that was served least goes first."""
    sampler_work: int = 0
    """Bits of passes.SamplerWork: a pipeline predicts by them how long sampling takes."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a person may call the request: its number, or the client's id of it.

        Over HTTP the client's id counts also without the prefix that the service put before it.
        """
        prefix, _, rest = self.client_id.partition("-")
        names = (
            (str(self.request_id), self.client_id) if self.client_id else (str(self.request_id),)
        )
        return (*names, rest) if prefix in ("cmpl", "chatcmpl") and rest else names


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The client wants the request to end. Unknown and ended ids are ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The receiver `instance` has copied every page of the ticket into its frames."""

    ticket: int
    instance: int


@dataclass(frozen=True, slots=True)
class TransferFenced:
    """Instance `instance` refuses every page of the ticket from now on.

    A page that it copied before stays written.
    """

    ticket: int
    instance: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The prefill gave the ticket up; its receivers are fenced before a frame is freed."""

    ticket: int
    message: str


class Finished(NamedTuple):
    """A row that stopped by itself."""

    request_id: int
    num_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class WindowDone:
    """An instance has run every step of the window.

    Every instance answers every window with one, even without rows.
    """

    instance: int
    window: int
    finished: tuple[Finished, ...] = ()
    """Rows of this instance that stopped in this window."""
    step_us: int = 0
    """Mean wall time of the window's steps. Telemetry: no decision reads it."""
    exchange_us: int = 0
    """Mean time of a step spent waiting for the exchange. Telemetry, like every field below."""
    num_tokens: int = 0
    """Tokens sampled in the window, accepted drafts among them; deferral reads it too."""
    num_rows: int = 0
    """Rows of the instance."""
    num_received: int = 0
    """Attention rows received from others, in each step."""
    bucket_rows: int = 0
    """Rows of the captured step that was replayed, padding included."""
    bucket_received: int = 0
    """Received attention rows of the captured step, padding included."""
    route_bytes: int = 0
    """Bytes that Q-route and Res-route put into other instances' memory."""
    expert_bytes: int = 0
    """Bytes that dispatch and combine put into other instances' memory."""
    mask_us: int = 0
    """Mean time of a step spent waiting for masks of structured output; 0 if no row has one."""
    waits_us: tuple[int, ...] = ()
    """Time that a stage waited since the pass before, for each of passes.WAIT_CAUSES; empty for an
    instance."""
    written: tuple[WrittenPage, ...] = ()
    """Pages that rows of this instance have filled in this window; none without kv_offload."""
    hidden_us: int = 0
    """Mean time of a step in which one lane computed while the other waited for the exchange."""
    advanced: tuple[int, ...] = ()
    """Requests of this instance that have not stopped, once for each draft that was accepted."""
    drafts: tuple[tuple[int, int], ...] = ()
    """(drafts that were checked, those that were accepted), by their offset from 1."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """This controller takes the place of one that was lost; before any other event of it.

    A later one, also before any other event, takes its place.
    """

    newest_ticket: int
    """No ticket of an earlier controller is newer."""
    kept: tuple[tuple[int, tuple[TargetRun, ...]], ...] = ()
    """(request, its pages), as the instances still hold them. Empty if one of them was lost too."""
    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): positions at which rows may go on with states that are kept."""


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
    """A request whose row state begins at this instance with this window."""

    request_id: int
    position: int
    """Position of the token that the first step takes as input: prompt_len - 1 for a new request.
    """
    max_tokens: int
    row_start: bytes
    """`Arrival.row_start`, which the scheduler has not read."""


class HandOff(NamedTuple):
    """State of a row that changes its MoE binding at the edge before this window.

    It travels through the exchange's mailbox (protocol.md, hand-offs).
    """

    request_id: int
    peer: int
    """The new MoE binding (outgoing) or the old one (incoming)."""


class InstancePlan(NamedTuple):
    """One instance's share of a window: what changed since the window before (4.2.4).

    Every instance gets one for every window, an empty one if nothing changed.
    """

    instance: int
    window: int
    """Counts from 0 without gaps."""
    first_step: int
    """Number of the window's first step: counts from 0 since the cluster started."""
    num_steps: int
    base_digest: int
    """Digest of the table before the changes (protocol.md, table digests)."""
    result_digest: int
    """Digest of the table after the changes."""
    is_full: bool = False
    """True: a resync, whose `changes` build this window's table from an empty one. All other fields
    equal the delta's."""
    changes: TableChanges = TableChanges()
    starts: tuple[RowStart, ...] = ()
    hand_offs_out: tuple[HandOff, ...] = ()
    hand_offs_in: tuple[HandOff, ...] = ()
    ends: tuple[int, ...] = ()
    """Requests whose row state this instance (their MoE binding) drops before the window's first
    step."""
    two_lanes: bool = False
    """Whether the window's steps run in two lanes; equal in all plans of a window."""
    num_drafts: int = 0
    """Most drafts of a row in a step; equal in a window's plans (protocol.md, equal width)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Allocated frames: KV of the first `num_tokens` positions may be written under this ticket.

    It is the paper's MIGRATE (3).
    """

    ticket: int
    request_id: int
    num_tokens: int
    targets: tuple[TargetRun, ...]
    """Ascending by page, without gaps; page p gets tokens 64p .. min(64p + 64, num_tokens) - 1. The
    pages of the state after num_tokens tokens come last, if they go too."""
    source: int | None = None
    """The instance that has the pages, all of them full, and sends them. None: prefill writes them.
    """

    @property
    def receivers(self) -> tuple[int, ...]:
        """Instances that get a page, ascending."""
        return tuple(sorted({target.instance for target in self.targets}))

    def tokens_in(self, page: int) -> int:
        """Tokens of a page that are written; 0: it is a page of the state."""
        return max(min(self.num_tokens - page * PAGE_SIZE, PAGE_SIZE), 0)

    def frames_at(self, instance: int) -> dict[int, int]:
        """page -> frame, for the pages that one instance gets."""
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
    """Each of `instances` must refuse the ticket from now on and answer TransferFenced."""

    ticket: int
    instances: tuple[int, ...]


class Placement(NamedTuple):
    """Which instances hold a request, for its front end; sent at each change (4.2.3)."""

    request_id: int
    moe_binding: int
    num_tokens: int
    """Tokens of KV that the request had, or was about to get, at that time."""
    holders: tuple[tuple[int, int], ...]
    """(first page, instance), ascending: the instance holds the pages up to the next entry, the
    last one all after."""
    begins: tuple[int, int] | None = None
    """With drafts: the least and the most tokens of KV that the request has when the row's first
    window at its MoE binding begins. None: num_tokens says it."""

    def kv_split(self, num_tokens: int | None = None) -> tuple[tuple[int, int], ...]:
        """(instance, pages), ascending, of the KV of `num_tokens` tokens (default: its own).

        A MoE binding without a page is absent.
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
        """Number of instances that held KV of the request."""
        return len(self.kv_split())


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that the scheduler ended.

    A row that stops by itself ends at its front end with its last token, and has no Ended.
    """

    request_id: int
    reason: FinishReason
    message: str = ""


class Preempted(NamedTuple):
    """A request that gave its frames to others.

    It comes back as an Arrival that `resumes`, or is aborted.
    """

    request_id: int
    num_tokens: int
    """Tokens of its prompt and its output; their KV has left the instances."""


class InstanceLoad(NamedTuple):
    """The load that the scheduler has decided for one instance; nothing in it is observed."""

    kv_tokens: int
    """Tokens resident or in transfer: what attention reads."""
    num_rows: int
    frames_free: int
    """0 while the instance is to leave, and once it has left."""
    frames_quarantined: int
    frames_committed: int
    """Frames of requests, those for coming tokens included. Every frame is free, quarantined or
    committed."""

    @property
    def num_frames(self) -> int:
        """Frames that hold something or could: 0 for a seat that serves nothing."""
        return self.frames_free + self.frames_quarantined + self.frames_committed


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """The load that the scheduler has decided for the cluster after one call."""

    num_running: int = 0
    """Requests that decode: their KV is there, and they have not ended."""
    num_waiting: int = 0
    """Requests that do not decode yet: in the waiting queue or prefilling."""
    instances: tuple[InstanceLoad, ...] = ()
    num_prefilling: int = 0
    """Requests that are placed and whose KV is not there yet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to one `plan_window` call, which the controller carries out."""

    window: int | None
    """None: no window now (no runnable row, or two are in flight)."""
    instances: tuple[InstancePlan, ...] = ()
    """One for each instance if `window` is not None, else empty."""
    transfers: tuple[Transfer, ...] = ()
    fences: tuple[Fence, ...] = ()
    placements: tuple[Placement, ...] = ()
    ended: tuple[Ended, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    stows: tuple[Stow, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    """Pages of `transfers` that come from slots; nobody else writes them."""
    is_settled: bool = False
    """The change of SeatsWanted may be carried out: no window and no ticket is open, and none will
    be until Regrouped."""
