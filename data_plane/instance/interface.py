"""The instance's interface: the few calls by which a process or a test drives one instance.

DecodeInstance (instance/decode.py) and the fake HashInstance
(tests/harness/hash_clusters/hash_instance.py) implement it. Synchronous, no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from data_plane.kv.page_ring import ArrivedPage
from data_plane.transport.exchange import Exchange
from nanocp.config.cluster import ClusterConfig
from nanocp.values.experts import ExpertTable
from nanocp.values.members import Report, Resync
from nanocp.values.plan import Fetch, InstancePlan, Stow, Transfer
from nanocp.values.sampling import Token as Token
from nanocp.values.table_changes import PageRun


@dataclass(frozen=True, slots=True)
class Polled:
    """What happened since the last poll."""

    events: tuple[Report, ...] = ()
    """WindowDone, TransferDone, TransferFenced, TransferMissed: for the controller."""
    tokens: tuple[Token, ...] = ()
    """Sampled tokens, for the front ends."""


class PageSource(Protocol):
    """Where prefill's pages arrive."""

    def arrived(self) -> Iterator[ArrivedPage]:
        """The pages that are there; each is consumed when the next is asked for."""

    def close(self) -> None:
        """Release everything."""


class PageMover(Protocol):
    """How pages get to and from other instances."""

    def connect(self) -> None:
        """Attach to every peer."""

    def arrived(self) -> Iterable[Iterator[ArrivedPage]]:
        """The pages that are there, one iterator for each peer."""

    def has_lost(self, peer: int) -> bool:
        """Whether the connection that brings the peer's pages has ended; ask before `arrived`."""

    def has_place(self, peer: int) -> bool:
        """Whether a page for the peer would find a place now."""

    def send(self, peer: int, *, ticket: int, page: int, num_tokens: int, payload: Any) -> None:
        """Send a page. There must be a place."""

    def close(self) -> None:
        """Release everything."""


class States(Protocol):
    """States of rows in linear attention layers; kv.carry_pool.CarryPool is one."""

    def clear(self, frame: int, num_tokens: int = 0) -> None:
        """The frame gets the state of no token, or of tokens without content."""

    def num_folded(self, frame: int) -> int:
        """Tokens that a state has, in the layer with most."""

    def page(self, frame: int, number: int) -> Any:
        """A page of a frame's own bytes, no copy: an array, or a tensor on a GPU."""


def state_page(states: States | None, cluster: ClusterConfig, frame: int) -> Any:
    """The page of a state in a frame that a ticket names; None: it is one of KV."""
    if states is None or frame < cluster.num_frames:
        return None
    return states.page(*cluster.carry_place(frame))


class PageFrames(Protocol):
    """An instance's frames, of KV and of states, by the numbers that tickets name."""

    states: Any
    """A States; None: the model has no linear attention layers."""

    def read(self, frame: int) -> Any:
        """A full page's bytes, all layers, perhaps a view; in their order `write` takes them."""

    def write(self, frame: int, num_tokens: int, payload: Any, offset: int) -> None:
        """Put bytes of an arrived page into its frame; offset: see ArrivedPage."""

    def make(self, transfer: Transfer) -> bool:
        """Fill the ticket's frames with synthetic KV; False if its pages are sent."""


class TermEnds(NamedTuple):
    """What one instance shares with others in one term; nothing of it outlives the term."""

    exchange: Exchange
    rings: Sequence[PageSource]
    """Where the prefill puts pages: a ring for each of its writers, none with synthetic KV."""
    moves: PageMover


class TermStart(NamedTuple):
    """What an instance must know of a term that it joins."""

    seats: Sequence[int]
    """Instances of the term, ascending."""
    experts: ExpertTable | None = None
    """Where each expert is; None: where it was."""
    newest_ticket: int = 0
    """The last ticket of the terms before: pages under it or older ones are refused."""
    keeps_rows: bool = False
    """Whether rows and table are those of the last term: it ended at the edge of a window."""


