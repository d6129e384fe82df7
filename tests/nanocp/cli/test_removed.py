"""Options that are gone are refused by name, with what to write instead; that can be written."""

import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from harness.paths import ROOT
from nanocp.cli.ask.sampling import read_sampling
from nanocp.cli.main import app
from nanocp.cli.options.removed import removed
from nanocp.config.file import known_keys
from nanocp.values.sampling_fields import SamplingRequest


def commands_of(command, words=()):
    yield " ".join(words), command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands_of(each, (*words, name))


COMMANDS = dict(commands_of(typer.main.get_command(app)))
GONE = [(name, flag, write) for name in COMMANDS for flag, write in removed(name).items()]


def flags_of(command):
    params = [param for param in command.params if param.param_type_name == "option"]
    return {flag for param in params for flag in (*param.opts, *param.secondary_opts)}


def test_the_table_names_commands_that_there_are():
    assert len(GONE) > 60
    text = (ROOT / "nanocp/cli/options/removed.toml").read_text()
    named = {
        name
        for list_ in re.findall(r"^commands = \[(.*)\]", text, re.M)
        for name in list_.split(", ")
    }
    assert {name.strip('"') for name in named} <= COMMANDS.keys()


@pytest.mark.parametrize("gone", GONE, ids=lambda gone: " ".join(gone[:2]))
def test_an_option_that_is_gone_says_what_to_write(gone):
    name, flag, write = gone
    assert flag not in flags_of(COMMANDS[name])
    result = CliRunner().invoke(app, [*name.split(), flag, "1"])
    said = f"nanocp {name}: {flag} is no option any more: write {write}\n"
    assert (result.exit_code, result.stderr) == (2, said)


def value_of(setting):
    """Any value that the setting takes."""
    for text in ("9", "on", "float32"):
        try:
            return setting.read(text)
        except ValueError:
            pass
    raise AssertionError(setting)


@pytest.mark.parametrize("gone", GONE, ids=lambda gone: " ".join(gone[:2]))
def test_what_is_to_be_written_is_taken(gone):
    name, _, write = gone
    command = COMMANDS[name]
    match shlex.split(write):
        case ["--set", item] if name == "serve":
            key = item.partition("=")[0]
            assert tuple(key.split(".")) in known_keys()
        case ["--set", item]:
            setting, _, value = item.partition("=")
            made = command.callback.settings[setting]
            assert (
                made.read(value) is not None
                if value in ("on", "off")
                else value_of(made) is not None
            )
        case ["--sampling", json]:
            parameter = re.fullmatch(r'\{"(\w+)": .*\}', json)[1]
            assert hasattr(SamplingRequest(), parameter)
            example = {"VALUE": "null", "BIAS": "1", "[ID]": "[1]", '"ID"': '"1"'}
            for word, value in example.items():
                json = json.replace(word, value)
            assert read_sampling(json) is not None
        case [flag, *_]:
            assert flag in flags_of(command) or flag == "nothing:"


def test_changes_are_said():
    text = (ROOT / "CHANGELOG.md").read_text()
    unsaid = [f"{name} {flag}" for name, flag, _ in GONE if f"`{flag}`" not in text]
    assert not unsaid, "CHANGELOG.md, Unreleased, Removed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "burstines=2"], "--set has 'burstines'; it must be one of"),
        (["--set", "burstines=2"], "(nearest: burstiness)"),
        (["--set", "burstiness"], "--set is 'burstiness'; it must be NAME=VALUE"),
        (["--set", "burstiness=x"], "burstiness is 'x'; it must be a number"),
        (["--set", "num_warmups=1.5"], "num_warmups is '1.5'; it must be a whole number"),
        (["--set", "disable_tqdm=maybe"], "disable_tqdm is 'maybe'; it must be on or off"),
        (["--set", "goodput=ttft", "--set", "goodput=x:1"], "--goodput is 'ttft'"),
    ],
)
def test_a_setting_that_cannot_be_is_named(words, said):
    result = CliRunner().invoke(app, ["bench", "serve", *words])
    assert result.exit_code == 2 and said in result.stderr
    assert result.stderr.startswith("nanocp bench serve: ")


def test_a_setting_has_its_bounds():
    for words, said in (
        ("simulate --set groups=0", "nanocp simulate: groups is 0; it must be at least 1"),
        ("overlap model --set gpus=0", "nanocp overlap model: gpus is 0; it must be at least 1"),
        (
            "plan models/tale --set dtype=int8",
            "nanocp plan: dtype is 'int8'; it must be bfloat16 or",
        ),
    ):
        result = CliRunner().invoke(app, words.split())
        assert result.exit_code == 2 and result.stderr.startswith(said), result.stderr
