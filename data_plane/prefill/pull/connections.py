"""The puller's connections to engines: handshakes, heartbeats, and notices of freed blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from data_plane.prefill.pull.holds import EngineAddress, Holds
from nanocp.values.members import EngineNow, EnginesNow
from nanocp.values.remote_blocks import RemoteBlocks

MAX_ENGINES = 64
"""More are forgotten once nothing uses them."""
FORGET_S = 600.0
_MAX_HANDSHAKES = 16
_REST_S = 1.0
"""An engine that could not be reached is not dialled again for so long."""
_IDS_PER_BEAT = 256


@dataclass(slots=True, eq=False)
class PulledEngine:
    """One engine, and the connection to it, if there is one."""

    address: EngineAddress
    now: EngineNow
    used_at: float = 0.0
    remote: Any = None
    """A RemoteEngine; None: hands must be shaken."""
    met_at: float = float("-inf")
    is_being_met: bool = False
    is_refused: bool = False
    """The problem is the client's or the operator's fault."""
    rest_until: float = float("-inf")

    def is_met(self, blocks: RemoteBlocks, since: float) -> bool:
        """Return True if its registration is that of the blocks, or of a handshake after `since`.

        since: the time at which the blocks came here.
        """
        if self.remote is None:
            return False
        is_older = (self.remote.generation or 0) < (blocks.generation or 0)
        return not is_older or self.met_at >= since

    def count(self, **more: float) -> None:
        """Add to the counts."""
        summed = {name: getattr(self.now, name) + number for name, number in more.items()}
        self.now = self.now._replace(**summed)


class Met(NamedTuple):
    """A handshake has ended."""

    engine: PulledEngine
    remote: Any
    error: Exception | None = None


class Connections:
    """Every engine of late. For one thread; handshakes have threads of their own."""

    def __init__(
        self,
        reader: Any,
        holds: Holds,
        refuse: Callable[[int, str], None],
        post: Callable[[Met], None],
        after_reads: Executor,
    ) -> None:
        """reader: an EngineReader. refuse: called with a request and why its blocks cannot be read.

        post: called from any thread; `met` takes the message. after_reads: closes connections.
        """
        self._reader, self._holds, self._refuse, self._post = reader, holds, refuse, post
        self._after_reads = after_reads
        self._handshakes = ThreadPoolExecutor(_MAX_HANDSHAKES, "handshake")
        self._engines: dict[EngineAddress, PulledEngine] = {}
        """The least recently used first."""

    def of(self, blocks: RemoteBlocks, now: float) -> PulledEngine:
        """Return the engine that has these blocks, for a use of it."""
        address = EngineAddress.of(blocks)
        engine = self._engines.pop(address, None)
        if engine is None:
            engine = PulledEngine(address, EngineNow(f"{address.host}:{address.port}"))
        self._engines[address], engine.used_at = engine, now
        return engine

    def judge(self, request_id: int, blocks: RemoteBlocks, now: float) -> None:
        """Refuse held blocks that cannot be read, perhaps after a handshake."""
        engine = self.of(blocks, now)
        if engine.is_met(blocks, now):
            try:
                engine.remote.check(blocks)
            except ValueError as error:
                self._refuse(request_id, str(error))
            return
        self.meet(engine, blocks, now)
        if engine.is_refused and not engine.is_being_met:
            self._refuse(request_id, engine.now.problem)

    def meet(self, engine: PulledEngine, blocks: RemoteBlocks, now: float) -> None:
        """Begin a handshake, unless there is one or the engine rests after a failure."""
        if engine.is_being_met or now < engine.rest_until:
            return

        def shake_hands() -> None:
            try:
                self._post(Met(engine, self._reader.meet(blocks)))
            except Exception as error:
                self._post(Met(engine, None, error))

        engine.is_being_met = True
        self._handshakes.submit(shake_hands)

    def met(self, event: Met, now: float) -> None:
        """Take the end of a handshake."""
        engine, error = event.engine, event.error
        engine.is_being_met = False
        requests = list(self._holds.requests_at(engine.address))
        if error is not None:
            self.lose(engine, error, now)
            if engine.is_refused:
                for request_id, _ in requests:
                    self._refuse(request_id, str(error))
            return
        self._disconnect(engine)
        engine.remote, engine.met_at = event.remote, now
        engine.now = engine.now._replace(is_up=True, problem="")
        for request_id, blocks in requests:
            self.judge(request_id, blocks, now)
        self._beat(engine, now)

    def lose(self, engine: PulledEngine, error: Exception, now: float) -> None:
        """Forget a connection that has failed, and let the engine rest."""
        self._disconnect(engine)
        engine.is_refused, engine.rest_until = isinstance(error, ValueError), now + _REST_S
        engine.now = engine.now._replace(is_up=False, problem=str(error))

    def tend(self, now: float) -> None:
        """Send the heartbeats and notices that are due; forget engines."""
        for address in self._holds.beats_due(now):
            self._beat(self._engines[address], now)
        for address, freed in list(self._holds.notices.items()):
            engine = self.of(freed[0], now)
            if engine.remote is None:
                self.meet(engine, freed[0], now)
                if engine.is_being_met:
                    continue
            del self._holds.notices[address]
            for blocks in freed:
                self._notify(engine, f"{blocks.request_id}:1", now)
        num_more = len(self._engines) - MAX_ENGINES
        for engine in list(self._engines.values()):
            is_old = num_more > 0 or now >= engine.used_at + FORGET_S
            if is_old and not (engine.is_being_met or self._holds.uses(engine.address)):
                self._disconnect(engine)
                del self._engines[engine.address]
                num_more -= 1

    def state(self) -> EnginesNow:
        """Return the state of each engine; of several at one host:port the last used one."""
        states = {engine.now.url: engine.now for engine in self._engines.values()}
        return EnginesNow(tuple(states.values()))

    def close(self) -> None:
        """Begin no handshake any more, and close the connections."""
        self._handshakes.shutdown(wait=False, cancel_futures=True)
        for engine in self._engines.values():
            self._disconnect(engine)

    def _beat(self, engine: PulledEngine, now: float) -> None:
        sets = self._holds.to_renew(engine.address, now)
        if sets and engine.remote is None:
            self.meet(engine, sets[0].blocks, now)
        for begin in range(0, len(sets), _IDS_PER_BEAT):
            part = sets[begin : begin + _IDS_PER_BEAT]
            ids = ",".join(held.blocks.request_id for held in part)
            if self._notify(engine, f"HB:{ids}", now):
                self._holds.renewed(part, now)

    def _notify(self, engine: PulledEngine, text: str, now: float) -> bool:
        if engine.remote is None:
            return False
        try:
            engine.remote.notify(text)
        except ConnectionError as error:
            self.lose(engine, error, now)
            return False
        return True

    def _disconnect(self, engine: PulledEngine) -> None:
        remote, engine.remote = engine.remote, None
        if remote is not None:
            self._after_reads.submit(remote.close)
