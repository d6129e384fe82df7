"""Messages between members and the controller, with their codecs and gRPC methods."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from nanocp.values.commands import (
    CancelPrefill,
    ChangeExperts,
    ExpectPages,
    HoldBlocks,
    Join,
    Leave,
    PagesArrived,
    PrefillRequest,
    RefuseBlocks,
    RefusePages,
    ReleaseBlocks,
    SendPages,
    Shutdown,
    StagePrompt,
)
from nanocp.values.members import (
    Beat,
    BlocksRefused,
    EnginesNow,
    Envelope,
    ExpertLoad,
    ExpertsHere,
    Failure,
    Hello,
    Left,
    Loading,
    Member,
    Ready,
    Resync,
    Suspect,
    TokensLost,
)
from nanocp.values.offload import Fetch, Stow
from nanocp.values.passes import LayerMoves, LayersMoved, PassPlan
from nanocp.values.plan import (
    InstancePlan,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferMissed,
    WindowDone,
)
from nanocp.values.sampling import TokenBatch
from nanocp.wire.codec import Codec

VERSION = 6
"""Increased with every change of a message but a new dataclass field with a default. Other versions
find no such service, so a rolling upgrade to them is refused."""
CONTROLLER = f"nanocp.v{VERSION}.Controller"
"""The service that members dial. Each method is one stream as long as the member runs."""
TOKEN_SINK = f"nanocp.v{VERSION}.TokenSink"
"""The front end's service that members dial. `Deliver` is one stream from each instance and the
prefill."""


class Opened(NamedTuple):
    """An instance has dialled its node: the metadata of its call."""

    name: str
    secret: str


class FromStream(NamedTuple):
    """A message up one of a node's streams; without both fields the stream has ended."""

    stream: int
    """The node counts its streams from 1."""
    opened: Opened | None = None
    message: bytes | None = None


class FromNode(NamedTuple):
    """A batch of messages; an empty one is the node process's heartbeat."""

    items: tuple[FromStream, ...] = ()


class ToStream(NamedTuple):
    """A message down one of a node's streams."""

    stream: int
    message: bytes | None = None
    """None: the stream has ended."""


class ToNode(NamedTuple):
    """A batch of messages."""

    items: tuple[ToStream, ...] = ()


FROM_INSTANCE = Codec(
    Hello, Loading, Beat, Ready, Left, Suspect, Failure, WindowDone, TransferDone, TransferFenced,
    TransferMissed, LayersMoved, ExpertsHere, ExpertLoad, Resync, TokensLost,
)  # fmt: skip
"""Before Hello come only Loading and Failure."""
TO_INSTANCE = Codec(
    Join, ChangeExperts, InstancePlan, ExpectPages, SendPages, RefusePages, Stow, Fetch, PassPlan,
    LayerMoves, StagePrompt, Leave, Shutdown,
)  # fmt: skip
FROM_PREFILL = Codec(
    Loading, Beat, Ready, Suspect, Failure, TransferFailed, EnginesNow, BlocksRefused
)
"""Messages of the prefill and of the puller."""
TO_PREFILL = Codec(
    Join, PrefillRequest, CancelPrefill, PagesArrived, HoldBlocks, ReleaseBlocks, RefuseBlocks,
    Shutdown,
)  # fmt: skip
FROM_NODE, TO_NODE = Codec(FromNode), Codec(ToNode)
TOKENS = Codec(TokenBatch)


def why_broken(error: grpc.RpcError) -> str:
    """A sentence about a broken stream to the controller."""
    code = error.code()
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "it is of another version, which takes a restart of the service"
    return f"{code.name}: {error.details()}"


def opened_said(member: Member, data: bytes) -> Envelope:
    """Decode a member's message.

    Raises ValueError for undecodable bytes, or if the member speaks for another one.
    """
    envelope = (FROM_PREFILL if member.instance is None else FROM_INSTANCE).open(data)
    match envelope.message:
        case (
            WindowDone(instance=speaker)
            | TransferDone(instance=speaker)
            | TransferFenced(instance=speaker)
            | TransferMissed(instance=speaker)
            | LayersMoved(stage=speaker)
            | ExpertsHere(instance=speaker)
            | ExpertLoad(instance=speaker)
        ) if speaker != member.instance:
            raise ValueError(f"it speaks as instance {speaker}")
        case Hello(instance=speaker, kept=kept):
            for _, run in kept or ():
                if run.instance != speaker or min(run) < 0:
                    raise ValueError(f"its hello has pages that it cannot have: {run}")
    return envelope
