"""The puller's connections to engines: handshakes, heartbeats, and notices of freed blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from data_plane.prefill.pull.holds import EngineAddress, Holds
from nanocp.values.members import EngineNow, EnginesNow
from nanocp.values.remote_blocks import RemoteBlocks

MAX_ENGINES = 64
"""More are forgotten once nothing uses them."""
_MAX_HANDSHAKES = 16
REST_S, _LONGEST_REST_S = 1.0, 30.0
"""An engine that could not be reached is not dialled again for so long."""
_IDS_PER_BEAT = 256


@dataclass(slots=True, eq=False)
class PulledEngine:
    """One engine, and the connection to it, which can be used if `now.is_up`."""

    address: EngineAddress
    now: EngineNow
    remote: Any = None
    """A RemoteEngine, of the latest handshake."""
    is_being_met: bool = False
    met_at: float = float("-inf")
    is_refused: bool = False
    """The problem is the client's or the operator's fault."""
    rest_until: float = float("-inf")
    rest_s: float = REST_S
    """The next rest, twice as long as the last one until a read succeeds."""

    def is_met(self, blocks: RemoteBlocks) -> bool:
        """Return True if the connection is to the registration that has the blocks."""
        return self.now.is_up and (self.remote.generation or 0) >= (blocks.generation or 0)

    def count(self, **more: float) -> None:
        """Add to the counts."""
        summed = {name: getattr(self.now, name) + number for name, number in more.items()}
        self.now = self.now._replace(**summed)


class Connections:
    """Every engine of late. For one thread; handshakes have threads of their own."""

    def __init__(
        self, reader: Any, holds: Holds, post: Callable[[Callable[[float], None]], None]
    ) -> None:
        """reader: an EngineReader. post: has the owner's thread call a function of the time."""
        self._reader, self._holds, self._post = reader, holds, post
        self._handshakes = ThreadPoolExecutor(_MAX_HANDSHAKES, "handshake")
        self._engines: dict[EngineAddress, PulledEngine] = {}
        """The least recently used first."""

    def of(self, blocks: RemoteBlocks) -> PulledEngine:
        """Return the engine that has these blocks, for a use of it."""
        address = EngineAddress.of(blocks)
        engine = self._engines.pop(address, None)
        if engine is None:
            engine = PulledEngine(address, EngineNow(f"{address.host}:{address.port}"))
        self._engines[address] = engine
        return engine

    def meet(self, blocks: RemoteBlocks, now: float) -> PulledEngine:
        """Return the engine of these blocks, with a handshake under way if it must be met.

        There is none while the engine rests after a failure.
        """
        engine = self.of(blocks)
        if not (engine.is_met(blocks) or engine.is_being_met or now < engine.rest_until):
            engine.is_being_met = True
            self._handshakes.submit(self._shake_hands, engine, blocks)
        return engine

    def _shake_hands(self, engine: PulledEngine, blocks: RemoteBlocks) -> None:
        try:
            found = self._reader.meet(blocks)
        except Exception as error:
            found = error
        self._post(partial(self._met, engine, found))

    def _met(self, engine: PulledEngine, found: Any, now: float) -> None:
        engine.is_being_met = False
        if isinstance(found, Exception):
            self.lose(engine, found, now)
            return
        engine.remote, engine.now = found, engine.now._replace(is_up=True, problem="")
        engine.met_at = now
        self._holds.beat_at = now

    def lose(self, engine: PulledEngine, error: Exception, now: float) -> None:
        """Use a connection or an engine no more that has failed, and let the engine rest."""
        engine.is_refused, engine.rest_until = isinstance(error, ValueError), now + engine.rest_s
        engine.rest_s = min(2 * engine.rest_s, _LONGEST_REST_S)
        self._leave(engine, error)

    def doubt(self, engine: PulledEngine, error: Exception, now: float) -> None:
        """Meet an engine again whose blocks were other ones: it may have moved its KV unsaid."""
        if now >= engine.met_at + REST_S:
            self._leave(engine, error)

    def _leave(self, engine: PulledEngine, error: Exception) -> None:
        engine.now = engine.now._replace(is_up=False, problem=str(error))
        if engine.remote is not None:
            engine.remote.is_usable = False

    def tend(self, now: float) -> None:
        """Send the heartbeats and notices that are due; forget engines."""
        for sets in self._holds.beats_due(now).values():
            engine = self.meet(sets[0].blocks, now)
            for begin in range(0, len(sets), _IDS_PER_BEAT):
                part = sets[begin : begin + _IDS_PER_BEAT]
                ids = ",".join(held.blocks.request_id for held in part)
                if self._notify(engine, f"HB:{ids}", now):
                    self._holds.renewed(part, now)
        for address, freed in list(self._holds.notices.items()):
            engine = self.meet(freed[0], now)
            if not engine.is_being_met:
                del self._holds.notices[address]
                for blocks in freed:
                    self._notify(engine, f"{blocks.request_id}:1", now)
        if (num_more := len(self._engines) - MAX_ENGINES) > 0:
            used = self._holds.addresses()
            idle = [e for e in self._engines.values() if not e.is_being_met]
            for engine in [e for e in idle if e.address not in used][:num_more]:
                del self._engines[engine.address]
                if engine.remote is not None:
                    engine.remote.close()

    def _notify(self, engine: PulledEngine, text: str, now: float) -> bool:
        if engine.now.is_up:
            try:
                engine.remote.notify(text)
            except ConnectionError as error:
                self.lose(engine, error, now)
        return engine.now.is_up

    def state(self) -> EnginesNow:
        """Return the state of each engine; of several at one host:port the last used one."""
        states = {engine.now.url: engine.now for engine in self._engines.values()}
        return EnginesNow(tuple(states.values()))

    def close(self) -> None:
        """Begin no handshake any more. The reader closes the connections."""
        self._handshakes.shutdown(wait=False, cancel_futures=True)