class Pages(Protocol):
    """The pages that come to an instance and leave it, called between steps or when idle."""

    def expect(self, transfer: Transfer) -> None:
        """Accept pages under this ticket from now on.

        Answered by TransferDone when the last page is in its frame.
        """

    def send(self, transfer: Transfer) -> None:
        """Send pages of this instance to the instances that expect them.

        The pages are full and will not be written again. A page that is not here any more is left
        out: its request has ended, and its ticket is fenced there.
        """

    def stow(self, stow: Stow) -> None:
        """Copy pages into slots, beside the steps and in the order of these calls.

        Answered by TransferDone, or by TransferFenced if a page could not be written.
        """

    def fetch(self, fetch: Fetch) -> None:
        """Send pages from slots to the instances that expect them, this one too.

        A page that cannot be read is answered by TransferMissed; the others arrive.
        """

    def fence(self, ticket: int) -> None:
        """Refuse pages under this ticket from now on.

        Answered by TransferFenced, also for an unknown ticket.
        """

    def copy_arrived_pages(self) -> None:
        """Copy the pages that arrived into their frames, which is safe only between two steps.

        A page whose ticket is newer than every ticket expected so far stays in the ring: its
        `expect` is under way. Raises PeerLost (transport.exchange) if the connection has ended by
        which another instance's pages were to come.
        """

    def send_pages(self) -> None:
        """Write pages into the receivers' rings as far as there is room, without waiting."""

    @property
    def is_moving_pages(self) -> bool:
        """Whether pages are still to be sent, or to come from another instance.

        While they are, an idle caller must call `send_pages` and `copy_arrived_pages` again soon.
        """


class Instance(Protocol):
    """One instance, driven from one thread.

    The caller's loop: `begin(plan)`, then `run_step()` plan.num_steps times; `poll()` after each,
    and `expect`, `send`, `fence`, `copy_arrived_pages` and `send_pages` between steps or when idle.
    """

    pages: Any
    """What has the calls of Pages, and the term's rings."""
    experts: Any
    """The instance's ExpertTables."""

    def begin(self, plan: InstancePlan) -> Resync | None:
        """Apply the plan, post and await the hand-offs, stage the tables. Nothing runs yet.

        Returns Resync, with nothing committed, if a digest differs; the caller must begin the
        full plan of the same window next. Raises PeerLost, ExchangeTimeout or TermOver
        (transport.exchange) while awaiting a hand-off.
        """

    def run_step(self) -> None:
        """Run one step of the begun window: exchange, attention, MoE, sampling.

        The window's last step adds WindowDone to the events. Raises what a wait of the exchange
        raises. The step is then abandoned: only `leave` may follow.
        """

    def leave(self) -> None:
        """Leave the term: forget the window, tickets, what was not polled, and the ends.

        Rows and table stay until `join` says whether they go on. Frames keep their KV, which the
        next term may read (protocol.md, kept KV). It may be called at any point between two
        other calls, also after one that raised, and twice.
        """

    def join(self, ends: TermEnds, start: TermStart) -> None:
        """Begin another term after `leave`, with ends that are this instance's in that term.

        Experts that it lacks are loaded. Raises ValueError if this kind of instance cannot join
        another term, and what reading the checkpoint raises (model.weights.load_experts).
        """

    def poll(self) -> Polled:
        """Take what happened since the last poll."""

    def kept_pages(self) -> list[PageRun]:
        """The pages of requests in the table of the term that was left.

        Each holds KV of its request, up to a position that the request's front end knows. Requests
        are left out whose frames may have been given to another since.
        """

    def restarts(self) -> list[tuple[int, int, int]]:
        """(request, least, most) of rows of the term that was left whose states are here.

        At these positions a row may go on with its state. There is none without linear attention
        layers.
        """

    def close(self) -> None:
        """Release everything, shared memory included. Idempotent."""
