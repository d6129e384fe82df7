"""An answer that a grammar held to tool calls, as its text comes.

Enters: pieces of text. Leaves: reasoning, and each call once it is complete. Does not know: forms
of calls, grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from control_plane.frontend.http.answer_parser import AnswerParser, AnswerPart, PartKind
from control_plane.frontend.http.call_forms import ToolCall

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:')
_MARK = re.compile(r'\\.|["{}[\]]', re.DOTALL)
"""What tells where objects and strings begin and end; a backslash with what it escapes."""


class ForcedCallsParser:
    """Parses an answer of reasoning, JSON, and nothing else.

    Arguments stay as they are written, however deep they are nested.
    """

    def __init__(
        self,
        name: str | None,
        text: AnswerParser,
        new_id: Callable[[str, int], str],
        number: int = 0,
    ) -> None:
        """name: the function whose arguments the answer is; None: the answer is a list of calls.

        text: takes reasoning apart from the JSON. new_id, number: see CallForm and CallContext.
        """
        self._name = name
        self._parser = text
        self._new_id = new_id
        self._num_earlier = self._number = number
        self._held = ""
        self._num_read = 0
        self._depth = 0
        self._is_string = False
        self._begin = -1
        """Where the object in the held text begins that is a call, or a call's arguments."""

    @property
    def is_reasoning(self) -> bool | None:
        """Whether the next text is reasoning; None: the answer has none."""
        return self._parser.is_reasoning

    def feed(self, text: str) -> list[AnswerPart]:
        """Parts that the text completes, in order."""
        return self._taken(self._parser.feed(text))

    def finish(self) -> list[AnswerPart]:
        """What was held back, at the answer's end; a call that max_tokens cut is content."""
        parts = self._taken(self._parser.finish())
        if self._number > self._num_earlier:
            self._held = self._held[self._begin :] if self._begin >= 0 else ""
        return parts + ([AnswerPart(PartKind.CONTENT, self._held)] if self._held else [])

    def _taken(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """The reasoning among the parts, and the calls that their content completes."""
        taken = [part for part in parts if part.kind is PartKind.REASONING]
        self._held += "".join(part.text for part in parts if part.kind is PartKind.CONTENT)
        while (end := self._end_of_object()) >= 0:
            taken.append(self._call(self._held[self._begin : end]))
            self._held = self._held[end:]
            self._num_read, self._begin = 0, -1
        return taken

    def _end_of_object(self) -> int:
        """Read on to where a call is complete; -1 if it is not yet."""
        outer = 0 if self._name else 1
        for found in _MARK.finditer(self._held, self._num_read):
            mark, self._num_read = found[0], found.end()
            if mark == '"':
                self._is_string = not self._is_string
            elif self._is_string or len(mark) > 1:
                continue
            elif mark in "{[":
                if self._depth == outer and mark == "{":
                    self._begin = found.start()
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == outer and self._begin >= 0:
                    return self._num_read
        # What a backslash escapes may come later.
        is_cut = self._num_read < len(self._held) and self._held.endswith("\\")
        self._num_read = len(self._held) - is_cut
        return -1

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
