"""Budgets of the house: each is a ratchet. What is over it today is listed, and may only shrink.

A number here goes down with the change that makes it possible. Only a decision record raises one.
"""

import ast
import re
from functools import cache

import typer
from test_house import ROOMS, SOURCES, docstrings, tree_of

from harness.paths import ROOT
from nanocp.cli.main import app
from nanocp.config.file import known_keys

MAX_LINES = {"nanocp": 25_730, "control_plane": 28_560, "data_plane": 33_700}
"""Lines of Python, C++ and CUDA, without generated code, which says so in its first line."""
MAX_OPTIONS = 177
"""Options of all commands together."""
MAX_SETTINGS = 103
"""Keys that a configuration file may have."""
MAX_ROOMS = 16
FREE_RELATIVE = re.compile(r"(What|How|Which|Whether|Who|Where|Why|Whoever)\b")
MANY_ARROWS = 20
"""Imports between the rooms of a folder, unless the folder is named here."""
MAX_ARROWS = {
    "control_plane/coordinator/members": 27, "control_plane/frontend": 34,
    "control_plane/frontend/http": 43, "control_plane/frontend/http/tools": 21,
    "control_plane/scheduler": 36, "control_plane/scheduler/policies": 37, "data_plane": 66,
    "data_plane/instance": 27, "data_plane/model": 35, "data_plane/transport": 25, "nanocp": 29,
    "nanocp/cli": 22, "nanocp/config": 30, "nanocp/overlap": 25, "nanocp/simulator": 32,
    "tests/harness": 29, "tests/harness/hash_clusters": 49,
}  # fmt: skip
SEARCHED = [(ROOT / room, ROOT) for room in (*ROOMS, "benchmarks")]
SEARCHED.append((ROOT / "tests/harness", ROOT / "tests"))


def module_name(path, root):
    name = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


MODULES = {
    module_name(path, root): path
    for folder, root in SEARCHED
    for path in folder.rglob("*.py")
    if "wire/v1" not in path.as_posix()
}
MAX_METHODS = 25
MAX_METHODS_WITH_BASES = 30
MAX_ATTRIBUTES = 20
"""Attributes that a class and its bases set of themselves."""
MAX_WHOLE_CONFIGS = 20
"""Files that have a function which takes the whole Config instead of its sections."""
MAX_DOCSTRING_WORDS = 95_500
MAX_FREE_RELATIVES = 300
"""Docstrings that begin with what, how, who or their like: they hide their subject."""
MAX_DOC_WORDS = {"docs": 67_500, "docs/decisions": 18_500}
MAX_TEST_LINES = 86_500
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


@cache
def imported(path):
    """Modules of this repository that a file imports, those for types too."""
    return [*_imported(path)]


