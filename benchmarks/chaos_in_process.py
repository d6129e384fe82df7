"""A service in this process, loaded by every kind of client while somebody disturbs it.

Enters: a Config, a checkpoint, a disturbance. Leaves: requests with what came of them, what the
service has left, one object of numbers. Does not know: how a disturbance is made.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from control_plane.launchers.processes import ProcessLauncher
from nanocp.chaos.judge import Judge
from nanocp.chaos.load import Asked
from nanocp.chaos.losses import Loss
from nanocp.chaos.report import judged, pauses_by_kind
from nanocp.chaos.run import ChaosRun, ask_all, settled
from nanocp.config.whole import Config
from nanocp.serve.process import HELD_FRAMES
from nanocp.serve.service import Service, member_environment, open_checkpoint


@dataclass(slots=True)
class Disturbed:
    """A service that runs, and what was done to it."""

    service: Service
    launcher: ProcessLauncher
    asked: list[Asked] = field(default_factory=list)
    happened: list[Loss] = field(default_factory=list)

    def note(self, kind: str) -> None:
        """Something of this kind is done now."""
        self.happened.append(Loss(kind, time.monotonic(), ()))

    def sample(self, name: str) -> float:
        """The sum of a metric over its labels, or its only value."""
        families = self.service.metrics.registry.collect()
        return sum(
            each.value for family in families for each in family.samples if each.name == name
        )


def play_in_process(
    config: Config,
    run: ChaosRun,
    judge: Judge,
    disturb: Callable[[Disturbed, float], Awaitable[None]],
    before: Callable[[Disturbed], None] = lambda disturbed: None,
) -> tuple[dict[str, Any], Disturbed]:
    """Load a service of real processes until the run's time is over, and judge what came of it.

    disturb: runs beside the clients; it gets the service, and when the time ends, in seconds of
    time.monotonic. before: called once the service is ready, before the clients begin. Of `run`,
    checkpoint, seconds, seed and timeout_s are taken. Raises RuntimeError if the service ends.
    """
    command = [sys.executable, "-m", "data_plane.member.process"]
    launcher = ProcessLauncher(command, member_environment(config))
    service = Service(config, open_checkpoint(config, run.checkpoint), launcher)
    disturbed = Disturbed(service, launcher)
    try:
        service.start(lambda step: None)
        before(disturbed)
        began_s = time.monotonic()
        http_urls = [f"http://{address}" for address in service.http_addresses]

        async def disturb_until(until_s: float) -> None:
            await disturb(disturbed, until_s)

        asyncio.run(
            ask_all(
                run,
                service.addresses,
                http_urls,
                disturb_until,
                disturbed.asked,
                service.failure.done,
            )
        )
        took_s = time.monotonic() - began_s
        if service.failure.done():
            raise RuntimeError(
                f"the service ended after {took_s:.0f} s: {service.failure.result()}"
            )
        frames = settled(lambda: round(sum(map(disturbed.sample, HELD_FRAMES))))
        tickets = settled(lambda: round(disturbed.sample("nanocp:tickets_open")))
    finally:
        service.stop()
    found = judged(disturbed.asked, judge)
    return found | {
        "seconds": round(took_s, 1),
        "losses": len(disturbed.happened),
        "frames_left": frames,
        "tickets_left": tickets,
        "segments_left": sum(service.cluster_id in name for name in os.listdir("/dev/shm")),
        "processes_left": settled(lambda: len(psutil.Process().children(recursive=True))),
        "exit_status": 0,
        "tokens_per_s": round(found["tokens"] / took_s, 1),
        "by_kind": pauses_by_kind(disturbed.asked, disturbed.happened),
    }, disturbed
