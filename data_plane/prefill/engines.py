"""The engines that compute prompts: their states, and the choice of the next.

An engine is used once it has passed a probe. One that fails rests, longer each time, and must pass
again. One that is up is probed every hour, as its weights may have been exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0
_PROBE_EVERY_S = 3600.0
_POSTPONED_S = 60.0
_BUSY_S = 0.2
"""Pause after an engine's answer that it is busy."""


class EngineState(Enum):
    """The state of an engine in the pool."""

    UP = "up"
    PROBED = "is being probed"
    RESTING = "rests"


@dataclass(slots=True)
class Engine:
    """One engine, and its record since the start."""

    index: int
    """Also of its rings."""
    url: str
    process: str = ""
    """From the answer to the latest probe."""
    state: EngineState = EngineState.RESTING
    problem: str = "it has not answered yet"
    probe_at: float = 0.0
    is_being_probed: bool = False
    num_failures_in_a_row: int = 0
    busy_until: float = 0.0
    last_asked: int = 0
    tokens_in_flight: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_pages: int = 0
    answer_s: float = 0.0
    arrive_s: float = 0.0

    @property
    def is_up(self) -> bool:
        """True if it takes prompts."""
        return self.state is EngineState.UP


class EnginePool:
    """Every engine of a service. Times are seconds of one monotonic clock."""

    def __init__(self, urls: Sequence[str], max_tokens_in_flight: int) -> None:
        self.engines = [Engine(index, url) for index, url in enumerate(urls)]
        self._max_tokens = max_tokens_in_flight
        self._num_asked = 0
        self.none_up_since: float | None = 0.0
        """The time since which no engine is up; None if one is."""

    def choose(self, num_tokens: int, now: float) -> Engine | None:
        """Take the engine with the fewest tokens in flight; None: none is up, or none has room.

        Its tokens count until `release`.
        """
        able = [
            engine
            for engine in self.engines
            if engine.is_up
            and now >= engine.busy_until
            and (
                engine.tokens_in_flight == 0
                or engine.tokens_in_flight + num_tokens <= self._max_tokens
            )
        ]
        if not able:
            return None
        chosen = min(able, key=lambda engine: (engine.tokens_in_flight, engine.last_asked))
        self._num_asked += 1
        chosen.last_asked = self._num_asked
        chosen.tokens_in_flight += num_tokens
        return chosen

    def release(self, engine: Engine, num_tokens: int) -> None:
        """Note that a prompt has left the engine."""
        engine.tokens_in_flight -= num_tokens

    def busy(self, engine: Engine, now: float) -> None:
        """Note that the engine, which is well, gave a prompt back."""
        engine.busy_until = now + _BUSY_S

    def failed(self, engine: Engine, problem: str, now: float) -> bool:
        """Let an engine rest after a failure; False if it was resting already."""
        if engine.state == EngineState.RESTING:
            return False
        rest_s = min(_FIRST_REST_S * 2**engine.num_failures_in_a_row, _LONGEST_REST_S)
        engine.state, engine.problem, engine.probe_at = EngineState.RESTING, problem, now + rest_s
        engine.num_failures_in_a_row += 1
        if self.none_up_since is None and not self.is_any_up:
            self.none_up_since = now
        return True

    def restarted(self, engine: Engine, now: float) -> None:
        """Require a probe: the engine is another process than the probed one."""
        if self.failed(engine, "it was restarted", now):
            engine.probe_at = now

    def due(self, now: float) -> list[Engine]:
        """Take the engines to probe now; each probe ends with `passed` or `unpassed`."""
        due = [e for e in self.engines if not e.is_being_probed and e.probe_at <= now]
        for engine in due:
            engine.is_being_probed = True
            if engine.state == EngineState.RESTING:
                engine.state = EngineState.PROBED
        return due

    def passed(self, engine: Engine, process: str, now: float) -> None:
        """Note that the engine has passed a probe, as this process."""
        engine.process, engine.is_being_probed = process, False
        engine.state, engine.problem, engine.num_failures_in_a_row = EngineState.UP, "", 0
        engine.probe_at = now + _PROBE_EVERY_S
        self.none_up_since = None

    def unpassed(self, engine: Engine, problem: str, now: float, *, is_busy: bool) -> None:
        """Note a failed probe. is_busy: the engine had no time, and stays up."""
        engine.is_being_probed = False
        if is_busy and engine.is_up:
            engine.probe_at = now + _POSTPONED_S
        else:
            self.failed(engine, problem, now)

    @property
    def is_any_up(self) -> bool:
        """True if an engine is up."""
        return any(engine.is_up for engine in self.engines)

    def next_change(self, now: float) -> float:
        """Return the time of the next probe or end of a pause."""
        times = [e.probe_at for e in self.engines if not e.is_being_probed]
        times += [e.busy_until for e in self.engines if e.busy_until > now]
        return min(times, default=float("inf"))

    def problems(self) -> str:
        """Return for a client why each engine is down."""
        return "; ".join(f"{e.url}: {e.problem}" for e in self.engines if e.problem)
