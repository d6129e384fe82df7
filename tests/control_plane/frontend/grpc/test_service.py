"""The gRPC API over real sockets: streams, ends, aborts, slow clients, draining, health."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from control_plane.frontend.front_end import CONTROL, INFERENCE, FrontEnd
from control_plane.frontend.grpc import servicers
from control_plane.frontend.validation import ModelLimits
from harness.frontend_fakes import (
    LIMITS,
    MEMBER_SECRETS,
    TOKENIZER,
    WAIT_S,
    Service,
    make_config,
    running,
)
from nanocp.client import (
    Aborted,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from nanocp.config import ClusterConfig, Config, SchedulerConfig, ServiceConfig
from nanocp.plan import Ended, FinishReason, Placement
from nanocp.sampling import Token, TokenLogprobs
from nanocp.wire.convert import decode_row_input
from nanocp.wire.v1 import cluster_pb2 as cluster_pb
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running() as service:
        yield service


# --- streams ---


def test_tokens_and_text_stream_and_the_last_message_says_where_the_request_lived(
    service: Service,
) -> None:
    ids = TOKENIZER.encode("the life of a fox \N{HOT BEVERAGE}!")
    prompt = "the quick brown fox " * 40
    chunks = service.client.generate(prompt, max_tokens=len(ids), request_id="fox")
    submission = service.controller.next_submission()
    assert list(submission.prompt_ids) == TOKENIZER.encode(prompt)
    assert (submission.prompt_len, submission.max_tokens) == (len(submission.prompt_ids), len(ids))
    service.front_end.placed(
        Placement(submission.request_id, 2, submission.prompt_len, ((0, 0), (1, 2)))
    )
    instance = service.member(2)
    instance.deliver(submission.request_id, 0, ids[:1])
    first = next(chunks)
    assert (first.request_id, list(first.token_ids), first.finish) == ("fox", ids[:1], None)
    for index in range(1, len(ids)):
        instance.deliver(
            submission.request_id, index, [ids[index]], LENGTH if index == len(ids) - 1 else None
        )
    rest = list(chunks)
    instance.close()
    assert (
        first.text + "".join(chunk.text for chunk in rest) == "the life of a fox \N{HOT BEVERAGE}!"
    )
    assert [token_id for chunk in rest for token_id in chunk.token_ids] == ids[1:]
    finish = rest[-1].finish
    assert finish is not None and all(chunk.finish is None for chunk in rest[:-1])
    assert (finish.reason, finish.prompt_tokens, finish.generated_tokens) == (
        LENGTH,
        submission.prompt_len,
        len(ids),
    )
    num_pages = -(-(submission.prompt_len + len(ids) - 1) // 64)
    assert num_pages > 1, "the prompt should be longer"
    assert (finish.cp_degree, finish.moe_binding, finish.kv_split) == (
        2,
        2,
        ((0, 1), (2, num_pages - 1)),
    )


def test_the_latest_placement_is_the_one_returned(service: Service) -> None:
    chunks = service.client.generate([5] * 256, max_tokens=1)
    request = service.controller.next_submission().request_id
    service.front_end.placed(Placement(request, 0, 256, ((0, 0),)))
    service.front_end.placed(Placement(request, 3, 256, ((0, 0), (1, 1), (2, 3))))
    with contextlib.closing(service.member(3)) as instance:
        instance.deliver(request, 0, [9], FinishReason.STOP)
        (chunk,) = chunks
    assert chunk.finish is not None
    assert (chunk.finish.reason, chunk.finish.cp_degree, chunk.finish.moe_binding) == (
        FinishReason.STOP,
        3,
        3,
    )


def test_tokens_of_two_instances_come_out_in_order_and_once(service: Service) -> None:
    other = service.member(1)
    chunks = service.client.generate([5], max_tokens=6)
    request = service.controller.next_submission().request_id
    service.front_end.placed(Placement(request, 1, 4, ()))  # From the fourth token on.
    other.deliver(request, 3, [13, 14, 15], LENGTH)
    other.deliver(request, 3, [13])
    service.instance.deliver(request, 0, [10])
    first = next(chunks)
    assert first.token_ids == (10,)
    service.instance.deliver(request, 0, [10, 11, 12])
    service.instance.deliver(request, 2, [12])
    rest = list(chunks)
    assert [token_id for chunk in rest for token_id in chunk.token_ids] == [11, 12, 13, 14, 15]
    assert rest[-1].finish is not None and rest[-1].finish.generated_tokens == 6
    other.finish()
    other.close()


def test_tokens_of_unknown_and_ended_requests_are_ignored(service: Service) -> None:
    chunks = service.client.generate([5], max_tokens=1)
    request = service.controller.next_submission().request_id
    service.instance.deliver(request + 1000, 0, [1, 2, 3])
    service.instance.deliver(request, 5, [9])  # Beyond max_tokens.
    service.instance.deliver(request, 0, [10], LENGTH)
    assert [chunk.token_ids for chunk in chunks] == [(10,)]
    service.instance.deliver(request, 0, [10], LENGTH)
    service.front_end.ended(Ended(request, FinishReason.FAILED, "too late"))
    service.front_end.placed(Placement(request, 0, 1, ()))


def test_an_instance_that_sends_nonsense_loses_its_stream(service: Service) -> None:
    other = service.member(1)
    other.deliver_raw(
        cluster_pb.TokenBatch(
            instance=1, tokens=[cluster_pb.TokenItem(request_id=1, finish_reason="tired")]
        )
    )
    with pytest.raises(grpc.RpcError) as raised:
        other.finish()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tired" in raised.value.details()
    other.close()


def test_the_row_carries_all_that_the_instance_needs(service: Service) -> None:
    options = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "seed": 11,
    }
    for ignore_eos, stop_ids in ((False, (1, 42)), (True, (42,))):
        chunks = service.client.generate(
            [5, 6, 7], stop_token_ids=[42], ignore_eos=ignore_eos, **options
        )
        row = decode_row_input(service.controller.next_submission().row_start)
        assert (row.last_token, row.front_end, row.output_ids) == (
            7,
            service.front_end.members_address,
            (),
        )
        assert {name: getattr(row.params, name) for name in options} == options
        assert row.params.stop_token_ids == stop_ids
        chunks.close()
        service.controller.next_abort()


def test_penalties_reach_the_row_and_bring_the_prompt_that_they_need(service: Service) -> None:
    options = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
    }
    chunks = service.client.generate(
        [7, 5, 7, 6], **options, logit_bias={9: -1.5, 3: 2.0}, bad_words=["quick", " zq"]
    )
    row = decode_row_input(service.controller.next_submission().row_start)
    assert {name: getattr(row.params, name) for name in options} == options
    assert row.params.logit_bias == ((3, 2.0), (9, -1.5))
    assert row.prompt_ids == (5, 6, 7)
    # " quick" is one token, "quick" two; " zq" ends as "zq".
    assert row.params.bad_words == tuple(
        tuple(TOKENIZER.encode(text)) for text in ("quick", " quick", "zq")
    )
    chunks.close()
    service.controller.next_abort()
    chunks = service.client.generate([7, 5, 7, 6], presence_penalty=1.0)
    assert decode_row_input(service.controller.next_submission().row_start).prompt_ids == ()
    chunks.close()
    service.controller.next_abort()


@pytest.mark.parametrize(
    ("timeout_s", "queue_timeout_s", "range_us"),
    [
        (None, None, None),
        (None, 2.5, (2_500_000, 2_500_000)),
        (50.0, 7200, (40_000_000, 51_000_000)),
    ],
)
def test_priority_and_the_shorter_of_two_limits_reach_the_controller(
    service: Service,
    timeout_s: float | None,
    queue_timeout_s: float | None,
    range_us: tuple[int, int] | None,
) -> None:
    chunks = service.client.generate(
        [5], priority=-7, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s
    )
    submission = service.controller.next_submission()
    assert (submission.priority, submission.resumes) == (-7, False)
    if range_us is None:
        assert submission.queue_timeout_us is None
    else:
        assert submission.queue_timeout_us is not None
        assert range_us[0] <= submission.queue_timeout_us <= range_us[1]
    chunks.close()
    service.controller.next_abort()


def test_absent_options_take_their_defaults_and_a_seed_is_drawn(service: Service) -> None:
    rows = []
    for _ in range(2):
        chunks = service.client.generate([5])
        rows.append(decode_row_input(service.controller.next_submission().row_start).params)
        chunks.close()
        service.controller.next_abort()
    assert (rows[0].max_tokens, rows[0].temperature, rows[0].top_k, rows[0].top_p) == (
        16,
        0.0,
        0,
        1.0,
    )
    assert rows[0].seed != rows[1].seed


def test_request_ids_count_up_and_a_made_one_is_echoed(service: Service) -> None:
    requests, names = [], set()
    for _ in range(3):
        chunks = service.client.generate([5], max_tokens=1)
        requests.append(service.controller.next_submission().request_id)
        service.instance.deliver(requests[-1], 0, [9], LENGTH)
        names |= {chunk.request_id for chunk in chunks}
    assert requests == [requests[0], requests[0] + 1, requests[0] + 2] and requests[0] > 0
    assert len(names) == 3 and all(names)


def test_a_prompt_of_a_hundred_thousand_tokens_fits(service: Service) -> None:
    prompt = [299] * 100_000
    for asked in (prompt, "the life of a token, and then some words. " * 5_000):
        chunks = service.client.generate(asked, max_tokens=1)
        submission = service.controller.next_submission()
        assert submission.prompt_len == len(submission.prompt_ids) >= 100_000
        service.instance.deliver(submission.request_id, 0, [9], LENGTH)
        assert len(list(chunks)) == 1


def test_a_longer_model_takes_larger_messages() -> None:
    limits = ModelLimits(vocab_size=2**28, max_model_len=1_000_000)
    with (
        running(limits=limits) as service,
        pytest.raises(InvalidArgument, match="token_ids has 1500000 tokens"),
    ):
        next(service.client.generate([2**27] * 1_500_000))


def test_an_incomplete_character_is_held_back_and_shown_at_the_end(service: Service) -> None:
    first, *others = TOKENIZER.encode("\N{HOT BEVERAGE}")
    assert len(others) == 2
    chunks = service.client.generate([5], max_tokens=4)
    request = service.controller.next_submission().request_id
    texts = []
    for index, token_id in enumerate([first, *others, first]):
        service.instance.deliver(request, index, [token_id], LENGTH if index == 3 else None)
        texts.append(next(chunks).text)
    assert texts == ["", "", "\N{HOT BEVERAGE}", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_stop_string_across_tokens_ends_the_request_and_its_row(
    service: Service, is_included: bool, is_late: bool
) -> None:
    """A stop string ends the request, however late the client reads.

    That holds if the row has run on meanwhile, and if the last token that it may generate completes
    the string.
    """
    ids = [TOKENIZER.encode(piece)[0] for piece in ("x", "y", "q", "z")]
    chunks = service.client.generate(
        [5], max_tokens=6, stop=["yq", "never"], include_stop_str_in_output=is_included
    )
    request = service.controller.next_submission().request_id
    if is_late:
        service.instance.deliver(request, 0, [*ids, 9, 9], LENGTH)
    else:
        service.instance.deliver(request, 0, ids[:2])
        assert next(chunks).text == ("xy" if is_included else "x"), (
            "what may be the start of a stop string stays back"
        )
        service.instance.deliver(request, 2, ids[2:3])
    received = list(chunks)
    assert received[-1].finish is not None
    assert (received[-1].finish.reason, received[-1].finish.generated_tokens) == (STOP, 3)
    token_ids = [token_id for chunk in received for token_id in chunk.token_ids]
    assert token_ids == (ids[:3] if is_late else ids[2:3])
    texts = "".join(chunk.text for chunk in received)
    assert (
        texts
        == {(False, True): "x", (True, True): "xyq", (False, False): "", (True, False): "q"}[
            is_included, is_late
        ]
    )
    assert service.controller.next_abort() == request
    # What the row generates before the scheduler has ended it is dropped.
    service.instance.deliver(request, 3, [9, 9], None)
    service.front_end.ended(Ended(request, FinishReason.ABORTED, "aborted"))
    assert ("finished", STOP, 3) in service.observer.calls


def test_a_stop_string_in_the_last_token_needs_no_abort(service: Service) -> None:
    (token_id,) = TOKENIZER.encode("z")
    chunks = service.client.generate([5], max_tokens=1, stop="z")
    service.instance.deliver(service.controller.next_submission().request_id, 0, [token_id], LENGTH)
    (chunk,) = chunks
    assert (chunk.text, chunk.finish.reason) == ("", STOP)
    assert service.controller.aborts.empty()


def test_stop_strings_and_bad_words_need_a_tokenizer() -> None:
    with running(with_tokenizer=False) as service:
        for name, instead in (("stop", "stop_token_ids"), ("bad_words", "logit_bias")):
            sentence = (
                f"{name} cannot be used: the checkpoint has no tokenizer.json; give {instead}"
            )
            with pytest.raises(InvalidArgument, match=sentence):
                next(service.client.generate([5], **{name: ["x"]}))


def test_logprobs_come_with_their_tokens_however_these_arrive(service: Service) -> None:
    chunks = service.client.generate([5], max_tokens=4, logprobs=2, stop="q")
    submission = service.controller.next_submission()
    assert decode_row_input(submission.row_start).params.logprobs == 2
    (q_id,) = TOKENIZER.encode("q")
    tokens = [
        Token(
            service.address,
            submission.request_id,
            i,
            q_id if i == 2 else 9,
            LENGTH if i == 3 else None,
            logprobs,
        )
        for i, logprobs in enumerate(
            TokenLogprobs(-0.5 * i, ((9, -0.25), (i, -1.5))) for i in range(4)
        )
    ]
    service.instance.deliver_tokens([tokens[1], tokens[0], tokens[0]])
    service.instance.deliver_tokens([tokens[3], tokens[2]])
    received = list(chunks)
    assert [len(chunk.logprobs) for chunk in received] == [
        len(chunk.token_ids) for chunk in received
    ]
    # The stop string is complete with the third.
    assert [logprobs for chunk in received for logprobs in chunk.logprobs] == [
        t.logprobs for t in tokens[:3]
    ]
    assert service.controller.next_abort() == submission.request_id


def test_many_streams_at_once_each_get_their_own_tokens(service: Service) -> None:
    all_chunks = [
        service.client.generate([5, i], max_tokens=20, request_id=f"many-{i}") for i in range(32)
    ]
    submissions = [service.controller.next_submission() for _ in all_chunks]
    for index in range(20):
        for submission in submissions:
            token_id = (submission.prompt_ids[1] * 7 + index) % 256
            service.instance.deliver(
                submission.request_id, index, [token_id], LENGTH if index == 19 else None
            )
    for i, chunks in enumerate(all_chunks):
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert ids == [(i * 7 + index) % 256 for index in range(20)]


# --- ends ---


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.REFUSED, ResourceExhausted),
        (FinishReason.INVALID, InvalidArgument),
        (FinishReason.FAILED, Unavailable),
        (FinishReason.ABORTED, Aborted),
        (FinishReason.EXPIRED, DeadlineExceeded),
    ],
)
def test_an_end_by_the_scheduler_reaches_the_client_after_its_tokens(
    service: Service, reason: FinishReason, error: type[Exception]
) -> None:
    chunks = service.client.generate([5], max_tokens=9)
    request = service.controller.next_submission().request_id
    service.instance.deliver(request, 0, [3, 4])
    assert next(chunks).token_ids == (3, 4)
    service.front_end.ended(Ended(request, reason, "max_queued_requests (7) is reached"))
    with pytest.raises(error, match=r"max_queued_requests \(7\) is reached"):
        next(chunks)
    assert service.controller.aborts.empty(), "the scheduler ended it: there is nothing to abort"


def test_a_running_request_id_cannot_be_used_twice_but_again_later(service: Service) -> None:
    first = service.client.generate([5], max_tokens=1, request_id="twice")
    request = service.controller.next_submission().request_id
    with pytest.raises(InvalidArgument, match="request_id 'twice' is running"):
        next(service.client.generate([5], request_id="twice"))
    service.instance.deliver(request, 0, [9], LENGTH)
    assert len(list(first)) == 1
    again = service.client.generate([5], max_tokens=1, request_id="twice")
    service.instance.deliver(service.controller.next_submission().request_id, 0, [9], LENGTH)
    assert len(list(again)) == 1


def test_abort_ends_the_stream_and_reaches_the_controller(service: Service) -> None:
    chunks = service.client.generate([5], request_id="abort me")
    request = service.controller.next_submission().request_id
    assert service.client.abort("nobody", "abort me", "abort me") == ("abort me",)
    assert service.controller.next_abort() == request
    with pytest.raises(Aborted, match="was aborted"):
        next(chunks)
    with pytest.raises(NotFound, match="no request is running or waiting as 'abort me'"):
        service.client.abort("abort me")
    with pytest.raises(InvalidArgument, match="request_ids"):
        service.client.abort()
    assert service.controller.aborts.empty()


def test_a_cancelled_stream_aborts_and_frees_its_id(service: Service) -> None:
    chunks = service.client.generate([5], request_id="cancelled")
    request = service.controller.next_submission().request_id
    service.instance.deliver(request, 0, [3])
    assert next(chunks).token_ids == (3,)
    chunks.close()
    assert service.controller.next_abort() == request
    again = service.client.generate([5], request_id="cancelled")
    assert service.controller.next_submission().request_id == request + 1
    again.close()
    assert service.controller.next_abort() == request + 1


def test_an_expired_deadline_aborts(service: Service) -> None:
    chunks = service.client.generate([5], timeout_s=2.0)
    request = service.controller.next_submission().request_id
    with pytest.raises(DeadlineExceeded, match="timeout_s ran out"):
        next(chunks)
    assert service.controller.next_abort() == request


def test_a_client_that_vanishes_aborts(service: Service) -> None:
    client = Client(service.address)
    chunks = client.generate([5])
    request = service.controller.next_submission().request_id
    client.close()
    assert service.controller.next_abort() == request
    with pytest.raises(Aborted):
        next(chunks)


def test_a_slow_client_loses_its_request_and_stalls_nobody() -> None:
    with running(make_config(max_undelivered_tokens=64)) as service:
        # A client that reads nothing, with the smallest window that HTTP/2 lets it have.
        options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        with grpc.insecure_channel(service.address, options=options) as channel:
            parameters = pb.SamplingParameters(max_tokens=150_000)
            slow = rpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=parameters)
            )
            slow_request = service.controller.next_submission().request_id
            fast = service.client.generate([6], max_tokens=2)
            fast_request = service.controller.next_submission().request_id
            for first in range(0, 150_000, 50):
                service.instance.deliver(slow_request, first, [7] * 50)
                if not service.controller.aborts.empty():
                    break
                time.sleep(0.0005)
            assert service.controller.next_abort() == slow_request
            assert ("finished", FinishReason.REFUSED) in [
                call[:2] for call in service.observer.calls
            ]
            service.instance.deliver(fast_request, 0, [8, 9], LENGTH)
            assert [token_id for chunk in fast for token_id in chunk.token_ids] == [8, 9]
            with pytest.raises(grpc.RpcError) as raised:
                list(slow)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_undelivered_tokens (64)" in raised.value.details()


def test_a_client_that_never_reads_holds_nothing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may have ended, with tokens that fit in no window of HTTP/2."""
    monkeypatch.setattr(servicers, "UNREAD_TIMEOUT_S", 1)
    config = make_config(drain_timeout_ms=30_000)
    with (
        running(config) as service,
        grpc.insecure_channel(service.address, (("grpc.http2.bdp_probe", 0),)) as channel,
    ):
        parameters = pb.SamplingParameters(max_tokens=4000, logprobs=20)
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=parameters)
        idle = rpc.InferenceStub(channel).Generate(message)
        request = service.controller.next_submission().request_id
        logprobs = TokenLogprobs(-0.5, tuple((299, -0.5) for _ in range(20)))
        reasons = [None] * 3999 + [LENGTH]
        tokens = [
            Token(service.address, request, index, 7, reason, logprobs)
            for index, reason in enumerate(reasons)
        ]
        service.instance.deliver_tokens(tokens)
        assert service.front_end.drain(), "a request of a client that reads nothing stays open"
        with pytest.raises(grpc.RpcError) as raised:
            list(idle)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the client has read nothing for 1 s" in raised.value.details()


