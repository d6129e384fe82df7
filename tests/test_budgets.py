"""Budgets of the house: each is a ratchet. What is over it today is listed, and may only shrink.

A number here goes down with the change that makes it possible. Only a decision record raises one.
"""

import ast

import typer
from test_house import ROOMS, SOURCES, tree_of

from harness.paths import ROOT
from nanocp.cli.main import app

MAX_LINES = {"nanocp": 26_400, "control_plane": 25_930, "data_plane": 33_430}
"""Lines of Python, C++ and CUDA, without generated code, which says so in its first line."""
MAX_OPTIONS = 288
"""Options of all commands together."""
MAX_ROOMS = 16
LARGE_FOLDERS = {
    "control_plane/frontend": 21,
    "control_plane/frontend/http": 24,
    "control_plane/observe": 18,
    "data_plane/moe": 18,
    "nanocp/cli": 25,
    "nanocp/simulator": 17,
}
MAX_METHODS = 25
MAX_PARAMETERS = 8
"""Without kernels, and commands, whose parameters are their options."""


def is_generated(text):
    return text.startswith("# Generated from ")


def test_a_plane_has_no_more_lines():
    for plane, most in MAX_LINES.items():
        texts = [
            path.read_text()
            for path in (ROOT / plane).rglob("*")
            if path.suffix in (".py", ".cpp", ".h", ".cu") and "wire/v1" not in path.as_posix()
        ]
        lines = sum(len(text.splitlines()) for text in texts if not is_generated(text))
        assert most - 600 <= lines <= most, f"{plane} has {lines} lines: at most {most}, or less"


def test_what_says_that_it_is_generated_is():
    """Others are written by hand, and count."""
    generated = [path.name for path in SOURCES if is_generated(path.read_text())]
    assert generated == ["sync_client.py"]


def test_a_folder_has_few_rooms():
    rooms = {}
    for plane in ROOMS:
        for folder in [ROOT / plane, *(ROOT / plane).rglob("*/")]:
            inside = [
                each
                for each in folder.iterdir()
                if (each / "__init__.py").exists()
                or (each.suffix == ".py" and each.name != "__init__.py")
            ]
            if len(inside) > MAX_ROOMS and "wire/v1" not in folder.as_posix():
                rooms[folder.relative_to(ROOT).as_posix()] = len(inside)
    assert rooms == LARGE_FOLDERS


def classes_and_functions():
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def test_a_class_has_few_methods():
    found = {}
    for _, node in classes_and_functions():
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            num = sum(isinstance(each, functions) for each in node.body)
            if num > MAX_METHODS:
                found[node.name] = num
    assert not found


def test_a_function_has_few_parameters():
    found = []
    for path, node in classes_and_functions():
        place = path.relative_to(ROOT).as_posix()
        if isinstance(node, ast.ClassDef) or place.startswith("nanocp/cli/"):
            continue
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        num = len(names) + len(node.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
        if num > MAX_PARAMETERS and "triton" not in path.read_text():
            found.append(f"{place}:{node.name} has {num}")
    assert not found


def options_of(command):
    inside = getattr(command, "commands", {})
    own = sum(parameter.param_type_name == "option" for parameter in command.params)
    return own + sum(map(options_of, inside.values()))


def test_the_command_line_has_no_more_options():
    num = options_of(typer.main.get_command(app))
    assert num <= MAX_OPTIONS, f"{num} options, at most {MAX_OPTIONS}: remove some, or decide"
