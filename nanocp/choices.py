"""A value that must be one of a few words: one tuple makes the check, the sentence and the help.

Enters: the words. Leaves: a ValueError for any other. Does not know: options. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Sequence


def one_of(words: Sequence[str]) -> str:
    """The words as a sentence lists them: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def check_one_of(words: Sequence[str], **values: str) -> None:
    """Raises ValueError naming the value that is none of the words."""
    for name, value in values.items():
        if value not in words:
            raise ValueError(f"{name} is {value!r}; it must be {one_of(words)}")
