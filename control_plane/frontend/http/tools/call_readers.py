"""Readers that take a tool call piece by piece, and find its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from control_plane.frontend.http.tools.tool_schemas import (
    ALL_TYPES,
    Schema,
    knows,
    property_of,
    type_of,
    types_of,
)

Tools = Mapping[str, Schema]
"""Schemas of arguments by the function's name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes."""

    id: str
    """Empty if the model writes none."""
    name: str
    arguments: str
    """A JSON object, in the model's spelling."""


class CallReader(Protocol):
    """Reads one call from left to right, each piece once."""

    pieces: list[str]
    """What it has taken, from the tag that begins the call."""

    def add(self, piece: str, is_tag: bool) -> bool | None:
        """Take a tag, or text. True: it ends the call; False: there is no call."""

    def call(self, has_end: bool, is_cut: bool = False) -> ToolCall:
        """Return the call of the pieces. has_end: they have its last tag. is_cut: more would come.

        Raises an error of NO_CALL if they are none.
        """


NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors from reading a text that is no call."""


def is_plain_name(name: str) -> bool:
    """Return whether a function's name is distinct in every form."""
    return re.fullmatch(r"[\w.-]+", name) is not None


def is_name(name: str, tools: Tools) -> bool:
    """Return whether a function can have the name."""
    return name in tools or is_plain_name(name)


def named(name: str, tools: Tools) -> str:
    """Return the name, if it can be one. Raises ValueError."""
    if is_name(name, tools):
        return name
    raise ValueError("no name")


def _unquoted(name: str) -> str:
    name = name.strip()
    return name[1:-1] if re.fullmatch("\"[^\"]+\"|'[^']+'", name) else name


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


STRICT_JSON = json.JSONDecoder(parse_constant=_refuse, parse_int=lambda digits: 0)
"""Finds JSON and its end, with numbers of any length."""


_MARK = re.compile(r'\\.?|["{}[\]]', re.DOTALL)
"""Starts and ends of objects and strings; a backslash comes with the character it escapes."""


class JsonScan:
    """Follows strings and nesting of JSON that comes in pieces."""

    def __init__(self, outer: int = 0) -> None:
        """outer: the depth of the wanted objects."""
        self.is_string = False
        self._outer = outer
        self._depth = 0
        self._num_escaped = 0
        """Characters of the next piece that a backslash before it escapes."""

    def objects(self, text: str) -> Iterator[tuple[int, bool]]:
        """Yield starts (place, True) and ends (place, False) of objects."""
        first, self._num_escaped = self._num_escaped, 0 if text else self._num_escaped
        for found in _MARK.finditer(text, first):
            mark = found[0]
            if mark[0] == "\\":
                self._num_escaped = 2 - len(mark)
            elif mark == '"':
                self.is_string = not self.is_string
            elif not self.is_string:
                is_begin = mark in "{["
                self._depth -= not is_begin
                if self._depth == self._outer and mark in "{}":
                    yield (found.start() if is_begin else found.end()), is_begin
                self._depth += is_begin


class JsonReader(CallReader):
    """Reads a call with arguments in JSON; tags inside strings are text."""

    def __init__(
        self, read: Callable[[str, Tools], ToolCall], end: str, separator: str, tools: Tools
    ) -> None:
        """read: makes the call of the text between the first tag and `end`.

        separator: the tag before the JSON; empty: none.
        """
        self.pieces = []
        self._read, self._end, self._tools = read, end, tools
        self._separator = separator
        """Empty after it was read."""
        self._is_silent = not separator
        """True if the next text must begin an object."""
        self._is_whole = False
        self._scan = JsonScan()

    def add(self, piece: str, is_tag: bool) -> bool | None:
        is_end = False
        if not self.pieces:
            pass
        elif is_tag and not self._scan.is_string:
            is_end = piece == self._end
            if not is_end and piece != self._separator:
                return False
            self._separator = ""
        elif not self._separator:
            if self._is_silent and (text := piece.lstrip()):
                if text[0] != "{":
                    return False
                self._is_silent = False
            for _, is_begin in self._scan.objects(piece):
                self._is_whole = not is_begin
        self.pieces.append(piece)
        return is_end or None

    def call(self, has_end: bool, is_cut: bool = False) -> ToolCall:
        if not has_end and not self._is_whole:
            raise ValueError("the arguments do not end")
        return self._read("".join(self.pieces[1 : -1 if has_end else None]), self._tools)


