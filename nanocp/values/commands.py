"""Commands of the controller to members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanocp.values.experts import ExpertTable
from nanocp.values.members import Peer
from nanocp.values.offload import Fetch, Stow
from nanocp.values.passes import LayerMoves, PassPlan
from nanocp.values.plan import InstancePlan, Transfer
from nanocp.values.remote_blocks import RemoteBlocks


@dataclass(frozen=True, slots=True)
class Join:
    """A term begins with all its instances: attach to the peers."""

    peers: tuple[Peer, ...] = ()
    """By instance."""
    newest_ticket: int = 0
    """The last ticket of earlier terms; all up to it are void."""
    seats: tuple[int, ...] = ()
    """Instances of the term, ascending."""
    experts: ExpertTable | None = None
    """None: no experts, or where they were."""
    keeps_rows: bool = False
    """Rows and tables stay: the last term ended between windows."""


@dataclass(frozen=True, slots=True)
class ChangeExperts:
    """Plans of the term will name this table: load what it lacks here, and answer ExpertsHere."""

    number: int
    """From 1; the term began with table 0."""
    table: ExpertTable


@dataclass(frozen=True, slots=True)
class Leave:
    """The term is over: abandon the step, and answer Left."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Close everything and end the stream."""

    reason: str


@dataclass(frozen=True, slots=True)
class ExpectPages:
    """Pages of a ticket come to this instance."""

    transfer: Transfer
    """With no targets but the instance's own."""


@dataclass(frozen=True, slots=True)
class SendPages:
    """Send pages to the instances that expect them."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class RefusePages:
    """Take no more pages of this ticket, and answer TransferFenced."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StagePrompt:
    """A prompt for a pipeline's stage, before the request's first pass."""

    request_id: int
    token_ids: Sequence[int]
    prompt_logprobs: int | None = None
    """Most likely tokens to report beside each prompt token; None: no log probabilities."""
    front_end: str = ""
    """host:port that gets them."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute a prompt's KV, and write it under the transfer's ticket."""

    transfer: Transfer
    token_ids: Sequence[int]
    """Ids of positions 0 .. num_tokens - 1, and of num_tokens with prompt_logprobs or drafts."""
    prompt_logprobs: int | None = None
    """Most likely tokens to report at positions 1 .. num_tokens; None: no log probabilities."""
    front_end: str = ""
    """host:port that gets them."""
    salt: bytes = b""
    """The prefill's own cache shares pages of prompts with equal salts."""


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """Stop the prefill of this ticket, queued or running."""

    ticket: int


@dataclass(frozen=True, slots=True)
class PagesArrived:
    """All receivers of this ticket have their pages."""

    ticket: int


@dataclass(frozen=True, slots=True)
class HoldBlocks:
    """Keep the blocks of a request at their engine, which waits for its placement or its pages."""

    request_id: int
    blocks: RemoteBlocks


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Let the engine free the blocks of a request, which has its pages or has ended."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RefuseBlocks:
    """Let the engine free blocks that no request reads, unless one holds them."""

    blocks: RemoteBlocks


ToInstance = (
    Join
    | ChangeExperts
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
ToPuller = ToPrefill | HoldBlocks | ReleaseBlocks | RefuseBlocks
ToMember = ToInstance | ToPuller
