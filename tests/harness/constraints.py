"""Constraints of each kind for tests, and judges that know nothing of grammars."""

import json
import re

import jsonschema

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.constraint import constraint_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
        "deep": {"$ref": "#/$defs/pair"},
    },
    "required": ["name", "n", "deep"],
    "additionalProperties": False,
    "$defs": {
        "pair": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"type": ["null", "boolean"]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
GBNF = 'root ::= "sum(" number ("," number)? ")"\nnumber ::= [0-9] [0-9]?\n'
LARK = 'start: "[" word{1,3} "]"\nword: /[a-c]{2}/\n'
REGEX = r"([0-9]{1,3}\.){3}[0-9]{1,3}|none"
CHOICES = ["yes", "no", 'it "depends"', "ünsicher", "a\nb"]


def _json(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    assert not re.search(r"[:,] ", re.sub(r'"(\\.|[^"\\])*"', '""', text)), "no whitespace"


def _matches(pattern):
    def judge(text):
        assert re.fullmatch(pattern, text), text

    return judge


def _choice(text):
    assert text in CHOICES


KINDS = {
    "json_schema": (json.dumps(SCHEMA), _json),
    "regex": (REGEX, _matches(REGEX)),
    "choice": (CHOICES, _choice),
    "gbnf": (GBNF, _matches(r"sum\(\d\d?(,\d\d?)?\)")),
    "lark": (LARK, _matches(r"\[([a-c]{2}){1,3}\]")),
}
"""kind -> (value, judge of a complete output). Each output is finite."""


def request_with(kind):
    value, _ = KINDS[kind]
    name = "grammar" if kind in ("gbnf", "lark") else kind
    return ClientRequest("x", "prompt", **{name: value})


def grammar_of(kind):
    return constraint_of(request_with(kind), 32_768, True)
