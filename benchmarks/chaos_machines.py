"""Chaos between three machines of namespaces under Ray; one of them is unplugged for good. As root.

    PYTHONPATH=tests python benchmarks/chaos_machines.py [--minutes M] [--seed S] [--json PATH]

Enters: a checkpoint of preset tiny with 12 experts, two of them redundant on each instance. Leaves:
pauses by kind of loss, what was lost, wrong, doubled or left; exit status 1 if a claim of `nanocp
chaos` does not hold. Does not know: how a service recovers.

An instance is on each machine, and all KV and rows between them go by TCP. Members are killed and
stopped, machines are unplugged for some seconds, and in the last fifth of the time one of them
stays unplugged: the other two serve on. Requests are judged as they end, in one thread beside all.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from kit import CANNOT_JUDGE, BenchRun, bench
from prometheus_client.parser import text_string_to_metric_families

from harness.nodes import Node, nodes, why_not
from harness.ray_machines import RayCluster, Serve, make_checkpoint_of_12, serve
from nanocp.chaos.judge import ReferenceJudge
from nanocp.chaos.judge_beside import JudgeBeside
from nanocp.chaos.load import Asked
from nanocp.chaos.losses import Loss
from nanocp.chaos.report import claims_of, pauses_by_kind, serving_share, total_losses
from nanocp.chaos.run import JUDGE_S, ChaosRun, ask_all, settled
from nanocp.cli.console import counted
from nanocp.serve.process import HELD_FRAMES

NUM_MACHINES = 3
MEMBER = "ray::MemberActor"
KILLED, STOPPED = "member killed", "member stopped"
WHILE, FOR_GOOD = "machine unplugged for a while", "machine unplugged"
_PAUSES_S = (5.0, 30.0)
_WHILE_S = (2.0, 12.0)
_HTTP_PORT, _STATUS_PORT = 8000, 9464
_SETTINGS = {
    "CLUSTER__REDUNDANT_EXPERTS": 2,
    "CLUSTER__NUM_FRAMES": 128,
    "CLUSTER__MAX_MODEL_LEN": 2048,
    "SERVICE__HTTP_PORT": _HTTP_PORT,
    "SERVICE__METRICS_PORT": _STATUS_PORT,
    "LIMITS__START_TIMEOUT_MS": 280_000,
    "LIMITS__RECOVERY_TIMEOUT_MS": 600_000,
}
"""All machines share the cores of this one: other work may hold up a start for minutes."""


class Unplugging:
    """Losses drawn by a seed. The first machine, with the controller and Ray's head, stays."""

    def __init__(self, machines: Sequence[Node], seed: int) -> None:
        self.happened: list[Loss] = []
        self._machines = machines
        self._draw = random.Random(f"unplugging {seed}")

    async def cause_until(self, until_s: float) -> None:
        """Cause one loss after the other, the last one for good."""
        last_s = until_s - 0.2 * (until_s - time.monotonic())
        while (now_s := time.monotonic()) < last_s:
            await asyncio.sleep(min(self._draw.uniform(*_PAUSES_S), last_s - now_s))
            await self._cause(self._draw.choice((KILLED, STOPPED, WHILE)))
        self._note(FOR_GOOD, self._machines[-1].name)
        await asyncio.to_thread(self._machines[-1].unplug)

    async def _cause(self, kind: str) -> None:
        if kind == WHILE:
            machine = self._draw.choice(self._machines[1:])
            self._note(kind, machine.name)
            await asyncio.to_thread(machine.unplug)
            await asyncio.sleep(self._draw.uniform(*_WHILE_S))
            await asyncio.to_thread(machine.plug)
            return
        machine = self._draw.choice(self._machines)
        found = await asyncio.to_thread(machine.run, f"pgrep -f {MEMBER}")
        if pids := found.stdout.split():
            number = signal.SIGKILL if kind == KILLED else signal.SIGSTOP
            at_s, kill = time.monotonic(), f"kill -{number:d} {self._draw.choice(pids)}"
            if (await asyncio.to_thread(machine.run, kill)).returncode == 0:
                self.happened.append(Loss(kind, at_s, (machine.name,)))

    def _note(self, kind: str, name: str) -> None:
        self.happened.append(Loss(kind, time.monotonic(), (name,)))


