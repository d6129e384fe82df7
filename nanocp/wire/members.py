"""What members say, from protobuf: the one place where their messages are opened.

Enters: messages of nanocp.wire.v1, and whose stream they came up. Leaves: values of
nanocp.values.members and reports. Does not know: streams, terms.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from nanocp.values.members import (
    Beat,
    EngineNow,
    EnginesNow,
    Failure,
    Hello,
    Left,
    Loading,
    Peer,
    Ready,
    Resync,
    Said,
    Suspect,
    TokensLost,
)
from nanocp.values.passes import LayersMoved
from nanocp.values.plan import (
    TargetRun,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferMissed,
)
from nanocp.wire.convert import window_done_from_wire
from nanocp.wire.v1 import cluster_pb2 as pb

FromMember = pb.FromInstance | pb.FromPrefill
ToMember = pb.ToInstance | pb.ToPrefill


def said_from_wire(instance: int | None, message: FromMember | bytes) -> tuple[Said, int]:
    """(what an instance says, or the prefill if `instance` is None; the term it belongs to).

    bytes: an encoded FromInstance. Raises ValueError if the message means nothing.
    """
    if isinstance(message, bytes):
        encoded, message = message, pb.FromInstance()
        try:
            message.ParseFromString(encoded)
        except DecodeError as error:
            raise ValueError(f"{len(encoded)} bytes are not an encoded FromInstance") from error
    return _said(instance, message), message.term


def _said(instance: int | None, message: FromMember) -> Said:
    kind = message.WhichOneof("message")
    match kind:
        case "window_done" if instance is not None and isinstance(message, pb.FromInstance):
            return window_done_from_wire(instance, message.window_done)
        case "heartbeat":
            beat = message.heartbeat
            return Beat(beat.awaited if beat.HasField("awaited") else None)
        case "failure":
            return Failure(message.failure.message)
        case "suspect":
            suspect = message.suspect
            peer = suspect.instance if suspect.HasField("instance") else None
            return Suspect(peer, suspect.is_gone, suspect.message)
        case _ if isinstance(message, pb.FromPrefill):
            return _by_prefill(kind, message)
        case _ if instance is not None:
            return _by_instance(kind, instance, message)
    raise ValueError("a prefill does not speak as an instance")


def _by_instance(kind: str | None, instance: int, message: pb.FromInstance) -> Said:
    match kind:
        case "transfer_done":
            return TransferDone(message.transfer_done.ticket, instance)
        case "transfer_fenced":
            return TransferFenced(message.transfer_fenced.ticket, instance)
        case "transfer_missed":
            return TransferMissed(message.transfer_missed.ticket, instance)
        case "layers_moved":
            return LayersMoved(instance, message.layers_moved)
        case "resync":
            return Resync(message.resync.window, message.resync.reason)
        case "tokens_lost":
            lost = message.tokens_lost
            return TokensLost(tuple(lost.request_ids), lost.reason)
        case "left":
            return Left()
        case "ready":
            graphs = f"graphs: {message.ready.num_graphs} prepared"
            return Ready((*message.ready.selected, graphs))
        case "loading":
            return Loading(message.loading.percent)
        case "hello":
            return _hello(message.hello)
        case _:
            raise ValueError(f"an instance says {kind}, which has no meaning here")


def _hello(hello: pb.InstanceHello) -> Hello:
    kept = None
    if hello.HasField("kept"):
        runs = hello.kept
        columns = zip(runs.request_id, runs.first_page, runs.num_pages, runs.frame, strict=True)
        kept = tuple(
            (request_id, TargetRun(first_page, num_pages, hello.instance, frame))
            for request_id, first_page, num_pages, frame in columns
        )
    return Hello(hello.instance, Peer(hello.where.node, hello.where.address), kept)


def _by_prefill(kind: str | None, message: pb.FromPrefill) -> Said:
    match kind:
        case "ready":
            return Ready((f"process {message.ready.pid}",))
        case "failed":
            return TransferFailed(message.failed.ticket, message.failed.message)
        case "loading_percent":
            return Loading(message.loading_percent)
        case "engines":
            engines = message.engines.engines
            return EnginesNow(
                tuple(
                    EngineNow(*(getattr(each, name) for name in EngineNow._fields))
                    for each in engines
                )
            )
        case _:
            raise ValueError(f"a prefill says {kind}, which has no meaning here")
