"""What is wrong with a request is said by name, before anything reaches the controller."""

import math
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.validation import ModelLimits, validated
from control_plane.scheduler.queue.waiting_queue import invalidity
from harness.services.frontend_fakes import TOKENIZER, Service, make_config, running
from harness.waits import WAIT_S
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.whole import Config
from nanocp.serve.served import open_checkpoint
from nanocp.values.plan import Arrival
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

LIMITS = ModelLimits(vocab_size=300, max_model_len=1000, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(make_config(), LIMITS) as service:
        yield service


def ids(*token_ids: int) -> dict[str, pb.TokenIds]:
    return {"token_ids": pb.TokenIds(ids=token_ids)}


MALFORMED = [
    # The prompt.
    ({}, {}, "prompt is absent; give either text or token_ids"),
    ({"request_id": "only a name"}, {"max_tokens": 5}, "prompt is absent"),
    (ids(5, 6, 301, 7), {}, "token_ids has 301"),
    (ids(2**31), {}, "token_ids has 2147483648"),
    (ids(*[5] * 1000), {"max_tokens": 1}, "token_ids has 1000 tokens"),
    (ids(*[5] * 100_000), {"max_tokens": 1}, "token_ids has 100000 tokens"),
    ({"text": "x" * 1001},
     {"max_tokens": 1},
     "text has 1001 tokens, and the output needs one. This model's maximum context"),
    ({"text": "qz" * 200_000}, {"max_tokens": 1}, "text has at least 233333 tokens"),
    # The length of prompt and output.
    (ids(*[5] * 999),
     {"max_tokens": 9, "min_tokens": 2},
     "min_tokens is 2; after a prompt of 999 tokens it must be at most 1. This model's maximum"),
    (ids(5), {"max_tokens": 1001}, "max_tokens is 1001; it must be at most 1000. This model's"),
    (ids(*[5] * 999), {"max_tokens": 1001}, "max_tokens is 1001; it must be at most 1000"),
    ({"request_id": "x" * 100_000, **ids(5)}, {}, "request_id has 100000 characters"),
    # What a value must be depends on others.
    (ids(5),
     {"min_tokens": 3, "max_tokens": 2},
     "min_tokens is 3; it must be from 0 to max_tokens (2)"),
    (ids(5),
     {"logit_bias": {4: 100.5}},
     "logit_bias of token 4 is 100.5; it must be from -100 to 100"),
    (ids(5), {"logit_bias": {4: math.nan}}, "logit_bias of token 4 is nan"),
    (ids(5), {"logit_bias": {4: -math.inf}}, "logit_bias of token 4 is -inf"),
    (ids(5), {"bad_words": ["qz" * 257]}, "bad_words have 514 tokens together; at most 512 fit"),
    (ids(5), {"bad_words": ["x"] * 513}, "bad_words has 513 words; at most 512 tokens fit"),
    (ids(5), {"stop": ["x"] * 17}, "stop has 17 strings; at most 16 fit"),
    (ids(5), {"n": -1, "temperature": 1.0}, "n is -1"),
    (ids(5), {"n": 129, "temperature": 1.0}, "n is 129"),
    (ids(5), {"n": 2}, "n is 2; it must be 1 when temperature is 0: greedy choices would be alike"),
    (ids(5),
     {"stop_token_ids": range(2, 67)},
     "stop_token_ids has 66 ids, the model's 1 end-of-sequence tokens included; at most 64"),
    # Several at once: one of them is named.
    ({"request_id": "x" * 129, **ids(5)}, {"max_tokens": 0}, "request_id has 129 characters"),
    ({"text": ""}, {"temperature": math.nan, "max_tokens": 0}, "is"),
]  # fmt: skip
"""Beside those of test_malformed_requests.py, which any value alone makes."""


def first_response(service: Service, request: pb.GenerateRequest) -> pb.GenerateResponse:
    with grpc.insecure_channel(service.address) as channel:
        return next(rpc.InferenceStub(channel).Generate(request, timeout=WAIT_S))


@pytest.mark.parametrize(
    ("fields", "sampling", "sentence"), MALFORMED, ids=[case[2][:40] for case in MALFORMED]
)
def test_a_malformed_request_is_refused_by_name(service, fields, sampling, sentence):
    request = pb.GenerateRequest(**fields, sampling=pb.SamplingParameters(**sampling))
    with pytest.raises(grpc.RpcError) as raised:
        first_response(service, request)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in raised.value.details()
    assert service.controller.submissions.empty()


def test_there_are_enough_malformed_requests():
    assert len(MALFORMED) >= 20


def test_of_two_kinds_of_prompt_the_last_on_the_wire_counts(service):
    # A oneof cannot hold both; what a broken client sends twice is read as protobuf says.
    data = (
        pb.GenerateRequest(text="hello").SerializeToString()
        + pb.GenerateRequest(**ids(300)).SerializeToString()
    )
    with pytest.raises(grpc.RpcError) as raised:
        first_response(service, pb.GenerateRequest.FromString(data))
    assert "token_ids has 300" in raised.value.details()


def test_words_of_tokens_that_the_model_has_not_are_refused():
    """The sampler would look for their logits: one request would end the cluster."""
    request = ClientRequest([5], "token_ids", bad_words=["fox"])
    highest = max(TOKENIZER.encode("fox") + TOKENIZER.encode(" fox"))
    limits = ModelLimits(vocab_size=highest, max_model_len=1000)
    with pytest.raises(
        ValueError, match=rf"^bad_words' 'fox' has {highest}; ids must be below .* \({highest}\)$"
    ):
        validated(request, limits, TOKENIZER)
    validated(request, replace(limits, vocab_size=highest + 1), TOKENIZER)


@pytest.mark.parametrize(
    ("prompt_len", "max_held", "left"),
    [(10, None, 990), (10, 5000, 990), (10, 257, 247), (256, 257, 1), (300, 257, 1)],
)
def test_an_absent_max_tokens_is_what_the_model_and_the_frames_leave(prompt_len, max_held, left):
    """A prompt that no frames hold is left to the scheduler, which has the numbers."""
    request = ClientRequest([5] * prompt_len, "messages", max_tokens=None)
    limits = replace(LIMITS, max_held_tokens=max_held)
    (params,) = validated(request, limits, TOKENIZER).params
    assert params.max_tokens == left
    # What is asked for is clipped to it, and the checkpoint's default is.
    for most in (1, 16, left, 1000):
        for asked, default in ((most, None), (most, 3), (None, most), (None, 10_000)):
            request = ClientRequest([5] * prompt_len, "messages", max_tokens=asked, n=2, seed=1)
            defaults = {} if default is None else {"max_tokens": default}
            limits = replace(limits, default_sampling=defaults)
            (params, _) = validated(request, limits, TOKENIZER).params
            assert params.max_tokens == min(asked or default or 1000, left)


def test_what_must_be_generated_is_not_clipped():
    """A prompt whose output no frames hold is left to the scheduler, which has the numbers."""
    request = ClientRequest([5] * 10, "prompt", max_tokens=500, min_tokens=300)
    (params,) = validated(request, replace(LIMITS, max_held_tokens=257), TOKENIZER).params
    assert params.max_tokens == 300
    request = ClientRequest([5] * 10, "messages", max_tokens=None, min_tokens=300)
    (params,) = validated(
        request, replace(LIMITS, default_sampling={"max_tokens": 20}), TOKENIZER
    ).params
    assert params.max_tokens == 300
    with pytest.raises(ValueError, match=r"^min_tokens is 991; after a prompt of 10 tokens"):
        validated(replace(request, min_tokens=991), LIMITS, TOKENIZER)


def test_both_ends_of_sequence_end_a_request_unless_it_says_otherwise():
    limits = replace(LIMITS, eos_token_ids=(7, 3), tokenizer_eos_id=5)

    def stop_ids(**fields: object) -> tuple[int, ...]:
        request = ClientRequest([9], "prompt", **fields)  # type: ignore[arg-type]
        return validated(request, limits, TOKENIZER).params[0].stop_token_ids

    assert stop_ids() == (3, 5, 7)
    assert stop_ids(stop_token_ids=[5, 8]) == (3, 5, 7, 8)
    assert stop_ids(stop_token_ids=[5, 8], ignore_eos=True) == (5, 8)
    assert stop_ids(regex="a", ignore_eos=True) == (3, 5, 7)
    assert replace(limits, tokenizer_eos_id=None).end_token_ids == (3, 7)


@pytest.mark.parametrize(
    ("num_frames", "partials", "layout"),
    [(4, 3, "instances"), (4, 1, "instances"), (1, 63, "instances"), (5, 3, "pipeline")],
)
def test_what_a_checkpoint_is_said_to_hold_is_what_the_scheduler_takes(
    tiny_checkpoint, num_frames, partials, layout
):
    bounds = replace(BoundsConfig(), max_partials=partials)
    cluster = ClusterConfig(
        num_instances=2, num_frames=num_frames, max_model_len=2048, bounds=bounds, layout=layout
    )
    limits = open_checkpoint(Config(cluster=cluster), tiny_checkpoint).limits
    request = ClientRequest([5] * 10, "messages", max_tokens=None)
    (params,) = validated(request, limits, None).params
    assert invalidity(Arrival(1, 10, params.max_tokens), cluster) is None
    assert "need" in (invalidity(Arrival(1, 10, params.max_tokens + 1), cluster) or "")


@pytest.mark.parametrize(("fields", "sampling"), [
    (ids(0), {}),
    ({"priority": -100, "queue_timeout_ms": 2**31 - 1, **ids(5)}, {}),
    (ids(299), {"max_tokens": 999}),
    (ids(*[5] * 999), {"max_tokens": 1}),
    (ids(*[5] * 999), {"max_tokens": 1000}),
    (ids(*[5] * 999), {}),
    ({"text": "x"}, {"min_tokens": 16, "max_tokens": 16}),
    ({"request_id": "x" * 128, **ids(5)}, {}),
    (ids(5), {"temperature": 5e-324, "top_p": 5e-324, "top_k": 2**31 - 1, "seed": 2**63 - 1}),
    (ids(5),
     {"min_p": 1.0, "repetition_penalty": 5e-324, "presence_penalty": -2.0,
      "frequency_penalty": 2.0}),
    (ids(5), {"logit_bias": {0: -100.0, 299: 100.0}, "bad_words": ["qz" * 64, "x"]}),
    (ids(5), {"stop": ["\N{HOT BEVERAGE}" * 256] * 16, "include_stop_str_in_output": True}),
    (ids(5), {"logprobs": 20}),
    (ids(5), {"stop_token_ids": [2] * 100}),
    (ids(5), {"stop_token_ids": range(1, 65)}),
    (ids(5), {"stop_token_ids": range(2, 66), "ignore_eos": True}),
])  # fmt: skip
def test_what_is_just_allowed_goes_through(service, fields, sampling):
    request = pb.GenerateRequest(**fields, sampling=pb.SamplingParameters(**sampling))
    with grpc.insecure_channel(service.address) as channel:
        call = rpc.InferenceStub(channel).Generate(request, timeout=WAIT_S)
        submission = service.submitted()
        expected = (
            fields["token_ids"].ids if "token_ids" in fields else TOKENIZER.encode(fields["text"])
        )
        assert list(submission.prompt_ids) == list(expected)
        call.cancel()
    assert service.next_abort() == submission.request_id
