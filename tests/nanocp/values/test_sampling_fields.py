"""The table of sampling parameters, and everything that spells one: each must know every row."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from control_plane.frontend.access.api_keys import ApiKeys
from control_plane.frontend.client_request import NOWHERE, ClientRequest
from control_plane.frontend.grpc.servicers import _client_request
from control_plane.frontend.http.client_requests import chat_request, completion_requests
from control_plane.frontend.http.protocol import ChatRequest, CompletionRequest
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from control_plane.frontend.validation import ModelLimits, validated
from harness.paths import ROOT
from nanocp.cli.ask.sampling import read_sampling
from nanocp.cli.options.vllm_flags import answers
from nanocp.client.messages import Sampling, request_message
from nanocp.values.sampling import RowInput, SamplingParams
from nanocp.values.sampling_fields import (
    BOUNDS,
    CONSTRAINTS,
    CONTROLS,
    SamplingControls,
    SamplingRequest,
)
from nanocp.wire import rows
from nanocp.wire.v1 import inference_pb2

NAMES = [field.name for field in fields(SamplingRequest)]
DEFAULTS = {name: getattr(SamplingRequest(), name) for name in NAMES}
TYPES = get_type_hints(SamplingRequest)
OTHER = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.5, "repetition_penalty": 1.5,
    "presence_penalty": -0.5, "frequency_penalty": 0.25, "n": 2, "max_tokens": 9, "min_tokens": 4,
    "seed": 6, "stop_token_ids": [5], "ignore_eos": True, "stop": ["end"],
    "include_stop_str_in_output": True, "logit_bias": {7: 1.5}, "bad_words": ["no"], "logprobs": 1,
    "prompt_logprobs": 2, "json_schema": '{"type": "null"}', "regex": "a+", "choice": ["a", "b"],
    "grammar": 'start: "a"', "json_object": True, "structural_tag": '{"structures": []}',
}  # fmt: skip
"""A value of each parameter that is not its default."""
MESSAGE = inference_pb2.SamplingParameters.DESCRIPTOR.fields_by_name
PROTO = (ROOT / "proto/nanocp/wire/v1/inference.proto").read_text()


def test_every_row_has_a_value_to_try_that_is_not_its_default():
    assert set(OTHER) == set(NAMES), "each row has a value in OTHER above"
    assert all(OTHER[name] != DEFAULTS[name] for name in NAMES)


# --- the message of gRPC


def kind_of(field):
    """The Python type of a message's field."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return Mapping
    kinds = {field.CPPTYPE_BOOL: bool, field.CPPTYPE_DOUBLE: float, field.CPPTYPE_STRING: str}
    kind = kinds.get(field.cpp_type, int)
    return [kind] if field.is_repeated else kind


def plain(hint):
    """int for int | None, [int] for Sequence[int], Mapping for Mapping[int, float]."""
    options = [option for option in get_args(hint) or (hint,) if option is not type(None)]
    origin = getattr(hint, "__origin__", None)
    if origin is None:
        return options[0]
    return Mapping if issubclass(origin, Mapping) else options


@pytest.mark.parametrize("name", NAMES)
def test_the_grpc_message_has_it_with_its_type(name):
    assert name in MESSAGE, "SamplingParameters of inference.proto lacks it; then run make proto"
    assert kind_of(MESSAGE[name]) == plain(TYPES[name])
    is_optional = MESSAGE[name].has_presence
    assert is_optional or DEFAULTS[name] in (False, (), {}), "absent must be the default"


@pytest.mark.parametrize("name", [name for name in NAMES if type(DEFAULTS[name]) in (int, float)])
def test_the_grpc_message_says_its_default(name):
    comment = re.search(rf"((?:  //[^\n]*\n)+)  optional \w+ {name} = ", PROTO)
    said = comment and re.search(r"Default:? (-?[\d.]+)", comment.group(1))
    assert said, "its comment in inference.proto does not say its default, as Default N"
    assert float(said.group(1).rstrip(".")) == DEFAULTS[name]


def test_the_grpc_message_has_nothing_else():
    assert set(MESSAGE) == set(NAMES)


