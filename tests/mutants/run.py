"""Mutants: small faults planted in a copy of the tree, each of which must turn the suite red.

    python tests/mutants/run.py                 every mutant, two at a time
    python tests/mutants/run.py quarantine      those that are named
    python tests/mutants/run.py --third 2       the third, sixth, ... of all; 0 and 1 are the others
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
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
WAIT_S = 20
"""How long a test waits for what the fault keeps from coming."""
NUM_AT_ONCE = 2
OUTPUT = "output"
FORK_FAILED = 70
CRASHES = {
    -each: each.name for each in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
}


class Running(NamedTuple):
    """A mutant whose tests run."""

    mutant: Mutant
    folder: tempfile.TemporaryDirectory[str]
    """With the tree, and beside it what its tests print."""
    pid: int
    begin_s: float


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


def start(mutant: Mutant) -> Running:
    """Plant the fault, and let a fork of this process run the mutant's tests."""
    folder = tempfile.TemporaryDirectory()
    tree = Path(folder.name, "tree")
    plant(mutant, tree)
    begin_s = time.monotonic()
    pid = os.fork()
    if not pid:
        _run_tests(mutant, tree)
    return Running(mutant, folder, pid, begin_s)


def _run_tests(mutant: Mutant, tree: Path) -> NoReturn:
    status = FORK_FAILED
    try:
        os.setsid()
        output = os.open(tree.with_name(OUTPUT), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        # The copy comes first on the path, so that the fault and not the installed package is
        # tested. pytest cuts the sentence of a failure at the width of the terminal.
        os.environ |= {"PYTHONPATH": str(tree), "COLUMNS": "300"}
        sys.path[0] = str(tree)
        status = pytest.main(["-x", "-rf", "-p", "no:cacheprovider", *mutant.tests])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def verdict(running: Running) -> Verdict | None:
    """Whether the suite went red; None while it runs. A deadlock is a failure: a timeout is red.

    Raises SystemExit for a mistake of the mutant's own.
    """
    mutant, folder, pid, begin_s = running
    seconds = time.monotonic() - begin_s
    if seconds > TIMEOUT_S:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        folder.cleanup()
        return Verdict(mutant, True, seconds, f"nothing ended in {TIMEOUT_S} s")
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    output = Path(folder.name, OUTPUT).read_text(errors="replace")
    folder.cleanup()
    code = os.waitstatus_to_exitcode(status)
    failed = re.search(r"^FAILED (.*)", output, re.M)
    if code in CRASHES and not failed:
        # A fault in native code may end the process in the middle of a test, which Python's fault
        # handler then names.
        failed = re.search(r'^  File ".*/tree/(.*", line \d+ in test_\w+)', output, re.M)
    # Exit status 1 with a failed test, or 0. A failed test may also leave threads inside native
    # code, and C++ ends the process with a signal when the interpreter stops them. Anything else
    # (no tests, a usage error, a fixture that fails) is the mutant's own mistake.
    has_ended_red = code == 1 or code in CRASHES
    if (code != 0 and not has_ended_red) or has_ended_red != bool(failed):
        raise SystemExit(f"mutant {mutant.name}: pytest exited {code}\n{output[-4000:]}")
    ended_by = CRASHES.get(code, "")
    seen_by = f"{failed[1]} {ended_by}".rstrip() if failed else ""
    return Verdict(mutant, failed is not None, seconds, seen_by)


def judge(mutants: Sequence[Mutant]) -> Iterator[Verdict]:
    """Verdicts in the order in which the tests end, NUM_AT_ONCE mutants at a time.

    What all of them import from elsewhere is imported once, here.
    """
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        "NANOCP_TEST_WAIT_S": f"{WAIT_S}",
    }
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    import_module("torch")
    waiting, running = list(reversed(mutants)), list[Running]()
    while waiting or running:
        while waiting and len(running) < NUM_AT_ONCE:
            running.append(start(waiting.pop()))
        for each in list(running):
            if found := verdict(each):
                running.remove(each)
                yield found
        time.sleep(0.02)


def main(names: list[str]) -> int:
    """Run the named mutants, or all; returns the exit code."""
    third = int(names[1]) if names[:1] == ["--third"] else None
    names = names[2:] if third is not None else names
    known = {mutant.name: mutant for mutant in MUTANTS}
    if names == ["--list"]:
        for mutant in MUTANTS:
            print(f"{mutant.name:24} {mutant.why}")
        return 0
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no mutant is called {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in names] or MUTANTS
    if third is not None:
        chosen = MUTANTS[third % 3 :: 3]
    features = Path("/proc/cpuinfo").read_text().split()
    for mutant in chosen:
        if mutant.needs and mutant.needs not in features:
            print(f"not judged {mutant.name}: this processor has no {mutant.needs}")
    chosen = [each for each in chosen if not each.needs or each.needs in features]
    begin_s, survivors = time.monotonic(), list[str]()
    for mutant, is_caught, seconds, seen_by in judge(chosen):
        survivors += [] if is_caught else [mutant.name]
        outcome = "caught" if is_caught else "SURVIVED"
        print(f"{outcome:9} {mutant.name:20} {seconds:5.0f} s  {mutant.why}")
        print(f"{'':9} {seen_by}", flush=True)
    minutes = (time.monotonic() - begin_s) / 60
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {minutes:.1f} minutes")
    if survivors:
        print(f"survived: {', '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
