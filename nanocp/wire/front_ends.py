"""Messages between the controller and front ends in processes of their own.

Enters: events and loads of plan.py, or messages of frontend.proto. Leaves: the other of the two.
Does not know: streams.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from nanocp.values.plan import ClusterLoad, Ended, FinishReason, InstanceLoad, Placement, Preempted
from nanocp.wire.v1 import frontend_pb2 as pb


def placed_to_wire(placement: Placement, num_cached: int | None) -> pb.ToFrontEnd:
    """The message for a placement."""
    holders = [pb.PlacedPages(first_page=page, instance=i) for page, i in placement.holders]
    placed = pb.RequestPlaced(
        request_id=placement.request_id,
        moe_binding=placement.moe_binding,
        num_tokens=placement.num_tokens,
        holders=holders,
        num_cached=num_cached,
    )
    return pb.ToFrontEnd(placed=placed)


def placed_from_wire(message: pb.RequestPlaced) -> tuple[Placement, int | None]:
    """The placement, and the tokens that were cached if it is the first."""
    holders = tuple((run.first_page, run.instance) for run in message.holders)
    placement = Placement(message.request_id, message.moe_binding, message.num_tokens, holders)
    return placement, message.num_cached if message.HasField("num_cached") else None


def preempted_to_wire(preempted: Preempted) -> pb.ToFrontEnd:
    """The message for a preemption."""
    return pb.ToFrontEnd(preempted=pb.RequestPreempted(**preempted._asdict()))


def preempted_from_wire(message: pb.RequestPreempted) -> Preempted:
    """The preemption in a message."""
    return Preempted(message.request_id, message.num_tokens)


def ended_to_wire(ended: Ended) -> pb.ToFrontEnd:
    """The message for the end of a request."""
    message = pb.RequestEnded(
        request_id=ended.request_id, reason=ended.reason.name, message=ended.message
    )
    return pb.ToFrontEnd(ended=message)


def ended_from_wire(message: pb.RequestEnded) -> Ended:
    """The end of a request in a message."""
    return Ended(message.request_id, FinishReason[message.reason], message.message)


def load_to_wire(load: ClusterLoad) -> pb.ToFrontEnd:
    """The message for the cluster's load."""
    return pb.ToFrontEnd(load=json.dumps(asdict(load)).encode())


def load_from_wire(content: bytes) -> ClusterLoad:
    """The cluster's load in a message."""
    fields = json.loads(content)
    instances = tuple(InstanceLoad(*load) for load in fields.pop("instances"))
    return ClusterLoad(instances=instances, **fields)