NO_KEYS = ApiKeys(())


def context():
    return SimpleNamespace(time_remaining=lambda: None, invocation_metadata=lambda: ())


def test_the_grpc_endpoint_reads_every_row():
    asked = inference_pb2.SamplingParameters(**OTHER)
    request = _client_request(
        inference_pb2.GenerateRequest(text="x", sampling=asked), context(), "Generate", NO_KEYS, {}
    )
    assert {name: getattr(request, name) for name in NAMES} == OTHER
    silent = inference_pb2.GenerateRequest(text="x")
    request = _client_request(silent, context(), "Generate", NO_KEYS, {})
    assert {name: getattr(request, name) for name in NAMES} == DEFAULTS


def test_both_apis_take_the_checkpoints_defaults_where_a_request_is_silent():
    defaults = {
        "temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.15
    }  # fmt: skip
    assert set(defaults) <= set(CONTROLS)
    for given in {}, {"repetition_penalty": 1.0, "temperature": 0.0}:
        message = inference_pb2.GenerateRequest(
            text="x", sampling=inference_pb2.SamplingParameters(**given)
        )
        by_grpc = _client_request(message, context(), "Generate", NO_KEYS, defaults)
        model = replace(MODEL, default_sampling=defaults)
        body = CompletionRequest.model_validate({"prompt": "x", **given})
        (by_http,) = completion_requests(body, model, "1", NOWHERE)
        for asked in by_grpc, by_http:
            assert {name: getattr(asked, name) for name in defaults} == {**defaults, **given}


# --- HTTP

MODEL = ServedModel("m", "m", ChatTemplate("x", {}))
HTTP_DEFAULTS = DEFAULTS | {"temperature": 1.0, "stop": [], "stop_token_ids": [], "bad_words": []}
"""OpenAI's API samples at temperature 1; an absent list is an empty one."""


def body_of(name):
    """The JSON of a parameter that is given."""
    value = OTHER[name]
    if name in CONSTRAINTS:
        return {"structured_outputs": {{"json_schema": "json"}.get(name, name): value}}
    return {
        name: {str(key): bias for key, bias in value.items()} if name == "logit_bias" else value
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_completion_has_it(name):
    (absent,) = completion_requests(CompletionRequest(prompt="x"), MODEL, "id", NOWHERE)
    body = CompletionRequest(prompt="x", **body_of(name))
    (given,) = completion_requests(body, MODEL, "id", NOWHERE)
    assert getattr(absent, name) == HTTP_DEFAULTS[name]
    assert getattr(given, name) == OTHER[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "logprobs"])
def test_a_chat_has_it(name):
    message = {"messages": [{"role": "user", "content": "x"}]}
    body = ChatRequest(**message, **body_of(name))
    request, _ = asyncio.run(chat_request(body, MODEL, "id", NOWHERE))
    assert getattr(request, name) == OTHER[name]


# --- the Python client and the command line


@pytest.mark.parametrize("name", NAMES)
def test_the_python_client_sends_it(name):
    hints = get_type_hints(Sampling)
    assert set(hints) == set(NAMES), "Sampling of nanocp/client/messages.py has other names"
    options = get_args(hints[name]) if name in ("stop", "bad_words") else (hints[name],)
    assert plain(options[-1]) == plain(TYPES[name])
    message = request_message("x", "", {name: OTHER[name]}, 0, None)
    assert message.sampling == inference_pb2.SamplingParameters(**{name: OTHER[name]})


@pytest.mark.parametrize("name", NAMES)
def test_generate_takes_it_in_its_json(name):
    value = OTHER[name]
    asked = read_sampling(json.dumps({name: value}))
    assert asked == {name: value}
    with pytest.raises(ValueError, match=f"^{name} is .*; it must be "):
        read_sampling(json.dumps({name: [[]]}))


@pytest.mark.parametrize("name", CONTROLS)
def test_bench_has_vllms_flag_for_what_shapes_the_distribution(name):
    answer = answers("bench")[f"--{name.replace('_', '-')}"]
    assert (answer.option, answer.key) == ("--extra-body", name)


