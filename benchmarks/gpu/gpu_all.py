"""All that a card has not run yet, the most valuable first, in 25 minutes at most.

    PYTHONPATH=.:tests python3 benchmarks/gpu/gpu_all.py [--json PATH] [--limit-s 1500]

Enters: nothing. Leaves: each stage's own file in benchmarks/results/, and PATH with a list of
{stage, proves, status, seconds}, written as each stage ends. Does not know: what a stage measures.

A stage that has passed with this code is not run again, and one that was cut off goes on where it
stopped. Status 0: it passed; "no time": it was not begun or was cut off. The exit status is 1
unless all have passed. Needs what the stages need: torch, Triton, and for tokens transformers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kit import machine

RESULTS = "benchmarks/results"
NO_TIME = "no time"
_END_S = 30
"""Time beyond its own limit that a stage has for what it has begun."""


class Stage(NamedTuple):
    """A command, and what it shows if it passes."""

    name: str
    proves: str
    limit_s: int
    command: tuple[str, ...]
    has_limit: bool = True
    """The command takes --limit-s and ends by itself."""


def _bench(name: str, limit_s: int, proves: str) -> Stage:
    command = ("-m", f"benchmarks.gpu.{name}", "--json", f"{RESULTS}/{name}.json")
    return Stage(name, proves, limit_s, command)


_CHECK = ("tests/gpu_check.py", "--json", f"{RESULTS}/gpu_check.json")
_PROFILE = ("-m", "nanocp.cli.main", "profile", "models/tale", "--instances", "2", "--quick")
STAGES = (
    Stage(
        "tokens",
        "Tokens, captured and eager, in one and two lanes, fused, with drafts and after a loss",
        270,
        (*_CHECK, "--only", "tokens", "--only", "draft"),
    ),
    Stage(
        "checks",
        "The exchange between processes, packages, pinned pages, kernels; last, fused FP8",
        270,
        _CHECK,
    ),
    Stage(
        "profile",
        "Phases by events in a captured graph: two instances on the card, costs and CP degrees",
        150,
        (*_PROFILE, "--out", f"{RESULTS}/gpu_profile"),
        has_limit=False,
    ),
    _bench("gpu_step", 220, "A step's launches and times, packed rows against fields, drafts"),
    _bench("gpu_overlap", 220, "Two lanes in one graph, and the overlap engine's streams"),
    _bench("gpu_attention", 150, "Our attention against FlashMLA"),
    _bench("gpu_moe", 100, "The fused mixture against its parts"),
)


def run(stages: Sequence[Stage], path: Path, limit_s: float) -> bool:
    """Run the stages that have not passed; returns True if all have."""
    done = {each["stage"]: each for each in machine.read_results(path) if each["status"] == 0}
    described, deadline_s = machine.describe(os.getloadavg()[0]), time.monotonic() + limit_s
    environment = os.environ | {
        "PYTHONPATH": f"{machine.ROOT}{os.pathsep}{machine.ROOT / 'tests'}",
        "NANOCP_DATA_PLANE__DEVICE": "cuda",
    }
    for number, stage in enumerate(stages, start=1):
        if stage.name in done:
            continue
        began_s, status = time.monotonic(), NO_TIME
        seconds = min(stage.limit_s, deadline_s - began_s - _END_S)
        if seconds > 0:
            limit = ["--limit-s", str(int(seconds))] if stage.has_limit else []
            print(f"{number} of {len(stages)}: {stage.name}, at most {seconds:.0f} s", flush=True)
            try:
                command = [sys.executable, *stage.command, *limit]
                ended = subprocess.run(
                    command, cwd=machine.ROOT, env=environment, timeout=seconds + _END_S
                )
                status = ended.returncode
            except subprocess.TimeoutExpired:
                print(f"{stage.name} was cut off", flush=True)
        took_s = round(time.monotonic() - began_s, 1)
        done[stage.name] = {
            "stage": stage.name,
            "proves": stage.proves,
            "status": status,
            "seconds": took_s,
        }
        machine.write_results(path, list(done.values()), described)
    for each in done.values():
        verdict = {0: "passed", 2: "unfinished", NO_TIME: NO_TIME}.get(each["status"], "FAILED")
        print(f"{verdict}  {each['stage']} ({each['seconds']} s): {each['proves']}")
    return all(each["status"] == 0 for each in done.values())


def main() -> None:
    """Run all stages on this machine's GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = machine.ROOT / RESULTS / "gpu_all.json"
    parser.add_argument("--json", type=Path, metavar="PATH", default=default)
    parser.add_argument("--limit-s", type=int, default=1500, help="of all stages together")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_all: no NVIDIA GPU is here (torch sees none); run it on a machine with one")
    sys.exit(not run(STAGES, options.json, options.limit_s))


if __name__ == "__main__":
    main()
