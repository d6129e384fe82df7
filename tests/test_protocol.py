"""Every law has a name, a place in docs/develop/protocol.md, and a test that guards it."""

import re

import pytest

from harness.paths import ROOT
from harness.programs.texts import TEXTS

LAWS = [
    "frozen window", "one window for all", "quarantine", "pages ahead", "hand-offs", "step commit",
    "table digests", "named slots", "equal epochs", "ordered tokens", "bounded waits", "one clock",
    "terms", "one history", "kept KV", "planned terms", "checked drafts", "equal width",
    "bounded positions", "late fold", "one state", "state of the position",
]  # fmt: skip
PROTOCOL = (ROOT / "docs/develop/protocol.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", PROTOCOL, re.M | re.S))


def test_the_laws_are_the_headings_and_the_table():
    assert list(SECTIONS) == [name[0].upper() + name[1:] for name in LAWS]
    assert re.findall(r"^\| \[([\w -]+)\]\(#[a-z-]+\) \|", PROTOCOL, re.M) == LAWS


@pytest.mark.parametrize("name", LAWS)
def test_a_law_has_its_parts_and_a_test_that_exists(name):
    section = SECTIONS[name[0].upper() + name[1:]]
    assert re.findall(r"^\*\*(\w+)\.\*\*", section, re.M) == ["What", "Why", "Code", "Tests"]
    cited = re.findall(r"^- `(tests/[\w/]+\.py)::(\w+)`", section, re.M)
    assert cited
    for path, function in cited:
        assert f"def {function}(" in (ROOT / path).read_text(), f"{path} has no {function}"


def citations(text):
    """Find what names the law at each "(docs/develop/protocol.md...)"."""
    words = re.sub(r"\s+(?:(?:#|//|\*) )?\s*", " ", text)
    for before, after in re.findall(
        r"([\w-]+(?: \w+)*) \((?:docs/develop/)?protocol\.md(?:, ([^)]*))?\)", words
    ):
        yield after or before


def test_laws_are_cited_by_name_and_not_by_number():
    named = re.compile("|".join(LAWS))
    wrong, num_cited = [], 0
    for path in TEXTS:
        text = path.read_text()
        cited = list(citations(text))
        num_cited += len(cited)
        wrong += [
            (path.relative_to(ROOT).as_posix(), words)
            for words in cited + re.findall(r"\brules? \d+", text, re.I)
            if not (
                named.match(words)
                or words[:1].lower() + words[1:] in LAWS
                or words.endswith(tuple(LAWS))
            )
        ]
    assert not wrong
    assert num_cited > 30


def test_a_wrong_citation_would_be_seen():
    place = "docs/develop/protocol.md"
    text = f"a ({place},\n    # number 5) b. Isolation ({place}): c"
    assert list(citations(text)) == ["number 5", "Isolation"]
