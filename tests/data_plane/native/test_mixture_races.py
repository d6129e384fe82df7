"""The mixture's C++ under ThreadSanitizer: instances are threads, each with processors of its own.

It sees a store that no release announces, which an x86 machine never shows. Without it, the driver
compares outputs only.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from data_plane.native import build
from harness.paths import ROOT

DRIVER = Path(__file__).with_name("mixture_driver.cpp")
NATIVE = ROOT / "data_plane" / "native"


def build_driver(folder, *flags):
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None or "avx2" not in build._cpu_flags():
        pytest.skip("there is no C++ compiler, or the CPU has no AVX2")
    driver = folder / "driver"
    command = [compiler, "-std=c++17", "-pthread", "-mavx2", "-mfma", *flags, f"-I{NATIVE}"]
    subprocess.run([*command, str(DRIVER), "-o", str(driver)], check=True, timeout=300)
    return driver


def run(driver, *arguments):
    ended = subprocess.run(
        [str(driver), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert ended.returncode == 0, f"{arguments}: {ended.stderr[-3000:]}"


def test_outputs_are_those_of_one_processor(tmp_path):
    driver = build_driver(tmp_path, "-O1")
    for instances, processors, schedule in [
        (1, 3, 0),
        (2, 2, 0),
        (2, 2, 1),
        (4, 2, 2),
        (4, 1, 2),
    ]:
        run(driver, instances, processors, 40, schedule, instances + processors)


@pytest.mark.system
def test_no_store_races(tmp_path):
    driver = build_driver(tmp_path, "-O1", "-g", "-fsanitize=thread")
    for seed in range(3):
        for instances in (1, 2, 4):
            for schedule in (0, 2):
                run(driver, instances, 3, 60, schedule, seed)
