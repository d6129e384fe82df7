"""Processes that never compute do not load torch: it takes longer than all else they import."""

import subprocess
import sys

MODULES = (
    "nanocp.serve.service",
    "nanocp.serve.front_end_process",
    "nanocp.serve.supervisor",
    "nanocp.cli.controller_process",
    "data_plane.member.process",
)


def test_the_service_and_its_processes_start_without_torch():
    program = f"import sys, {', '.join(MODULES)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
