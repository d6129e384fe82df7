"""Memory of an instance on a GPU that the peers of a term map, in one term after the other.

A member publishes its zeroed memory's handle in a segment's description (segments.py), and
withdraws it when it has unmapped its peers'. So memory of a past term is free once no peer
publishes, and never while a hanging peer may write it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from data_plane.transport.exchange import PeerLost
from data_plane.transport.gpu.cuda_runtime import CudaError, CudaRuntime
from data_plane.transport.gpu.peer_memory import PeerMemory, RegionPlaces
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import OwnedSegment, Segment, require_description
from nanocp.config.limits import LimitsConfig

_DEATH_S = 1.0
"""Longest time from the loss of a process's GPU memory to its end."""
_TICK_S = 0.01


class _Published(NamedTuple):
    regions: str
    process: str
    address: str
    handle: str
    """64 bytes in hexadecimal."""


class _GivenUp(NamedTuple):
    address: int
    term: int
    peers: tuple[int, ...]


class IpcMemory:
    """An instance's memory for one lane's (micro-batch's) exchange, made anew in each term."""

    def __init__(
        self,
        runtime: CudaRuntime,
        segments: Segments,
        lane: int,
        instance: int,
        places: RegionPlaces,
        limits: LimitsConfig,
    ) -> None:
        self._runtime, self._segments, self._places = runtime, segments, places
        self._kind, self._instance, self._limits = f"gpu_memory{lane}", instance, limits
        self._segment: OwnedSegment | None = None
        self._own: _GivenUp | None = None
        self._opened: list[int] = []
        self._given_up: list[_GivenUp] = []

    def begin_term(self, seats: Sequence[int]) -> PeerMemory:
        """Make this instance's memory and map its peers', who all call this in the same term.

        seats: with this one. Raises ExchangeTimeout or PeerLost, which name the peer, TermOver or
        CudaError; ValueError if a peer is on another node or has other bounds.
        """
        self.leave()
        peers = tuple(seat for seat in seats if seat != self._instance)
        for peer in peers:
            if not self._segments.is_shared(peer):
                raise ValueError(
                    f"cuda_ipc reaches the GPUs of one node; instance {peer} is on another one"
                )
        address = self._runtime.allocate(self._places.num_bytes)
        self._own = _GivenUp(address, self._segments.term.number, peers)
        addresses = [0] * self._places.num_instances
        addresses[self._instance] = address
        if peers:
            self._publish(address)
        deadline = time.monotonic() + self._limits.start_timeout_ms / 1000
        for peer in peers:
            addresses[peer] = self._map(peer, deadline)
        # Peers withdraw their memory of the term before, and only then publish that of this one.
        self._free_unmapped()
        return PeerMemory(self._instance, addresses)

    def leave(self) -> None:
        """Close peers' memory once the GPU is idle, and give up this instance's. Idempotent.

        No step may run until another term begins.
        """
        if self._own is None:
            return
        self._runtime.synchronize()
        while self._opened:
            self._runtime.close(self._opened.pop())
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._given_up.append(self._own)
        self._own = None
        self._free_unmapped()

    def _publish(self, address: int) -> None:
        handle = self._runtime.export(address).hex()
        published = _Published(self._regions, self._runtime.process, str(address), handle)
        self._segment = self._segments.own(self._kind, self._instance, "\n".join(published), 0)

    @property
    def _regions(self) -> str:
        return f"{self._places.num_instances} instances, {self._places.num_bytes} bytes"

    def _map(self, peer: int, deadline: float) -> int:
        left_ms = max(0.0, (deadline - time.monotonic()) * 1000)
        writer = f"instance {self._instance}"
        segment = self._segments.attach(self._kind, peer, writer, self._limits, left_ms)
        try:
            published = _Published(*segment.description.split("\n"))
            require_description(segment.name, published.regions, self._regions)
            if published.process == self._runtime.process:
                return int(published.address)
            try:
                address = self._runtime.open(bytes.fromhex(published.handle))
            except CudaError as error:
                self._raise_if_lost(segment, peer, error)
                raise
            self._opened.append(address)
            return address
        finally:
            segment.close()

    def _raise_if_lost(self, segment: Segment, peer: int, error: CudaError) -> None:
        """Raise PeerLost if the peer's process is ending: its memory goes before its segment."""
        deadline = time.monotonic() + _DEATH_S
        while time.monotonic() < deadline:
            self._segments.term.check()
            if not segment.owner_is_alive():
                raise PeerLost(f"the process of instance {peer} is gone: {error}", peer) from error
            time.sleep(_TICK_S)

    def _free_unmapped(self) -> None:
        kept = []
        for memory in self._given_up:
            owned = (
                self._segments.is_owned(self._kind, peer, memory.term) for peer in memory.peers
            )
            if any(owned):
                kept.append(memory)
            else:
                self._runtime.free(memory.address)
        self._given_up = kept
