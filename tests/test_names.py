"""Names in code and documents are today's: paths and modules exist, retired words are gone."""

import ast
import io
import re
import tokenize
from dataclasses import fields
from functools import cache

from harness.paths import ROOT
from harness.programs.texts import DOCUMENTS, FOLDERS, PACKAGES, TEXTS
from nanocp.config.whole import Config

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


ENDS = {file.split("/", depth)[-1] for file in FILES for depth in range(file.count("/") + 1)}
"""The last parts of every file and folder."""


@cache
def exists(name):
    """Whole, or by its last parts (step/cpu.py), or by its first (docs/decisions/0064)."""
    name = re.sub(r"^(\.\./)+", "", name).rstrip("/")
    if name in ENDS:
        return True
    pattern = re.escape(name).replace(r"\*", "[^/]*")
    return any(re.fullmatch(rf"(.*/)?{pattern}|{pattern}-[^/]*", file) for file in FILES)


def said_in_vain(is_read, find):
    """(file, name) that `find` reports in what files say to a person.

    Most files have none in their whole text: only the others are taken apart.
    """
    return [
        (path.relative_to(ROOT).as_posix(), name)
        for path in TEXTS
        if is_read(path) and path.name not in HISTORY and any(find(path.read_text()))
        for name in find(sentences(path))
    ]


def missing_paths(text):
    """Paths in a text that do not exist."""
    for name in paths(text):
        if not ELSEWHERE.search(name) and not exists(name):
            yield name


def test_paths_exist():
    assert not said_in_vain(lambda path: path.suffix not in (".yaml", ".yml"), missing_paths)


def test_a_path_that_does_not_exist_would_be_seen():
    assert paths("see runner.py, `data_plane/gone/` and nanocp/values/plan.py.") == [
        "runner.py",
        "data_plane/gone/",
        "nanocp/values/plan.py",
    ]
    assert not exists("runner.py") and not exists("data_plane/gone/")
    assert (
        exists("step/cpu.py") and exists("nanocp/values/plan.py") and exists("docs/decisions/0064")
    )


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


def defined_elsewhere(text):
    """`Name` in `file.py` where the file, or one of several of that name, does not define it."""
    for name, path in re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w/]+\.py)`", text):
        defines = re.compile(rf"^\s*(?:(?:class|def|async def) {name}\b|{name}\b[^(\n]*=)", re.M)
        files = [file for file in FILES if f"/{file}".endswith(f"/{path}")]
        if files and not any(defines.search((ROOT / file).read_text()) for file in files):
            yield f"{name} in {path}"


def test_names_are_in_the_files_where_documents_say_they_are():
    found = said_in_vain(lambda path: path.suffix == ".md", defined_elsewhere)
    assert not found, f"(document, name and the file that does not define it): {found}"


def test_a_name_in_another_file_would_be_seen():
    text = "`Plan` in `nanocp/values/plan.py`, `Plan`\nin `values/passes.py`, `INSTANCES` in `f.py`"
    assert list(defined_elsewhere(text)) == ["Plan in values/passes.py"]


def test_modules_exist():
    assert not said_in_vain(lambda path: path.suffix in (".py", ".md"), unknown_modules)
    assert list(
        unknown_modules("See door.Instance; nanocp.gone.away; nanocp.values.plan.Plan")
    ) == ["nanocp.gone.away", "door.Instance"]


RETIRED = [
    word
    for row in re.findall(
        r"^\|.+\|.+\|(.+)\|$", (ROOT / "docs/develop/vocabulary.md").read_text(), re.M
    )
    for word in re.findall(r"`([^`]+)`", row)
]


VLLMS_OWN = re.compile(
    r"\bvllm(\.\w+)+|\bnum_speculative_tokens\w*|\bnum_spec_tokens\b|--mamba-\S+|\bssm_sizes\b"
)
"""Modules and keys of vLLM, whose names are not ours to choose."""


def uses(word, text):
    """How often a text has the word: alone, in snake_case or in CamelCase, also in the plural."""
    words = word.replace(" ", r"[\s_]+")
    pattern = rf"(?i:(?<![a-z]){words}s?(?![a-z]))|(?<=[a-z]){word.capitalize()}s?(?![a-z])"
    return len(re.findall(pattern, text))


def test_retired_words_are_not_used():
    found = []
    for path in TEXTS:
        is_read = path.parts[len(ROOT.parts)] in PACKAGES or path in DOCUMENTS
        if is_read and path.name not in {*HISTORY, "vocabulary.md"}:
            text = VLLMS_OWN.sub("", path.read_text())
            lower = text.lower()
            words = (word for word in set(RETIRED) if word.split()[0].lower() in lower)
            found += [
                (path.relative_to(ROOT).as_posix(), word) for word in words if uses(word, text)
            ]
    assert not found


def test_a_retired_word_would_be_seen():
    assert len(RETIRED) > 15
    assert uses("brain", "The brain; num_brains, ControllerBrain") == 3
    assert uses("brain", "brainstorm") == 0
    assert uses("shard group", "a shard_group") == 1
