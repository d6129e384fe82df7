"""Pages that instances kept though their controller was lost, until the next one's first term.

Enters: what instances say in their hello, losses. Leaves: the pages of each request over all
instances. Does not know: what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.ports.member_streams import Member
from nanocp.values.plan import TargetRun
from nanocp.wire.v1 import cluster_pb2 as pb


class KeptPages:
    """Used from the controller's event loop."""

    def __init__(self) -> None:
        self._said: dict[Member, pb.KeptPages] = {}

    def say(self, member: Member, hello: pb.InstanceHello | None) -> None:
        """Take what an instance has."""
        if hello is not None and hello.HasField("kept"):
            self._said[member] = hello.kept

    def lose(self, member: Member) -> None:
        """The member's process is gone."""
        self._said.pop(member, None)

    def of(self, seats: Sequence[Member]) -> tuple[tuple[int, tuple[TargetRun, ...]], ...]:
        """(request, its pages) of these instances; none if some instance has no pages to tell of.

        One that is gone may have had the newer copy of a page that was moving. For the same reason
        a page that is in two places is in none.
        """
        if not self._said.keys() >= {*seats}:
            return ()
        runs: dict[int, list[TargetRun]] = {}
        for member in seats:
            kept = self._said[member]
            for request_id, *run in zip(
                kept.request_id, kept.first_page, kept.num_pages, kept.frame, strict=True
            ):
                first_page, num_pages, frame = run
                target = TargetRun(first_page, num_pages, member.instance or 0, frame)
                runs.setdefault(request_id, []).append(target)
        return tuple((request_id, tuple(sorted(found))) for request_id, found in runs.items())