def _imported(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (MODULES[name] for name in names if name in MODULES)


def room_of(path, folder):
    return path.relative_to(folder).parts[0].removesuffix(".py")


def rooms_and_arrows(folder):
    """What a folder holds, and which of these imports which."""
    inside = [path for path in MODULES.values() if path.is_relative_to(folder)]
    inside = [path for path in inside if path != folder / "__init__.py"]
    arrows = {
        (room_of(path, folder), room_of(other, folder))
        for path in inside
        for other in imported(path)
        if other.is_relative_to(folder) and other != folder / "__init__.py"
    }
    return {room_of(path, folder) for path in inside}, {(a, b) for a, b in arrows if a != b}


def in_circles(rooms, arrows):
    """Rooms from which imports lead back to them."""
    reach = {room: {b for a, b in arrows if a == room} for room in rooms}
    for middle in rooms:
        for room in rooms:
            if middle in reach[room]:
                reach[room] |= reach[middle]
    return {room for room in rooms if room in reach[room]}


FOLDERS = sorted(
    {
        folder
        for path in MODULES.values()
        for folder in path.relative_to(ROOT).parents
        if folder.parts and folder.parts != ("tests",)
    }
)


def test_folders_have_few_rooms_and_arrows_and_no_circle():
    wrong = []
    for folder in FOLDERS:
        rooms, arrows = rooms_and_arrows(ROOT / folder)
        most = MAX_ARROWS.get(folder.as_posix(), MANY_ARROWS)
        if len(rooms) > MAX_ROOMS or len(arrows) > most:
            wrong.append(f"{folder}: {len(rooms)} rooms, {len(arrows)} arrows of {most}")
        wrong += [f"{folder}/{room} is in a circle" for room in in_circles(rooms, arrows)]
    assert not wrong


def test_a_circle_would_be_seen():
    assert in_circles({"a", "b", "c"}, {("a", "b"), ("b", "a"), ("b", "c")}) == {"a", "b"}


@cache
def classes_and_functions():
    return [
        (path, node)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def is_class(node):
    return isinstance(node, ast.ClassDef)


def test_a_class_has_few_methods():
    found = {}
    for _, node in classes_and_functions():
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            num = sum(isinstance(each, functions) for each in node.body)
            if num > MAX_METHODS:
                found[node.name] = num
    assert not found


def own_parts(node):
    """Names of a class's methods, and of what its methods set of `self`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    methods = {each.name for each in node.body if isinstance(each, functions)}
    attributes = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and getattr(each.value, "id", "") == "self"
    }
    return methods, attributes


def with_bases(name, classes, seen=()):
    """Names of methods and attributes of a class and its bases that are no protocols."""
    methods, attributes = own_parts(classes[name])
    for base in map(ast.unparse, classes[name].bases):
        base = base.partition("[")[0].rpartition(".")[2]
        if (
            base in classes
            and base not in seen
            and "Protocol" not in map(ast.unparse, classes[base].bases)
        ):
            more = with_bases(base, classes, (*seen, name))
            methods, attributes = methods | more[0], attributes | more[1]
    return methods, attributes


def test_a_class_with_its_bases_has_few_methods_and_attributes():
    classes = {node.name: node for _, node in classes_and_functions() if is_class(node)}
    sizes = {name: tuple(map(len, with_bases(name, classes))) for name in classes}
    large = {
        name: size
        for name, size in sizes.items()
        if size[0] > MAX_METHODS_WITH_BASES or size[1] > MAX_ATTRIBUTES
    }
    assert not large


def test_few_files_take_the_whole_configuration():
    found = {
        path.relative_to(ROOT).as_posix()
        for path, node in classes_and_functions()
        if not is_class(node)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.annotation
        and ast.unparse(argument.annotation).partition("|")[0].strip() == "Config"
    }
    assert len(found) <= MAX_WHOLE_CONFIGS, sorted(found)


def test_docstrings_are_few_words_and_name_their_subject():
    texts = [text for path in SOURCES for _, text, _ in docstrings(tree_of(path))]
    words = sum(len(text.split()) for text in texts)
    assert words <= MAX_DOCSTRING_WORDS
    hiding = [text for text in texts if FREE_RELATIVE.match(text)]
    assert len(hiding) <= MAX_FREE_RELATIVES


def test_documents_are_few_words():
    for folder, most in MAX_DOC_WORDS.items():
        words = sum(len(path.read_text().split()) for path in (ROOT / folder).rglob("*.md"))
        assert words <= most, f"{folder} has {words} words, at most {most}"


def test_tests_are_few_lines():
    texts = [
        path.read_text()
        for path in (ROOT / "tests").rglob("*")
        if path.suffix in (".py", ".cpp") and "__pycache__" not in path.as_posix()
    ]
    lines = sum(len(text.splitlines()) for text in texts)
    assert lines <= MAX_TEST_LINES, f"tests have {lines} lines, at most {MAX_TEST_LINES}"


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


def test_the_configuration_has_no_more_settings():
    num = len([*known_keys()])
    assert num <= MAX_SETTINGS, f"{num} settings, at most {MAX_SETTINGS}: remove some, or decide"


def test_the_command_line_has_no_more_options():
    num = options_of(typer.main.get_command(app))
    assert num <= MAX_OPTIONS, f"{num} options, at most {MAX_OPTIONS}: remove some, or decide"
