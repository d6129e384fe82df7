"""A parser of an answer that a grammar limits to tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from control_plane.frontend.client_request import Contents
from control_plane.frontend.http.tools.answer_parser import AnswerParser, AnswerPart, PartKind
from control_plane.frontend.http.tools.call_readers import JsonScan, ToolCall

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:')


class ForcedCallsParser(Contents):
    """Parses an answer of reasoning and JSON; arguments keep the model's spelling."""

    def __init__(
        self,
        name: str | None,
        text: AnswerParser,
        new_id: Callable[[str, int], str],
        number: int = 0,
    ) -> None:
        """name: the function of the arguments; None: the answer is a list of calls.

        text: separates reasoning. new_id, number: see CallForm and CallContext.
        """
        self._name = name
        self._parser = text
        self._new_id = new_id
        self._num_earlier = self._number = number
        self._scan = JsonScan(outer=0 if name else 1)
        self._skipped: list[str] = []
        """Text behind the latest call that is in none."""
        self._object: list[str] = []
        """Present part of an object that is a call, or a call's arguments."""

    @property
    def is_reasoning(self) -> bool | None:
        """Return whether the next text is reasoning; None: the answer has none."""
        return self._parser.is_reasoning

    @property
    def reasoning(self) -> tuple[int, int]:
        """(start, end) of reasoning in the answer's text so far, with its end marker."""
        return self._parser.reasoning

    @property
    def num_decided(self) -> int:
        return self._parser.num_decided

    def contents(self, text: str) -> list[tuple[int, str]]:
        self.feed(text)
        return []

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that the text completes, in order."""
        return self._taken(self._parser.feed(text))

    def finish(self, is_cut: bool = False) -> list[AnswerPart]:
        """Return the held parts at the end; a cut call is content."""
        parts = self._taken(self._parser.finish(is_cut))
        rest = "".join(self._object)
        if self._number == self._num_earlier:
            rest = "".join(self._skipped) + rest
        return parts + ([AnswerPart(PartKind.CONTENT, rest)] if rest else [])

    def _taken(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        taken = [part for part in parts if part.kind is PartKind.REASONING]
        for text in (part.text for part in parts if part.kind is PartKind.CONTENT):
            begin, into = 0, self._object or self._skipped
            for at, is_begin in self._scan.objects(text):
                into.append(text[begin:at])
                begin, into = at, self._object
                if not is_begin:
                    taken.append(self._call("".join(self._object)))
                    self._object, self._skipped = [], []
                    into = self._skipped
            into.append(text[begin:])
        return taken

    def _call(self, text: str) -> AnswerPart:
        name, arguments = self._name, text
        if name is None:
            head = _HEAD.match(text)
            if head is None:  # The grammar does not allow this.
                return AnswerPart(PartKind.CONTENT, text)
            name, arguments = json.loads(head[1]), text[head.end() : -1].strip()
        call = ToolCall(self._new_id(name, self._number), name, arguments)
        self._number += 1
        return AnswerPart(PartKind.CALL, call=call)


Parser = AnswerParser | ForcedCallsParser
"""Takes an answer apart."""
