"""Every kernel compiles for sm_90 without a GPU, and takes no more registers, spills and shared
memory than it may."""

import json
import os
import subprocess
import sys

import pytest
from filelock import FileLock

from harness.kernel_compilation import SHARED_LIMIT, unordered_releases
from harness.paths import TESTS

LIMITS = {
    "grouped gemm bf16": (168, 0, 0),
    "grouped gemm fp8": (255, 0, 0),
    "grouped gemm fp32": (255, 256, 0),
    "decode bf16": (255, 288, 24),
    "decode fp16": (255, 288, 24),
    "decode fp32": (255, 0, 0),
    "decode fp8": (255, 640, 120),
    **dict.fromkeys(("put q", "put res", "put dispatch", "take q", "take res"), (64, 0, 0)),
    **dict.fromkeys(("wait", "wait counted"), (32, 0, 0)),
    **dict.fromkeys(("adopt", "locate", "route", "group", "ungroup", "sum"), (64, 0, 0)),
    **dict.fromkeys(("target", "slot", "plan"), (128, 0, 0)),
    **dict.fromkeys(("merge splits", "merge partials", "merge routed"), (64, 0, 0)),
}
"""Registers and spilled bytes of a thread; loads and stores of spilled ones in the loops that
multiply. With Triton 3.6 those are none (docs/log.md): later ones widen and convert with more
registers. On a GPU machine `make gpu-check` asks for none."""

UNANNOUNCED = ["put, plain flag", "put, relaxed flag", "put, GPU scope", "put, flag first"]
UNACQUIRED = ["wait, relaxed sys", "wait, acquire gpu"]
CONTROLS = [*UNANNOUNCED, *UNACQUIRED, "put, right", "wait, acquire sys"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, worker_id):
    """Compiled once, also where several workers share the tests of this file."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id == "master":
        return json.loads(compile_all(folder / "triton"))
    answer = folder.parent / "compiled_kernels.json"
    with FileLock(f"{answer}.lock"):
        if not answer.exists():
            answer.write_text(compile_all(folder / "triton"))
    return json.loads(answer.read_text())


def compile_all(cache):
    """Without an old cache, so that what is looked at was compiled from what is there."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path]),
    }
    result = subprocess.run(
        [sys.executable, TESTS / "harness/kernel_compilation.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_kernel_is_compiled(compiled):
    assert set(compiled) == {*LIMITS, *CONTROLS}


@pytest.mark.parametrize("name", LIMITS)
def test_resources_are_within_limits(compiled, name):
    kernel, (registers, stack_bytes, num_spills) = compiled[name], LIMITS[name]
    assert kernel["registers"] <= registers
    assert kernel["stack_bytes"] <= stack_bytes and kernel["num_spills_in_loop"] <= num_spills
    assert kernel["shared_bytes"] <= SHARED_LIMIT


@pytest.mark.parametrize(
    "name", ["decode bf16", "decode fp16", "decode fp8", "grouped gemm bf16", "grouped gemm fp8"]
)
def test_the_16_bit_kernels_use_hoppers_matrix_units_and_asynchronous_copies(compiled, name):
    assert compiled[name]["num_wgmma"] > 0 and compiled[name]["num_async_copies"] > 0


@pytest.mark.parametrize("name", LIMITS)
def test_no_flag_is_released_before_what_it_announces(compiled, name):
    assert compiled[name]["unordered_releases"] == []


@pytest.mark.parametrize("name", ["put q", "put res", "put dispatch", "put, right"])
def test_a_put_releases_its_stores_to_the_whole_system_and_needs_its_barrier(compiled, name):
    assert compiled[name]["unannounced_stores"] == [] and compiled[name]["unordered_releases"] == []
    assert compiled[name]["num_unordered_without_barriers"] > 0


@pytest.mark.parametrize(
    "name", ["put q", "put res", "put dispatch", "wait", "wait counted", "wait, acquire sys"]
)
def test_what_others_released_is_acquired(compiled, name):
    # Of a put: the last program must have seen the others' stores before it sets the flag for all.
    assert compiled[name]["num_system_acquires"] == 1


@pytest.mark.parametrize("name", UNANNOUNCED)
def test_the_lint_sees_stores_that_no_flag_announces(compiled, name):
    assert compiled[name]["unannounced_stores"]


@pytest.mark.parametrize("name", UNACQUIRED)
def test_the_lint_sees_a_wait_that_acquires_nothing(compiled, name):
    assert compiled[name]["num_system_acquires"] == 0


STORE, BARRIER = "\tst.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};", "\tbar.sync 0;"


@pytest.mark.parametrize(
    "release",
    [
        "\tst.release.sys.global.b32 [%rd2], %r5;",
        "\tatom.global.sys.release.exch.b32 %r6, [%rd2], %r5;",
        "\t@%p1 atom.global.acq_rel.sys.add.u32 %r6, [%rd2], 1;",
        "\tred.release.sys.global.add.u32 [%rd2], 1;",
        "\tfence.acq_rel.sys;",
    ],
)
def test_the_lint_sees_a_flag_that_other_threads_stores_may_pass(release):
    assert unordered_releases("\n".join([STORE, BARRIER, release])) == []
    assert unordered_releases("\n".join([STORE, release])) == [release.strip()]
    assert unordered_releases("\n".join([BARRIER, "\t@%p2 " + STORE.strip(), release])) == [
        release.strip()
    ]
    assert (
        unordered_releases(
            "\n".join(["\tst.shared.b32 [%r9], %r5;", "\tld.global.b32 %r1, [%rd1];", release])
        )
        == []
    )
