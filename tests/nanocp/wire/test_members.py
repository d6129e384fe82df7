"""What members say: each message has a meaning, and each report somebody who takes it."""

import re
from typing import get_args

import pytest

from harness.paths import ROOT
from nanocp.values.members import Report, Said
from nanocp.wire.members import said_from_wire
from nanocp.wire.v1 import cluster_pb2 as pb

KINDS = [
    (member, message, field)
    for member, message in ((0, pb.FromInstance), (None, pb.FromPrefill))
    for field in message.DESCRIPTOR.oneofs_by_name["message"].fields
]


@pytest.mark.parametrize(
    ("member", "message", "field"),
    KINDS,
    ids=[f"{message.__name__}.{field.name}" for _, message, field in KINDS],
)
def test_every_message_of_a_member_means_something(member, message, field):
    empty = field.message_type and getattr(pb, field.message_type.name)()
    said, term = said_from_wire(member, message(term=7, **{field.name: empty or 1}))
    assert isinstance(said, Said) and term == 7


@pytest.mark.parametrize("report", get_args(Report), ids=lambda report: report.__name__)
def test_the_coordinator_takes_every_report(report):
    """One that nobody takes ends the stream of the member that says it."""
    sources = (ROOT / "control_plane/coordinator").rglob("*.py")
    asks = re.compile(rf"\b(?:case\b|isinstance\().*\b{report.__name__}\b")
    is_taken = any(asks.search(path.read_text()) for path in sources)
    assert is_taken, f"no case or isinstance in control_plane/coordinator/ takes {report.__name__}"
