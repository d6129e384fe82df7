"""Names in code and documents are today's: paths and modules exist, retired words are gone."""

import ast
import io
import re
import tokenize
from dataclasses import fields
from functools import cache

import pytest

from harness.paths import ROOT
from harness.texts import DOCUMENTS, FOLDERS, PACKAGES, TEXTS
from nanocp.config import Config

HISTORY = {"log.md", "CHANGELOG.md"}
"""Documents whose names are those of their day."""
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in (ROOT, *(ROOT / name for name in FOLDERS))
    for path in (folder.iterdir() if folder == ROOT else folder.rglob("*"))
    if "__pycache__" not in path.parts
}
MODULES = {name.rsplit("/", 1)[-1].removesuffix(".py") for name in FILES}
SETTINGS = {
    f"{section.name}.{setting.name}"
    for section in fields(Config)
    for setting in fields(section.default_factory)
}
ELSEWHERE = re.compile(
    r"(vllm|flash_mla|deep_ep|csrc|grpc|hopper)/|flash_mla_interface.py$|docs/(legacy|build)\.md$"
    r"|benchmarks/results/gpu_|^llama\.cpp$"
)
"""Paths in other projects, and results that only a GPU writes."""


@cache
def sentences(path):
    """What a file says to a person: all of it, or the comments and docstrings of Python."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    docstrings = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return "\n".join(comments + docstrings)


def paths(text):
    """Files and folders of this repository that a text names."""
    tops = "|".join(map(re.escape, FOLDERS))
    pattern = rf"(?<![\w/.:@-])([\w.*/-]*[\w*]\.(?:py|md|proto|cpp)\b|(?:{tops})/[\w./*-]*[\w*/])"
    return re.findall(pattern, text)


@cache
def exists(name):
    """Whole, or by its last parts (step/cpu.py), or by its first (docs/decisions/0018)."""
    pattern = re.escape(re.sub(r"^(\.\./)+", "", name).rstrip("/")).replace(r"\*", "[^/]*")
    return any(re.fullmatch(rf"(.*/)?{pattern}|{pattern}-[^/]*", file) for file in FILES)


def test_paths_exist():
    missing = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in TEXTS
        if path.suffix not in (".yaml", ".yml") and path.name not in HISTORY
        for name in paths(sentences(path))
        if not ELSEWHERE.search(name) and not exists(name)
    ]
    assert not missing


def test_a_path_that_does_not_exist_would_be_seen():
    assert paths("see runner.py, `data_plane/gone/` and nanocp/plan.py.") == [
        "runner.py",
        "data_plane/gone/",
        "nanocp/plan.py",
    ]
    assert not exists("runner.py") and not exists("data_plane/gone/")
    assert exists("step/cpu.py") and exists("nanocp/plan.py") and exists("docs/decisions/0018")


def unknown_modules(text):
    """Dotted names of this project, or `module.Class`, that lead nowhere."""
    for name in re.findall(r"(?<![\w./])(?:nanocp|control_plane|data_plane)(?:\.[a-z_]\w*)+", text):
        parts = name.split(".")
        known = "/".join(parts[:-1]), "/".join(parts)
        if name not in SETTINGS and not {f"{known[0]}.py", f"{known[1]}.py", *known} & FILES:
            yield name
    for module, name in re.findall(r"\bSee ([a-z_]+)\.([A-Z]\w+)", text):
        if module not in MODULES:
            yield f"{module}.{name}"


def test_modules_exist():
    missing = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in TEXTS
        if path.suffix in (".py", ".md") and path.name not in HISTORY
        for name in unknown_modules(sentences(path))
    ]
    assert not missing
    assert list(unknown_modules("See door.Instance; nanocp.gone.away; nanocp.plan.Plan")) == [
        "nanocp.gone.away",
        "door.Instance",
    ]


RETIRED = [
    word
    for row in re.findall(r"^\|.+\|.+\|(.+)\|$", (ROOT / "docs/vocabulary.md").read_text(), re.M)
    for word in re.findall(r"`([^`]+)`", row)
]


VLLMS_OWN = re.compile(r"\bvllm(\.\w+)+")
"""Modules of vLLM, whose names are not ours to choose."""


def uses(word, text):
    """How often a text has the word: alone, in snake_case or in CamelCase, also in the plural."""
    words = word.replace(" ", r"[\s_]+")
    pattern = rf"(?i:(?<![a-z]){words}s?(?![a-z]))|(?<=[a-z]){word.capitalize()}s?(?![a-z])"
    return len(re.findall(pattern, text))


@pytest.mark.parametrize("word", sorted(set(RETIRED)))
def test_a_retired_word_is_not_used(word):
    found = {
        path.relative_to(ROOT).as_posix(): uses(word, VLLMS_OWN.sub("", path.read_text()))
        for path in TEXTS
        if path.parts[len(ROOT.parts)] in PACKAGES or path in DOCUMENTS
        if path.name not in {*HISTORY, "vocabulary.md"}
    }
    assert not {name: count for name, count in found.items() if count}


def test_a_retired_word_would_be_seen():
    assert len(RETIRED) > 15
    assert uses("brain", "The brain; num_brains, ControllerBrain") == 3
    assert uses("brain", "brainstorm") == 0
    assert uses("shard group", "a shard_group") == 1
