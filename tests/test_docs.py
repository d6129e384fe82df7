"""The documents name things that exist: files, tests, decisions."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


def test_decisions_have_a_number_each():
    numbers = [path.name[:4] for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def test_every_yes_of_the_comparison_names_a_test_that_exists():
    rows = [line for line in (ROOT / "docs/comparison.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) > 30
    for row in rows:
        _, number, _, answer, proof, _ = row.split("|")
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", proof)
        assert named or not answer.strip(" *").startswith("yes"), f"row {number.strip()} has no test"
        for path, function in named:
            text = (ROOT / path).read_text()
            assert not function or f"def {function}(" in text, f"{path} has no {function}"
