"""The blocks that engines keep for requests here: their users, leases and ends.

Times are seconds of one monotonic clock, which the caller reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanocp.values.remote_blocks import RemoteBlocks

_MAX_RELEASED = 1 << 14
_MARGIN_S = 5.0
"""From a deadline here to the end of the engine's lease."""
_NEVER = float("inf")


class KvChanged(RuntimeError):
    """The blocks do not hold the KV of the prompt, or not for sure."""


class EngineAddress(NamedTuple):
    """What requests must have in common to share a connection to an engine."""

    engine_id: str
    host: str
    port: int

    @classmethod
    def of(cls, blocks: RemoteBlocks) -> EngineAddress:
        """Return the address of the engine that has these blocks."""
        return cls(blocks.engine_id, blocks.host, blocks.port)


@dataclass(slots=True, eq=False)
class BlocksInUse:
    """One set of blocks, until its last user has gone."""

    blocks: RemoteBlocks
    deadline: float
    """The engine may have freed the blocks at this time."""
    users: set[Hashable] = field(default_factory=set)


class Holds:
    """Every set of blocks in use; a notice of each is due once, after its last user.

    A user is a request, by its id, or a read, by any other object.
    """

    def __init__(self, lease_s: float) -> None:
        """lease_s: shortest time for which an engine keeps blocks without a heartbeat."""
        self._lease_s = lease_s
        self._of_users: dict[Hashable, BlocksInUse] = {}
        self._in_use: dict[tuple[str, str], BlocksInUse] = {}
        self._released: dict[tuple[str, str], None] = {}
        """The latest, oldest first."""
        self._orphans: set[Hashable] = set()
        self._orphans_until = _NEVER
        self.beat_at = 0.0
        """The time of the next heartbeat, if blocks are in use then."""
        self.notices: dict[EngineAddress, list[RemoteBlocks]] = {}
        """Blocks that their engine may free: whoever tells it takes them out."""

    def hold(self, user: Hashable, blocks: RemoteBlocks, now: float) -> None:
        """Make a request or a read a user of blocks. Idempotent."""
        self._orphans.discard(user)
        if user in self._of_users:
            return
        if blocks.key not in self._in_use:
            deadline = now + self._lease_s - min(_MARGIN_S, self._lease_s / 2)
            deadline = -_NEVER if blocks.key in self._released else deadline
            self._in_use[blocks.key] = BlocksInUse(blocks, deadline)
        self._of_users[user] = held = self._in_use[blocks.key]
        held.users.add(user)

    def release(self, user: Hashable) -> None:
        """Take a user from its blocks. Idempotent."""
        self._orphans.discard(user)
        if (held := self._of_users.pop(user, None)) is not None:
            held.users.remove(user)
            if not held.users:
                held.deadline = -_NEVER
                del self._in_use[held.blocks.key]
                self.refuse(held.blocks)

    def refuse(self, blocks: RemoteBlocks) -> None:
        """Free blocks, unless they have users or were freed lately."""
        if blocks.key in self._in_use or blocks.key in self._released:
            return
        self.notices.setdefault(EngineAddress.of(blocks), []).append(blocks)
        self._released[blocks.key] = None
        if len(self._released) > _MAX_RELEASED:
            del self._released[next(iter(self._released))]

    def orphan(self, now: float) -> None:
        """Let all that no controller holds again end with the lease."""
        self._orphans = {user for user in self._of_users if isinstance(user, int)}
        self._orphans_until = now + self._lease_s

    def expire(self, now: float) -> None:
        """Release what no controller has held again in time."""
        if now >= self._orphans_until:
            self._orphans_until = _NEVER
            for user in list(self._orphans):
                self.release(user)

    def of(self, request_id: int) -> BlocksInUse | None:
        """Return a request's blocks; None: it holds none."""
        return self._of_users.get(request_id)

    def addresses(self) -> set[EngineAddress]:
        """Return the engines whose blocks are in use, or that must be told of freed ones."""
        used = {EngineAddress.of(held.blocks) for held in self._in_use.values()}
        return used | self.notices.keys()

    def beats_due(self, now: float) -> dict[EngineAddress, list[BlocksInUse]]:
        """Take the sets that need a heartbeat now, by engine: those before their deadline."""
        due: dict[EngineAddress, list[BlocksInUse]] = {}
        if now >= self.beat_at:
            self.beat_at = now + self._lease_s / 6
            for held in self._in_use.values():
                if now < held.deadline:
                    due.setdefault(EngineAddress.of(held.blocks), []).append(held)
        return due

    def renewed(self, sets: Sequence[BlocksInUse], now: float) -> None:
        """Note a heartbeat for these sets, sent now or later."""
        renewed_s = 2 / 3 * self._lease_s - min(_MARGIN_S, self._lease_s / 3)
        for held in sets:
            held.deadline = max(held.deadline, now + renewed_s)

    def next_change(self) -> float:
        """Return the time of the next heartbeat or end."""
        return min(self._orphans_until, self.beat_at if self._in_use else _NEVER)
