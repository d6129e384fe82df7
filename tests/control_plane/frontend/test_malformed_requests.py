"""Several hundred malformed requests: each gets the right status and a sentence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from control_plane.frontend.validation import ModelLimits
from harness.exact.settings import configured
from harness.services.frontend_fakes import TOKENIZER
from harness.services.hash_service import CONFIG, forked_service
from harness.services.kit import ids_of, started
from harness.waits import until
from nanocp.client import Client
from nanocp.serve.service import Served, Service
from nanocp.wire.v1 import inference_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
LIMITS = ModelLimits(vocab_size=300, max_model_len=1000, eos_token_ids=(1,), has_prefill=False)
BAD_FLOATS = (math.nan, -math.nan, math.inf, -math.inf, -5e-324, -0.1, -1e300)
BAD_INTS = (-1, -2, -(2**31))
PROMPTS = ({"token_ids": pb.TokenIds(ids=[5, 6])}, {"text": "the fox"})

# Field of the sampling parameters: (values that are wrong alone, what the sentence says would be
# right).
MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "max_tokens": ((0, *BAD_INTS), "it must be at least 1"),
    "min_tokens": ((17, 2**31 - 1, *BAD_INTS), "it must be from 0 to max_tokens"),
    "temperature": (BAD_FLOATS, "it must be a finite number, 0 (greedy) or more"),
    "top_k": (BAD_INTS, "it must be 0 (all tokens) or more"),
    "top_p": ((0.0, -0.0, 1.0000001, 2.0, *BAD_FLOATS), "it must be above 0 and at most 1"),
    "seed": ((-1, -(2**63)), "it must be from 0 to 2**63 - 1"),
    "min_p": ((1.0000001, 2.0, *BAD_FLOATS), "it must be from 0 (all tokens) to 1"),
    "repetition_penalty": ((0.0, -0.0, -1.0, *BAD_FLOATS), "it must be a finite number above 0"),
    "presence_penalty": ((2.1, -2.1, 1e300, math.nan, math.inf), "it must be from -2 to 2"),
    "frequency_penalty": ((2.1, -2.1, -1e300, math.nan, -math.inf), "it must be from -2 to 2"),
    "logprobs": ((21, 2**31 - 1, *BAD_INTS), "it must be from 0 to 20"),
    "prompt_logprobs": ((21, 2**31 - 1, *BAD_INTS), "it must be from 0 to 20"),
    "n": ((0, 129, 2**31 - 1, *BAD_INTS), "it must be from 1 to 128"),
    "stop_token_ids": (([300], [5, 301], [2, 2**32 - 1]),
                       "ids must be below the vocabulary size (300)"),
    "logit_bias": (({300: 1.0}, {5: 0.0, 2**32 - 1: 1.0}),
                   "ids must be below the vocabulary size (300)"),
    "stop": (([""], ["x", ""], ["x" * 257]), "each must have from 1 to 256"),
    "bad_words": (([""], ["fox", "  "]), "each word must have at least one"),
}  # fmt: skip
OF_REQUEST: dict[str, tuple[tuple[object, ...], str]] = {
    "request_id": (("x" * 129, "\N{HOT BEVERAGE}" * 200), "it must have at most 128"),
    "priority": ((101, -101, 2**31 - 1, -(2**31)), "it must be from -100 to 100"),
    "queue_timeout_ms": ((0, -5, *BAD_INTS), "it must be at least 1"),
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


def asked(prompt: int = 0, /, **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**PROMPTS[prompt], sampling=pb.SamplingParameters(**sampling))


def named(field: str, value: object) -> str:
    """How a sentence on the value begins."""
    return f"{field} is {value}" if isinstance(value, int | float) else field


def corpus() -> Iterator[tuple[pb.GenerateRequest, str, str]]:
    """(message, how its sentence begins, what it says would be right)."""
    for field, (values, right) in MISTAKES.items():
        for prompt, value in itertools.product(range(2), values):
            yield asked(prompt, **{field: value}), named(field, value), right
    for field, (value, right) in TOO_MANY.items():
        yield asked(**{field: value}), named(field, value), right
    for field, (values, right) in OF_REQUEST.items():
        for value in values:
            prompt = PROMPTS[1] if field != "token_ids" else {}
            yield pb.GenerateRequest(**{field: value}, **prompt), named(field, value), right
    # Beside fields that are right the wrong one is named.
    right_ones = {
        "temperature": 0.5, "top_p": 0.5, "max_tokens": 3, "stop": ["x"], "ignore_eos": True,
    }  # fmt: skip
    for field, (values, right) in MISTAKES.items():
        yield asked(**right_ones | {field: values[-1]}), named(field, values[-1]), right
    yield asked(n=2), "n", "it must be 1 when temperature is 0"
    yield asked(prompt_logprobs=1), "prompt_logprobs", "KV is synthetic here"
    for message in (
        pb.GenerateRequest(),
        pb.GenerateRequest(sampling=pb.SamplingParameters(max_tokens=3), priority=1),
    ):
        yield message, "prompt", "give either text or token_ids"
    yield pb.GenerateRequest(text=""), "text is empty", "a prompt has at least one token"
    for length in (1000, 1001, 5000):
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * length))
        yield message, f"token_ids has {length} tokens", "maximum context length is 1000 tokens"
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
    config = configured(CONFIG, num_instances=1, max_model_len=1000, synthetic_kv=True)
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
        generate = channel.unary_stream("/nanocp.v1.Inference/Generate")
        unary = channel.unary_unary("/nanocp.v1.Inference/GenerateUnary")
        yield {
            "Generate": lambda data: next(generate(data, timeout=60)),
            "GenerateUnary": lambda data: unary(data, timeout=60),
        }
        assert len(ids_of([first, *running])) == 900, "a mistake of one client ends no other"
        num_frames = CONFIG.cluster.num_frames
        until(lambda: client.loads().instances[0].frames_free == num_frames, limit_s=60)
        load = client.loads()
        assert (load.num_running, load.num_waiting, load.instances[0].num_rows) == (0, 0, 0)


def test_there_are_enough_of_them():
    assert len({message.SerializeToString() for message, _, _ in CORPUS}) >= 200
    assert len(set(unreadable())) >= 20


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
def test_each_mistake_is_named_with_what_would_be_right(calls, method):
    for message, begin, right in CORPUS:
        with pytest.raises(grpc.RpcError) as raised:
            calls[method](message.SerializeToString())
        status, sentence = raised.value.code(), raised.value.details()
        case = str(message)[:200], status, sentence
        assert status is INVALID, case
        assert sentence.startswith(begin) and right in sentence, case
        assert len(sentence) < 300 and sentence.isprintable(), case


def test_of_two_mistakes_one_is_named(calls):
    for (one, (values, _)), (other, (others, _)) in itertools.combinations(MISTAKES.items(), 2):
        message = asked(**{one: values[0], other: others[0]})
        with pytest.raises(grpc.RpcError) as raised:
            calls["Generate"](message.SerializeToString())
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
