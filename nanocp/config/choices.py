"""Checks of values: a value that must be one of a few words, or a number that must not be lower.

Enters: the words or the bound. Leaves: a ValueError with a sentence for any other value. Does not
know: options. One tuple of words makes the check, the sentence and the help. Standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def one_of(words: Sequence[str]) -> str:
    """The words as a sentence lists them: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def none_of(word: str, words: Sequence[str]) -> str:
    """What a word that is none of these must be, and the one that it resembles, if any."""
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


def check_at_least(low: int, **values: int) -> None:
    """Raises ValueError naming the value that is below `low`."""
    for name, value in values.items():
        require(value >= low, f"{name} is {value}; it must be at least {low}")
