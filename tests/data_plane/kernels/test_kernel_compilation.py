"""Every kernel compiles for sm_90 without a GPU, within its registers, spills and shared memory."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from harness.kernels.compiled_kernel import SHARED_LIMIT, unordered_releases
from harness.kernels.kernel_compilation import controls, kernels
from harness.paths import TESTS
from harness.programs.made_once import made_once

pytestmark = pytest.mark.system
"""CI runs them behind `make test`."""


class Limit(NamedTuple):
    """The most that a kernel may take."""

    registers: int
    """Registers of a thread."""
    stack_bytes: int = 0
    """Spilled bytes of a thread."""
    spills_in_loop: int = 0
    """Loads and stores of spilled registers in the loops that multiply."""


LIMITS = {
    "rows to FP8": Limit(64),
    **dict.fromkeys(("gated gemm bf16", "gated gemm bf16, many rows"), Limit(168)),
    "grouped gemm bf16": Limit(208),
    **dict.fromkeys(("grouped gemm bf16, many rows", "gated gemm fp8"), Limit(255)),
    "grouped gemm fp8": Limit(255),
    "gated gemm fp32": Limit(255, stack_bytes=256),
    "grouped gemm fp32": Limit(255, stack_bytes=640),
    **dict.fromkeys(("norm of embeddings", "norm of a sum", "norm of three"), Limit(64)),
    **dict.fromkeys(("gated rows", "latent rows bf16", "latent rows fp8"), Limit(64)),
    **dict.fromkeys(("append bf16", "append fp8", "rotate", "return sums"), Limit(64)),
    **dict.fromkeys(("scores bf16", "scores fp32", "choose", "sum returned"), Limit(96)),
    **dict.fromkeys(("rows laid out in fp8", "gated rows laid out in fp8"), Limit(64)),
    **dict.fromkeys(("pairs here", "pairs that arrived"), Limit(128)),
    "sum pairs": Limit(208),
    **dict.fromkeys(("decode bf16", "decode bf16, two queries", "decode fp16"), Limit(
        255, stack_bytes=208, spills_in_loop=20
    )),
    **dict.fromkeys(("decode fp32", "decode fp8, fp32 queries"), Limit(255)),
    **dict.fromkeys(("decode fp8", "decode fp8, fp16 queries", "decode fp8, two queries"),
                    Limit(255, stack_bytes=448, spills_in_loop=80)),
    "decode K/V heads bf16": Limit(168),
    "decode K/V heads bf16, four queries": Limit(168),
    "decode K/V heads bf16, two queries": Limit(168),
    "decode K/V heads fp32": Limit(128),
    **dict.fromkeys(("put q", "put res", "put dispatch", "take q", "take res"), Limit(64)),
    **dict.fromkeys(("put q packed", "put dispatch packed", "take q packed"), Limit(64)),
    "return sums packed": Limit(64),
    **dict.fromkeys(("wait", "wait counted"), Limit(32)),
    **dict.fromkeys(("adopt", "locate", "route", "next turn"), Limit(64)),
    **dict.fromkeys(("target", "plan"), Limit(128)),
    **dict.fromkeys(("delta rule bf16", "delta rule fp32"), Limit(168)),
    "delta rule by channel bf16": Limit(224),
    **dict.fromkeys(("merge splits", "merge partials", "merge returned"), Limit(64)),
}  # fmt: skip
"""Kernel -> the most that it may take.

With Triton 3.6 no kernel spills in a loop; later versions widen and convert with more registers. On
a GPU machine `make gpu-check` allows none.
"""

UNANNOUNCED = ["put, plain flag", "put, relaxed flag", "put, GPU scope", "put, flag first"]
UNACQUIRED = ["wait, relaxed sys", "wait, acquire gpu"]
CONTROLS = [*UNANNOUNCED, *UNACQUIRED, "put, right", "wait, acquire sys"]


LONG = [
    *("decode bf16, two queries", "decode fp8, two queries", "decode fp16", "decode fp32"),
    *("decode fp8", "decode K/V heads bf16, two queries", "grouped gemm fp32"),
    *("decode fp8, fp16 queries", "decode fp8, fp32 queries"),
    *("decode K/V heads bf16, four queries", "decode bf16", "grouped gemm fp8", "gated gemm fp32"),
]
"""They take as long to compile as all others, which another worker compiles meanwhile."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, worker_id):
    """Compile the kernels once, also where several workers share the tests of this file.

    Returns a function: a kernel's name -> its resources. The long kernels are compiled when the
    first of them is asked for.
    """
    cache = tmp_path_factory.getbasetemp() / "triton"

    def compiled_kernel(name):
        is_long = name in LONG
        names = LONG if is_long else [one for one in LIMITS if one not in LONG] + CONTROLS
        answer = made_once(
            tmp_path_factory,
            worker_id,
            f"compiled_kernels_{is_long}.json",
            lambda path: path.write_text(compile_kernels(names, cache)),
        )
        return json.loads(answer.read_text())[name]

    return compiled_kernel


