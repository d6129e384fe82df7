"""Strict tools that a model may call or not: in each form of calls, arguments follow schemas."""

import json
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from control_plane.frontend.client_request import ClientRequest, Reasoning
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.answer_parser import (
    THINK,
    AnswerParser,
    CallContext,
    PartKind,
)
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from control_plane.frontend.http.tools.strict_calls import strict_calls
from control_plane.frontend.http.tools.tool_schemas import property_of, types_of
from control_plane.frontend.text.constraint import constraint_of
from data_plane.instance.grammar import GrammarMasks, MaskedRow
from data_plane.instance.sampler import RowMasks, sample_rows
from harness.services.frontend_fakes import TOKENIZER, params_of, running, with_tokens
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import SamplingParams

EOS = 1
INNER = ("<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>",
         "<arg_value>", "</arg_value>", "</parameter>")  # fmt: skip
"""Markers inside calls."""
FUNCTIONS = [
    {"name": "weather", "strict": True,
     "parameters": {"type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 5},
                                   "days": {"type": "integer", "minimum": 1, "maximum": 99},
                                   "at": {"$ref": "#/$defs/zone"}},
                    "required": ["city", "at"],
                    "additionalProperties": False,
                    "$defs": {"zone": {"enum": ["UTC", "CET"]}}}},
    {"name": "stop"},
    {"name": "tree",
     "parameters": {
         "type": "object",
         "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9},
                        "next": {"anyOf": [{"enum": [None, *range(1, 9)]}, {"$ref": "#"}]},
                        "same": {"$ref": "#/properties/v"},
                        "name": {"type": "string", "pattern": "^[a-c/]{1,3}$", "format": "path"},
                        "unit": {"type": ["string", "null", "boolean"], "maxLength": 3},
                        "mode": {"anyOf": [{"enum": ["a b", "c"]}, {"enum": [5, "x", None]}]}},
         "required": ["v", "next", "name", "mode"], "additionalProperties": False,
     }},
]  # fmt: skip
SCHEMAS = {one["name"]: one.get("parameters", {"maxProperties": 0}) for one in FUNCTIONS}
"""What each call's arguments must follow."""


def markers_of(form):
    """Every marker of a form, and those of reasoning."""
    return {*form.begins, form.end, *form.section, *INNER, *THINK}


