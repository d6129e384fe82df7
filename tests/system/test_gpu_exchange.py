"""The exchange of GPUs between real processes, interpreted, over shared memory, with delays."""

import os
import subprocess
import sys
import time

import pytest

from harness.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(1600)]


def run(tmp_path, num_layers):
    """Run two instances; returns the last line of each one's error, empty if there is none."""
    num_bytes = 1 << 20
    for index in range(2):
        (tmp_path / f"memory-{index}").write_bytes(bytes(num_bytes))
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    program = "from harness.transports.exchange_cases import *\nrun_slowly({}, 2, {!r}, {})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program.format(index, str(tmp_path), num_layers)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    deadline = time.monotonic() + 1500
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            # A process whose peer has failed would wait for it in vain.
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    return [process.communicate()[1].strip().rpartition("\n")[2] for process in processes]


def test_a_thousand_layers_of_random_tables_with_delays(tmp_path):
    assert run(tmp_path, 1000) == ["", ""]
