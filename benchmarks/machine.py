"""What a result was measured on, and how results are kept: machine, commit, versions.

Enters: results. Leaves: PATH with the results and PATH's .machine.json beside it. Does not know:
what was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "numpy", "grpcio", "ray", "triton")
"""Those of them that are there: a GPU machine may have torch and triton only."""
MODULES = {"grpcio": "grpc"}


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
    if not described.exists() or json.loads(described.read_text()).get("code") != code_digest():
        print(f"{path} was measured with other code: begun anew")
        return []
    results: list[dict[str, Any]] = json.loads(path.read_text())
    return results


def write_results(path: Path, results: Sequence[dict[str, Any]], machine: dict[str, Any]) -> None:
    """Write the list, and the machine beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(results), indent=1) + "\n")
    path.with_suffix(".machine.json").write_text(json.dumps(machine, indent=1) + "\n")


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
