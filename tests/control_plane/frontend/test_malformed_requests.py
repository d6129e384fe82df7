"""Several hundred malformed requests: each gets the right status and a sentence."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from control_plane.frontend.validation import ModelLimits
from harness.services.frontend_fakes import TOKENIZER
from harness.services.hash_service import CONFIG, forked_service
from harness.services.kit import started
from nanocp.client import Client
from nanocp.config.prefill import PrefillConfig
from nanocp.serve.service import Served, Service
from nanocp.wire.v1 import inference_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
LIMITS = ModelLimits(vocab_size=300, max_model_len=1000, eos_token_ids=(1,), has_prefill=False)
BAD_FLOATS = (math.nan, -math.nan, math.inf, -math.inf, -5e-324, -0.5, -1e300)
BAD_INTS = (-1, -2, -(2**31))
PROMPTS = ({"token_ids": pb.TokenIds(ids=[5, 6])}, {"text": "the fox"})

# Field of the sampling parameters: (values that are wrong alone, what the sentence says would be
# right).
MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "max_tokens": ((0, *BAD_INTS), "it must be at least 1"),
    "min_tokens": ((17, 2**31 - 1, *BAD_INTS), "it must be from 0 to max_tokens"),
    "temperature": (BAD_FLOATS, "it must be a finite number, 0 (greedy) or more"),
    "top_k": (BAD_INTS, "it must be 0 (all tokens) or more"),
    "top_p": ((0.0, 1.0000001, 2.0, *BAD_FLOATS), "it must be above 0 and at most 1"),
    "seed": ((-1, -(2**63)), "it must be from 0 to 2**63 - 1"),
    "min_p": ((1.0000001, 2.0, *BAD_FLOATS), "it must be from 0 (all tokens) to 1"),
    "repetition_penalty": ((0.0, -0.0, *BAD_FLOATS), "it must be a finite number above 0"),
    "presence_penalty": ((2.1, -2.1, 1e300, math.nan, math.inf), "it must be from -2 to 2"),
    "frequency_penalty": ((2.1, -2.1, -1e300, math.nan, -math.inf), "it must be from -2 to 2"),
    "logprobs": ((21, 2**31 - 1, *BAD_INTS), "it must be from 0 to 20"),
    "prompt_logprobs": ((21, 2**31 - 1, *BAD_INTS), "it must be from 0 to 20"),
    "n": ((0, 129, 2**31 - 1, *BAD_INTS), "it must be from 1 to 128"),
    "stop_token_ids": (([300], [5, 301], [2**32 - 1]),
                       "ids must be below the vocabulary size (300)"),
    "logit_bias": (({300: 1.0}, {5: 0.0, 2**32 - 1: 1.0}),
                   "ids must be below the vocabulary size (300)"),
    "stop": (([""], ["x", ""], ["x" * 257]), "each must have from 1 to 256"),
    "bad_words": (([""], ["fox", "  "]), "each word must have at least one"),
}  # fmt: skip
OF_REQUEST: dict[str, tuple[tuple[object, ...], str]] = {
    "request_id": (("x" * 129, "\N{HOT BEVERAGE}" * 200), "it must have at most 128"),
    "priority": ((101, -101, 2**31 - 1, -(2**31)), "it must be from -100 to 100"),
    "queue_timeout_ms": ((0, *BAD_INTS), "it must be at least 1"),
    "token_ids": (
        (pb.TokenIds(), pb.TokenIds(ids=[300]), pb.TokenIds(ids=[5] * 999 + [2**32 - 1])),
        "",  # Two kinds of mistakes: the field's name is looked for.
    ),
}
TOO_MANY = {
    "logit_bias": (dict.fromkeys(range(3), 101.0), "it must be from -100 to 100"),
    "stop": (["x"] * 17, "at most 16 fit"),
    "bad_words": (["qz" * 300], "at most 512 fit"),
    "stop_token_ids": (range(100, 165), "at most 64 fit"),
    "max_tokens": (2**31 - 1, "it must be at most 1000"),
}


def corpus() -> Iterator[tuple[pb.GenerateRequest, str, str]]:
    """(message, field that the sentence names, what it says would be right)."""
    for prompt, (field, (values, right)) in itertools.product(PROMPTS, MISTAKES.items()):
        for value in values:
            yield (
                pb.GenerateRequest(**prompt, sampling=pb.SamplingParameters(**{field: value})),
                field,
                right,
            )
    for field, (value, right) in TOO_MANY.items():
        message = pb.GenerateRequest(**PROMPTS[0], sampling=pb.SamplingParameters(**{field: value}))
        yield message, field, right
    for field, (values, right) in OF_REQUEST.items():
        for value in values:
            yield (
                pb.GenerateRequest(
                    **({field: value} | (PROMPTS[1] if field != "token_ids" else {}))
                ),
                field,
                right,
            )
    # Beside a field that is right, beside every other that is wrong: the wrong one is named, or one
    # of the two.
    right_ones = {
        "temperature": 0.5, "top_p": 0.5, "max_tokens": 3, "stop": ["x"], "ignore_eos": True,
    }  # fmt: skip
    for field, (values, right) in MISTAKES.items():
        others = {name: value for name, value in right_ones.items() if name != field}
        yield (
            pb.GenerateRequest(
                **PROMPTS[0], sampling=pb.SamplingParameters(**others, **{field: values[-1]})
            ),
            field,
            right,
        )
    yield (
        pb.GenerateRequest(**PROMPTS[0], sampling=pb.SamplingParameters(n=2)),
        "n",
        "it must be 1 when temperature is 0",
    )
    no_prefill = pb.SamplingParameters(prompt_logprobs=1)
    yield (
        pb.GenerateRequest(**PROMPTS[0], sampling=no_prefill),
        "prompt_logprobs",
        "KV is synthetic here",
    )
    for message in (
        pb.GenerateRequest(),
        pb.GenerateRequest(sampling=pb.SamplingParameters(max_tokens=3), priority=1),
    ):
        yield message, "prompt", "give either text or token_ids"
    yield pb.GenerateRequest(text=""), "text", "a prompt has at least one token"
    for length in (1000, 1001, 5000):
        yield (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * length)),
            "token_ids",
            "maximum context length is 1000 tokens",
        )
    for length in (985, 990, 999):
        message = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5] * length), sampling=pb.SamplingParameters(min_tokens=16)
        )
        yield message, "min_tokens", f"it must be at most {1000 - length}"


CORPUS = list(corpus())
WELL_FORMED = pb.GenerateRequest(
    request_id="well formed",
    text="the fox",
    sampling=pb.SamplingParameters(max_tokens=3, seed=1, stop=["never"]),
).SerializeToString()


def unreadable() -> Iterator[bytes]:
    """Bytes that are no GenerateRequest: cut short, of another wire type, not UTF-8, endless."""
    for end in range(1, len(WELL_FORMED)):
        try:
            pb.GenerateRequest.FromString(WELL_FORMED[:end])
        except Exception:
            yield WELL_FORMED[:end]
    yield from (
        b"\xff" * 7,
        b"\x12\x02\xff\xfe",
        b"\x0a\x02\xc3\x28",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x07",
        b"\x00\x00",
    )
    yield from (bytes([field << 3 | 2, 0x7F]) for field in range(1, 16))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    config = replace(
        CONFIG,
        cluster=replace(CONFIG.cluster, num_instances=1, max_model_len=1000),
        prefill=PrefillConfig(synthetic_kv=True),
    )
    served = Served(
        LIMITS, TOKENIZER, Path("no-checkpoint"), "harness.services.hash_members:build_instance"
    )
    with started(forked_service(config, served)) as service:
        yield service


@pytest.fixture
def calls(service: Service) -> Iterator[dict[str, grpc.MultiCallable]]:
    """Bytes that are no messages are refused by both methods, while a request runs."""
    with Client(service.address) as client, grpc.insecure_channel(service.address) as channel:
        running = client.generate(
            [5], max_tokens=900, seed=1, request_id="running", timeout_s=150, ignore_eos=True
        )
        first = next(running)
        yield {
            "Generate": lambda data: next(
                channel.unary_stream("/nanocp.v1.Inference/Generate")(data, timeout=60)
            ),
            "GenerateUnary": lambda data: channel.unary_unary("/nanocp.v1.Inference/GenerateUnary")(
                data, timeout=60
            ),
        }
        ids = [*first.token_ids, *(token_id for chunk in running for token_id in chunk.token_ids)]
        assert len(ids) == 900, "a mistake of one client ends no other request"
        deadline = time.monotonic() + 60
        while (load := client.loads()).instances[0].frames_free < CONFIG.cluster.num_frames:
            assert time.monotonic() < deadline, load
            time.sleep(0.02)
        assert (load.num_running, load.num_waiting, load.instances[0].num_rows) == (0, 0, 0)


def test_there_are_enough_of_them():
    assert len({message.SerializeToString() for message, _, _ in CORPUS}) >= 200
    assert len(set(unreadable())) >= 20


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
def test_each_mistake_is_named_with_what_would_be_right(calls, method):
    for message, field, right in CORPUS:
        with pytest.raises(grpc.RpcError) as raised:
            calls[method](message.SerializeToString())
        status, sentence = raised.value.code(), raised.value.details()
        case = str(message)[:200], status, sentence
        assert status is INVALID, case
        assert sentence.startswith(field) and right in sentence, case
        assert len(sentence) < 300 and sentence.isprintable(), case


def test_of_two_mistakes_one_is_named(calls):
    for (one, (values, _)), (other, (others, _)) in itertools.combinations(MISTAKES.items(), 2):
        parameters = pb.SamplingParameters(**{one: values[0], other: others[0]})
        with pytest.raises(grpc.RpcError) as raised:
            calls["Generate"](
                pb.GenerateRequest(**PROMPTS[0], sampling=parameters).SerializeToString()
            )
        assert raised.value.code() is INVALID
        assert raised.value.details().startswith((one, other))


def test_bytes_that_are_no_message_are_refused_as_such(calls):
    for data in unreadable():
        for call in calls.values():
            with pytest.raises(grpc.RpcError) as raised:
                call(data)
            assert raised.value.code() is INVALID, (data, raised.value)
            assert "cannot be read as nanocp.v1.GenerateRequest" in raised.value.details()


def test_the_other_methods_say_what_is_wrong_too(service):
    with grpc.insecure_channel(service.address) as channel:
        for method, data, status, sentence in (
            ("Control/Abort", b"", INVALID, "request_ids is empty; name at least one request"),
            (
                "Control/Abort",
                b"\x0a\x01x",
                grpc.StatusCode.NOT_FOUND,
                "no request is running or waiting as 'x'",
            ),
            ("Control/Abort", b"\x0a\x7fx", INVALID, "cannot be read as nanocp.v1.AbortRequest"),
            ("Control/GetLoads", b"\xff", INVALID, "cannot be read as nanocp.v1.GetLoadsRequest"),
            (
                "Control/GetServerInfo",
                b"\x0a",
                INVALID,
                "cannot be read as nanocp.v1.GetServerInfoRequest",
            ),
            ("Inference/Complete", b"", grpc.StatusCode.UNIMPLEMENTED, "Method not found"),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/nanocp.v1.{method}")(data, timeout=60)
            assert (raised.value.code(), sentence in raised.value.details()) == (status, True), (
                raised.value
            )
