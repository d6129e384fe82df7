"""C++ of the mixture and of TCP without Python: under ThreadSanitizer, and what runs when."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from data_plane.native import build
from harness.paths import ROOT

NATIVE = ROOT / "data_plane" / "native"


def build_driver(folder, *flags, source="mixture_driver.cpp", needs_avx2=True):
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    if needs_avx2:
        if "avx2" not in build._cpu_flags():
            pytest.skip("the CPU has no AVX2")
        flags = ("-mavx2", "-mfma", *flags)
    driver = folder / "driver"
    command = [compiler, "-std=c++17", "-pthread", *flags, f"-I{NATIVE}"]
    path = Path(__file__).with_name(source)
    subprocess.run([*command, str(path), "-o", str(driver)], check=True, timeout=300)
    return driver


def run(driver, *arguments):
    ended = subprocess.run(
        [str(driver), *map(str, arguments)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )  # fmt: skip
    assert ended.returncode == 0, f"{arguments}: {ended.stderr[-3000:]}"


def test_outputs_are_those_of_one_processor(tmp_path):
    driver = build_driver(tmp_path, "-O1")
    for instances, processors, schedule in [(1, 3, 0), (2, 2, 0), (2, 2, 1), (4, 2, 2), (4, 1, 2)]:
        run(driver, instances, processors, 40, schedule, instances + processors)


def test_experts_whose_weights_are_in_the_cache_run_first(tmp_path):
    """The last one that began early comes first, then by rows or by slot (decision 0044)."""
    run(build_driver(tmp_path, "-O0", source="arrivals_driver.cpp"))


@pytest.mark.system
def test_no_store_races(tmp_path):
    driver = build_driver(tmp_path, "-O1", "-g", "-fsanitize=thread")
    for seed in range(3):
        for instances in (1, 2, 4):
            for schedule in (0, 2):
                run(driver, instances, 3, 60, schedule, seed)


def test_receivers_write_what_was_put(tmp_path):
    run(build_driver(tmp_path, "-O1", source="receive_driver.cpp", needs_avx2=False), 3, 40, 0)


@pytest.mark.system
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_store_of_a_receiver_races_or_is_outside(tmp_path, sanitizers):
    flags = ("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    driver = build_driver(tmp_path, *flags, source="receive_driver.cpp", needs_avx2=False)
    for seed in range(3):
        run(driver, 3, 40, seed)
