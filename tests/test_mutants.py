"""The mutants can be planted, and a sample of them is, so that the suite is known to see faults.

`make mutants` plants all of them.
"""

import importlib
import os
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


def test_planted_faults_turn_the_suite_red_and_what_no_test_sees_survives():
    """In a process that may fork; a mutant without tests is an error."""
    code = """
from dataclasses import replace
from run import MUTANTS, judge, main
first = MUTANTS[0]
assert main(["fence", "append-address"]) == 0
print(*judge([replace(first, fault=first.text)]))
print(*judge([replace(first, tests=("tests/test_docs.py", "-k", "nothing"))]))
"""
    command = [sys.executable, "-c", code]
    path = {**os.environ, "PYTHONPATH": str(RUN.parent)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=path)
    for name in ("fence", "append-address"):
        assert f"caught    {name}" in result.stdout, result.stdout + result.stderr
    assert result.stdout.count("is_caught=False") == 1
    assert result.returncode == 1 and "pytest exited 5" in result.stderr


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
