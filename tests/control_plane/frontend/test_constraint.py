"""A constraint becomes one grammar, or a sentence that names the field, in a bounded time."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from control_plane.frontend.client_request import ClientRequest, Reasoning
from control_plane.frontend.text.constraint import constraint_of
from harness.services.frontend_fakes import with_tokens
from harness.vllm.constraints import KINDS, grammar_of, request_with


def of(max_bytes=32_768, has_eos=True, **fields):
    return constraint_of(ClientRequest("x", "prompt", **fields), max_bytes, has_eos)


def test_without_a_constraint_there_is_no_grammar():
    assert of() == of(max_bytes=0, has_eos=False) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_grammar_and_always_the_same(kind):
    assert grammar_of(kind) == grammar_of(kind) != ""


def deep(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return json.dumps(schema)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"json_schema": "{"}, "json_schema cannot be used: "),
    ({"json_schema": "[1]"}, "json_schema cannot be used: "),
    ({"json_schema": '{"type": "wish"}'}, "json_schema cannot be used: "),
    ({"json_schema": '{"$ref": "#/gone"}'}, "Pointer '/gone' does not exist"),
    ({"json_schema": '{"$ref": "https://elsewhere.example/x"}'}, "json_schema cannot be used"),
    ({"json_schema": deep(200)}, "json_schema cannot be used: "),
    ({"json_schema": '{"type": "string", "pattern": "(?=a)b"}'}, "look-around"),
    ({"json_schema": '{"minimum": 3, "maximum": 1, "type": "integer"}'}, "json_schema cannot"),
    ({"regex": "("}, "regex cannot be used: "),
    ({"regex": ""}, "regex is empty; it must be a constraint"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: nothing"}, "grammar cannot be used: "),
    ({"grammar": 'root ::= gone "a"'}, "grammar cannot be used: "),
    ({"regex": "a" * 40_000}, "regex is too long; it must have at most 32768 bytes"),
    ({"choice": ["x" * 40_000]}, "choice is too long"),
    ({"regex": "a", "json_object": True}, "regex is given beside json_object"),
])  # fmt: skip
def test_what_cannot_be_used_is_named_within_a_tenth_of_a_second(fields, sentence):
    of(regex="warm")
    began_s = time.thread_time()
    with pytest.raises(ValueError) as caught:
        of(**fields)
    assert time.thread_time() - began_s < 0.1
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("fields", [
    {"json_schema": json.dumps({"type": "array", "minItems": 100_000})},
    {"json_schema": json.dumps({"anyOf": [{"type": "array", "maxItems": n} for n in range(99)]})},
    {"regex": "(a{1,1000}){1,1000}" * 9},
    {"regex": "|".join(f"(a|b|{n})*" for n in range(20))},
    {"choice": ["a" * n for n in range(1, 200)]},
])  # fmt: skip
def test_what_is_large_is_still_quick(fields):
    of(regex="warm")
    began_s = time.thread_time()
    assert of(**fields)
    assert time.thread_time() - began_s < 0.3


def test_a_service_or_a_model_without_it_says_so():
    with pytest.raises(ValueError, match=r"^regex cannot be used: structured output is off"):
        of(max_bytes=0, regex="a")
    with pytest.raises(ValueError, match=r"^regex cannot be used: the model has no end"):
        of(has_eos=False, regex="a")


@pytest.mark.parametrize("markers", [(), ("<think>", "</think>")])
# Text with tags has no beginning of a form; test_strict_calls.py has it behind reasoning.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"structural_tag"}))
def test_reasoning_comes_before_a_constraint_of_any_kind(kind, markers):
    """Markers are tokens of their own, or texts; either way only their end lets the form begin."""
    tokenizer = with_tokens(*markers)
    value = {"choice": "yes", "regex": "none", "gbnf": "sum(7)", "lark": "[ab]"}.get(
        kind, '{"name":"a","n":1,"deep":{"x":true}}'
    )
    for has_begun, outputs in (
        (True, [f"so {value} </b\n</think>\n{value}", f"</think>{value}"]),
        (False, [f"<think>so</think>\n\n{value}", value]),
    ):
        request = replace(request_with(kind), reasoning=Reasoning("<think>", "</think>", has_begun))
        grammar = constraint_of(request, 32_768, True, frozenset(markers))
        for output in outputs:
            matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=[1]), grammar)
            for token_id in tokenizer.encode(output, add_special_tokens=False).ids:
                assert not matcher.is_accepting()
                assert matcher.consume_token(token_id), (output, matcher.get_error())
            assert matcher.is_accepting()


@pytest.mark.parametrize("markers", [(), ("<call>",)])
def test_tags_hold_what_is_inside_them_and_nothing_else(markers):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    tags = {
        "structures": [{"begin": "<call>f:", "schema": schema, "end": "</call>"}],
        "triggers": ["<call>"],
    }
    request = ClientRequest("x", "prompt", structural_tag=json.dumps(tags))
    grammar = constraint_of(request, 32_768, True, frozenset(markers))
    tokenizer = with_tokens(*markers)
    for output, fits in (
        ("any <b> text", True),
        ('so: <call>f:{"n":2}</call> and <call>f:{"n":1}</call>.', True),
        ('<call>f:{"n":3}</call>', False),
        ("<call>g", False),
    ):
        matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=[1]), grammar, log_level=0)
        ids = tokenizer.encode(output, add_special_tokens=False).ids
        assert matcher.consume_tokens(ids) == fits, output
        assert matcher.is_accepting() == fits


def accepts(schema: Any, *texts: str) -> list[bool]:
    """Whether the grammar of the schema takes each text as a whole."""
    request = ClientRequest(prompt="", prompt_field="prompt", json_schema=json.dumps(schema))
    grammar, taken = constraint_of(request, 32_768, True), []
    for text in texts:
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        spelled = list(text.encode())
        is_whole = matcher.try_consume_tokens(spelled) == len(spelled)
        taken.append(is_whole and matcher.is_accepting())
    return taken


NAMES = {
    "a list": ({"enum": ["a", "b"]}, "a b"),
    "one name": ({"const": "a", "title": "for people"}, "a"),
    "a pattern": ({"type": "string", "pattern": "^[a-c]$"}, "a b c"),
    "lengths": ({"minLength": 2, "maxLength": 2}, "ab \u00e9\u00e9"),
    "a reference": ({"$ref": "#/$defs/key"}, "a \u00e9\u00e9"),
    "either list": ({"anyOf": [{"const": "a"}, {"$ref": "#/$defs/key"}]}, "a \u00e9\u00e9"),
    "any text": ({"type": "string"}, "a b c ab \u00e9\u00e9 abc"),
    "a format of nobody": ({"type": "string", "format": "slug"}, "a b c ab \u00e9\u00e9 abc"),
    "a format beside its pattern": ({"format": "uuid", "pattern": "^a.?$"}, "a ab"),
    "one of some": ({"oneOf": [{"const": "a"}, {"const": "abc"}]}, "a abc"),
    "a list or a pattern": ({"anyOf": [{"$ref": "#/$defs/key"}, {"pattern": "^[bc]$"}]},
                            "a \u00e9\u00e9 b c"),
    "some patterns": ({"anyOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"enum": ["c"]}]},
                      "a ab abc b c"),
    "all": (True, "a b c ab \u00e9\u00e9 abc"),
    "none": (False, ""),
    "no text": ({"type": "integer"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("place", ["the whole", "a property", "items", "a definition"])
@pytest.mark.parametrize("kind", NAMES)
def test_names_of_properties_are_held(kind, place):
    names, allowed = NAMES[kind]
    schema: Any = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
    }
    defs = {"key": {"enum": ["a", "\u00e9\u00e9"]}, "map": schema}
    whole, form = {
        "the whole": (schema, "%s"),
        "a property": (
            {"type": "object", "properties": {"m": schema}, "required": ["m"]},
            '{"m":%s}',
        ),
        "items": ({"type": "array", "items": schema}, "[{},%s]"),
        "a definition": ({"anyOf": [{"$ref": "#/$defs/map"}]}, "%s"),
    }[place]
    asked = ["a", "b", "c", "ab", "\u00e9\u00e9", "abc"]
    texts = [form % f'{{"{name}":1}}' for name in asked]
    taken = accepts({**whole, "$defs": defs}, form % "{}", form % '{"a":"x"}', *texts)
    assert taken == [True, False, *(name in allowed.split() for name in asked)]


def test_names_beside_other_words_about_properties_are_held():
    """Named properties keep their schemas; those that may not be there are not."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "B": {"type": "integer"}},
        "propertyNames": {"pattern": "^[a-z]$"},
        "additionalProperties": {"type": "integer"},
    }
    texts = ('{"a":"x"}', '{"a":1}', '{"B":1}', '{"c":1}', '{"cc":1}', "{}")
    assert accepts(schema, *texts) == [True, False, False, True, False, True]
    # Of another request, whatever was compiled before.
    assert accepts({**schema, "propertyNames": True}, '{"B":1}', '{"cc":1}') == [True, True]


