"""The fused mixture compiles for sm_90 without spills in its loops, and orders what it releases."""

import json
import os
import subprocess
import sys

import pytest

from harness.kernels.compiled_kernel import SHARED_LIMIT
from harness.paths import TESTS

pytestmark = pytest.mark.system

PUTS = ("dispatch", "return")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function: a kernel's name -> its resources; each is compiled when it is asked for."""
    cache, known = tmp_path_factory.mktemp("triton"), {}

    def resources(name):
        if name not in known:
            environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            environment |= {
                "TRITON_CACHE_DIR": str(cache),
                "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path]),
            }
            command = [sys.executable, TESTS / "harness/kernels/fused_compilation.py", name]
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=900
            )
            assert result.returncode == 0, result.stderr
            known.update(json.loads(result.stdout))
        return known[name]

    return resources


@pytest.mark.parametrize("name", PUTS)
def test_a_task_that_puts_releases_its_stores_to_the_whole_system(compiled, name):
    kernel = compiled(name)
    assert kernel["unordered_releases"] == [] and kernel["unannounced_stores"] == []
    assert kernel["num_unordered_without_barriers"] > 0


@pytest.mark.parametrize("name", ["gate", "choose", "route", "inner", "output", "combine", "sweep"])
def test_no_task_releases_before_what_it_announces(compiled, name):
    assert compiled(name)["unordered_releases"] == []


def test_a_sweep_acquires_what_peers_released_and_a_claim_what_programs_published(compiled):
    assert compiled("sweep")["num_system_acquires"] == 2
    assert compiled("return")["num_gpu_acquires"] >= 1
    # It also reads what routes and shared experts have published.
    assert compiled("sweep")["num_gpu_acquires"] >= 2


@pytest.mark.parametrize("name", ["fused bf16", "fused fp8", "fused bf16, one instance"])
def test_the_kernel_is_within_limits_and_uses_hoppers_matrix_units(compiled, name):
    kernel = compiled(name)
    assert kernel["num_spills_in_loop"] == 0 and kernel["stack_bytes"] == 0
    assert kernel["shared_bytes"] <= SHARED_LIMIT and kernel["registers"] <= 255
    assert kernel["num_wgmma"] > 0 and kernel["num_async_copies"] > 0
    assert kernel["unordered_releases"] == []
    assert kernel["num_unordered_without_barriers"] > 10
    only_flags = compiled("choose")["num_narrow"]
    assert kernel["num_narrow"] <= only_flags, "a hint of alignment was lost"
