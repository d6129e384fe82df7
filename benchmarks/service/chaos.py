"""`nanocp chaos` on a service of four real instances, with the machine beside its result.

Enters: a checkpoint, by default the tiny one. Leaves: pauses by kind of loss, what was lost, wrong,
doubled or left. Does not know: how a service recovers.

`play_in_process` is for others: a service in this process, loaded by every kind of client while
somebody disturbs it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil

from benchmarks.kit.bench import BenchRun, bench
from benchmarks.kit.service import checkpoint_of, in_process
from control_plane.launchers.processes import ProcessLauncher
from nanocp.cli.demo.chaos_run import ChaosRun, ask_all, play, settled
from nanocp.cli.demo.judge import Judge, ReferenceJudge
from nanocp.cli.demo.load import Asked
from nanocp.cli.demo.losses import Loss
from nanocp.cli.demo.report import claims_of, judged, pauses_by_kind
from nanocp.cli.options.console import counted
from nanocp.config.cluster import ClusterConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.process import HELD_FRAMES
from nanocp.serve.service import Service

NUM_INSTANCES = 4
SETTINGS = {"cluster.num_frames": 128, "cluster.max_model_len": 2048}
CONFIG = Config(
    cluster=ClusterConfig(num_instances=NUM_INSTANCES, num_frames=128, max_model_len=2048),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
)


@bench("20 seconds of losses: about a minute.")
def main(
    run: BenchRun,
    checkpoint: Annotated[Path | None, "A folder; by default tiny's."] = None,
    /,
    minutes: Annotated[float, "Time in which members are lost."] = 30.0,
    seed: Annotated[int, "Of the requests and the losses."] = 0,
    spares: Annotated[int, "Processes that stand by for lost instances."] = 0,
    processes: Annotated[
        bool, "Front ends and the controller are processes, which are lost too."
    ] = False,
) -> None:
    """Play chaos; the reference model judges every token."""
    checkpoint = checkpoint or checkpoint_of("tiny")
    chaos = ChaosRun(
        checkpoint,
        seconds=20.0 if run.is_quick else 60 * minutes,
        seed=seed,
        settings={**SETTINGS, "cluster.spares": spares},
        has_processes=processes,
    )
    with counted("judged") as judged:
        result = play(chaos, ReferenceJudge, lambda step: print(step, file=sys.stderr), judged)
    result |= {"checkpoint": checkpoint.name, "spares": spares, "processes": processes}
    run.facts(result)
    run.keep(result)
    run.judge(claims_of(result))


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
    chaos: ChaosRun,
    judge: Judge,
    disturb: Callable[[Disturbed, float], Awaitable[None]],
    before: Callable[[Disturbed], None] = lambda disturbed: None,
) -> tuple[dict[str, Any], Disturbed]:
    """Load a service of real processes until the run's time is over, and judge what came of it.

    disturb: runs beside the clients; it gets the service, and when the time ends, in seconds of
    time.monotonic. before: called once the service is ready, before the clients begin. Of `chaos`,
    checkpoint, seconds, seed and timeout_s are taken. Raises RuntimeError if the service ends.
    """
    others = set(psutil.Process().children(recursive=True))
    with in_process(config, chaos.checkpoint) as (service, launcher):
        disturbed = Disturbed(service, launcher)
        before(disturbed)
        began_s = time.monotonic()
        http_urls = [f"http://{address}" for address in service.http_addresses]

        async def disturb_until(until_s: float) -> None:
            await disturb(disturbed, until_s)

        has_ended = service.failure.done
        asyncio.run(
            ask_all(chaos, service.addresses, http_urls, disturb_until, disturbed.asked, has_ended)
        )
        took_s = time.monotonic() - began_s
        if has_ended():
            raise RuntimeError(
                f"the service ended after {took_s:.0f} s: {service.failure.result()}"
            )
        frames = settled(lambda: round(sum(map(disturbed.sample, HELD_FRAMES))))
        tickets = settled(lambda: round(disturbed.sample("nanocp:tickets_open")))
    found = judged(disturbed.asked, judge)
    return found | {
        "seconds": round(took_s, 1),
        "losses": len(disturbed.happened),
        "frames_left": frames,
        "tickets_left": tickets,
        "segments_left": sum(service.cluster_id in name for name in os.listdir("/dev/shm")),
        "processes_left": settled(
            lambda: len(set(psutil.Process().children(recursive=True)) - others)
        ),
        "exit_status": 0,
        "tokens_per_s": round(found["tokens"] / took_s, 1),
        "by_kind": pauses_by_kind(disturbed.asked, disturbed.happened),
    }, disturbed


if __name__ == "__main__":
    main()
