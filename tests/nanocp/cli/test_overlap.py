"""`nanocp overlap` from the command line."""

import yaml
from typer.testing import CliRunner

from nanocp.cli.main import app


def nanocp(*arguments):
    return CliRunner().invoke(app, ["overlap", *arguments])


def test_the_papers_numbers_are_printed_beside_ours_and_hold():
    result = nanocp("model", "--paper")
    assert result.exit_code == 0, result.output
    for title in ("Table 1", "Table 2", "Optimal throughput", "Ablation"):
        assert title in result.output
    assert "numbers that are judged are the paper's" in result.output


def test_another_machine_is_said_to_be_bound_by_something():
    result = nanocp("model", "--gpu", "H200", "--model", "LLaMA-3 8B", "--gpus", "1")
    assert result.exit_code == 0 and "compute-bound" in result.output
    assert "memory-bound" in nanocp("model", "--batch", "64").output


def test_what_is_not_known_is_a_sentence():
    result = nanocp("model", "--gpu", "H20000")
    assert result.exit_code == 2 and "is not known; it must be one of" in result.output
    result = nanocp("search")
    assert result.exit_code == 2 and "--paper" in result.output


def test_a_search_prints_its_bound_and_writes_its_schedule(tmp_path):
    path = tmp_path / "schedule.yaml"
    result = nanocp("search", "--paper", "--seconds", "6", "--out", str(path))
    assert result.exit_code == 0, result.output
    assert "fluid bound" in result.output and "of what any schedule could reach" in result.output
    assert len(yaml.safe_load(path.read_text())["nano_operations"]) >= 18
