"""Plays seeds of hash_recovery: `PYTHONPATH=tests python -m harness.hash_recovery_seeds --help`."""

from __future__ import annotations

import argparse
import sys
import time

from harness.hash_recovery import RecoveringCluster


def play(
    seed: int, max_losses: int = 6, max_regroups: int = 0, max_changes: int = 0
) -> RecoveringCluster:
    """Play one seed to its end; a failure names the seed."""
    cluster = RecoveringCluster(seed, max_losses, max_regroups, max_changes)
    try:
        cluster.play()
    except Exception as error:
        how = "--regroups " if max_regroups else "--changes " if max_changes else ""
        error.add_note(
            f"replay: PYTHONPATH=tests python -m harness.hash_recovery_seeds {how}--seed {seed}   "
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
    arguments = parser.parse_args()
    first, count = arguments.first, arguments.seeds
    seeds = range(first, first + count) if arguments.seed is None else [arguments.seed]
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
    totals = dict.fromkeys(names, 0)
    num_tokens = 0
    for seed in seeds:
        of_kind = (0, 20) if arguments.regroups else (4, 0, 12) if arguments.changes else ()
        cluster = play(seed, *of_kind)
        for name in names:
            totals[name] += getattr(cluster, name)
        num_tokens += sum(len(stream.output_ids) for stream in cluster.streams.values())
    told = ", ".join(f"{name.removeprefix('num_')} {number}" for name, number in totals.items())
    took_s = time.monotonic() - begin
    print(f"{len(seeds)} seeds in {took_s:.1f} s: tokens {num_tokens}, {told}", file=sys.stdout)


if __name__ == "__main__":
    main()