@bench()
def main(
    run: BenchRun,
    minutes: Annotated[float, "Time in which something is lost."] = 10.0,
    seed: Annotated[int, "Of the requests and the losses."] = 0,
) -> None:
    """Play chaos between machines; the reference model judges every token."""
    if reason := why_not():
        run.say(reason)
        raise SystemExit(CANNOT_JUDGE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = folder / "tiny-12"
        make_checkpoint_of_12(checkpoint)
        with nodes(NUM_MACHINES, folder / "machines") as machines:
            cluster = RayCluster(machines, folder)
            service = serve(machines, checkpoint, NUM_MACHINES, 1, **_SETTINGS)
            chaos = ChaosRun(checkpoint, seconds=60 * minutes, seed=seed)
            with closing(JudgeBeside(ReferenceJudge, checkpoint)) as judge:
                result = play(machines, service, chaos, judge)
            cluster.down()
    run.keep(result)
    run.facts(result)
    # Which seats the others have is Ray's choice. None of them is on the machine that is unplugged:
    # a window needs every instance of its term.
    num_seats = len(result["seats_at_the_end"])
    serve_on = ("the other machines serve", num_seats == NUM_MACHINES - 1)
    run.judge([*claims_of(result), serve_on])


def play(
    machines: Sequence[Node], service: Serve, chaos: ChaosRun, judge: JudgeBeside
) -> dict[str, Any]:
    """Load the service, cause losses, and judge what came of it."""
    asked: list[Asked] = []
    losses = Unplugging(machines, chaos.seed)
    began_s = time.monotonic()
    http_urls = [f"http://{machines[0].address}:{_HTTP_PORT}"]

    def has_ended() -> bool:
        return service.process.poll() is not None

    addresses, cause = [service.address], losses.cause_until
    asyncio.run(ask_all(chaos, addresses, http_urls, cause, asked, has_ended, judge.take))
    took_s = time.monotonic() - began_s
    seats: list[int] = []
    frames, tickets, ended_early = 0, 0, has_ended()
    if not ended_early:
        seats = json.loads(_status(machines[0], "cluster/seats"))["serving"]
        frames = settled(lambda: _sum_of(machines[0], HELD_FRAMES))
        tickets = settled(lambda: _sum_of(machines[0], ("nanocp:tickets_open",)))
    exit_status, there = service.interrupt(), machines[:-1]
    with counted("judged") as judged:
        found = judge.found(asked, JUDGE_S, judged)
    return {
        "seed": chaos.seed,
        "seconds": round(took_s, 1),
        **found,
        "losses": total_losses(losses.happened),
        "seats_at_the_end": seats,
        "frames_left": frames,
        "tickets_left": tickets,
        "segments_left": settled(lambda: sum(len(each.shared_memory()) for each in there)),
        "processes_left": settled(lambda: sum(len(each.processes(MEMBER)) for each in there)),
        "exit_status": exit_status,
        "ended_early": ended_early,
        "tokens_per_s": round(found["tokens"] / took_s, 1),
        "serving_share": serving_share(asked, began_s, chaos.seconds),
        "by_kind": pauses_by_kind(asked, losses.happened),
        "log_end": service.lines[-20:] if exit_status or ended_early else [],
    }


def _status(machine: Node, path: str) -> str:
    address = f"http://{machine.address}:{_STATUS_PORT}/{path}"
    with urllib.request.urlopen(address, timeout=10) as reply:
        text: str = reply.read().decode()
    return text


def _sum_of(machine: Node, names: Sequence[str]) -> int:
    families = text_string_to_metric_families(_status(machine, "metrics"))
    samples = (sample for family in families for sample in family.samples)
    return round(sum(sample.value for sample in samples if sample.name in names))


if __name__ == "__main__":
    main()
