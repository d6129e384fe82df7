"""Processes that never compute do not load torch: it takes longer than all else they import."""

import subprocess
import sys

from harness.paths import ROOT

MODULES = (
    "nanocp.serve.service", "nanocp.serve.front_end_process", "nanocp.serve.supervisor",
    "nanocp.cli.serve.controller_process", "data_plane.programs.process",
)  # fmt: skip


def test_a_checkpoint_is_opened_without_torch():
    program = """import sys
from pathlib import Path
from nanocp.config.whole import Config
from nanocp.serve.service import open_checkpoint
served = open_checkpoint(Config(), Path("models/tale"))
assert served.limits.vocab_size == 2048 and served.page_bytes
assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, cwd=ROOT)


def test_the_service_and_its_processes_start_without_torch():
    program = f"import sys, {', '.join(MODULES)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
