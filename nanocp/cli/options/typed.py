"""Options of a command as values with types, each written once, for Typer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from nanocp.config.choices import none_of, one_of
from nanocp.config.field_docs import field_docs
from nanocp.config.whole import Config

ApiKey = Annotated[
    str,
    typer.Option(help="For a service that asks for one.", envvar="OPENAI_API_KEY", metavar="KEY"),
]

T = TypeVar("T")
Option = Annotated[T, typer.Option()]
"""A field that is an option, with its docstring as help."""


class FieldOption(NamedTuple):
    """An option with type, default and help of a dataclass's field."""

    key: str
    name: str
    """The option is --name, with hyphens."""
    annotation: Any
    """The annotation for Typer; None is an absent option."""


class FieldOptions(tuple[FieldOption, ...]):
    """Options of a parameter that is annotated Annotated[dict[str, Any], FieldOptions].

    The dictionary has given options by key.
    """


class Setting(NamedTuple):
    """A plain field of a dataclass of options, given by --set NAME=VALUE."""

    name: str
    hint: Any
    """The field's type, with a number's Bounds."""
    shown: str

    def read(self, text: str) -> Any:
        """Read the value. Raises ValueError."""
        kind = _option_type(self.hint)
        kind = get_args(kind)[0] if get_origin(kind) is list else kind
        try:
            value = _SWITCH[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            right = _KINDS.get(kind) or one_of([one.value for one in kind])
            raise ValueError(f"{self.name} is {text!r}; it must be {right}") from None
        for bounds in _metadata(self.hint):
            bounds.check(self.name, value)
        return value


_SWITCH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_KINDS = {bool: "on or off", int: "a whole number", float: "a number"}
SET = "set_"
"""The parameter of given settings, NAME=VALUE each."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its options as separate parameters.

    They come from FieldOptions, or from a dataclass: options with docstrings as help, or settings
    of --set. Raises ValueError if two options have one name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    settings: dict[str, Setting] = {}
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) or _field_options(hint):
            groups[parameter.name] = hint
            parameters += _parameters(hint)
            settings |= {} if _field_options(hint) else _settings(hint)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))
    if settings:
        about = "One of the settings below. May be given again."
        option = typer.Option("--set", metavar="NAME=VALUE", help=about)
        parameters.append(_parameter(SET, [], Annotated[list[str], option]))

    def flat(**values: Any) -> None:
        values |= _given(settings, values.pop(SET, []))
        for name, hint in groups.items():
            values[name] = _collected(hint, values)
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    flat.settings = settings  # type: ignore[attr-defined]
    return flat


def json_object(option: str, text: str) -> dict[str, Any]:
    """An option's value as a JSON object. Raises ValueError, naming the option."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{option} is {text!r}; it must be a JSON object")
    return values


def _given(settings: Mapping[str, Setting], items: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in items:
        name, sign, text = item.partition("=")
        if name not in settings:
            raise ValueError(f"--set has {name!r}; {none_of(name, tuple(settings))}")
        if not sign:
            raise ValueError(f"--set is {item!r}; it must be NAME=VALUE, as {name}=...")
        value = settings[name].read(text)
        is_list = get_origin(_option_type(settings[name].hint)) is list
        values[name] = [*values.get(name, []), value] if is_list else value
    return values


def _is_option(hint: Any) -> bool:
    return any(isinstance(one, OptionInfo) for one in _metadata(hint))


def _metadata(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


def _settings(kind: Any) -> dict[str, Setting]:
    hints, docs = get_type_hints(kind, include_extras=True), field_docs(kind)
    return {
        field.name: Setting(
            field.name,
            hints[field.name],
            docs[field.name]
            + (f"  [default: {shown}]" if (shown := _shown(_default(field))) else ""),
        )
        for field in fields(kind)
        if not _is_option(hints[field.name])
    }


def _field_options(hint: Any) -> FieldOptions:
    return next((one for one in _metadata(hint) if isinstance(one, FieldOptions)), FieldOptions())


def _parameters(hint: Any) -> list[Parameter]:
    if options := _field_options(hint):
        return [_parameter(option.name, None, option.annotation) for option in options]
    hints, docs = get_type_hints(hint, include_extras=True), field_docs(hint)
    return [
        _parameter(
            field.name, _default(field), _helped(hints[field.name], docs.get(field.name, ""))
        )
        for field in fields(hint)
        if _is_option(hints[field.name])
    ]


def _helped(hint: Any, doc: str) -> Any:
    """An option's annotation, by default with its field's docstring as help."""
    kind, *_ = get_args(hint)
    (info,) = (copy(one) for one in _metadata(hint) if isinstance(one, OptionInfo))
    info.help = info.help or doc
    return Annotated[kind, info]


def _parameter(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


def _collected(hint: Any, values: dict[str, Any]) -> Any:
    if options := _field_options(hint):
        given = {option.key: values.pop(option.name) for option in options}
        return {key: value for key, value in given.items() if value not in (None, [])}
    return hint(
        **{each.name: values.pop(each.name) for each in fields(hint) if each.name in values}
    )


def field_option(
    kind: type,
    field_name: str,
    *,
    key: str = "",
    name: str = "",
    metavar: str | None = None,
) -> FieldOption:
    """The option of a field; `key` and `name` are by default the field's.

    The help is its docstring. Fields of several values become repeatable options.
    """
    field = next(field for field in fields(kind) if field.name == field_name)
    option_type = _option_type(get_type_hints(kind)[field_name])
    sentences = [
        field_docs(kind).get(field_name, ""),
        "May be given again." if get_origin(option_type) is list else "",
        f"({key})" if key else "",
    ]
    option = typer.Option(
        help=" ".join(filter(None, sentences)),
        metavar=metavar,
        show_default=_shown(_default(field)),
    )
    name = name or field_name
    return FieldOption(key or field_name, name, Annotated[option_type | None, option])


def config_option(key: str, name: str = "", metavar: str | None = None) -> FieldOption:
    """The option of a key such as cluster.num_instances; name: by default its last part."""
    *sections, field_name = key.split(".")
    kind: type = Config
    for section in sections:
        kind = get_type_hints(kind)[section]
    return field_option(kind, field_name, key=key, name=name, metavar=metavar)


def _shown(default: Any) -> str | bool:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default in ("", (), {}, []):
        return False
    return f"{default:g}" if isinstance(default, float) else str(default)


def _option_type(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _option_type(get_args(hint)[0])
    if NoneType in get_args(hint):
        return _option_type(next(kind for kind in get_args(hint) if kind is not NoneType))
    origin = get_origin(hint)
    if origin is None:
        return hint
    # An entry of a mapping is written KEY:VALUE, for the command to parse.
    return list[str] if issubclass(origin, Mapping) else list[get_args(hint)[0]]  # type: ignore[misc]
