"""Checks of values against a few words or bounds, each with a sentence. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

from nanocp.values.sampling_fields import Bounds as Bounds

PROFILED = "profiled"
"""Marks a field that `nanocp profile` measures and only the profile file sets."""
INTERNAL = "internal"
"""Marks a field that follows from others or that only tests set."""


def one_of(words: Sequence[str]) -> str:
    """List words in a sentence: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def none_of(word: str, words: Sequence[str]) -> str:
    """A sentence about a word that is none of these, with the nearest one if any."""
    longer = [one for one in words if word and one.startswith(word)]
    near = difflib.get_close_matches(word, words, n=1) or longer
    return f"it must be one of {', '.join(words)}" + (f" (nearest: {near[0]})" if near else "")


def check_one_of(words: Sequence[str], **values: str) -> None:
    """Raises ValueError naming the value that is none of the words."""
    for name, value in values.items():
        if value not in words:
            raise ValueError(f"{name} is {value!r}; it must be {one_of(words)}")


def require(condition: bool, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def at_least(low: int) -> Bounds:
    """Bounds of a field: Annotated[int, at_least(1)]."""
    return Bounds(f"at least {low}", low)


def between(low: int, high: int) -> Bounds:
    """Bounds of a field, both inclusive."""
    return Bounds(f"from {low} to {high}", low, high)


class Among(NamedTuple):
    """Words that a field may be: Annotated[str, Among(WORDS)]."""

    words: tuple[str, ...]

    def check(self, name: str, value: str) -> None:
        """Raises ValueError naming the field whose value is none of them."""
        check_one_of(self.words, **{name: value})


Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
NotNegative = Annotated[float, Bounds("a finite number and not negative", 0)]
ABOVE_ZERO = Bounds("positive and finite", 0, excludes_low=True)
AboveZero = Annotated[float, ABOVE_ZERO]
Share = Annotated[float, Bounds("above 0 and at most 1", 0, 1, True)]

_MARKS: dict[type, dict[str, tuple[Any, ...]]] = {}


def marks_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """Marks of each field of a dataclass, from its annotation."""
    if kind not in _MARKS:
        hints = get_type_hints(kind, include_extras=True).items()
        _MARKS[kind] = {name: getattr(hint, "__metadata__", ()) for name, hint in hints}
    return _MARKS[kind]


def is_hidden(marks: tuple[Any, ...]) -> bool:
    """True if no file, variable or flag may set such a field."""
    return INTERNAL in marks or PROFILED in marks


def check_fields(section: Any, spelled: Callable[[str], str] = str) -> None:
    """Raises ValueError for the first field outside its declaration; None never is.

    spelled: a field's name for the user.
    """
    for name, marks in marks_of(type(section)).items():
        for mark in marks:
            if isinstance(mark, (Bounds, Among)) and (value := getattr(section, name)) is not None:
                mark.check(spelled(name), value)
