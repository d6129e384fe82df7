"""The grammar of text with tags in it, whose insides follow schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_TEXT = r"TEXT: /(.|\n)*/"


def tagged_text(
    text: str, added_tokens: frozenset[str], schema_text: Callable[[dict[str, Any]], str]
) -> str:
    """Return the grammar of vLLM's structural tags: text with tags that begin with a trigger.

    text: JSON with lists of structures, each {begin, schema, end}, and of triggers. Instead of a
    schema a structure may have parts: texts, schemas, lists of optional parts; {either: lists of
    parts}; {texts, never, end}: text that all expressions of `texts` match, without the texts of
    `never`, up to the end. Markers in `between` mean nothing. schema_text: writes a schema in the
    grammar. Raises ValueError.
    """
    form = json.loads(text)
    structures, triggers = (
        form.get(key) if isinstance(form, dict) else None for key in ("structures", "triggers")
    )
    if not (isinstance(structures, list) and structures and isinstance(triggers, list)):
        raise ValueError(
            "it must have lists of structures, each with begin, schema and end, and of triggers; "
            '"format" is not supported'
        )
    rules = _Rules(added_tokens, schema_text)
    bodies: dict[str, list[str]] = {}
    for number, tag in enumerate(structures):
        match tag:
            case {"begin": str(begin), "schema": dict(schema), "end": str(end)}:
                parts: list[Any] = [schema]
            case {"begin": str(begin), "parts": list(parts), "end": str(end)}:
                pass
            case _:
                begin = ""
        starts = [one for one in triggers if one and begin.startswith(str(one))]
        if not starts:
            raise ValueError(
                f"structures.{number} must have a begin that starts with a trigger, a schema that "
                "is an object, and an end"
            )
        body = rules.add([begin.removeprefix(starts[0]), *parts, end])
        bodies.setdefault(starts[0], []).append(body)
    return rules.grammar(bodies, form.get("between", ()))


class _Rules:
    def __init__(
        self, added_tokens: frozenset[str], schema_text: Callable[[dict[str, Any]], str]
    ) -> None:
        named = [token for token in added_tokens if re.fullmatch(r"<[^<>\s]+>", token)]
        self._tokens = frozenset(named)
        spelled = "|".join(re.escape(token) for token in sorted(named, key=len, reverse=True))
        self._split = re.compile(f"({spelled})") if named else None
        self._schema_text = schema_text
        self._lines: list[str] = []

    def add(self, parts: list[Any]) -> str:
        """Add a rule for these parts in sequence; return its name."""
        pieces = [piece for part in parts for piece in self._pieces(part)]
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}: {' '.join(pieces)}")
        return name

    def _pieces(self, part: Any) -> Iterator[str]:
        if isinstance(part, str):
            for text in self._split.split(part) if self._split else [part]:
                if text:
                    yield text if text in self._tokens else json.dumps(text)
        elif isinstance(part, list):
            yield f"{self.add(part)}?"
        elif "either" in part:
            yield "(" + " | ".join(self.add(one) for one in part["either"]) + ")"
        elif "never" in part:
            yield from self._text(**part)
        else:
            yield f"%json {self._schema_text(part)}"

    def _text(self, texts: list[str], never: list[str], end: str) -> Iterator[str]:
        name, marker = f"VALUE_{len(self._lines)}", end.strip()
        slashed = [one.replace("/", r"\/") for one in (*texts, *map(re.escape, never))]
        held = [f"/{one}/" for one in slashed[: len(texts)]]
        held += [f"~/(?s:.*){one}(?s:.*)/" for one in slashed[len(texts) :]]
        self._lines.append(f"{name}: {' & '.join(held)}")
        if marker in self._tokens:
            yield from (name, marker)
        else:
            # The first end counts, as for whoever reads it.
            self._lines.append(f"{name.lower()}[suffix={json.dumps(end)}]: {name}")
            yield name.lower()

    def grammar(self, bodies: dict[str, list[str]], between: list[str]) -> str:
        """bodies: names of rules by the trigger before them."""
        pieces = []
        for number, (trigger, names) in enumerate(bodies.items()):
            choice = "(" + " | ".join(names) + ")"
            if trigger in self._tokens:
                pieces.append(f"TEXT {trigger} {choice}")
            else:
                self._lines.append(f"head_{number}[lazy]: TEXT {json.dumps(trigger)}")
                pieces.append(f"head_{number} {choice}")
        pieces += [f"TEXT {marker}" for marker in between if marker in self._tokens]
        start = f"start: ({' | '.join(pieces)})* rest"
        return "\n".join(["%llguidance {}", start, "rest: TEXT", _TEXT, *self._lines])
