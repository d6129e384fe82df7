"""The GPU's commands: on the CPU they say that there is no GPU, and what they check runs under the interpreter too."""

import os
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
import torch

ROOT = Path(__file__).parents[3]


def compiling_environment():
    """Of a process that does not interpret its kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["tests/gpu_check.py", "benchmarks/gpu_attention.py"])
def test_without_a_gpu_the_commands_say_so(script):
    command = [sys.executable, ROOT / script]
    result = subprocess.run(command, env=compiling_environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "no NVIDIA GPU is here" in result.stderr, result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_checks_themselves_run():
    checks = [*gpu_check.attention_checks("cpu", (32, 16), 2, num_parts=2), *gpu_check.merge_and_expert_checks("cpu")]
    exchange = gpu_check.exchange_checks("cpu", 2, 2, (6, 3, 2, 5))
    results = gpu_check.run([*checks[:8], *checks[-4:], *exchange])
    assert not [result for result in results if result["error"]]


def test_a_wrong_result_is_a_failed_check():
    (result,) = gpu_check.run([("wrong", lambda: torch.testing.assert_close(torch.ones(1), torch.zeros(1)))])
    assert "Tensor-likes are not close" in result["error"]


@pytest.mark.gpu
def test_every_kernel_on_the_gpu():
    command = [sys.executable, ROOT / "tests/gpu_check.py"]
    subprocess.run(command, env=compiling_environment(), check=True, timeout=480)
