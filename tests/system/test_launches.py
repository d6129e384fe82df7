"""Every kernel that steps launch compiles for sm_90, as launches specialise it.

See tests/harness/launch_compilation.py.
"""

import json
import os
import subprocess
import sys

import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from harness.kernel_compilation import SHARED_LIMIT
from harness.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def test_no_launch_is_refused(tmp_path):
    """The control: one that is, because of a number that is not 1."""
    make_checkpoint(tmp_path, "tiny")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        map(str, (ROOT, ROOT / "tests", ROOT / "benchmarks"))
    )
    command = [sys.executable, ROOT / "tests/harness/launch_compilation.py", tmp_path]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["refused"] == [] and found["shared_bytes"] <= SHARED_LIMIT
    assert found["variants"] > 100
    (control,) = found["controls"]
    assert control.startswith("control_kernel: ")
