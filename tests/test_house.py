"""The house rules that a machine can check: imports, generated code, sizes, docstrings, paths."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from harness.paths import ROOT

ROOMS = ("nanocp", "control_plane", "data_plane")
SOURCES = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if "wire/v1" not in path.as_posix()
]
READ = [
    *SOURCES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "deploy").rglob("*.py")),
]
NEEDS_ITS_NEIGHBOUR = re.compile(r"(Of|Their|Its|As|The same|The latter)\b")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
"""Without what is above its first statement: a command's options are a table."""


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def docstrings(tree):
    """Yield (line, text, whether it is a module's, class's or function's) of every docstring."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for index, statement in enumerate(body if isinstance(body, list) else ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip(), index == 0


def test_import_rules_hold():
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_generated_code_is_what_the_protos_say(tmp_path):
    protos = sorted(
        path.relative_to(ROOT / "proto").as_posix() for path in (ROOT / "proto").rglob("*.proto")
    )
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    subprocess.run(
        [*command, *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")),
         *protos],
        check=True,
    )  # fmt: skip
    for generated in sorted(tmp_path.rglob("*.py*")):
        checked_in = ROOT / generated.relative_to(tmp_path)
        assert checked_in.read_text() == generated.read_text(), f"{checked_in}: run `make proto`"


def test_files_and_functions_fit_the_head():
    too_long = [
        f"{path} has {num} lines, at most {MAX_FILE_LINES}: split it along its subject"
        for path in READ
        if (num := path.read_text().count("\n")) > MAX_FILE_LINES
    ]
    too_long += [
        f"{path}: {node.name} has {MAX_FUNCTION_LINES} lines or more"
        for path in READ
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.body[0].lineno >= MAX_FUNCTION_LINES
    ]
    assert not too_long


def test_modules_say_what_they_are_and_are_not_called_utils():
    """Every module begins with what enters, leaves, and what it does not know."""
    assert not {"utils", "common", "helpers", "types", "misc"} & {path.stem for path in SOURCES}
    modules = [path for path in SOURCES if path.stem != "__init__"]
    assert not [path for path in modules if not ast.get_docstring(tree_of(path))]


def test_every_docstring_stands_alone():
    """An editor shows one docstring at a time, in lists its first line only."""
    wrong = []
    for path in READ:
        for line, text, is_first in docstrings(tree_of(path)):
            first, _, rest = text.partition("\n")
            where = f"{path}:{line}: {first}"
            if NEEDS_ITS_NEIGHBOUR.match(text):
                wrong.append(f"{where}: it needs what stands above it")
            if is_first and rest and not rest.startswith("\n"):
                wrong.append(f"{where}: the first line does not end")
            if is_first and not re.search(r"[.:?!][)`\"']?$", first):
                wrong.append(f"{where}: the first line is no sentence")
    assert not wrong


def test_a_docstring_that_leans_on_another_is_seen():
    tree = ast.parse('class A:\n    """Of B."""\n    c: int\n    """The same,\n    again."""\n')
    found = [(2, "Of B.", True), (4, "The same,\n    again.", False)]
    assert list(docstrings(tree)) == found
    assert all(NEEDS_ITS_NEIGHBOUR.match(text) for _, text, _ in found)
    assert not any(map(NEEDS_ITS_NEIGHBOUR.match, ("Offer a row.", "Assume one.", "These rows.")))


def test_no_docstring_says_only_where_another_one_is():
    """An override without a docstring has its base's."""
    assert not [
        f"{path}:{line}: {text}"
        for path in SOURCES
        for line, text, _ in docstrings(tree_of(path))
        if text.startswith("See ")
    ]


def test_what_is_public_has_a_docstring_of_its_own_or_an_inherited_one():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = []
    for path in SOURCES:
        tree = tree_of(path)
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for owner in (tree, *owners):
            if isinstance(owner, ast.ClassDef) and (owner.bases or owner.name.startswith("_")):
                continue
            wrong += [
                f"{path}:{node.lineno}: {node.name}"
                for node in owner.body
                if isinstance(node, (*functions, ast.ClassDef))
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ]
    assert not wrong


def test_no_public_class_name_stands_twice():
    """A benchmark's class has a name of its own too."""
    names = Counter(
        node.name
        for path in (*SOURCES, *sorted((ROOT / "benchmarks").rglob("*.py")))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("package", "most", "has_files"), [("control_plane", 12, True), ("data_plane", 16, False)]
)
def test_roots_of_the_planes_have_few_rooms(package, most, has_files):
    """A room is a folder or a file; the data plane's root has folders only."""
    entries = [
        path
        for path in (ROOT / package).iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    ]
    assert len(entries) <= most
    assert has_files or all(path.is_dir() for path in entries)


def test_package_inits_do_not_pull_in_the_house():
    for room in ROOMS:
        tree = ast.parse((ROOT / room / "__init__.py").read_text())
        assert not [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def test_the_scheduler_imports_without_anything_installed():
    heavy = "{'torch', 'ray', 'grpc', 'numpy', 'asyncio'}"
    program = (
        f"import sys, control_plane.scheduler.scheduler; assert not {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_readme_paths_exist():
    for path in re.findall(
        r"`((?:nanocp|control_plane|data_plane|proto|deploy|tests|benchmarks|docs)/[\w./-]+)`",
        (ROOT / "README.md").read_text(),
    ):
        assert (ROOT / path).exists(), path


def test_a_benchmark_that_needs_the_tests_harness_says_so():
    """The command in its first lines must find what it imports."""
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        text = path.read_text()
        if re.search(r"^(from|import) harness", text, re.M) and "__main__" in text:
            assert re.search(r"PYTHONPATH=\S*tests python", ast.get_docstring(tree_of(path))), path
