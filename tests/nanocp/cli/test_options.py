"""Dataclasses and fields become options of a command, and come back as values."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from data_plane.model.presets import PRESETS
from harness.paths import ROOT
from nanocp.cli.checkpoint.make_checkpoint import Preset
from nanocp.cli.main import app
from nanocp.cli.options.typed import FieldOptions, Option, field_option, with_options
from nanocp.config.field_docs import field_docs
from nanocp.values.sampling_fields import Bounds


@dataclass(frozen=True, slots=True)
class Declared:
    """Fields that are declared elsewhere."""

    host: str = "here"
    """Where it
    listens."""
    ports: tuple[int, ...] = ()
    """Ports to use."""
    rate: float | None = None
    weights: Mapping[int, float] = field(default_factory=dict)
    names: Sequence[str] = ()
    is_open: bool = False
    """Whether it is open."""


@dataclass(frozen=True, slots=True)
class Derived(Declared):
    count: int = 7
    """How many."""


@dataclass(frozen=True, slots=True)
class Group:
    needed: Annotated[int, typer.Option(help="A number.")]
    words: Option[list[str]] = field(default_factory=list)
    """Some
    words."""
    share: Annotated[float, Bounds("at least 0", 0)] = 0.5
    """A share."""
    parts: list[int] = field(default_factory=list)
    """Some parts."""


OPTIONS = FieldOptions(
    [
        field_option(Derived, "host", key="service.host"),
        field_option(Derived, "ports", name="port"),
        *(field_option(Derived, name) for name in ("rate", "weights", "names", "is_open", "count")),
    ]
)
SEEN: list[Any] = []


@with_options
def command(
    place: Annotated[str, typer.Argument()],
    group: Group,
    given: Annotated[dict[str, Any], OPTIONS],
    loud: Annotated[bool, typer.Option()] = False,
) -> None:
    """Note what is given."""
    SEEN[:] = [place, group, given, loud]


APP = typer.Typer()
APP.command()(command)


def run(*words: str):
    result = CliRunner().invoke(APP, words)
    assert result.exit_code == 0, result.output
    return SEEN


def test_a_dataclass_comes_back_as_a_value():
    assert run("there", "--needed", "3", "--words", "a", "--words", "b", "--loud") == [
        "there", Group(3, ["a", "b"]), {}, True,
    ]  # fmt: skip
    assert run("there", "--needed", "3")[1] == Group(3, [])


def test_a_plain_field_is_a_setting():
    words = [word for item in ("share=2", "parts=3", "parts=4") for word in ("--set", item)]
    assert run("there", "--needed", "3", *words)[1] == Group(3, [], 2.0, [3, 4])
    for wrong in ("share=-1", "shore=1", "share", "parts=x"):
        result = CliRunner().invoke(APP, ["there", "--needed", "3", "--set", wrong])
        assert isinstance(result.exception, ValueError), wrong


def test_what_is_not_given_is_absent():
    assert run("x", "--needed", "3", "--no-is-open")[2] == {"is_open": False}
    given = run("x", "--needed", "3", "--host", "h", "--port", "1", "--port", "2", "--count", "0")
    assert given[2] == {"service.host": "h", "ports": [1, 2], "count": 0}
    given = run("x", "--needed", "3", "--rate", "0.5", "--weights", "1:2", "--names", "a")
    assert given[2] == {"rate": 0.5, "weights": ["1:2"], "names": ["a"]}


def test_a_missing_option_and_a_wrong_type_are_refused():
    assert CliRunner().invoke(APP, ["x"]).exit_code == 2
    assert CliRunner().invoke(APP, ["x", "--needed", "3", "--rate", "fast"]).exit_code == 2


def test_help_is_the_fields_own():
    options = {parameter.name: parameter for parameter in typer.main.get_command(APP).params}
    assert options["host"].help == "Where it listens. (service.host)"
    assert options["port"].help == "Ports to use. May be given again."
    assert (options["host"].show_default, options["count"].show_default) == ("here", "7")
    assert options["words"].help == "Some words." and options["needed"].help == "A number."
    assert command.settings["share"].shown == "A share.  [default: 0.5]"
    assert options["is_open"].help == "Whether it is open." and not options["port"].show_default
    assert field_docs(Derived) == {
        "host": "Where it listens.",
        "ports": "Ports to use.",
        "is_open": "Whether it is open.",
        "count": "How many.",
    }


def test_two_options_of_one_name_are_refused():
    def clash(first: Group, second: Group) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="duplicate parameter name: 'needed'"):
        with_options(clash)


def commands_of(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands_of(each, (*words, name))


WORD = r"[^\s,|<>{}\[\]]+"
ALL = dict(commands_of(typer.main.get_command(app)))


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_is_readable_in_80_columns(words):
    """No name is cut or broken, and all that is said of each is there."""
    shown = CliRunner(env={"COLUMNS": "80", "TERM": "xterm"}).invoke(app, [*words, "--help"]).output
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    named, text = set(re.findall(WORD, shown)), " ".join(shown.split())
    context = ALL[words].make_context("nanocp", [], resilient_parsing=True)
    for param in ALL[words].params:
        assert set(param.opts + param.secondary_opts) <= named, param.name
        assert set(re.findall(WORD, param.get_help_record(context)[0])) <= named, param.name
        assert " ".join((getattr(param, "help", "") or "").split()) in text, param.name
    for name, setting in getattr(ALL[words].callback, "settings", {}).items():
        assert re.search(rf"^  {name}\b", shown, re.M) and " ".join(setting.shown.split()) in text
    for name, command in getattr(ALL[words], "commands", {}).items():
        assert re.search(rf"^  {name}\b", shown, re.M)
        assert " ".join(command.help.partition("\n\n")[0].split()).partition(". ")[0] in text


PAGES = [
    path
    for folder, ends in (("tests", ("*.py",)), ("docs", ("*.md",)), ("deploy", ("*",)))
    for end in ends
    for path in (ROOT / folder).rglob(end)
    if path.is_file() and path.suffix != ".json"
]


def test_the_version_is_said():
    assert CliRunner().invoke(app, ["--version"]).output == f"nanocp {version('nanocp')}\n"


def test_every_option_is_named_somewhere():
    """In a test, a page of the documents or a deployment file."""
    pages = [path.read_text(errors="replace") for path in PAGES if path.name != "vllm.md"]
    pages += [(ROOT / name).read_text() for name in ("README.md", "Makefile", "CONTRIBUTING.md")]
    named = {word for page in pages for word in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", page)}
    nameless = [
        (*words, param.name)
        for words, each in ALL.items()
        for param in each.params
        if words != ("serve",) and param.param_type_name == "option"
        if not named & {*param.opts, *param.secondary_opts}
    ]
    assert not nameless


def test_every_preset_can_be_made_from_the_command_line():
    assert {each.value for each in Preset} == set(PRESETS)
