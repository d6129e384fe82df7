"""Submissions as messages of frontend.proto.

Enters: a Submission or its message. Leaves: the other of the two. Does not know: streams.
"""

from __future__ import annotations

from dataclasses import fields

from control_plane.frontend.controller_interface import Submission
from nanocp.wire.v1 import frontend_pb2 as pb

_NAMES = [field.name for field in fields(Submission) if field.name != "prompt_len"]
"""The message has the prompt, and so its length."""


def submission_to_wire(submission: Submission) -> pb.Submission:
    """The message for a submission."""
    return pb.Submission(**{name: getattr(submission, name) for name in _NAMES})


def submission_from_wire(message: pb.Submission) -> Submission:
    """The submission in a message."""
    values = {name: getattr(message, name) for name in _NAMES}
    values["prompt_ids"] = list(message.prompt_ids)
    values["page_hashes"] = tuple(message.page_hashes)
    for name in ("queue_timeout_us", "prompt_logprobs"):
        if not message.HasField(name):
            values[name] = None
    return Submission(prompt_len=len(message.prompt_ids), **values)
