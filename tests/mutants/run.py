"""Mutants: small faults planted in a copy of the tree, each of which must turn the suite red.

    python tests/mutants/run.py                 every mutant, two at a time
    python tests/mutants/run.py quarantine      those that are named
    python tests/mutants/run.py --list

Prints how long each took and which test saw it. Exits 0 if every mutant that ran was caught. If a
mutant's text is no longer in the code, that is an error: mend the mutant.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
NUM_AT_ONCE = 2


class Verdict(NamedTuple):
    """How the tests of one mutant ended."""

    mutant: Mutant
    is_caught: bool
    seconds: float
    seen_by: str
    """The first test that failed, and how."""


def pattern(text: str) -> re.Pattern[str]:
    """A pattern that matches the text however it is formatted.

    White space between two tokens may differ, and so may a comma before a closing bracket.
    """
    without_last_commas = re.sub(r",(?=\s*[)\]}])", "", text)
    tokens = re.findall(r"\w+|[^\w\s]", without_last_commas)
    parts = []
    for token in tokens:
        escaped = re.escape(token)
        if token in ")]}":
            parts.append(rf",?\s*{escaped}")
        else:
            parts.append(rf"\b{escaped}\b" if re.match(r"\w", token) else escaped)
    return re.compile(r"\s*".join(parts))


def planted(mutant: Mutant) -> str:
    """The file's text with the fault in it. Raises SystemExit if that cannot be."""
    source = (ROOT / mutant.path).read_text()
    found = list(pattern(mutant.text).finditer(source))
    if len(found) != 1:
        raise SystemExit(
            f"mutant {mutant.name}: its text stands {len(found)} times in {mutant.path}; "
            "mend the mutant"
        )
    (match,) = found
    before, after = source[: match.start()], source[match.end() :]
    line = before[before.rfind("\n") + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    faulty = before + mutant.fault.replace("\n", "\n" + indent) + after
    if mutant.path.endswith(".py"):
        compile(faulty, mutant.path, "exec")
    return faulty


def plant(mutant: Mutant, tree: Path) -> None:
    """Copy the tree without what git ignores to `tree`, and plant the fault."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    (tree / mutant.path).write_text(planted(mutant))


def judge(mutant: Mutant) -> Verdict:
    """Whether the suite goes red. A timeout is red too: a deadlock is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        plant(mutant, tree)
        command = [sys.executable, "-m", "pytest", "-x", "-rf", "-p", "no:cacheprovider"]
        begin_s = time.monotonic()
        try:
            result = subprocess.run(
                [*command, *mutant.tests],
                cwd=tree,
                env=_environment(tree),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Verdict(mutant, True, TIMEOUT_S, f"nothing ended in {TIMEOUT_S} s")
    seconds = time.monotonic() - begin_s
    failed = re.search(r"^FAILED (.*)", result.stdout, re.M)
    # Exit status 1 with a failed test, or 0. A failed test may leave threads inside native code,
    # and C++ ends the process with a signal when the interpreter stops them. Anything else (no
    # tests, a usage error, a fixture that fails) is the mutant's own mistake.
    has_ended_red = result.returncode == 1 or result.returncode == -signal.SIGABRT
    if (result.returncode != 0 and not has_ended_red) or has_ended_red != bool(failed):
        raise SystemExit(
            f"mutant {mutant.name}: pytest exited {result.returncode}\n{result.stdout[-2000:]}"
            f"{result.stderr[-2000:]}"
        )
    return Verdict(mutant, failed is not None, seconds, failed[1] if failed else "")


def _environment(tree: Path) -> dict[str, str]:
    # The copy comes first on the path, so that the fault and not the installed package is tested.
    # pytest cuts the sentence of a failure at the width of the terminal.
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}


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
    chosen = [known[name] for name in names] or MUTANTS
    begin_s, num_survivors = time.monotonic(), 0
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for verdict in pool.map(judge, chosen):
            num_survivors += not verdict.is_caught
            outcome = "caught" if verdict.is_caught else "SURVIVED"
            mutant = verdict.mutant
            print(f"{outcome:9} {mutant.name:20} {verdict.seconds:5.0f} s  {mutant.why}")
            print(f"{'':9} {verdict.seen_by}", flush=True)
    minutes = (time.monotonic() - begin_s) / 60
    print(f"{len(chosen)} mutants, {num_survivors} survived, {minutes:.1f} minutes")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
