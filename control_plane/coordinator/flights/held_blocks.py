"""Blocks that requests hold at the engines which computed their prompts, until they have the KV."""

from __future__ import annotations

from control_plane.coordinator.members.members import Members
from nanocp.values.commands import HoldBlocks, RefuseBlocks, ReleaseBlocks
from nanocp.values.members import PULLER
from nanocp.values.remote_blocks import RemoteBlocks


class HeldBlocks:
    """What the puller is to keep. Used from the controller's thread."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._held: dict[int, RemoteBlocks] = {}
        self._pulled: set[int] = set()
        """Requests with a ticket of the puller in this attempt."""
        self._unsure: set[int] = set()
        """Requests of an ended term, until they are submitted again."""

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._held

    def hold(self, request_id: int, blocks: RemoteBlocks) -> None:
        """Keep the blocks of a request that was submitted, as often as it is."""
        self._held[request_id] = blocks
        self._pulled.discard(request_id)
        self._unsure.discard(request_id)
        self._members.send(PULLER, HoldBlocks(request_id, blocks))

    def pull(self, request_id: int) -> None:
        """Note that the puller gets a ticket of the request."""
        self._pulled.add(request_id)

    def placed(self, request_id: int) -> None:
        """Release the blocks of a placed request of which nothing is pulled."""
        if request_id not in self._pulled:
            self.release(request_id)

    def release(self, request_id: int) -> None:
        """Let the engine free them: the request has its KV, needs none from there, or has ended."""
        if self._held.pop(request_id, None) is not None:
            self._pulled.discard(request_id)
            self._members.send(PULLER, ReleaseBlocks(request_id))

    def interrupted(self) -> None:
        """Every open request will be submitted again; one that has ended meanwhile will not."""
        self._unsure = set(self._held)

    def resubmitted(self) -> None:
        """Release the blocks of those that were not submitted again."""
        for request_id in self._unsure:
            self.release(request_id)
        self._unsure.clear()

    def refuse(self, blocks: RemoteBlocks) -> None:
        """Let the engine free blocks of a request that never was submitted."""
        self._members.send(PULLER, RefuseBlocks(blocks))

    def send_again(self) -> None:
        """A new puller has dialled: it knows nothing."""
        for request_id, blocks in self._held.items():
            self._members.send(PULLER, HoldBlocks(request_id, blocks))
