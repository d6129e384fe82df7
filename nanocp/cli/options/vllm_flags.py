"""vLLM's flags and variables on our commands: accepted or refused, by vllm_flags.toml."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from nanocp.cli.options.help import Command, name_of
from nanocp.cli.options.removed import refusal
from nanocp.config.choices import one_of

_FLAG = re.compile(r"--?[A-Za-z]")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])")
_POWERS = {letter: power for power, letter in enumerate("kmgt", 1)}


class FlagAnswer(NamedTuple):
    """The answer to one of vLLM's flags, as in vllm_flags.toml."""

    flag: str
    kind: str
    """same, sets, always, give or never."""
    why: str
    option: str = ""
    key: str = ""
    values: Mapping[str, str] = {}
    number: bool = False
    switch: bool = False
    takes: bool = False
    many: bool = False
    harmless: tuple[str, ...] = ()


def _read() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "vllm_flags.toml").read_text(encoding="utf-8"))


@cache
def answers(command: str) -> dict[str, FlagAnswer]:
    """Answers of a command, serve or bench, by vLLM's flags."""
    found = {}
    for kind, rows in _read()[command].items():
        for row in rows:
            for flag in row["flags"]:
                key = row.get("key", "").replace("NAME", flag[2:].replace("-", "_"))
                others = {
                    name: value for name, value in row.items() if name not in ("flags", "key")
                }
                found[flag] = FlagAnswer(row["flags"][0], kind, key=key, **others)
    return found


