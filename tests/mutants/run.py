"""Mutants: small faults planted in a copy of the tree, each of which must turn the suite red.

    python tests/mutants/run.py            every mutant
    python tests/mutants/run.py quarantine one of them
    python tests/mutants/run.py --list

Exits 0 if every mutant that ran was caught. A mutant whose text is no longer in the code is an
error: mend the mutant.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def check(mutant: Mutant) -> None:
    """The fault can be planted: its text stands in the code exactly once."""
    count = (ROOT / mutant.path).read_text().count(mutant.text)
    if count != 1:
        raise SystemExit(
            f"mutant {mutant.name}: its text stands {count} times in {mutant.path}; mend the mutant"
        )


def plant(mutant: Mutant, tree: Path) -> None:
    """Copy the tracked tree to `tree` and plant the fault."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    check(mutant)
    target = tree / mutant.path
    target.write_text(target.read_text().replace(mutant.text, mutant.fault))


def is_caught(mutant: Mutant) -> bool:
    """Whether the suite goes red. A timeout is red too: a deadlock is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        plant(mutant, tree)
        # The copy comes first on the path, so that the fault and not the installed package is
        # tested.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *mutant.tests,
        ]
        try:
            result = subprocess.run(
                command,
                cwd=tree,
                env=_environment(tree),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return True
        # 1: tests failed. Anything else but 0 (no tests, a usage error) is the mutant's own
        # mistake.
        if result.returncode not in (0, 1):
            raise SystemExit(
                f"mutant {mutant.name}: pytest exited {result.returncode}\n{result.stdout[-2000:]}"
            )
        return result.returncode == 1


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def main(names: list[str]) -> int:
    """Run the named mutants, or all; returns the exit code."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    if names == ["--list"]:
        for mutant in MUTANTS:
            print(f"{mutant.name:24} {mutant.why}")
        return 0
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no mutant is called {', '.join(unknown)}; there are {', '.join(known)}")
    survivors = []
    for mutant in [known[name] for name in names] or MUTANTS:
        caught = is_caught(mutant)
        print(f"{'caught' if caught else 'SURVIVED':9} {mutant.name:24} {mutant.why}", flush=True)
        if not caught:
            survivors.append(mutant.name)
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
