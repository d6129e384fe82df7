"""Submissions as messages of frontend.proto.

Enters: a Submission or its message. Leaves: the other of the two. Does not know: streams.
"""

from __future__ import annotations

from dataclasses import fields

from control_plane.frontend.controller_interface import Submission
from nanocp.values.plan import Arrival
from nanocp.wire.v1 import frontend_pb2 as pb

_NAMES = {field.name for field in fields(Arrival)} & set(pb.Submission.DESCRIPTOR.fields_by_name)
"""Fields of the arrival that the message has; it has the prompt, and so its length."""


def submission_to_wire(submission: Submission) -> pb.Submission:
    """The message for a submission."""
    return pb.Submission(
        prompt_ids=submission.prompt_ids,
        queue_timeout_us=submission.queue_timeout_us,
        front_end=submission.front_end,
        prompt_logprobs=submission.prompt_logprobs,
        **{name: getattr(submission.arrival, name) for name in _NAMES},
    )


def submission_from_wire(message: pb.Submission) -> Submission:
    """The submission in a message."""
    values = {name: getattr(message, name) for name in _NAMES}
    values["page_hashes"] = tuple(message.page_hashes)
    timeout_us, num_top = (
        getattr(message, name) if message.HasField(name) else None
        for name in ("queue_timeout_us", "prompt_logprobs")
    )
    arrival = Arrival(prompt_len=len(message.prompt_ids), **values)
    return Submission(arrival, list(message.prompt_ids), timeout_us, message.front_end, num_top)