def test_more_calls_than_the_cluster_can_hold_are_refused() -> None:
    config = Config(
        cluster=ClusterConfig(num_instances=1, num_frames=1),
        scheduler=SchedulerConfig(max_queued_requests=1),
        service=ServiceConfig(grpc_port=0),
    )
    with running(config) as service:
        open_calls = [service.client.generate([5]) for _ in range(2)]
        for _ in open_calls:
            service.controller.next_submission()
        with pytest.raises(ResourceExhausted, match="2 requests are open"):
            next(service.client.generate([5]))
        open_calls[0].close()
        service.controller.next_abort()
        last = service.client.generate([5])
        service.controller.next_submission()
        last.close()


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    with running(with_tokenizer=False) as service:
        with pytest.raises(
            InvalidArgument, match=r"text cannot be used: the checkpoint has no tokenizer\.json"
        ):
            next(service.client.generate("hello"))
        chunks = service.client.generate([5], max_tokens=1)
        service.instance.deliver(service.controller.next_submission().request_id, 0, [9], LENGTH)
        assert [(chunk.token_ids, chunk.text) for chunk in chunks] == [((9,), "")]


def test_the_observer_gets_each_thing_once() -> None:
    with running() as service:
        chunks = service.client.generate([5, 6], max_tokens=3)
        request = service.controller.next_submission().request_id
        service.instance.deliver(request, 1, [1])
        service.instance.deliver(request, 0, [1, 1, 2], FinishReason.STOP)
        assert list(chunks)[-1].finish is not None
        with pytest.raises(InvalidArgument):
            next(service.client.generate([]))
        assert service.observer.calls == [
            ("submitted", 2),
            ("first",),
            ("token",),
            ("token",),
            ("finished", FinishReason.STOP, 3),
        ]
        assert service.observer.longest == [3], "of the one that was valid"


