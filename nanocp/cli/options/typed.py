"""Options of a command as values with types, each written once.

Enters: a command that takes dataclasses of options, or options derived from fields that are
declared elsewhere. Leaves: the same command as Typer reads it, with a parameter for each option.
Does not know: any command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from nanocp.config.choices import one_of
from nanocp.config.field_docs import field_docs
from nanocp.config.whole import Config

ApiKey = Annotated[
    str,
    typer.Option(help="For a service that asks for one.", envvar="OPENAI_API_KEY", metavar="KEY"),
]


class FieldOption(NamedTuple):
    """An option that takes type, default and help from a field of a dataclass."""

    key: str
    """The option's name among the values that its command gets."""
    name: str
    """The option is --name, with hyphens."""
    annotation: Any
    """The annotation that Typer reads. An option that is not given is None."""


class FieldOptions(tuple[FieldOption, ...]):
    """Options of a command's parameter that is annotated Annotated[dict[str, Any], FieldOptions].

    The dictionary has the options that were given, by their keys.
    """


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that stands for several options replaced by these.

    A parameter stands for the fields of its dataclass, or for its FieldOptions. A field of the
    dataclass is annotated as a parameter of a Typer command is. Raises ValueError if two options
    have one name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) or _field_options(hint):
            groups[parameter.name] = hint
            parameters += _parameters(hint)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))

    def flat(**values: Any) -> None:
        for name, hint in groups.items():
            values[name] = _collected(hint, values)
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _field_options(hint: Any) -> FieldOptions:
    for metadata in getattr(hint, "__metadata__", ()):
        if isinstance(metadata, FieldOptions):
            return metadata
    return FieldOptions()


def _parameters(hint: Any) -> list[Parameter]:
    if options := _field_options(hint):
        return [_parameter(option.name, None, option.annotation) for option in options]
    hints = get_type_hints(hint, include_extras=True)
    return [_parameter(field.name, _default(field), hints[field.name]) for field in fields(hint)]


def _parameter(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


def _collected(hint: Any, values: dict[str, Any]) -> Any:
    """The value of a parameter of the command; its options leave `values`."""
    if options := _field_options(hint):
        given = {option.key: values.pop(option.name) for option in options}
        return {key: value for key, value in given.items() if value not in (None, [])}
    return hint(**{field.name: values.pop(field.name) for field in fields(hint)})


def field_option(
    kind: type,
    field_name: str,
    *,
    key: str = "",
    name: str = "",
    choices: Sequence[str] = (),
    metavar: str | None = None,
    shows_default: bool = True,
) -> FieldOption:
    """The option of a dataclass's field; `key` and `name` are the field's own unless given.

    The help is the field's docstring, after the choices. A field that holds several values becomes
    an option that may be given again.
    """
    field = next(field for field in fields(kind) if field.name == field_name)
    option_type = _option_type(get_type_hints(kind)[field_name])
    sentences = [
        f"{one_of(choices)}." if choices else "",
        field_docs(kind).get(field_name, ""),
        "May be given again." if get_origin(option_type) is list else "",
        f"({key})" if key else "",
    ]
    option = typer.Option(
        help=escape(" ".join(filter(None, sentences))),
        metavar=metavar,
        show_default=shows_default and _shown(_default(field)),
    )
    name = name or field_name
    return FieldOption(key or field_name, name, Annotated[option_type | None, option])


def config_option(key: str, name: str = "", metavar: str | None = None) -> FieldOption:
    """The option of a key such as cluster.num_instances; name: by default the key's last part."""
    *sections, field_name = key.split(".")
    kind: type = Config
    for section in sections:
        kind = get_type_hints(kind)[section]
    return field_option(kind, field_name, key=key, name=name, metavar=metavar)


def _shown(default: Any) -> str | bool:
    """How a default is shown; False: not at all."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default in ("", (), {}):
        return False
    return f"{default:g}" if isinstance(default, float) else str(default)


def _option_type(hint: Any) -> Any:
    """The type that Typer parses for a field's type."""
    if get_origin(hint) in (Union, UnionType):
        return _option_type(next(kind for kind in get_args(hint) if kind is not NoneType))
    origin = get_origin(hint)
    if origin is None:
        return hint
    # An entry of a mapping is written KEY:VALUE, for the command to parse.
    return list[str] if issubclass(origin, Mapping) else list[get_args(hint)[0]]  # type: ignore[misc]
