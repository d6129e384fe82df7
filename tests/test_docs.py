"""The documents name things that exist: files, tests, decisions, commands and flags."""

import re
import shlex

import pytest
import typer

from harness.paths import ROOT
from nanocp.cli.main import app

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    missing = [
        link for link in links if "://" not in link and not (document.parent / link).exists()
    ]
    assert not missing


def test_decisions_have_a_number_each():
    numbers = [path.name[:4] for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def test_every_yes_of_the_comparison_names_a_test_that_exists():
    rows = [
        line
        for line in (ROOT / "docs/comparison.md").read_text().splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    assert len(rows) > 30
    for row in rows:
        _, number, _, answer, proof, _ = row.split("|")
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", proof)
        assert named or not answer.strip(" *").startswith("yes"), (
            f"row {number.strip()} has no test"
        )
        for path, function in named:
            text = (ROOT / path).read_text()
            assert not function or f"def {function}(" in text, f"{path} has no {function}"


def commands(document):
    """Every `nanocp ...` of a document's shell blocks, as words."""
    for block in re.findall(r"```bash\n(.*?)```", document.read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.findall(
                r"(?:^|'|&& |-- +)(?:\S+/)?nanocp ([^'#|]+(?:'[^']*'[^'#|]*)*)", line.strip()
            ):
                yield shlex.split(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_their_flags_exist(document):
    for words in commands(document):
        command, path = typer.main.get_command(app), ["nanocp"]
        for word in words:
            if word in getattr(command, "commands", ()):
                command, path = command.commands[word], [*path, word]
            elif word.startswith("--") and word != "--help":
                flags = {
                    flag
                    for parameter in command.params
                    for flag in (*parameter.opts, *parameter.secondary_opts)
                }
                assert word in flags, f"{' '.join(path)} has no {word}"
        assert len(path) > 1 or words == ["--help"], words


def test_a_command_that_is_not_there_would_be_seen():
    assert [words[0] for words in commands(ROOT / "docs/quick-start.md")].count("serve") == 2
    assert ["serve", "/models/v3"] in [words[:2] for words in commands(ROOT / "docs/deploy.md")], (
        "within ray's quotes"
    )
