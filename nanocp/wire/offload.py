"""Commands about pages outside the frames <-> protobuf, both ways, exactly.

Enters: values of nanocp.values.offload, or messages of nanocp.wire.v1. Leaves: the other of the
two. Does not know: which page a slot has.
"""

from __future__ import annotations

from nanocp.values.offload import Fetch, StoredPage, Stow
from nanocp.wire.v1 import cluster_pb2 as pb


def stow_to_wire(stow: Stow) -> pb.Stow:
    """The message for the instance that the command names."""
    sources, slots = zip(*stow.pages, strict=True)
    return pb.Stow(
        ticket=stow.ticket,
        instance=stow.instance,
        source=sources,
        slot=slots,
        is_demotion=stow.is_demotion,
    )


def stow_from_wire(message: pb.Stow) -> Stow:
    """The command in the message. Raises ValueError if its columns differ in length."""
    pages = tuple(zip(message.source, message.slot, strict=True))
    return Stow(message.ticket, message.instance, pages, message.is_demotion)


def fetch_to_wire(fetch: Fetch) -> pb.Fetch:
    """The message for the instance that the command names."""
    pages, slots, receivers = zip(*fetch.pages, strict=True)
    return pb.Fetch(
        ticket=fetch.ticket, instance=fetch.instance, page=pages, slot=slots, receiver=receivers
    )


def fetch_from_wire(message: pb.Fetch) -> Fetch:
    """The command in the message. Raises ValueError if its columns differ in length."""
    pages = zip(message.page, message.slot, message.receiver, strict=True)
    return Fetch(message.ticket, message.instance, tuple(StoredPage(*page) for page in pages))
