"""`nanocp demo`: its tokens, what it says of its service, and the log of one that fails."""

import io

import pytest
import torch
import typer
from rich.console import Console
from rich.progress import Progress

from harness.kernels.native_cases import native
from harness.paths import ROOT
from harness.programs.command_line import nanocp
from nanocp.cli.demo.demo import serving


def test_a_service_that_does_not_start_says_why(tmp_path):
    said = io.StringIO()
    progress = Progress(console=Console(file=said, width=200))
    with pytest.raises(typer.Exit), serving(tmp_path, progress):
        pass
    assert "config.json" in said.getvalue()


@pytest.mark.system
@pytest.mark.parametrize("lanes", ["off", "always"])
def test_every_token_is_exact_where_mixtures_are_one_call_and_in_lanes(monkeypatch, lanes):
    native((torch.float32, "avx2"))
    monkeypatch.setenv("NANOCP_SCHEDULER__LANES", lanes)
    result = nanocp("demo", ROOT / "models/tale")
    assert result.exit_code == 0, result.output
    assert "dispatch: fused, because kernels are native" in result.output
    assert ("(always)" in result.output) == (lanes == "always")
    assert '"requests": 8, "exact": 8' in result.output
