"""Processes that never compute do not load torch: it takes longer than all else they import."""

from harness.programs.imports import assert_not_imported

MODULES = (
    "nanocp.serve.service", "nanocp.serve.front_end_process", "nanocp.serve.supervisor",
    "nanocp.cli.serve.controller_process", "data_plane.programs.process",
)  # fmt: skip


def test_a_checkpoint_is_opened_without_torch():
    program = """from pathlib import Path
from nanocp.config.whole import Config
from nanocp.serve.service import open_checkpoint
served = open_checkpoint(Config(), Path("models/tale"))
assert served.limits.vocab_size == 2048 and served.page_bytes"""
    assert_not_imported(program, "torch")


def test_the_service_and_its_processes_start_without_torch():
    assert_not_imported(f"import {', '.join(MODULES)}", "torch")
