"""A constraint becomes one grammar, or a sentence that names the field, in a bounded time."""

import json
import time
from dataclasses import replace

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from control_plane.frontend.client_request import ClientRequest, Reasoning
from control_plane.frontend.constraint import constraint_of
from harness.constraints import KINDS, grammar_of, request_with
from harness.frontend_fakes import TOKENIZER


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
        ({"regex": ""}, "regex is empty; it must be a constraint"),
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
    began_s = time.thread_time()
    with pytest.raises(ValueError) as caught:
        of(**fields)
    assert time.thread_time() - began_s < 0.1
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
    began_s = time.thread_time()
    assert of(**fields)
    assert time.thread_time() - began_s < 0.3


def test_a_service_or_a_model_without_it_says_so():
    with pytest.raises(ValueError, match=r"^regex cannot be used: structured output is off"):
        of(max_bytes=0, regex="a")
    with pytest.raises(ValueError, match=r"^regex cannot be used: the model has no end"):
        of(has_eos=False, regex="a")


def added(*markers):
    """A byte-level tokenizer to which the markers were added as tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
    tokenizer.add_tokens([tokenizers.AddedToken(marker, normalized=False) for marker in markers])
    return tokenizer


@pytest.mark.parametrize("markers", [(), ("<think>", "</think>")])
# Text with tags has no beginning of a form; test_strict_calls.py has it behind reasoning.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"structural_tag"}))
def test_reasoning_comes_before_a_constraint_of_any_kind(kind, markers):
    """Markers are tokens of their own, or texts; either way only their end lets the form begin."""
    tokenizer = added(*markers)
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
    tokenizer = added(*markers)
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