def sampled(masks, tokenizer, grammar, begin, number):
    """Sample at temperature 1 from random logits, behind the beginning of a call."""
    num_tokens = tokenizer.get_vocab_size()
    params = SamplingParams(
        temperature=1.0, seed=number, max_tokens=400, stop_token_ids=(EOS,),
        logit_bias=((EOS, 6.0),),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(number)
    output = tokenizer.encode(begin, add_special_tokens=False).ids
    while output[-1] != EOS and len(output) < 400:
        logits = torch.randn((1, num_tokens), generator=generator)
        mask = masks.masks([MaskedRow(number, 0, grammar, output)])
        output += sample_rows(logits, [params], [output], [()], RowMasks([0], mask))
    assert output[-1] == EOS
    return tokenizer.decode(output[:-1], skip_special_tokens=False)


def parsed(form, text, has_reasoning, random):
    """The parts of a text that comes in pieces."""
    parser, parts = AnswerParser(CallContext(form, SCHEMAS), has_reasoning, False), []
    while text:
        size = random.randrange(1, 9)
        parts += parser.feed(text[:size])
        text = text[size:]
    return parts + parser.finish()


@pytest.mark.parametrize("num_samples", [6, pytest.param(200, marks=pytest.mark.system)])
@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", [name for name in CALL_FORMS if name != "glm47"])
def test_each_call_of_a_sample_follows_its_schema(name, are_tokens, num_samples):
    """Random logits are the hardest model; markers are tokens of their own, or texts."""
    form = CALL_FORMS[name]
    markers = frozenset(markers_of(form)) if are_tokens else frozenset()
    tokenizer = with_tokens(*sorted(markers))
    library_tokenizer = LLTokenizer(tokenizer.to_str(), eos_token=[EOS])
    masks = GrammarMasks(library_tokenizer, tokenizer.get_vocab_size(), [EOS])
    request = ClientRequest(
        "x",
        "prompt",
        structural_tag=strict_calls(name, FUNCTIONS),
        reasoning=Reasoning(*THINK, has_begun=False) if are_tokens else None,
    )
    grammar = constraint_of(request, 32_768, True, markers)
    called, random = set(), Random(name)
    for number in range(num_samples):
        section = form.section[0] if form.section and number % 2 else ""
        begin = f"Well.\n{section}{form.begins[0]}"
        if are_tokens and number % 3 == 0:
            begin = f"<think>a <b> {{</think>\n{begin}"
        text = sampled(masks, tokenizer, grammar, begin, number)
        parts = parsed(form, text, are_tokens, random)
        calls = [part.call for part in parts if part.kind is PartKind.CALL]
        assert calls, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            called.add(call.name)
        content = "".join(part.text for part in parts if part.kind is PartKind.CONTENT)
        assert form.begins[0] not in content, text
    assert called == set(SCHEMAS) or num_samples < len(SCHEMAS) ** 3


def asked(function, **fields):
    tools = [{"type": "function", "function": function}]
    return {"messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}


def test_only_auto_with_a_strict_tool_holds_text_to_tags():
    """The row has the grammar of the tags, and nothing if no tool is strict or none may be used."""
    model = ServedModel("tiny", "c", ChatTemplate("<tool_call>", {}), call_form="hermes")
    weather = FUNCTIONS[0]
    with running(model=model) as service:
        for body, is_held in (
            (asked(weather), True),
            (asked(weather, tool_choice="auto", stream=True), True),
            (asked(weather | {"strict": False}), False),
            (asked(weather, tool_choice="none"), False),
            (asked(FUNCTIONS[1]), False),
        ):
            with ThreadPoolExecutor(1) as pool:
                url = f"{service.url}/v1/chat/completions"
                answer = pool.submit(httpx.post, url, json=body, timeout=60)
                submission = service.submitted()
                service.instance.deliver(submission.request_id, 0, [5, EOS], FinishReason.STOP)
                assert answer.result(60).status_code == 200
            constraint = params_of(submission).constraint
            assert ("arguments" in constraint) == bool(constraint) == is_held, constraint


SELF = {"$ref": "#/properties/a"}


def with_property(schema, name="a"):
    return {"type": "object", "properties": {name: schema}}


@pytest.mark.parametrize(("name", "change"), [
    ("glm45", {"parameters": {"type": "object", "anyOf": [{}]}}),
    ("glm45", {"parameters": {"type": "object", "required": ["gone"]}}),
    ("kimi_k2", {"name": "a b"}),
    ("qwen3_coder", {"parameters": with_property({"type": "string", "pattern": "a|^b"})}),
    ("qwen3_coder", {"parameters": with_property({"type": "string", "not": {"const": "a"}})}),
    ("qwen3_coder", {"parameters": with_property({"not": {"const": "a"}})}),
    ("qwen3_coder", {"parameters": with_property({"type": "integer"}, "a>b")}),
    ("qwen3_coder", {"parameters": with_property({"anyOf": [SELF, {"type": "string"}]})}),
    ("qwen3_coder", {"parameters": with_property({"enum": [str(n) for n in range(2000)]})}),
    ("qwen3_coder", {"parameters": {"type": "object", "properties": 5}}),
])  # fmt: skip
def test_what_cannot_be_strict_is_refused_by_its_place(name, change):
    with pytest.raises(ApiError, match=r"tools\.1\.function\."):
        strict_calls(name, [FUNCTIONS[0], FUNCTIONS[0] | change])


@pytest.mark.parametrize(("form", "head", "tail", "never"), [
    ("glm45", "f<arg_key>a</arg_key><arg_value>", "</arg_value></tool_call>", "<arg_key>"),
    ("qwen3_coder", "\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>",
     "<parameter=b>"),
])  # fmt: skip
def test_a_text_that_could_not_be_read_is_never_written(form, head, tail, never):
    """Markers of the form, spelled in letters, are in no value."""
    functions = [{"name": "f", "parameters": with_property({"type": "string"})}]
    tag = strict_calls(form, functions)
    grammar = constraint_of(ClientRequest("x", "prompt", structural_tag=tag), 32_768, True)
    for value in ("12 <b>", never, "", tail[:8], "a\n\n b", "</tool_call>", tail):
        text = f"<tool_call>{head}{value}{tail}"
        matcher = LLMatcher(LLTokenizer(TOKENIZER._tokenizer.to_str(), eos_token=[EOS]), grammar)
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        is_allowed = matcher.try_consume_tokens(ids) == len(ids)
        parts = parsed(CALL_FORMS[form], text, False, Random(value))
        arguments = [json.loads(part.call.arguments) for part in parts if part.call]
        assert is_allowed == (never != value), value
        if is_allowed:
            assert arguments == [{"a": value if value != tail else ""}]


def test_types_of_a_schema_that_refers_to_itself_in_many_ways():
    layers = {
        str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]}
        for n in range(40)
    }
    root = {
        "properties": {"a": {"oneOf": [{"$ref": "#/properties/a"}, {"$ref": "#/$defs/0"}]}},
        "$defs": {**layers, "40": {"type": ["integer", "null"]}},
    }
    assert types_of(property_of(root, "a"), root) == {"integer", "null"}
    assert types_of({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {}) == {"string"}
