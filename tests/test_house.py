"""The house rules that a machine can check: import rules, generated code, sizes, words, and the
README's paths."""

import ast
import re
import subprocess
import sys
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
MAX_FILE_LINES = 560
MAX_FUNCTION_LINES = 90


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
        [
            *command,
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")),
            *protos,
        ],
        check=True,
    )
    for generated in sorted(tmp_path.rglob("*.py*")):
        checked_in = ROOT / generated.relative_to(tmp_path)
        assert checked_in.read_text() == generated.read_text(), f"{checked_in}: run `make proto`"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_fit_the_head(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_say_what_they_are_and_are_not_called_utils(path):
    assert path.stem not in ("utils", "common", "helpers", "types", "misc")
    if path.stem != "__init__":
        assert ast.get_docstring(ast.parse(path.read_text())), (
            "every module begins with what enters, leaves, and what it does not know"
        )


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


def test_brain_imports_without_anything_installed():
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
