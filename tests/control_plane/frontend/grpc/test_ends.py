"""Ends of requests of the gRPC API: aborts, slow and vanished clients, refusals."""

import time

import grpc
import pytest

from control_plane.frontend.grpc import servicers
from harness.exact.settings import configured
from harness.services.frontend_fakes import make_config, running
from harness.services.kit import ids_of
from nanocp.client import (
    Aborted,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from nanocp.values.plan import Ended, FinishReason
from nanocp.values.sampling import Token, TokenLogprobs
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@pytest.mark.parametrize(("reason", "error"), [
    (FinishReason.REFUSED, ResourceExhausted),
    (FinishReason.INVALID, InvalidArgument),
    (FinishReason.FAILED, Unavailable),
    (FinishReason.ABORTED, Aborted),
    (FinishReason.EXPIRED, DeadlineExceeded),
])  # fmt: skip
def test_an_end_by_the_scheduler_reaches_the_client_after_its_tokens(service, reason, error):
    chunks = service.client.generate([5], max_tokens=9)
    request = service.next_request()
    service.instance.deliver(request, 0, [3, 4])
    assert next(chunks).token_ids == (3, 4)
    service.front_end.ended(Ended(request, reason, "max_queued_requests (7) is reached"))
    with pytest.raises(error, match=r"max_queued_requests \(7\) is reached"):
        next(chunks)
    assert service.controller.aborts.empty(), "the scheduler ended it: there is nothing to abort"


def test_a_running_request_id_cannot_be_used_twice_but_again_later(service):
    first = service.client.generate([5], max_tokens=1, request_id="twice")
    request = service.next_request()
    with pytest.raises(InvalidArgument, match="request_id 'twice' is running"):
        next(service.client.generate([5], request_id="twice"))
    service.instance.deliver(request, 0, [9], LENGTH)
    assert len(list(first)) == 1
    again = service.client.generate([5], max_tokens=1, request_id="twice")
    service.answer([9])
    assert len(list(again)) == 1


def test_abort_ends_the_stream_and_reaches_the_controller(service):
    chunks = service.client.generate([5], request_id="abort me")
    request = service.next_request()
    assert service.client.abort("nobody", "abort me", "abort me") == ("abort me",)
    assert service.next_abort() == request
    with pytest.raises(Aborted, match="was aborted"):
        next(chunks)
    with pytest.raises(NotFound, match="no request is running or waiting as 'abort me'"):
        service.client.abort("abort me")
    with pytest.raises(InvalidArgument, match="request_ids"):
        service.client.abort()
    assert service.controller.aborts.empty()


def test_a_cancelled_stream_aborts_and_frees_its_id(service):
    chunks = service.client.generate([5], request_id="cancelled")
    request = service.next_request()
    service.instance.deliver(request, 0, [3])
    assert next(chunks).token_ids == (3,)
    chunks.close()
    assert service.next_abort() == request
    again = service.client.generate([5], request_id="cancelled")
    assert service.next_request() == request + 1
    again.close()
    assert service.next_abort() == request + 1


def test_an_expired_deadline_aborts(service):
    chunks = service.client.generate([5], timeout_s=2.0)
    request = service.next_request()
    with pytest.raises(DeadlineExceeded, match="timeout_s ran out"):
        next(chunks)
    assert service.next_abort() == request


def test_a_client_that_vanishes_aborts(service):
    client = Client(service.address)
    chunks = client.generate([5])
    request = service.next_request()
    client.close()
    assert service.next_abort() == request
    with pytest.raises(Aborted):
        next(chunks)


def test_a_slow_client_loses_its_request_and_stalls_nobody():
    with running(make_config(max_undelivered_tokens=64)) as service:
        # A client that reads nothing, with the smallest window that HTTP/2 lets it have.
        options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        with grpc.insecure_channel(service.address, options=options) as channel:
            parameters = pb.SamplingParameters(max_tokens=150_000)
            slow = rpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=parameters)
            )
            slow_request = service.next_request()
            fast = service.client.generate([6], max_tokens=2)
            fast_request = service.next_request()
            for first in range(0, 150_000, 50):
                service.instance.deliver(slow_request, first, [7] * 50)
                if not service.controller.aborts.empty():
                    break
                time.sleep(0.0005)
            assert service.next_abort() == slow_request
            assert ("finished", FinishReason.REFUSED) in [
                call[:2] for call in service.observer.calls
            ]
            service.instance.deliver(fast_request, 0, [8, 9], LENGTH)
            assert ids_of(fast) == [8, 9]
            with pytest.raises(grpc.RpcError) as raised:
                list(slow)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_undelivered_tokens (64)" in raised.value.details()


def test_a_client_that_never_reads_holds_nothing_for_ever(monkeypatch):
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
        request = service.next_request()
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


def test_more_calls_than_the_cluster_can_hold_are_refused():
    config = configured(num_instances=1, num_frames=1, max_queued_requests=1, grpc_port=0)
    with running(config) as service:
        open_calls = [service.client.generate([5]) for _ in range(2)]
        for _ in open_calls:
            service.submitted()
        with pytest.raises(ResourceExhausted, match="2 requests are open"):
            next(service.client.generate([5]))
        open_calls[0].close()
        service.next_abort()
        last = service.client.generate([5])
        service.submitted()
        last.close()


def test_without_a_tokenizer_ids_work_and_text_is_refused():
    with running(with_tokenizer=False) as service:
        with pytest.raises(
            InvalidArgument, match=r"text cannot be used: the checkpoint has no tokenizer\.json"
        ):
            next(service.client.generate("hello"))
        chunks = service.client.generate([5], max_tokens=1)
        service.answer([9])
        assert [(chunk.token_ids, chunk.text) for chunk in chunks] == [((9,), "")]


def test_the_observer_gets_each_thing_once():
    with running() as service:
        chunks = service.client.generate([5, 6], max_tokens=3)
        request = service.next_request()
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