@pytest.mark.parametrize("names", [
    {"not": {}},
    {"pattern": "a", "maxLength": 3},
    {"format": "uuid"},
    3,
    {"$ref": "#/nowhere"},
    {"oneOf": [{"const": "a"}, {"enum": ["a"]}]},
    {"oneOf": [{"const": "a"}, {"type": "string"}]},
])  # fmt: skip
def test_names_that_cannot_be_held_are_refused(names):
    with pytest.raises(ValueError, match="propertyNames must be a list of names, a pattern"):
        accepts({"type": "object", "propertyNames": names})


INT64 = 1 << 63


@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"], None])
@pytest.mark.parametrize(("bounds", "inside", "outside"), [
    ({"minimum": -INT64, "maximum": INT64 - 1}, [0, -(10**18), 10**18], [INT64, -INT64 - 1]),
    ({"exclusiveMinimum": -INT64 - 1}, [0, -(10**18)], [-(10**19)]),
    ({"minimum": 0, "maximum": 2 * INT64 - 1}, [0, 10**18], [-1, 2 * INT64]),
    ({"maximum": 10**30}, [0, -(10**18)], [10**31]),
    ({"minimum": 2**53 + 1}, [2**53 + 2, 10**17], [2**53, 0]),
    ({"maximum": -(2**53) - 1}, [-(2**53) - 2], [-(2**53), 0]),
])  # fmt: skip
def test_large_bounds_are_held(kind, bounds, inside, outside):
    schema = bounds if kind is None else {"type": kind, **bounds}
    assert all(accepts(schema, *map(str, inside))), schema
    assert not any(accepts(schema, *map(str, outside))), schema


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(("word", "bound"), [("minimum", 10**25), ("exclusiveMaximum", -(10**25))])
def test_a_bound_that_leaves_nothing_that_can_be_held_is_refused(kind, word, bound):
    with pytest.raises(ValueError, match=rf"{word} is {bound}; it must be at (most|least) -?9"):
        accepts({"type": kind, word: bound})


def test_formats_that_no_grammar_knows_are_left_out_everywhere():
    for name in ("path", "binary", "uuid4", "starts_with", "e164", "no such"):
        schema = {"type": "array", "items": {"anyOf": [{"type": "string", "format": name}]}}
        assert accepts(schema, '["x"]', "[1]") == [True, False]
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": "uuid"}}}
    assert accepts(schema, '{"format":"path"}') == [False]


def test_what_a_grammar_cannot_hold_is_said_in_words_that_a_client_can_follow():
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(ValueError, match=r"oneOf has choices that may both fit .* give anyOf"):
        accepts(schema)
