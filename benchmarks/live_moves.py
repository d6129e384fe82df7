"""Rows re-bind, pages move and requests are preempted while others run: exactness, and the cost.

    python benchmarks/live_moves.py [--quick] [--minutes M] [--json PATH]

Enters: the tiny checkpoint, four real instances under the policy `chaos`, which draws re-bindings,
extensions and page moves. Leaves: tables, and a list of {phase, seconds, requests, tokens, wrong,
near_ties, pages_moved, binding_changes, preemptions, frames_not_back, tpot_ms_p50, tpot_ms_p99,
wait_ms_p50, wait_ms_max, moves}, where moves are moved_tokens.costs and the waits those of
preempted requests; exit status 1 if a claim does not hold. Does not know: who moved when.

Rows and pages move all the time (`moving`); then under a load that generates more than its frames
hold (`preempting`).
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from kit import BenchRun, Claim, at_least, at_most, bench, none
from moved_tokens import ANY, MIN_PROMPT_LEN, MOVES, costs, gaps_of, waits_ms
from rich.progress import Progress, TaskID
from service import checkpoint_of, random_prompts

from nanocp.cli.console import progress
from nanocp.client import AsyncClient
from nanocp.serve.process import serving

NUM_INSTANCES = 4
NUM_CLIENTS = 8
CHAOS = {"scheduler.policy": "chaos", "scheduler.chaos_period_windows": 4}
"""One of four windows re-binds, and one of four moves pages, on average."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A load, and the service that it is played on."""

    share: float
    """Seconds of it for each second of moves."""
    settings: dict[str, object]
    prompt_lens: tuple[int, int] = (MIN_PROMPT_LEN, 1024)
    output_lens: tuple[int, int] = (64, 256)


PHASES = {
    "moving": Phase(1.0, {"cluster.num_frames": 256}),
    # Short prompts are placed together, and outgrow the frames together.
    "preempting": Phase(
        0.2,
        {"cluster.num_frames": 6, "scheduler.growth_promise": "tokens:0"},
        prompt_lens=(MIN_PROMPT_LEN, 128),
        output_lens=(192, 256),
    ),
}
MIN_PAGES_PER_S = 1.0
MIN_PREEMPTIONS_PER_MIN = 1.0
MAX_NEAR_TIES = 1e-3
"""Claims: pages that move in a second and preemptions in a minute, at least; near-ties of the
reference, of all tokens, at most."""
MAX_RATIO_OTHERS, MAX_RATIO_BEFORE = 1.05, 1.10
"""Claims: the time to the next token while the request is moved, of that of the others in the same
windows, for every kind of move; and of its own just before, when nothing moved of anybody, for all
moves together. On a busy machine, in 15 s of load the first was 0.96 to 1.02, and the second 1.00
to 1.06 (0.99 to 1.04 while nothing moved: docs/log.md)."""


COUNTED = {
    "pages_moved": "pages_moved",
    "binding_changes": "binding_changes",
    "preemptions": "num_preemptions",
}
"""What the service counts, by the names of its metrics."""