@pytest.fixture(scope="module")
def compiled_by_oldest(tmp_path_factory, worker_id, oldest_triton):
    """The resources of every kernel by the oldest Triton, compiled once."""
    cache = tmp_path_factory.getbasetemp() / "triton"
    answer = made_once(
        tmp_path_factory,
        worker_id,
        "compiled_by_oldest.json",
        lambda path: path.write_text(compile_kernels([*LIMITS], cache, oldest_triton)),
    )
    return json.loads(answer.read_text())


def compile_kernels(names, cache, *packages):
    """Compile without an old cache, so that the result is of today's sources.

    packages: folders that come before the environment's.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([*packages, str(TESTS.parent), *sys.path]),
    }
    result = subprocess.run(
        [sys.executable, TESTS / "harness/kernels/kernel_compilation.py", *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_kernel_is_compiled():
    assert {*kernels(), *controls()} == {*LIMITS, *CONTROLS}


@pytest.mark.parametrize("name", LIMITS)
def test_resources_are_within_limits(compiled, name):
    kernel, limit = compiled(name), LIMITS[name]
    assert kernel["registers"] <= limit.registers
    assert kernel["stack_bytes"] <= limit.stack_bytes
    assert kernel["num_spills_in_loop"] <= limit.spills_in_loop
    assert kernel["shared_bytes"] <= SHARED_LIMIT


@pytest.mark.parametrize("name", LIMITS)
def test_with_the_oldest_triton_no_loop_spills(compiled_by_oldest, name):
    kernel = compiled_by_oldest[name]
    assert kernel["num_spills_in_loop"] == 0 and kernel["unordered_releases"] == []
    assert kernel["shared_bytes"] <= SHARED_LIMIT


@pytest.mark.parametrize("name", [
    *("gated gemm bf16", "gated gemm bf16, many rows", "gated gemm fp8", "grouped gemm bf16"),
    *("grouped gemm bf16, many rows", "grouped gemm fp8", "scores bf16"),
    *("decode bf16", "decode fp16", "decode fp8"),
])  # fmt: skip
def test_the_16_bit_kernels_use_hoppers_matrix_units_and_asynchronous_copies(compiled, name):
    kernel = compiled(name)
    assert kernel["num_wgmma"] > 0 and kernel["num_async_copies"] > 0


@pytest.mark.parametrize("name", LIMITS)
def test_no_flag_is_released_before_what_it_announces(compiled, name):
    assert compiled(name)["unordered_releases"] == []


PUTS = [
    *("put q", "put res", "put dispatch", "return sums"),
    *("put q packed", "put dispatch packed", "return sums packed"),
]


@pytest.mark.parametrize("name", [*PUTS, "put, right"])
def test_a_put_releases_its_stores_to_the_whole_system_and_needs_its_barrier(compiled, name):
    kernel = compiled(name)
    assert kernel["unannounced_stores"] == [] and kernel["unordered_releases"] == []
    assert kernel["num_unordered_without_barriers"] > 0


@pytest.mark.parametrize("name", [*PUTS, "wait", "wait counted", "wait, acquire sys"])
def test_what_others_released_is_acquired(compiled, name):
    # A put's last program must have seen the others' stores before it sets the flag for all.
    assert compiled(name)["num_system_acquires"] == 1


@pytest.mark.parametrize("name", UNANNOUNCED)
def test_the_lint_sees_stores_that_no_flag_announces(compiled, name):
    assert compiled(name)["unannounced_stores"]


@pytest.mark.parametrize("name", UNACQUIRED)
def test_the_lint_sees_a_wait_that_acquires_nothing(compiled, name):
    assert compiled(name)["num_system_acquires"] == 0


STORE, BARRIER = "\tst.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};", "\tbar.sync 0;"


@pytest.mark.parametrize("release", [
    "\tst.release.sys.global.b32 [%rd2], %r5;",
    "\tatom.global.sys.release.exch.b32 %r6, [%rd2], %r5;",
    "\t@%p1 atom.global.acq_rel.sys.add.u32 %r6, [%rd2], 1;",
    "\tred.release.sys.global.add.u32 [%rd2], 1;", "\tfence.acq_rel.sys;",
])  # fmt: skip
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
