"""Plays seeds of hash_recovery: `PYTHONPATH=tests python -m harness.hash_recovery_seeds --help`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TypeVar

from harness.hash_failover import FailoverCluster
from harness.hash_recovery import RecoveringCluster

Cluster = TypeVar("Cluster", bound=RecoveringCluster)


def play(
    seed: int, max_losses: int = 6, max_regroups: int = 0, max_changes: int = 0
) -> RecoveringCluster:
    """Play one seed to its end; a failure names the seed."""
    how = "--regroups " if max_regroups else "--changes " if max_changes else ""
    cluster = RecoveringCluster(seed, max_losses, max_regroups, max_changes)
    return _played(cluster, f"{how}--seed {seed}")


def play_failovers(seed: int) -> FailoverCluster:
    """Play one seed whose controller and front ends are lost too; a failure names the seed."""
    return _played(FailoverCluster(seed), f"--failovers --seed {seed}")


def _played(cluster: Cluster, arguments: str) -> Cluster:
    try:
        cluster.play()
    except Exception as error:
        error.add_note(
            f"replay: PYTHONPATH=tests python -m harness.hash_recovery_seeds {arguments}   "
            f"({cluster.config})"
        )
        raise
    return cluster


def main() -> None:
    """Play seeds from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="play seeds FIRST .. + SEEDS - 1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--regroups", action="store_true", help="terms end, and nothing is lost")
    parser.add_argument("--changes", action="store_true", help="seats come and go in order too")
    parser.add_argument(
        "--failovers", action="store_true", help="the controller and front ends are lost too"
    )
    arguments = parser.parse_args()
    first, count = arguments.first, arguments.seeds
    seeds = range(first, first + count) if arguments.seed is None else [arguments.seed]
    RecoveringCluster.check_every = 1
    begin = time.monotonic()
    names = (
        "num_terms",
        "num_losses",
        "num_shrinks",
        "num_changes",
        "num_kept",
        "num_attempts",
        "num_stale_tokens",
    )
    names += ("num_stale_events", "num_windows", "num_preemptions", "num_moves", "num_hand_offs")
    if arguments.failovers:
        names += ("num_failovers", "num_front_ends_lost", "num_resumed", "num_cut", "num_adopted")
    totals = dict.fromkeys(names, 0)
    num_tokens = 0
    for seed in seeds:
        of_kind = (0, 20) if arguments.regroups else (4, 0, 12) if arguments.changes else ()
        cluster = play_failovers(seed) if arguments.failovers else play(seed, *of_kind)
        for name in names:
            totals[name] += getattr(cluster, name)
        num_tokens += sum(len(stream.output_ids) for stream in cluster.streams.values())
    told = ", ".join(f"{name.removeprefix('num_')} {number}" for name, number in totals.items())
    took_s = time.monotonic() - begin
    print(f"{len(seeds)} seeds in {took_s:.1f} s: tokens {num_tokens}, {told}", file=sys.stdout)


if __name__ == "__main__":
    main()
