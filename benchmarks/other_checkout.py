"""A benchmark of counts, run with the packages of another checkout of this repository.

Enters: a benchmark that prints its count first, a checkout. Leaves: the count there, its commit.
Does not know: what is counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from machine import ROOT


def count_in(checkout: Path, program: str, quick: bool) -> float:
    """What the program prints first with the packages of the checkout, which may not have it.

    program: a path. Raises CalledProcessError if it fails there.
    """
    path = os.pathsep.join([str(checkout), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [sys.executable, program, *(["--quick"] if quick else [])],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[0])


def commit_of(checkout: Path) -> str:
    """The short commit of a checkout; empty if it is no repository."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
