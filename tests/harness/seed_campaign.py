"""Play many seeds of clusters that lose processes, and go on where an earlier run ended.

    PYTHONPATH=tests python -m harness.seed_campaign --seeds 10000 --progress seeds.jsonl
    PYTHONPATH=tests python -m harness.seed_campaign --seed N       plays one again
    PYTHONPATH=tests python -m harness.seed_campaign --kind operators --seeds 1000

Kinds take turns: instances are lost; seats come and go too; the controller and front ends are lost
too. All other kinds, such as operators and pipelines, are played if they are named. One line of
JSON is written for each seed, with the code that played it. Seeds whose last line is of the present
code and has no error are not played again. In one of eight seeds the scheduler's invariants are
checked after every call, in the others after every sixteenth, whenever a term changes, and at the
end; every token is checked in all. When nothing more is to be lost instances are no longer slow,
which would cost half of the time. Exits 1 if a seed failed or was not played.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from harness.hash_clusters import hash_offload
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.kinds import hash_drafts, hash_experts, hash_seeds, hash_states
from harness.hash_clusters.losses import hash_pulls, hash_recovery_seeds
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from harness.hash_clusters.losses.hash_operators import OperatedCluster
from harness.hash_clusters.pipeline import hash_pipeline, hash_pipeline_losses
from harness.paths import present_code
from harness.services import nested_calls

KINDS = ("losses", "changes", "failovers")
"""Seed N is of kind N % 3."""
OPERATORS = "operators"
"""A kind that takes no turn with the others."""


def play_between_nodes(seed: int) -> Any:
    """Layers of GPUs of several nodes, interpreted, over a network that delivers late."""
    # Before Triton is imported, which the other kinds do without.
    from harness.gpu_stand_ins.interpreter import interpret

    interpret()
    from harness.gpu_stand_ins.weak_memory import run_layers

    return run_layers(seed)


OTHERS: dict[str, Callable[[int], Any]] = {
    "plain": hash_seeds.play, "levelling": hash_seeds.play_levelling,
    "sharing": hash_seeds.play_sharing, "crowd": hash_seeds.play_crowd, "drafts": hash_drafts.play,
    "states": hash_states.play, "states-offload": hash_states.play_offload,
    "regroups": lambda seed: hash_recovery_seeds.play(seed, 0, 20),
    "offload": hash_offload.play_offloading, "offload-crowd": hash_offload.play_crowded,
    "offload-losses": hash_offload.play_losing, "offload-cuts": hash_offload.play_cut,
    "pipeline": hash_pipeline.play, "pipeline-chaos": partial(hash_pipeline.play, is_chaos=True),
    "pipeline-losses": hash_pipeline_losses.play, "between-nodes": play_between_nodes,
    "calls": nested_calls.play, "experts": hash_experts.play,
    "pulls": hash_pulls.play, "pull-failovers": hash_pulls.play_failovers,
    "pipeline-losses-chaos": partial(hash_pipeline_losses.play, is_chaos=True),
}  # fmt: skip
"""Such kinds too; each plays a seed."""
COUNTS = (
    *("terms", "losses", "shrinks", "changes", "kept", "attempts", "stale_tokens", "stale_events"),
    *("windows", "lane_windows", "calls", "preemptions", "moves", "hand_offs"),
    *("failovers", "front_ends_lost", "resumed", "cut", "adopted"),
    *("asked", "refused", "failed", "overdue", "undone", "unstarted"),
)


def make_cluster(seed: int, kind: str = "") -> RecoveringCluster:
    """The cluster of a seed. kind: empty if kinds take turns."""
    match kind or KINDS[seed % len(KINDS)]:
        case "losses":
            cluster = RecoveringCluster(seed, max_losses=6)
        case "changes":
            cluster = RecoveringCluster(seed, max_losses=4, max_changes=12)
        case "operators":
            cluster = OperatedCluster(seed)
        case _:
            cluster = FailoverCluster(seed)
    cluster.hurries = True
    return cluster


def play(seed: int, kind: str = "") -> dict[str, Any]:
    """Play a seed; returns its line."""
    begin_s = time.process_time()
    line: dict[str, Any] = {"seed": seed}
    try:
        if kind in OTHERS:
            of_kind = OTHERS[kind](seed)
            return line | _counts(of_kind) | {"cpu_s": round(time.process_time() - begin_s, 3)}
        cluster = make_cluster(seed, kind)
        cluster.check_every = 16 if seed // len(KINDS) % 8 else 1
        try:
            cluster.play()
        finally:
            line |= _counts(cluster)
            line["tokens"] = sum(len(stream.output.ids) for stream in cluster.streams.values())
    except Exception as raised:
        line["error"] = f"{type(raised).__name__}: {raised}"
    line["cpu_s"] = round(time.process_time() - begin_s, 3)
    return line


def _counts(played: Any) -> dict[str, int]:
    """What the play has met, of what it counts."""
    counts = {name: getattr(played, f"num_{name}", 0) for name in COUNTS}
    return counts | getattr(played, "counts", {})


def played(progress: Path, code: str) -> dict[int, dict[str, Any]]:
    """The last line of each seed that this code played; a line that was cut off is left out."""
    lines: dict[int, dict[str, Any]] = {}
    for text in progress.read_text().splitlines() if progress.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line.get("code") == code:
            lines[line["seed"]] = line
    return lines


def summary(lines: dict[int, dict[str, Any]]) -> str:
    """Sums over the seeds."""
    totals: Counter[str] = Counter()
    for line in lines.values():
        totals.update(
            {name: value for name, value in line.items() if name not in ("seed", "error", "code")}
        )
    failed = [seed for seed, line in lines.items() if "error" in line]
    told = ", ".join(f"{name} {round(number)}" for name, number in totals.items())
    return f"{len(lines)} seeds, {len(failed)} failed: {told}"


def main() -> int:
    """Play the seeds that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10000, help="FIRST .. FIRST + SEEDS - 1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this one only, with every check")
    parser.add_argument(
        "--kind",
        choices=[*KINDS, OPERATORS, *OTHERS],
        default="",
        help="of all seeds; else they take turns",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that play")
    parser.add_argument("--progress", type=Path, default=Path("seeds.jsonl"))
    arguments = parser.parse_args()
    if arguments.seed is not None:
        if arguments.kind in OTHERS:
            OTHERS[arguments.kind](arguments.seed)
        else:
            make_cluster(arguments.seed, arguments.kind).play()
        return 0
    wanted = range(arguments.first, arguments.first + arguments.seeds)
    code = f"{present_code()} {arguments.kind}".strip()
    before = played(arguments.progress, code)
    lines = {seed: line for seed, line in before.items() if seed in wanted}
    missing = [seed for seed in wanted if "error" in lines.get(seed, {"error": "not played"})]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} seeds were right before", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as pool, arguments.progress.open("a") as file:
        print(file=file)  # The last line may have been cut off.
        for future in as_completed([pool.submit(play, seed, arguments.kind) for seed in missing]):
            try:
                line = future.result() | {"code": code}
            except BrokenProcessPool:
                print("a process that played was killed", flush=True)
                break
            seed = line["seed"]
            lines[seed] = line
            print(json.dumps(line), file=file, flush=True)
            if "error" in line:
                print(f"seed {seed} failed: {line['error']}", flush=True)
            elif len(lines) % 100 == 0:
                print(f"{len(lines)} of {len(wanted)} seeds", flush=True)
    print(summary(lines))
    return len(lines) < len(wanted) or any("error" in line for line in lines.values())


if __name__ == "__main__":
    sys.exit(main())
