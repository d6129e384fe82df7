"""Programs that tests use if they are installed; else the tests are skipped."""

import os
import shutil

import pytest

from harness.paths import ROOT


def installed(program, variable, how):
    """The program's path, which the variable may name; how: how to install it."""
    path = os.environ.get(variable) or shutil.which(program)
    if path is None:
        pytest.skip(f"no program `{program}`: {how}, or name it in {variable}")
    return path


def vllm_python():
    """The interpreter of vLLM's own environment."""
    path = os.environ.get("NANOCP_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    if not os.access(path, os.X_OK):
        pytest.skip(f"no vLLM at {path}: run make .venv-vllm/.installed")
    return path