# --- start and end ---


def health_of(address: str, name: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S).status


def test_requests_wait_outside_until_the_cluster_is_ready() -> None:
    service = Service(make_config(), LIMITS)
    try:
        assert health_of(service.address, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Unavailable, match="the cluster is starting"):
            next(service.client.generate([5]))
        service.front_end.open(service.controller)
        chunks = service.client.generate([5])
        service.controller.next_submission()
        assert [health_of(service.address, name) for name in ("", INFERENCE, CONTROL)] == [
            health_pb2.HealthCheckResponse.SERVING
        ] * 3
        chunks.close()
    finally:
        service.close()


def test_draining_refuses_new_requests_and_lets_open_ones_end() -> None:
    with running() as service:
        chunks = service.client.generate([5], max_tokens=2)
        request = service.controller.next_submission().request_id
        drained: list[bool] = []
        drainer = threading.Thread(target=lambda: drained.append(service.front_end.drain()))
        drainer.start()
        while health_of(service.address, "") == health_pb2.HealthCheckResponse.SERVING:
            time.sleep(0.01)
        assert health_of(service.address, INFERENCE) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health_of(service.address, CONTROL) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(Unavailable, match="draining"):
            next(service.client.generate([5]))
        assert not drained
        service.instance.deliver(request, 0, [3, 4], LENGTH)
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [3, 4]
        drainer.join(WAIT_S)
        assert drained == [True]


