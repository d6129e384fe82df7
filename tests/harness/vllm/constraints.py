"""Constraints of each kind for tests, and judges that know nothing of grammars."""

import json
import re

import jsonschema

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.text.constraint import constraint_of
from nanocp.values.sampling import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6},
                   "n": {"type": "integer", "minimum": 0, "maximum": 999},
                   "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
                   "deep": {"$ref": "#/$defs/pair"}},
    "required": ["name", "n", "deep"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "object",
                       "properties": {"x": {"type": "boolean"}, "y": {"type": ["null", "boolean"]}},
                       "required": ["x"], "additionalProperties": False}},
}  # fmt: skip
GBNF = 'root ::= "sum(" number ("," number)? ")"\nnumber ::= [0-9] [0-9]?\n'
LARK = 'start: "[" word{1,3} "]"\nword: /[a-c]{2}/\n'
REGEX = r"([0-9]{1,3}\.){3}[0-9]{1,3}|none"
CHOICES = ["yes", "no", 'it "depends"', "ünsicher", "a\nb"]
TAGS = {
    "structures": [
        {"begin": "<n=", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": ">"},
        {"begin": "<w=", "schema": {"enum": ["a", "bb"]}, "end": "/>"},
    ],
    "triggers": ["<"],
}
EOS = 1
"""End of sequence of preset tiny."""


def _json(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    assert not re.search(r"[:,] ", re.sub(r'"(\\.|[^"\\])*"', '""', text)), "no whitespace"


def _matches(pattern):
    def judge(text):
        assert re.fullmatch(pattern, text), text

    return judge


def _choice(text):
    assert text in CHOICES


def _object(text):
    assert isinstance(json.loads(text), dict)


def _tagged(text):
    assert "<" not in re.sub(r'<n=[1-9]?[0-9]>|<w="(a|bb)"/>', "", text), text


KINDS = {
    "json_schema": (json.dumps(SCHEMA), _json),
    "regex": (REGEX, _matches(REGEX)),
    "choice": (CHOICES, _choice),
    "gbnf": (GBNF, _matches(r"sum\(\d\d?(,\d\d?)?\)")),
    "lark": (LARK, _matches(r"\[([a-c]{2}){1,3}\]")),
    "json_object": (True, _object),
    "structural_tag": (json.dumps(TAGS), _tagged),
}
"""kind -> (value, judge of a complete output)."""
_FAVOURED = {"json_object": {'"': 8.0, "}": 6.0}, "structural_tag": {"<": 8.0, "<eos>": 7.0}}
"""kind -> token -> what is added to its logit. The other kinds are finite; of these two, random
weights would write without an end, and hardly ever a tag."""


def request_with(kind):
    value, _ = KINDS[kind]
    name = "grammar" if kind in ("gbnf", "lark") else kind
    return ClientRequest("x", "prompt", **{name: value})


def grammar_of(kind):
    return constraint_of(request_with(kind), 32_768, True)


def sampled_params(kind, tokenizer, seed, max_tokens):
    """Temperature 1, held to a constraint of the kind; an output has a token before its end."""
    favoured = _FAVOURED.get(kind, {}).items()
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=max_tokens, min_tokens=2, stop_token_ids=(EOS,),
        logit_bias=tuple((tokenizer.token_to_id(token), bias) for token, bias in favoured),
        constraint=grammar_of(kind),
    )  # fmt: skip
