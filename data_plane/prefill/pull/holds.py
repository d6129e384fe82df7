"""The blocks that engines keep for requests here: their users, leases and ends.

Times are seconds of one monotonic clock, which the caller reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanocp.values.remote_blocks import RemoteBlocks

MAX_HOLDS = 16_384
"""More requests hold no blocks: their transfers fail."""
_MAX_RELEASED = 1024
_MARGIN_S = 5.0
"""From a deadline here to the end of the engine's lease."""
_NEVER = float("inf")


class EngineAddress(NamedTuple):
    """What requests must have in common to share a connection to an engine."""

    engine_id: str
    host: str
    port: int
    tp_size: int

    @classmethod
    def of(cls, blocks: RemoteBlocks) -> EngineAddress:
        """Return the address of the engine that has these blocks."""
        return cls(blocks.engine_id, blocks.host, blocks.port, blocks.tp_size)


@dataclass(slots=True, eq=False)
class BlocksInUse:
    """One set of blocks, until its last user has gone."""

    blocks: RemoteBlocks
    deadline: float
    """The engine may have freed the blocks at this time."""
    requests: set[int] = field(default_factory=set)
    num_reads: int = 0


class Holds:
    """Every set of blocks in use; a notice of each is due once, after its last user."""

    def __init__(self, lease_s: float) -> None:
        """lease_s: shortest time for which an engine keeps blocks without a heartbeat."""
        self._lease_s = lease_s
        self._blocks: dict[int, RemoteBlocks] = {}
        self._held: dict[tuple[str, str], BlocksInUse] = {}
        self._at: dict[EngineAddress, dict[tuple[str, str], BlocksInUse]] = {}
        self._beat_at: dict[EngineAddress, float] = {}
        self._released: dict[tuple[str, str], None] = {}
        """The latest, oldest first."""
        self._orphans: set[int] = set()
        self._orphans_until = _NEVER
        self.notices: dict[EngineAddress, list[RemoteBlocks]] = {}
        """Blocks that their engine may free: whoever tells it takes them out."""

    def hold(self, request_id: int, blocks: RemoteBlocks, now: float) -> bool:
        """Make a request a user of its blocks; False: too many hold some. Idempotent."""
        self._orphans.discard(request_id)
        if request_id in self._blocks:
            return True
        if len(self._blocks) >= MAX_HOLDS:
            return False
        if (held := self._held.get(blocks.key)) is None:
            deadline = now + self._lease_s - min(_MARGIN_S, self._lease_s / 2)
            held = BlocksInUse(blocks, -_NEVER if blocks.key in self._released else deadline)
            self._held[blocks.key] = held
            address = EngineAddress.of(blocks)
            self._at.setdefault(address, {})[blocks.key] = held
            self._beat_at.setdefault(address, now)
        self._blocks[request_id] = blocks
        held.requests.add(request_id)
        return True

    def release(self, request_id: int) -> None:
        """Take a request from the users of its blocks. Idempotent."""
        if (blocks := self._blocks.pop(request_id, None)) is not None:
            self._orphans.discard(request_id)
            self._held[blocks.key].requests.remove(request_id)
            self._end_if_unused(blocks.key)

    def refuse(self, blocks: RemoteBlocks) -> None:
        """Free blocks that no request reads, unless they have users or were freed lately."""
        if blocks.key not in self._held:
            self._note_released(blocks)

    def begin_read(self, blocks: RemoteBlocks) -> None:
        """Make a read a user of these blocks, which are held."""
        self._held[blocks.key].num_reads += 1

    def end_read(self, blocks: RemoteBlocks) -> None:
        """Take a read from the users of these blocks."""
        self._held[blocks.key].num_reads -= 1
        self._end_if_unused(blocks.key)

    def orphan(self, now: float) -> None:
        """Let all that no controller holds again end with the lease."""
        self._orphans, self._orphans_until = set(self._blocks), now + self._lease_s

    def expire(self, now: float) -> None:
        """Release what no controller has held again in time."""
        if now >= self._orphans_until:
            self._orphans_until = _NEVER
            for request_id in list(self._orphans):
                self.release(request_id)

    def release_all(self) -> None:
        """Release every request's blocks."""
        for request_id in list(self._blocks):
            self.release(request_id)

    def of(self, request_id: int) -> tuple[RemoteBlocks, BlocksInUse] | None:
        """Return a request's blocks and their state; None: it holds none."""
        blocks = self._blocks.get(request_id)
        return None if blocks is None else (blocks, self._held[blocks.key])

    def requests_at(self, address: EngineAddress) -> Iterator[tuple[int, RemoteBlocks]]:
        """Yield every request that holds blocks of an engine, with its blocks."""
        for held in self._at.get(address, {}).values():
            for request_id in held.requests:
                yield request_id, self._blocks[request_id]

    def uses(self, address: EngineAddress) -> bool:
        """Return True if blocks of the engine are held, or it must be told of freed ones."""
        return address in self._at or address in self.notices

    def beats_due(self, now: float) -> list[EngineAddress]:
        """Take the engines that need a heartbeat now."""
        due = [address for address, beat_at in self._beat_at.items() if beat_at <= now]
        self._beat_at |= dict.fromkeys(due, now + self._lease_s / 6)
        return due

    def to_renew(self, address: EngineAddress, now: float) -> list[BlocksInUse]:
        """Return an engine's blocks whose leases a heartbeat can renew now."""
        return [held for held in self._at.get(address, {}).values() if now < held.deadline]

    def renewed(self, sets: Sequence[BlocksInUse], now: float) -> None:
        """Note a heartbeat for these sets, sent now or later."""
        renewed_s = 2 / 3 * self._lease_s - min(_MARGIN_S, self._lease_s / 3)
        for held in sets:
            held.deadline = max(held.deadline, now + renewed_s)

    def next_change(self) -> float:
        """Return the time of the next heartbeat or end."""
        return min((self._orphans_until, *self._beat_at.values()))

    def _end_if_unused(self, key: tuple[str, str]) -> None:
        held = self._held[key]
        if held.requests or held.num_reads:
            return
        address, held.deadline = EngineAddress.of(held.blocks), -_NEVER
        del self._held[key], self._at[address][key]
        if not self._at[address]:
            del self._at[address], self._beat_at[address]
        self._note_released(held.blocks)

    def _note_released(self, blocks: RemoteBlocks) -> None:
        if blocks.key in self._released:
            return
        self.notices.setdefault(EngineAddress.of(blocks), []).append(blocks)
        self._released[blocks.key] = None
        if len(self._released) > _MAX_RELEASED:
            del self._released[next(iter(self._released))]
