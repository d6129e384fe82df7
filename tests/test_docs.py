"""The documents read well and are true: widths, links, decisions, proofs, commands and flags."""

import re
import shlex
import tomllib
from functools import cache

import pytest
import typer

from control_plane.scheduler.policies.registry import POLICY_NAMES
from harness.paths import ROOT
from harness.programs.texts import DOCUMENTS, PACKAGES
from nanocp.cli.main import app
from nanocp.cli.options.vllm_flags import answers

MAX_COLUMNS = 100
MAX_CELL_WORDS = 30
HISTORY = {"log.md", "CHANGELOG.md"}
"""Documents whose names are those of their day."""


def named(path):
    return path.relative_to(ROOT).as_posix()


def prose(document):
    """(number, line) of every line outside code blocks."""
    in_code = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        if not in_code and not is_fence and not line.startswith("    "):
            yield number, line


def too_wide(line):
    """A table, a picture or one name in a list cannot be wrapped; all else can."""
    is_one_name = re.fullmatch(r"\s*- (`[^`]+`|\S+)( \([\w, ]+\))?", line)
    return len(line) > MAX_COLUMNS and not line.startswith(("|", "![")) and not is_one_name


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_prose_fits_100_columns_and_a_cell_is_one_sentence(document):
    for number, line in prose(document):
        assert not too_wide(line), f"{document.name}:{number} has {len(line)} columns"
        for cell in line.split("|") if line.startswith("|") else ():
            text = re.sub(r"`[^`]*`", "code", cell).strip()
            where = f"{document.name}:{number}: {text!r}"
            assert len(text.split()) <= MAX_CELL_WORDS, where
            assert not re.search(r"[a-z)][.?!] [A-Z].*[a-z]{3}", text), f"two sentences in {where}"


def test_a_line_that_is_too_wide_would_be_seen():
    assert too_wide("word " * 21)
    assert not too_wide("- `" + "x" * 120 + "`")
    assert not too_wide("| " + "x " * 60 + "|")


@cache
def anchors(document):
    """The names that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}: there is no such heading"


def undefined_symbols(text):
    """(file, symbol) of every `file` (Symbol) whose file is not there or does not define it.

    The parentheses hold one name or several, plain or as Class.method.
    """
    pairs = re.findall(
        r"`([\w./-]+\.(?:py|cpp|h|proto))`\s+\((`?[A-Za-z_][\w.]*`?(?:,\s+`?[A-Za-z_][\w.]*`?)*)\)",
        text,
    )
    for path, names in pairs:
        code = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        for name in re.findall(r"\w+", names):
            defines = (
                rf"^\s*(?:class|def|async def) {name}\b|^\s*{name}\b[^(\n]*="
                if path.endswith(".py")
                else rf"\b{name}\b"
            )
            if not re.search(defines, code, re.M):
                yield path, name


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name not in HISTORY], ids=named
)
def test_a_symbol_in_parentheses_is_in_the_file_before_it(document):
    assert not list(undefined_symbols(document.read_text()))


def test_a_symbol_that_is_not_there_would_be_seen():
    file, gone = "nanocp/values/plan.py", "nanocp/values/gone.py"
    text = f"`{file}` (Arrival, Gone), `{file}`\n(`Placement.cp_degree`) (x) and `{gone}` (Plan)"
    assert list(undefined_symbols(text)) == [(file, "Gone"), (gone, "Plan")]


DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("document", DECISIONS, ids=named)
def test_a_decision_has_a_number_and_its_parts(document):
    """Numbers may be left out: decisions that are under way together have theirs beforehand."""
    text, number = document.read_text(), document.name[:4]
    assert [one for one in DECISIONS if one.name[:4] == number] == [document]
    assert re.match(rf"{number}-", document.name) and text.startswith(f"# {number}: ")
    assert re.findall(r"^(\*\*Status:\*\*|## .+)", text, re.M) == [
        "**Status:**", "## Context", "## Decision", "## Consequences",
    ]  # fmt: skip


def test_every_yes_of_the_comparison_names_a_test_that_exists():
    rows = [
        line
        for line in (ROOT / "docs/research/comparison.md").read_text().splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    assert len(rows) > 30
    for row in rows:
        _, number, _, answer, proof, _ = row.split("|")
        cited = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`(\*?)", proof)
        assert cited or not answer.strip(" *").startswith("yes"), (
            f"row {number.strip()} has no test"
        )
        assert len(cited) == proof.count("`tests/"), f"row {number.strip()}: name a test, no file"
        for path, function, star in cited:
            marks = re.search(rf"^((?:@.+\n|[ )].*\n)*)(?:async )?def {function}\(",
                              text := (ROOT / path).read_text(), re.M)  # fmt: skip
            assert marks, f"{path} has no {function}"
            is_system = "pytest.mark.system\n" in marks[1] or re.search(
                r"^pytestmark = .*\bmark\.system\b", text, re.M
            )
            assert bool(star) == bool(is_system), f"{function}: * is for make test-system"


def test_the_map_has_every_room():
    (tree,) = re.findall(r"```\n(nanocp/.*?)```", (ROOT / "docs/develop/map.md").read_text(), re.S)
    listed = re.findall(r"^(\S+) ", tree, re.M)
    rooms = [
        f"{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}"
        for package in PACKAGES
        for path in (ROOT / package).iterdir()
        if path.suffix in ("", ".py") and not path.name.startswith("__")
    ]
    assert sorted(listed) == sorted(rooms)


def test_the_architecture_has_the_floors_of_the_import_rules():
    text = (ROOT / "docs/develop/architecture.md").read_text()
    shown = [line.split("|") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {
        contract["containers"][0]: [sorted(layer.split(" | ")) for layer in contract["layers"]]
        for contract in contracts["contracts"]
        if contract["type"] == "layers"
    }
    for column, package in enumerate(("nanocp", "control_plane", "data_plane"), start=2):
        floors = [re.findall(r"`(\w+)`", row[column]) for row in shown]
        assert [sorted(rooms) for rooms in floors if rooms] == layers[package]


def test_every_policy_is_explained():
    text = (ROOT / "docs/use/tune.md").read_text()
    missing = [name for name in POLICY_NAMES if f"`{name}`" not in text]
    assert not missing, f"docs/use/tune.md does not have {missing} in its table of policies"


def commands(document):
    """Every `nanocp ...` of a document's shell blocks, as words."""
    for block in re.findall(r"```bash\n(.*?)```", document.read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.findall(
                r"(?:^|'|&& |-- +)(?:\S+/)?nanocp ([^'#|]+(?:'[^']*'[^'#|]*)*)", line.strip()
            ):
                yield shlex.split(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
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
                if path[1:] == ["bench", "serve"]:  # vLLM's, too
                    flags |= {flag for flag, one in answers("bench").items() if one.kind == "same"}
                assert word in flags, f"{' '.join(path)} has no {word}"
        assert len(path) > 1 or words == ["--help"], words


def test_a_command_that_is_not_there_would_be_seen():
    assert [words[0] for words in commands(ROOT / "docs/use/quick-start.md")].count("serve") == 2
    assert ["serve", "/models/v3"] in [
        words[:2] for words in commands(ROOT / "docs/use/deploy.md")
    ], "within ray's quotes"