def front_end_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("front end")


def test_a_drain_has_a_bound_and_stopping_ends_what_is_left() -> None:
    before = front_end_threads()
    service = Service(make_config(drain_timeout_ms=100), LIMITS)
    service.front_end.open(service.controller)
    chunks = service.client.generate([5], max_tokens=2)
    request = service.controller.next_submission().request_id
    assert service.front_end.drain() is False
    service.front_end.stop("instance 2 was lost")
    assert service.controller.next_abort() == request
    with pytest.raises(Unavailable, match="instance 2 was lost"):
        next(chunks)
    service.front_end.stop()
    assert service.front_end.drain() is True
    service.front_end.ended(Ended(request, FinishReason.FAILED))
    with pytest.raises(Unavailable, match=f"no service answers at {service.address}"):
        next(Client(service.address).generate([5]))
    service.close()
    assert front_end_threads() == before


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        front_end = FrontEnd(
            Config(service=ServiceConfig(grpc_port=port)), None, LIMITS, MEMBER_SECRETS
        )
        with pytest.raises(OSError, match=f"cannot listen on port {port} of 127.0.0.1"):
            front_end.start()
        front_end.stop()


def test_two_services_do_not_share_a_port(service: Service) -> None:
    port = int(service.address.rpartition(":")[2])
    with pytest.raises(OSError, match=str(port)):
        FrontEnd(
            Config(service=ServiceConfig(grpc_port=port)), None, LIMITS, MEMBER_SECRETS
        ).start()


