"""What a result was measured on, and how results are kept: machine, commit, versions.

    python -m benchmarks.kit.machine

Enters: results. Leaves: PATH with the results and PATH's .machine.json beside it; by itself, what
two processes do here over one. Does not know: what was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "numpy", "grpcio", "ray", "triton")
"""Those of them that are there: a GPU machine may have torch and triton only."""
MODULES = {"grpcio": "grpc"}
_STREAMED_MB, _AT_ONCE_MB, _MATRIX = 512, 32, 128
_SCALING_ROUNDS, _SCALING_S = 3, 0.4
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def describe(load_before: float) -> dict[str, Any]:
    """Describe machine and code.

    load_before: the load average when the benchmark began; above 0.5 it was not alone.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_CODE,
        "has_real_time_priority": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {
            package: version(package)
            for package in PACKAGES
            if find_spec(MODULES.get(package, package))
        },
        "load_average_before": round(load_before, 2),
    }


def headline(load_before: float) -> str:
    """Say in a line on what machine and of what code this is."""
    about = describe(load_before)
    commit = about["commit"][:12] or f"code {about['code']}"
    changed = " with local changes" if about["has_local_changes"] else ""
    torch = about["versions"].get("torch", "absent")
    return (
        f"{about['cpu']}, {about['cores']} cores, torch {torch}, commit {commit}{changed}, "
        f"load {load_before:.1f}"
    )


def code_digest() -> str:
    """Digest the code that runs on a GPU machine, which may have no commit.

    Results of other code are not continued.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(
        path
        for folder in ("data_plane", "nanocp", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp")
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_results(path: Path | None) -> list[dict[str, Any]]:
    """Read what `write_results` wrote there with this code; nothing if it was other code."""
    if path is None or not path.exists():
        return []
    described = path.with_suffix(".machine.json")
    if not described.exists() or json.loads(described.read_text()).get("code") != _CODE["code"]:
        print(f"{path} was measured with other code: begun anew")
        return []
    results: list[dict[str, Any]] = json.loads(path.read_text())
    return results


def write_results(path: Path, results: Any, machine: dict[str, Any]) -> None:
    """Write the results, a list or an object, and the machine beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".machine.json").write_text(json.dumps(machine, indent=1) + "\n")


class TwoProcesses(NamedTuple):
    """What two processes do together over what one does alone: 2 is a core each, 1 is none."""

    compute: float
    """Products of small matrices, which stay in a core's cache."""
    memory: float
    """Bytes read by processes that stream 512 MB each."""

    def why_not(self, at_least: float) -> str:
        """Why a claim that two do so many times what one does is not judged; empty if it is.

        Work reads memory and computes, so it scales like one of the two or between them. A miss
        says nothing where the machine itself has less than is asked. A claim that holds there does
        hold: the machine only works against it.
        """
        scarce, scaling = min(self._asdict().items(), key=lambda each: each[1])
        if scaling >= at_least:
            return ""
        return f"{scarce} of two processes is {scaling:.2f} of one's ({at_least:.2f})"


def two_processes(seconds: float = _SCALING_S) -> TwoProcesses:
    """Measure what two processes do over one; takes about 12 times `seconds`."""
    return TwoProcesses(*(_two_over_one(work, seconds) for work in TwoProcesses._fields))


def _two_over_one(work: str, seconds: float) -> float:
    """The median over rounds, in each of which one process works alone and then both do."""
    ratios = []
    with ExitStack() as held:
        rates = [held.enter_context(_worker(work)) for _ in range(2)]
        for _ in range(_SCALING_ROUNDS):
            (alone,) = _rates_of(rates[:1], seconds)
            ratios.append(sum(_rates_of(rates, seconds)) / alone)
    return median(ratios)


def _rates_of(workers: Sequence[subprocess.Popen[str]], seconds: float) -> list[float]:
    """Let these work at once; returns what each does in a second."""
    for each in workers:
        assert each.stdin is not None
        print(seconds, file=each.stdin, flush=True)
    return [float(each.stdout.readline()) for each in workers if each.stdout is not None]


@contextmanager
def _worker(work: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that works when it is given a number of seconds; it is ready."""
    command = [sys.executable, __file__, work]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=os.environ | _ONE_THREAD
    ) as process:
        try:
            _rates_of([process], 0.0)
            yield process
        finally:
            process.kill()


def _units(work: str) -> Iterator[None]:
    """Do a part of the work before each yield; without end."""
    import numpy

    if work == "memory":
        large = numpy.ones((_STREAMED_MB // _AT_ONCE_MB, _AT_ONCE_MB << 18), numpy.float32)
        for part in cycle(large):
            part.max()
            yield
    small = numpy.ones((_MATRIX, _MATRIX), numpy.float32)
    while True:
        small @ small
        yield


def _work(work: str) -> None:
    """Be such a process: do the work for as many seconds as each line of input says."""
    units = _units(work)
    for line in sys.stdin:
        begin, num_units, seconds = time.perf_counter(), 0, 0.0
        while not num_units or seconds < float(line):
            next(units)
            num_units, seconds = num_units + 1, time.perf_counter() - begin
        print(num_units / seconds, flush=True)


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


_CODE = {
    "commit": _git("rev-parse", "HEAD"),
    "code": code_digest(),
    "has_local_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
}
"""The code when the benchmark began: files may change while it runs."""


if __name__ == "__main__":
    if sys.argv[1:]:
        _work(*sys.argv[1:])
    else:
        for name, scaling in two_processes()._asdict().items():
            print(f"{name} of two processes over that of one: {scaling:.2f}")