def said_of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each set variable of vLLM."""
    sentences = _read()["environment"]
    for name in sorted(environment):
        if name.startswith("VLLM_"):
            yield f"{name} is vLLM's: {sentences.get(name, 'nothing here reads it')}"


@dataclass(slots=True)
class Translated:
    """A command line in our words."""

    words: list[str] = field(default_factory=list)
    sets: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class VllmCommand(Command):
    """A command that answers every flag of vLLM's command of its name.

    `context.obj` is a Translated.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the translated command line.

        Raises typer.Exit with status 2 if a flag is refused.
        """
        command = name_of(ctx)
        name = "bench" if command.startswith("bench") else "serve"
        options = {
            flag: param
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for flag in (*param.opts, *param.secondary_opts)
        }
        num_arguments = sum(param.param_type_name == "argument" for param in self.params)
        translated = Reader(options, answers(name), num_arguments, command).read(args)
        for sentence in translated.refused:
            print(f"nanocp {command}: {sentence}", file=sys.stderr)
        if translated.refused:
            raise typer.Exit(2)
        ctx.obj = translated
        return super().parse_args(ctx, translated.words)


class Reader:
    """Reads a command line as vLLM does: --a_b, --a=b, --a.b c, --no-a, -O3, and unique prefixes.

    options: ours, by flag. num_arguments: words of no option. command: the words after `nanocp`.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        table: Mapping[str, FlagAnswer],
        num_arguments: int,
        command: str = "",
    ) -> None:
        self._options, self._table, self._num_arguments = options, table, num_arguments
        self._command = command
        self._out = Translated()
        self._objects: dict[str, dict[str, Any]] = {}
        self._left: deque[str] = deque()

    def read(self, args: list[str]) -> Translated:
        """Translate the words of a command line."""
        self._left = deque(args)
        while self._left:
            word = self._left.popleft()
            if word == "--":
                break
            if _FLAG.match(word):
                flag, sign, value = word.partition("=")
                self._read_flag(flag, value if sign else None)
            else:
                self._argument(word)
        for option, values in self._objects.items():
            self._out.words += [option, json.dumps(values)]
        self._out.words += ["--", *self._left] if self._left else []
        return self._out

    def _argument(self, word: str) -> None:
        self._num_arguments -= 1
        self._out.words.append(word)

    def _read_flag(self, given: str, value: str | None) -> None:
        flag, _, path = given.partition(".")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        elif flag not in self._options and flag[:2] in self._table and flag not in self._table:
            flag, value = flag[:2], flag[2:] or value  # -O3
        is_off = flag not in self._table and flag.removeprefix("--no-") != flag
        is_off &= "--" + flag.removeprefix("--no-") in self._table
        known = "--" + flag.removeprefix("--no-") if is_off else self._known(flag)
        answer = self._table.get(known)
        if path and (option := answer.option if answer else known) in self._options:
            self._object(option, path, self._value(given, value))
        elif answer:
            self._answer(answer, given, value, is_off)
        else:
            self._option(f"{known}.{path}" if path else known, value)

    def _known(self, flag: str) -> str:
        known = {**self._options, **self._table}
        if flag in known or not flag.startswith("--"):
            return flag
        longer = [name for name in known if name.startswith(flag)]
        return longer[0] if len({id(known[name]) for name in longer}) == 1 else flag

    def _value(self, given: str, value: str | None) -> str:
        if value is None and self._left and not _FLAG.match(self._left[0]):
            value = self._left.popleft()
        if not value:
            self._out.refused.append(f"{given} has no value: give one")
        return value or ""

    def _option(self, flag: str, value: str | None) -> None:
        if (param := self._options.get(flag)) is None:
            near = get_close_matches(flag, [*self._options, *self._table], n=1)
            right = f"did you mean {near[0]}?" if near else "see --help"
            if keys := _keys_named(flag.removeprefix("--").replace("-", "_")):
                right = f"write --set {' or '.join(keys)}=VALUE"
            gone = refusal(self._command, flag)
            self._out.refused.append(gone or f"{flag} is no option here: {right}")
            return
        self._out.words.append(flag if value is None else f"{flag}={value}")
        if param.is_flag:
            return
        if value is None and self._left:
            self._out.words.append(self._left.popleft())
        while param.multiple and self._num_arguments <= 0 and self._left:
            if _FLAG.match(self._left[0]):
                return
            self._out.words += [flag, self._left.popleft()]

    def _object(self, option: str, path: str, value: str) -> None:
        *keys, last = path.removesuffix("+").split(".")
        parts: Any = value.split(",") if path.endswith("+") else _json(value)
        inner = self._objects.setdefault(option, {})
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[last] = inner.get(last, []) + parts if path.endswith("+") else parts

    def _answer(self, answer: FlagAnswer, given: str, value: str | None, is_off: bool) -> None:
        match answer.kind:
            case "same" | "sets" if answer.switch and value is not None:
                self._out.refused.append(f"{given} has a value: give it alone, or its opposite")
            case "same" if answer.switch:
                self._same(answer, given, "off" if is_off else "on")
            case "same":
                self._same(answer, given, self._value(given, value))
                while answer.many and self._left and not _FLAG.match(self._left[0]):
                    self._same(answer, given, self._left.popleft())
            case "sets":
                word = None if answer.switch else self._value(given, value)
                self._set(answer, given, word, is_off)
            case "always":
                if answer.takes:
                    self._value(given, value)
                self._out.said.append(f"{given} changes nothing: {answer.why}")
            case _:
                following = self._left[0] if value is None and self._left else value
                if following in answer.harmless:
                    self._value(given, value)
                elif not is_off:
                    what = "is not supported" if answer.kind == "never" else "is no option here"
                    self._out.refused.append(f"{given} {what}: {answer.why}")
                    while value is None and self._left and not _FLAG.match(self._left[0]):
                        self._left.popleft()

    def _same(self, answer: FlagAnswer, given: str, value: str) -> None:
        ours = answer.values.get(value.lower(), value)
        if ours != value:
            self._out.said.append(f"{given} {value}: {answer.why.replace('`', '')}")
        if answer.number:
            ours = _number(ours)
        if not answer.option:
            self._argument(ours)
        elif answer.key and answer.option != "--set":
            self._object(answer.option, answer.key, ours)
        elif ours:
            setting = f"{answer.key}=" if answer.key else ""
            self._out.words.append(f"{answer.option}={setting}{ours}")

    def _set(self, answer: FlagAnswer, given: str, value: str | None, is_off: bool) -> None:
        if value is None:
            self._out.sets[answer.key] = not is_off
        elif answer.values and value not in answer.values:
            self._out.refused.append(f"{given} is {value}; it must be {one_of([*answer.values])}")
        else:
            ours = _number(value) if answer.number else answer.values.get(value, value)
            self._out.sets[answer.key] = _json(ours)


def _keys_named(name: str) -> list[str]:
    from nanocp.config.file import known_keys

    keys = map(".".join, known_keys())
    return [key for key in keys if f".{key}".endswith(f".{name}")]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(text: str) -> str:
    """A number with vLLM's suffix in digits (16k: 16000, 16K: 16384), or the text unchanged."""
    if not (match := _NUMBER.fullmatch(text.strip())):
        return text
    decimal, small, binary, large = match.groups()
    if small:
        return str(int(float(decimal) * 1000 ** _POWERS[small]))
    return str(int(binary) * 1024 ** _POWERS[large.lower()])
