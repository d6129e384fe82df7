"""`nanocp demo`: the service's log stays out of the way, and is there if the service fails."""

import io

import pytest
import typer
from rich.console import Console
from rich.progress import Progress

from nanocp.cli.demo import serving


def test_a_service_that_does_not_start_says_why(tmp_path):
    said = io.StringIO()
    progress = Progress(console=Console(file=said, width=200))
    with pytest.raises(typer.Exit), serving(tmp_path, progress):
        pass
    assert "config.json" in said.getvalue()