@dataclass(slots=True)
class PlayedRequest:
    """One request that ended."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def tpot_ms(self) -> float:
        """Mean time from token to token."""
        return 1e3 * (self.arrivals_s[-1] - self.arrivals_s[0]) / (len(self.arrivals_s) - 1)


@bench("14 seconds of moves: under a minute.")
def main(
    run: BenchRun,
    minutes: Annotated[float, "Of load with moves; preemptions take a fifth more."] = 10.0,
) -> None:
    """Play the load, then let the reference model judge every output."""
    checkpoint, moving_s = checkpoint_of("tiny"), 14.0 if run.is_quick else 60.0 * minutes
    with progress() as bar:
        played = {name: play(checkpoint, name, moving_s, bar) for name in PHASES}
        results = [judge(checkpoint, name, *played[name], bar) for name in PHASES]
    for result in results:
        run.table("four instances, policy chaos", [result])
        run.table(f"from token to token by moves meanwhile, {result['phase']}", result["moves"])
    run.keep(*results)
    run.judge(claims_of(results))


def play(
    checkpoint: Path, name: str, moving_s: float, progress: Progress
) -> tuple[list[PlayedRequest], dict[str, Any]]:
    """The outputs of a phase's load on a service of its own, and what the service says of them."""
    phase = PHASES[name]
    seconds = phase.share * moving_s
    longest = phase.prompt_lens[1] + phase.output_lens[1]
    settings = CHAOS | {"cluster.max_model_len": longest} | phase.settings
    task = progress.add_task(name, total=seconds)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events"
        settings["service.event_log"] = str(log)
        with serving(checkpoint, NUM_INSTANCES, settings, ray=False, synthetic_kv=False) as service:
            outputs = asyncio.run(_load(checkpoint, service.target, phase, seconds, progress, task))
            frames_not_back = service.frames_not_back()
            metrics = service.metrics()
        gaps = gaps_of(log, ((output.prompt_ids, output.arrivals_s) for output in outputs))
    waits = waits_ms(gaps)
    return outputs, {
        "seconds": round(seconds, 1),
        **{what: round(metrics[f"nanocp:{name}_total", ""]) for what, name in COUNTED.items()},
        "frames_not_back": frames_not_back,
        "wait_ms_p50": round(waits[len(waits) // 2]) if waits else 0,
        "wait_ms_max": round(waits[-1]) if waits else 0,
        "moves": costs(gaps),
    }


async def _load(
    checkpoint: Path, target: str, phase: Phase, seconds: float, progress: Progress, task: TaskID
) -> list[PlayedRequest]:
    """Each client asks, reads to the end and, while there is time, asks again."""
    began_s = time.monotonic()
    outputs: list[PlayedRequest] = []
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(_ask(client, checkpoint, phase, number, began_s + seconds, outputs))
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            progress.update(task, completed=elapsed_s)
            await asyncio.sleep(0.5)
    return outputs


async def _ask(
    client: AsyncClient,
    checkpoint: Path,
    phase: Phase,
    number: int,
    until_s: float,
    outputs: list[PlayedRequest],
) -> None:
    draw, is_time_left = random.Random(number), True
    while is_time_left:
        [prompt_ids] = random_prompts(
            checkpoint, 1, draw.randint(*phase.prompt_lens), draw.getrandbits(32)
        )
        output = PlayedRequest(prompt_ids)
        max_tokens = draw.randint(*phase.output_lens)
        async for chunk in client.generate(
            prompt_ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        ):
            output.token_ids += chunk.token_ids
            output.arrivals_s += [time.monotonic()] * len(chunk.token_ids)
        assert len(output.token_ids) == max_tokens, (
            f"{len(output.token_ids)} tokens came of {max_tokens}"
        )
        outputs.append(output)
        is_time_left = time.monotonic() < until_s


def judge(
    checkpoint: Path,
    phase: str,
    outputs: list[PlayedRequest],
    service: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Every output by one forward of the reference model."""
    from data_plane.reference.oracle import Oracle

    oracle = Oracle(checkpoint)
    verdicts = [
        oracle.judge(output.prompt_ids, output.token_ids)
        for output in progress.track(outputs, description=f"checking {phase} against transformers")
    ]
    tpots_ms = sorted(output.tpot_ms for output in outputs)
    return {
        "phase": phase,
        "requests": len(outputs),
        "tokens": sum(len(output.token_ids) for output in outputs),
        "wrong": sum(not verdict.exact for verdict in verdicts),
        "near_ties": sum(verdict.near_ties for verdict in verdicts),
        "tpot_ms_p50": round(tpots_ms[len(tpots_ms) // 2], 2),
        "tpot_ms_p99": round(tpots_ms[len(tpots_ms) * 99 // 100], 2),
    } | service


def claims_of(results: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """What is claimed of both phases."""
    moving, preempting = results
    sums = {
        name: sum(result[name] for result in results)
        for name in ("wrong", "frames_not_back", "tokens", "near_ties")
    }
    yield none("request has a wrong token", sums["wrong"])
    yield none("frame is left", sums["frames_not_back"])
    pages_per_s = moving["pages_moved"] / moving["seconds"]
    yield at_least("{} pages move in a second", pages_per_s, MIN_PAGES_PER_S)
    preempted_per_min = preempting["preemptions"] / preempting["seconds"] * 60
    yield at_least(
        "{} requests are preempted in a minute", preempted_per_min, MIN_PREEMPTIONS_PER_MIN
    )
    yield at_most("near-ties, of all tokens", sums["near_ties"] / sums["tokens"], MAX_NEAR_TIES)
    cost_of = {cost["kind"]: cost for cost in moving["moves"]}
    for kind in MOVES:
        ratio = cost_of[kind]["ratio_others"] if kind in cost_of else math.inf
        what = f"{kind}: the moved request's next token takes {{}} times as long as others' then"
        yield at_most(what, ratio, MAX_RATIO_OTHERS)
    before = cost_of[ANY]["ratio_before"] if ANY in cost_of else math.inf
    what = "any move: {} times as long as its own just before, when nothing moved"
    yield at_most(what, before, MAX_RATIO_BEFORE)


if __name__ == "__main__":
    main()
