"""Losses: processes of a real service are killed or stopped, drawn by a seed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

KINDS = (
    "instance killed",
    "instance stopped",
    "instance stopped for a while",
    "prefill killed",
    "prefill stopped",
    "two instances killed",
    "killed in a recovery",
    "all instances killed",
)
"""Kinds of losses; a stopped member stays so until the service ends it."""
PROCESS_KINDS = (
    "front end killed",
    "front end stopped",
    "controller killed",
    "controller and instance killed",
)
"""Further kinds with front ends and controller as processes."""
_WHILE_S = (0.5, 8.0)
"""Time of a short stop, in which the service may replace the member."""
_NEXT_KILL_S = (0.2, 6.0)
"""Time to another kill in the same recovery."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss."""

    kind: str
    at_s: float
    """Seconds of time.monotonic."""
    members: tuple[str, ...]


class Losses:
    """Losses drawn by a seed, in random order of kinds."""

    def __init__(
        self,
        pids: Callable[[], Mapping[str, int]],
        seed: int,
        pauses_s: tuple[float, float],
        kinds: Sequence[str] = KINDS,
    ) -> None:
        """pids: present processes by name. pauses_s: between losses."""
        self._pids = pids
        self._draw = random.Random(seed)
        self._pauses_s = pauses_s
        self._kinds = kinds
        self._next: list[str] = []
        self.happened: list[Loss] = []

    async def cause_until(self, until_s: float) -> None:
        """Cause losses until that time, in seconds of time.monotonic."""
        while True:
            await asyncio.sleep(self._draw.uniform(*self._pauses_s))
            if time.monotonic() >= until_s:
                return
            await self._cause(self._next_kind())

    def _next_kind(self) -> str:
        if not self._next:
            self._next = self._draw.sample(self._kinds, len(self._kinds))
        return self._next.pop()

    async def _cause(self, kind: str) -> None:
        draw = self._draw
        pids = self._pids()
        instances = sorted(name for name in pids if name.startswith("instance"))
        if not instances:
            return
        front_ends = sorted(name for name in pids if name.startswith("front end"))
        draw.shuffle(front_ends)
        one, two = draw.choice(instances), draw.sample(instances, min(2, len(instances)))
        lost = {
            "instance killed": [one],
            "instance stopped": [one],
            "prefill killed": ["prefill"],
            "prefill stopped": ["prefill"],
            "two instances killed": two,
            "all instances killed": instances,
            "front end killed": front_ends[:1],
            "front end stopped": front_ends[:1],
            "controller killed": ["controller"],
            "controller and instance killed": ["controller", one],
        }
        match kind:
            case "instance stopped for a while":
                stopped = self._signal(kind, [one], signal.SIGSTOP)
                try:
                    await asyncio.sleep(draw.uniform(*_WHILE_S))
                finally:
                    for pid in stopped:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGCONT)
            case "killed in a recovery":
                self._signal(kind, two[:1], signal.SIGKILL)
                await asyncio.sleep(draw.uniform(*_NEXT_KILL_S))
                self._signal(kind, two[1:], signal.SIGKILL)
            case _:
                stop = kind.endswith("stopped")
                self._signal(kind, lost[kind], signal.SIGSTOP if stop else signal.SIGKILL)

    def _signal(self, kind: str, names: list[str], number: signal.Signals) -> list[int]:
        pids = self._pids()
        found = [name for name in names if name in pids]
        for name in found:
            with suppress(ProcessLookupError):
                os.kill(pids[name], number)
        if found:
            self.happened.append(Loss(kind, time.monotonic(), tuple(found)))
        return [pids[name] for name in found]