def test_a_server_on_every_interface_gives_an_address_to_dial() -> None:
    front_end = FrontEnd(
        Config(service=ServiceConfig(host="0.0.0.0", grpc_port=0)), None, LIMITS, MEMBER_SECRETS
    )
    try:
        host, _, port = front_end.start().rpartition(":")
        assert host != "0.0.0.0"
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    finally:
        front_end.stop()


def reflected(
    service: Service, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    with grpc.insecure_channel(service.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=WAIT_S)
    return answer


def test_reflection_lists_the_clients_services_and_no_others(service: Service) -> None:
    answer = reflected(service, reflection_pb2.ServerReflectionRequest(list_services=""))
    assert {listed.name for listed in answer.list_services_response.service} == {
        "nanocp.v1.Inference",
        "nanocp.v1.Control",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_reflection_describes_nothing_of_the_members_services(service: Service) -> None:
    def is_described(**request: str) -> bool:
        answer = reflected(service, reflection_pb2.ServerReflectionRequest(**request))
        return bool(answer.file_descriptor_response.file_descriptor_proto)

    assert is_described(file_containing_symbol=INFERENCE), "the control: it does answer"
    for symbol in ("TokenSink", "Controller", "TokenBatch", "FromInstance"):
        assert not is_described(file_containing_symbol=f"nanocp.v1.{symbol}"), symbol
    assert not is_described(file_by_filename=cluster_pb.DESCRIPTOR.name)
    assert is_described(file_by_filename=pb.DESCRIPTOR.name)


def test_nothing_is_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), running() as service:
        chunks = service.client.generate([5], max_tokens=1)
        service.instance.deliver(service.controller.next_submission().request_id, 0, [9], LENGTH)
        assert len(list(chunks)) == 1
        chunks = service.client.generate([5])
        service.controller.next_submission()
        chunks.close()
        service.controller.next_abort()
    assert not caplog.records


def test_bytes_that_are_no_request_harm_nobody(service: Service) -> None:
    with grpc.insecure_channel(service.address) as channel:
        raw = channel.unary_stream("/nanocp.v1.Inference/Generate")
        for garbage in (b"\xff" * 7, b"\x12\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"):
            with pytest.raises(grpc.RpcError):
                next(raw(garbage, timeout=WAIT_S))
        with pytest.raises(grpc.RpcError) as raised:
            next(
                rpc.InferenceStub(channel).Generate(
                    pb.GenerateRequest(text="x" * (5 << 20)), timeout=WAIT_S
                )
            )
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    test_the_latest_placement_is_the_one_returned(service)