# --- on the way to the sampler


def test_a_client_request_is_a_row_of_every_parameter():
    request = ClientRequest("x", "prompt", **OTHER)
    assert {name: getattr(request, name) for name in NAMES} == OTHER


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_the_sampler_gets_it(name):
    """From a client's request to a row, and through the message between members."""
    limits = ModelLimits(vocab_size=100, max_model_len=1000, eos_token_ids=(3,))
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [11],
        least_tokens=lambda text: 1,
        added_tokens=frozenset(),
        grammar_check=None,
    )
    others = {name: value for name, value in OTHER.items() if name not in CONSTRAINTS}
    request = ClientRequest([1], "prompt", **(others | {"n": 1, "stop": [], "regex": "a+"}))
    (params,) = validated(request, limits, tokenizer).params
    as_rows_have_it = {
        "logit_bias": ((7, 1.5),),
        "bad_words": ((11,),),
        # The end of sequence stops a row with a constraint, also beside ignore_eos.
        "stop_token_ids": (3, 5),
    }
    if name == "constraint":
        header, answer = json.loads(params.constraint)["grammars"]
        assert "start: @answer" in header["lark_grammar"]
        assert answer["lark_grammar"] == "start: /a+/" and answer["name"] == "answer"
    else:
        assert getattr(params, name) == as_rows_have_it.get(name, OTHER.get(name))
    row = RowInput(1, params, "h:1")
    assert rows.decode_row_input(rows.encode_row_input(row)).params == params


@pytest.mark.parametrize("name", sorted({field.name for field in fields(SamplingParams)}))
def test_an_instance_reads_it(name):
    """All but ignore_eos, which the front end has put into stop_token_ids."""
    sources = (ROOT / "data_plane" / "instance").glob("*.py")
    reads = any(re.search(rf"params\.{name}\b", path.read_text()) for path in sources)
    assert reads or name == "ignore_eos", f"the sampler reads no params.{name}"


@pytest.mark.parametrize("name", [name for name in CONTROLS if name != "temperature"])
def test_a_control_counts_in_the_work_of_the_sampler(name):
    drawn, controlled = SamplingParams(temperature=1), {"temperature": 1, name: OTHER[name]}
    is_counted = SamplingParams(**controlled).work != drawn.work
    assert is_counted, f"SamplingParams.work of nanocp/values/sampling.py does not count {name}"


def test_defaults_of_a_row_are_the_clients():
    own = {"seed": 0, "constraint": "", "logit_bias": (), "bad_words": (), "stop_token_ids": ()}
    for field in fields(SamplingParams):
        expected = own[field.name] if field.name in own else DEFAULTS[field.name]
        assert getattr(SamplingParams(), field.name) == expected


# --- bounds


def test_every_number_has_bounds():
    numbers = {name for name in NAMES if plain(TYPES[name]) in (int, float)}
    # Its upper bound is another parameter.
    assert set(BOUNDS) == numbers - {"min_tokens"}
    assert {field.name for field in fields(SamplingControls)} <= set(BOUNDS)


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_a_number_out_of_bounds_is_named_with_what_it_must_be(name):
    bounds = BOUNDS[name]
    bounds.check(name, OTHER[name])
    wrong = [bounds.low - 1, float("nan"), float("inf"), float("-inf")]
    wrong += [bounds.low] if bounds.excludes_low else []
    wrong += [bounds.high + 1] if bounds.high < float("inf") else []
    for value in wrong:
        with pytest.raises(
            ValueError, match=f"^{name} is .*; it must be {re.escape(bounds.sentence)}$"
        ):
            bounds.check(name, value)
    for value in (bounds.low, bounds.high):
        if abs(value) < float("inf") and not (value == bounds.low and bounds.excludes_low):
            bounds.check(name, value)


@pytest.mark.parametrize("name", NAMES)
def test_the_document_of_the_apis_names_it(name):
    is_named = f"`{name}`" in (ROOT / "docs/use/api.md").read_text()
    assert is_named, f"docs/use/api.md has no row for {name}"
