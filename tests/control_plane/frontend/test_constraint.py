"""A constraint becomes one grammar, or a sentence that names the field, in a bounded time."""

import json
import time

import pytest

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.constraint import constraint_of
from harness.constraints import KINDS, grammar_of


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


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"json_schema": "{"}, "json_schema cannot be used: "),
        ({"json_schema": "[1]"}, "json_schema cannot be used: "),
        ({"json_schema": '{"type": "wish"}'}, "json_schema cannot be used: "),
        ({"json_schema": '{"$ref": "#/gone"}'}, "Pointer '/gone' does not exist"),
        ({"json_schema": '{"$ref": "https://elsewhere.example/x"}'}, "json_schema cannot be used"),
        ({"json_schema": deep(200)}, "json_schema cannot be used: "),
        ({"json_schema": '{"type": "string", "pattern": "(?=a)b"}'}, "look-around"),
        ({"json_schema": '{"minimum": 3, "maximum": 1, "type": "integer"}'}, "json_schema cannot"),
        ({"regex": "("}, "regex cannot be used: "),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nothing"}, "grammar cannot be used: "),
        ({"grammar": 'root ::= gone "a"'}, "grammar cannot be used: "),
        ({"regex": "a" * 40_000}, "regex is too long; it must have at most 32768 bytes"),
        ({"choice": ["x" * 40_000]}, "choice is too long"),
        ({"regex": "a", "json_object": True}, "regex is given beside json_object"),
    ],
)
def test_what_cannot_be_used_is_named_within_a_tenth_of_a_second(fields, sentence):
    of(regex="warm")
    began_s = time.process_time()
    with pytest.raises(ValueError) as caught:
        of(**fields)
    assert time.process_time() - began_s < 0.1
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": json.dumps({"type": "array", "minItems": 100_000})},
        {
            "json_schema": json.dumps(
                {"anyOf": [{"type": "array", "maxItems": n} for n in range(99)]}
            )
        },
        {"regex": "(a{1,1000}){1,1000}" * 9},
        {"regex": "|".join(f"(a|b|{n})*" for n in range(20))},
        {"choice": ["a" * n for n in range(1, 200)]},
    ],
)
def test_what_is_large_is_still_quick(fields):
    of(regex="warm")
    began_s = time.process_time()
    assert of(**fields)
    assert time.process_time() - began_s < 0.3


def test_a_service_or_a_model_without_it_says_so():
    with pytest.raises(ValueError, match=r"^regex cannot be used: structured output is off"):
        of(max_bytes=0, regex="a")
    with pytest.raises(ValueError, match=r"^regex cannot be used: the model has no end"):
        of(has_eos=False, regex="a")
