"""Names of vLLM's flags and variables, and which of them have no answer here.

vllm_names.json has what a version of vLLM has: the flags of `vllm serve` and `vllm bench serve`,
and its variables.
"""

import json
from functools import cache
from pathlib import Path

import typer

from nanocp.cli.main import app
from nanocp.cli.options.vllm_flags import answers

NAMES = json.loads((Path(__file__).parent / "vllm_names.json").read_text())


@cache
def options_of(command):
    """The options of our `serve` or `bench serve` by flag."""
    found = typer.main.get_command(app)
    for name in ("bench", "serve") if command == "bench" else ("serve",):
        found = found.commands[name]
    return {
        flag: param
        for param in found.params
        if param.param_type_name == "option"
        for flag in (*param.opts, *param.secondary_opts)
    } | {"-h": None, "--help": None}


def unanswered(command, names):
    """Those of these flags that have no answer."""
    known = {*options_of(command), *answers(command)}
    return [
        name
        for name in names
        if name not in known and "--" + name.removeprefix("--no-") not in known
    ]
