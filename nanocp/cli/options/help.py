"""Commands whose help fits 80 columns with whole names, and that refuse removed options."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from nanocp.cli.options.removed import refusal

_Click: Any = TyperCommand.__base__
_WIDTH, _COLUMN = 78, 26


class _Plain(_Click):  # type: ignore[misc]
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; raises typer.Exit with status 2 for a removed option."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[no-any-return]
        except Exception as error:
            sentence = refusal(name_of(ctx), getattr(error, "option_name", ""))
            if not sentence:
                raise
            _refuse(ctx, sentence)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises typer.Exit with status 2 after its sentence for an error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # The reader has stopped reading, as `| head` does: Typer says nothing.
        except (ValueError, OSError) as error:
            _refuse(ctx, str(error))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Without Rich, whose tables cut names."""
        _Click.format_help(self, ctx, formatter)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The command's docstring."""
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            formatter.write(f"\n{_wrapped(paragraph, 2)}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options, settings and commands, with help."""
        records: dict[str, list[Any]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            records[param.param_type_name].append(param.get_help_record(ctx))
        settings = getattr(self.callback, "settings", {}).values()
        commands = getattr(self, "commands", {}).items()
        for title, rows in (
            ("Arguments", records["argument"]),
            ("Options", records["option"]),
            ("Settings, for --set", [(one.name, one.shown) for one in settings]),
            ("Commands", [(name, each.get_short_help_str(200)) for name, each in commands]),
        ):
            _write_rows(formatter, title, rows)


class Command(_Plain, TyperCommand):
    """A command."""


class Group(_Plain, TyperGroup):
    """Commands below a name."""


def name_of(ctx: Any) -> str:
    """The words of a command behind `nanocp`."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(words)


def _refuse(ctx: Any, sentence: str) -> NoReturn:
    print(f"nanocp {name_of(ctx)}: {sentence}", file=sys.stderr)
    raise typer.Exit(2) from None


def _write_rows(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        formatter.write(f"\n{title}:\n")
    for name, text in rows:
        shown = f"  {name}"
        if len(shown) > _WIDTH:
            shown = _wrapped(name.replace("|", " | "), 2, 6)
        text = _wrapped(re.sub(r"\[default: \((.*?)\)", r"[default: \1", text or ""), _COLUMN)
        is_short = len(shown) < _COLUMN - 1
        both = (shown + text[len(shown) :]) if is_short else f"{shown}\n{text}"
        formatter.write(f"{both.rstrip()}\n")


def _wrapped(text: str, indent: int, later: int | None = None) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if later is None else later),
        break_on_hyphens=False,
        break_long_words=False,
    )
