"""Options of a command as values with types.

Enters: a command that takes dataclasses of options. Leaves: the same command as Typer reads it, with
one parameter for each field. Does not know: any command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass replaced by the dataclass's fields.

    A field is annotated as a parameter of a Typer command is, with Annotated[..., typer.Option()].
    Raises ValueError if two dataclasses have a field of one name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            keyword = parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind)
            parameters.append(keyword)

    def flat(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _parameters(kind: Any) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
