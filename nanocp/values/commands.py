"""What the controller says to members.

Enters: nothing; values only. Leaves: the values. Does not know: streams, terms, what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanocp.values.members import Peer
from nanocp.values.offload import Fetch, Stow
from nanocp.values.passes import LayerMoves, PassPlan
from nanocp.values.plan import InstancePlan, Transfer


@dataclass(frozen=True, slots=True)
class Join:
    """A term begins, and all its instances are here: attach to the peers."""

    peers: tuple[Peer, ...] = ()
    """By instance."""
    newest_ticket: int = 0
    """The last ticket of all terms before; it and older ones are void."""
    seats: tuple[int, ...] = ()
    """Instances of the term, ascending."""
    expert_seats: tuple[int, ...] = ()
    """For each expert its instance, the same in every layer. Empty: a model without experts."""
    expert_slots: tuple[int, ...] = ()
    """For each expert its slot there."""
    keeps_rows: bool = False
    """Rows and tables go on as they are: the last term ended at the edge of a window."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The term is over: abandon the step, leave the term, and answer Left."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the cluster: close everything and end the stream."""

    reason: str


@dataclass(frozen=True, slots=True)
class ExpectPages:
    """Pages of a ticket come to this instance."""

    transfer: Transfer
    """With no targets but the instance's own."""


@dataclass(frozen=True, slots=True)
class SendPages:
    """Send pages of this instance to the instances that expect them."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class RefusePages:
    """Take no page of this ticket any more, and answer TransferFenced."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StagePrompt:
    """To a stage of a pipeline, before the pass in which the request starts."""

    request_id: int
    token_ids: Sequence[int]
    prompt_logprobs: int | None = None
    """Most likely tokens to report beside each token of the prompt; None: no log probabilities."""
    front_end: str = ""
    """host:port that gets them."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """To the prefill: compute the KV of a prompt, and write it under the transfer's ticket."""

    transfer: Transfer
    token_ids: Sequence[int]
    """Ids of positions 0 .. num_tokens - 1; with prompt_logprobs or drafts, of position num_tokens
    too."""
    prompt_logprobs: int | None = None
    """Most likely tokens to report at positions 1 .. num_tokens; None: no log probabilities."""
    front_end: str = ""
    """host:port that gets them."""


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """To the prefill: stop working on this ticket, if it is queued or running."""

    ticket: int


@dataclass(frozen=True, slots=True)
class PagesArrived:
    """To the prefill: all receivers of this ticket have all their pages."""

    ticket: int


ToInstance = (
    Join
    | InstancePlan
    | ExpectPages
    | SendPages
    | RefusePages
    | Stow
    | Fetch
    | PassPlan
    | LayerMoves
    | StagePrompt
    | Leave
    | Shutdown
)
ToPrefill = Join | PrefillRequest | CancelPrefill | PagesArrived | Shutdown
ToMember = ToInstance | ToPrefill