class TaggedReader(CallReader):
    """Reads a call whose arguments are bare text between tags.

    Each tag is a letter, n a name between two of them, - other text. A whole call within a value
    belongs to the value (docs/decisions/0051).
    """

    letters: ClassVar[dict[str, str]]
    """P begins a value, p may end one. Tags that begin and end a call in a value become ( and )."""
    heads: ClassVar[tuple[str, ...]]
    """Patterns of a call's start, up to its first value or its end."""
    opens: ClassVar[str]
    """Pattern of the start of a call with arguments, perhaps behind T."""
    ends: ClassVar[str]
    """Pattern of its end; in a value, and without T, the first two letters."""
    argument: ClassVar[str]
    """How an argument begins."""

    def __init__(self, tools: Tools) -> None:
        self.pieces = []
        self._tools = tools
        self._trail: list[str] = []
        self._places: list[int] = []
        """Piece with which each letter begins."""
        self._num_read = 0
        """Pieces that the trail has."""
        self._ends: list[str] = []
        """Ends of the open calls with arguments, each in a value of the one before."""

    def add(self, piece: str, is_tag: bool) -> bool | None:
        is_end = False
        if is_tag and (letter := self.letters.get(re.sub("=.*", "=", piece, flags=re.DOTALL))):
            gap = "".join(self.pieces[self._num_read :])
            if gap.strip():
                is_named = self._trail[-1:] == ["T"] and is_name(_unquoted(gap), self._tools)
                self._trail.append("n" if is_named else "-")
                self._places.append(self._num_read)
            self._trail.append(letter)
            self._places.append(len(self.pieces))
            self._num_read = len(self.pieces) + 1
            latest = "".join(self._trail[-len(self.heads[0]) :])
            if not self._ends:
                if not any(one.startswith(latest) for one in self.heads):
                    return False
                self._ends, is_end = [self.ends] * (letter == "P"), letter == "t"
            elif latest.endswith(self.opens):
                self._ends.append(self.ends if latest.endswith(self.heads[1]) else self.ends[:2])
                self._trail[-1] = "("
            elif latest.endswith(self._ends[-1]):
                is_end = len(self._ends) == 1
                if not is_end:
                    self._ends.pop()
                    self._trail[-1] = ")"
        self.pieces.append(piece)
        return is_end or None

    def call(self, has_end: bool, is_cut: bool = False) -> ToolCall:
        trail = "".join(self._trail)
        if not has_end:
            trail += "t"
            is_whole = self._ends == [self.ends] and trail.endswith(self.ends)
            is_whole = is_whole or (trail in self.heads and not self._ends)
            if is_cut or not is_whole or "".join(self.pieces[self._num_read :]).strip():
                raise ValueError("the call does not end")
        function = trail.find("F")
        name = self._key(function) if function >= 0 else self._text(0, 2)
        name = named(_unquoted(name), self._tools)
        return typed(name, dict(self._arguments(trail, name)) if self._ends else {}, self._tools)

    def _text(self, begin: int, end: int) -> str:
        return "".join(self.pieces[self._places[begin] + 1 : self._places[end]])

    def _key(self, place: int) -> str:
        """Return the name in this letter's tag, or in the text before it."""
        _, is_named, name = self.pieces[self._places[place]].partition("=")
        return _unquoted(name[:-1] if is_named else self._text(place - 3, place - 1))

    def _arguments(self, trail: str, name: str) -> Iterator[tuple[str, str]]:
        """Yield names and texts. Raises ValueError where an argument is ambiguous."""
        schema = self._tools.get(name, {})
        first, last = trail.index("P"), len(trail) - len(self.ends)
        begun, lone, depth = [(0, first)], list[tuple[str, int]](), 0
        begin = self.argument
        tags = rf"(?P<opens>\()|(?P<closes>\))|(?P<argument>p{begin})|(?P<lone>{begin})|(?P<end>p)"
        for found in re.compile(tags).finditer(trail, first + 1, last):
            kind, place = found.lastgroup, (found.start(), found.end() - 1)
            if kind in ("opens", "closes"):
                depth += 1 if kind == "opens" else -1
            elif depth or (kind == "end" and not lone):
                continue
            elif kind == "end":
                key, num_begun = lone.pop()
                if knows(schema, key):
                    del begun[num_begun:]
            elif kind == "lone":
                lone.append((self._key(place[1]), len(begun)))
            elif knows(schema, self._key(place[1])):
                begun.append(place)
        keys = [self._key(place) for _, place in begun]
        is_open = any(one not in keys and knows(schema, one) for one, _ in lone)
        if is_open or len(set(keys)) < len(keys):
            raise ValueError("one argument in another, or twice")
        ends = [place for place, _ in begun[1:]] + [last]
        for key, (_, opening), end in zip(keys, begun, ends, strict=True):
            yield key, self._text(opening, end)


def typed(name: str, values: Mapping[str, str], tools: Tools) -> ToolCall:
    """Return a call with arguments of types that their schemas allow."""
    schema = tools.get(name, {})
    pairs = (
        f"{_text(key)}: {_value(text, types_of(property_of(schema, key), schema))}"
        for key, text in values.items()
    )
    return ToolCall("", name, "{" + ", ".join(pairs) + "}")


def _value(text: str, types: frozenset[str]) -> str:
    written = text.strip()
    if {"boolean", "null"} & types and written in ("True", "False", "None"):
        written = {"True": "true", "False": "false", "None": "null"}[written]
    try:
        value = STRICT_JSON.decode(written)
    except (ValueError, RecursionError):
        return _text(text)
    fits = type_of(value) in types and (types == ALL_TYPES or not isinstance(value, str))
    return written if fits else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
