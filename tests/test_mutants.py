"""The mutants can be planted, and a sample of them is, so that the suite is known to see faults.

`make mutants` plants all of them.
"""

import importlib
import subprocess
import sys

import pytest

from harness.paths import TESTS

RUN = TESTS / "mutants" / "run.py"


@pytest.fixture
def mutants(monkeypatch):
    """tests/mutants/run.py as a module."""
    monkeypatch.syspath_prepend(RUN.parent)
    return importlib.import_module("run")


@pytest.mark.parametrize("name", ["fence", "append-address"])
def test_planted_fault_turns_the_suite_red(name):
    result = subprocess.run(
        [sys.executable, RUN, name], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"caught    {name}" in result.stdout


def judged(change: str) -> subprocess.CompletedProcess[str]:
    """What `judge` prints of the first mutant, so changed, in a process that it may fork."""
    code = f"""
from dataclasses import replace
from run import MUTANTS, judge
first = MUTANTS[0]
print(*judge([replace(first, {change})]))
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=RUN.parent)


def test_a_fault_that_no_test_sees_survives():
    assert "is_caught=False" in judged("fault=first.text").stdout


def test_a_mutant_without_tests_is_an_error():
    result = judged('tests=("tests/test_docs.py", "-k", "nothing")')
    assert result.returncode == 1
    assert "pytest exited 5" in result.stderr


def test_every_mutant_still_has_its_text(mutants):
    for mutant in mutants.MUTANTS:
        mutants.planted(mutant)


def test_a_text_matches_however_the_file_is_formatted(mutants):
    text = "if fits(pool, count):\n    place(row, count - 1)"
    same = [
        text,
        "if fits(pool,count): place(row, count-1)",
        "if fits(\n    pool,\n    count,\n):\n"
        "        place(\n            row, count - 1\n        )",
    ]
    other = ["if fits(pool, count):\n    place(row, count - 10)", "if unfits(pool, count): place()"]
    assert all(mutants.pattern(text).search(source) for source in same)
    assert not any(mutants.pattern(text).search(source) for source in other)
