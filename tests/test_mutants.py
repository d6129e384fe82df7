"""A sample of the mutants, so that the suite is known to see faults.

`make mutants` plants all of them.
"""

import subprocess
import sys

import pytest

from harness.paths import TESTS

RUN = TESTS / "mutants" / "run.py"


@pytest.mark.parametrize("name", ["fence", "append-address"])
def test_planted_fault_turns_the_suite_red(name):
    result = subprocess.run(
        [sys.executable, RUN, name], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_mutant_still_has_its_text():
    program = "import run; [run.planted(mutant) for mutant in run.MUTANTS]"
    subprocess.run([sys.executable, "-c", program], cwd=RUN.parent, check=True, timeout=60)
