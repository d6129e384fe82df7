"""Passes of a pipeline <-> protobuf, both ways, exactly.

Enters: values of nanocp.values.passes, or messages of nanocp.wire.v1. Leaves: the other of the two.
Does not know: streams, who sends what to whom.
"""

from __future__ import annotations

from nanocp.values.passes import LayerMove, LayerMoves, PassPlan, Span
from nanocp.wire.convert import instance_plan_from_wire, instance_plan_to_wire
from nanocp.wire.v1 import cluster_pb2 as pb


def pass_plan_to_wire(plan: PassPlan) -> pb.PassPlan:
    """The message for every stage."""
    return pb.PassPlan(
        number=plan.number,
        layout=plan.layout,
        after=plan.after,
        table=instance_plan_to_wire(plan.table),
        span_request=[span.request_id for span in plan.spans],
        span_first=[span.first for span in plan.spans],
        span_tokens=[span.num_tokens for span in plan.spans],
        span_samples=[span.samples for span in plan.spans],
    )


def pass_plan_from_wire(message: pb.PassPlan) -> PassPlan:
    """The pass in the message. Raises ValueError if columns differ in length."""
    spans = zip(
        message.span_request,
        message.span_first,
        message.span_tokens,
        message.span_samples,
        strict=True,
    )
    return PassPlan(
        number=message.number,
        layout=message.layout,
        after=message.after,
        table=instance_plan_from_wire(message.table),
        spans=tuple(Span(*span) for span in spans),
    )


def layer_moves_to_wire(moves: LayerMoves) -> pb.LayerMoves:
    """The message for every stage."""
    return pb.LayerMoves(
        number=moves.number,
        split=moves.split or (),
        moves=[
            pb.LayerMove(
                layer=move.layer,
                source=move.source,
                target=move.target,
                place=move.place,
                first_frame=[first for first, _ in move.frames],
                num_frames=[count for _, count in move.frames],
            )
            for move in moves.moves
        ],
    )


def layer_moves_from_wire(message: pb.LayerMoves) -> LayerMoves:
    """The moves in the message. Raises ValueError if columns differ in length."""
    return LayerMoves(
        number=message.number,
        split=tuple(message.split) or None,
        moves=tuple(
            LayerMove(
                move.layer,
                move.source,
                move.target,
                move.place,
                tuple(zip(move.first_frame, move.num_frames, strict=True)),
            )
            for move in message.moves
        ),
    )
