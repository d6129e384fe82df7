"""All kernels that whole steps launch compile for sm_90, specialised as a launch does it."""

import json
import os
import subprocess
import sys

import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from harness.kernels.compiled_kernel import SHARED_LIMIT
from harness.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def test_no_launch_is_refused(tmp_path):
    """One launch must be refused, to show that refusals are seen: its number is not 1."""
    assert_all_compile(tmp_path)


def test_no_launch_is_refused_by_the_oldest_triton(tmp_path, oldest_triton):
    """Attributes of a constexpr NamedTuple are plain numbers there, and no shapes."""
    assert_all_compile(tmp_path, oldest_triton)


def assert_all_compile(tmp_path, *packages):
    """Compile all launches of a small checkpoint; packages: folders that come first."""
    make_checkpoint(tmp_path, "tiny")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*packages, ROOT, ROOT / "tests")))
    command = [sys.executable, ROOT / "tests/harness/gpu/launch_compilation.py", tmp_path]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["refused"] == [] and found["shared_bytes"] <= SHARED_LIMIT
    assert found["variants"] > 100
    (control,) = found["controls"]
    assert control.startswith("control_kernel: ")
