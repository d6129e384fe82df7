"""The gRPC service itself: start, drain, ports, health, reflection, garbage."""

import logging
import socket
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from control_plane.frontend.front_end import CONTROL, INFERENCE, FrontEnd
from harness.hash_clusters.hash_parts import Unobserved
from harness.services.frontend_fakes import LIMITS, MEMBER_SECRETS, Service, make_config, running
from harness.services.kit import ids_of
from harness.waits import WAIT_S
from nanocp.client import Client, Unavailable
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.values.plan import Ended, FinishReason
from nanocp.wire.members import CONTROLLER, TOKEN_SINK
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def health_of(address: str, name: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S).status


def test_requests_wait_outside_until_the_cluster_is_ready():
    service = Service(make_config(), LIMITS)
    try:
        assert health_of(service.address, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Unavailable, match="the cluster is starting"):
            next(service.client.generate([5]))
        service.front_end.open(service.controller)
        chunks = service.client.generate([5])
        service.submitted()
        assert [health_of(service.address, name) for name in ("", INFERENCE, CONTROL)] == [
            health_pb2.HealthCheckResponse.SERVING
        ] * 3
        chunks.close()
    finally:
        service.close()


def test_draining_refuses_new_requests_and_lets_open_ones_end():
    with running() as service:
        chunks = service.client.generate([5], max_tokens=2)
        request = service.next_request()
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
        assert ids_of(chunks) == [3, 4]
        drainer.join(WAIT_S)
        assert drained == [True]


def front_end_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("front end")


def test_a_drain_has_a_bound_and_stopping_ends_what_is_left():
    before = front_end_threads()
    service = Service(make_config(drain_timeout_ms=100), LIMITS)
    service.front_end.open(service.controller)
    chunks = service.client.generate([5], max_tokens=2)
    request = service.next_request()
    assert service.front_end.drain() is False
    service.front_end.stop("instance 2 was lost")
    assert service.next_abort() == request
    with pytest.raises(Unavailable, match="instance 2 was lost"):
        next(chunks)
    service.front_end.stop()
    assert service.front_end.drain() is True
    service.front_end.ended(Ended(request, FinishReason.FAILED))
    with pytest.raises(Unavailable, match=f"no service answers at {service.address}"):
        next(Client(service.address).generate([5]))
    service.close()
    assert front_end_threads() == before


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        front_end = FrontEnd(
            Config(service=ServiceConfig(grpc_port=port)),
            None,
            LIMITS,
            MEMBER_SECRETS,
            Unobserved(),
        )
        with pytest.raises(OSError, match=f"cannot listen on port {port} of 127.0.0.1"):
            front_end.start()
        front_end.stop()


def test_two_services_do_not_share_a_port(service):
    port = int(service.address.rpartition(":")[2])
    with pytest.raises(OSError, match=str(port)):
        FrontEnd(
            Config(service=ServiceConfig(grpc_port=port)),
            None,
            LIMITS,
            MEMBER_SECRETS,
            Unobserved(),
        ).start()


def test_a_server_on_every_interface_gives_an_address_to_dial():
    front_end = FrontEnd(
        Config(service=ServiceConfig(host="0.0.0.0", grpc_port=0)),
        None,
        LIMITS,
        MEMBER_SECRETS,
        Unobserved(),
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


def test_reflection_lists_the_clients_services_and_no_others(service):
    answer = reflected(service, reflection_pb2.ServerReflectionRequest(list_services=""))
    assert {listed.name for listed in answer.list_services_response.service} == {
        "nanocp.v1.Inference",
        "nanocp.v1.Control",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_reflection_describes_nothing_of_the_members_services(service):
    def is_described(**request: str) -> bool:
        answer = reflected(service, reflection_pb2.ServerReflectionRequest(**request))
        return bool(answer.file_descriptor_response.file_descriptor_proto)

    assert is_described(file_containing_symbol=INFERENCE), "the control: it does answer"
    for symbol in (TOKEN_SINK, CONTROLLER):
        assert not is_described(file_containing_symbol=symbol), symbol
    assert is_described(file_by_filename=pb.DESCRIPTOR.name)


def test_nothing_is_logged_as_an_error(caplog):
    with caplog.at_level(logging.WARNING), running() as service:
        chunks = service.client.generate([5], max_tokens=1)
        service.answer([9])
        assert len(list(chunks)) == 1
        chunks = service.client.generate([5])
        service.submitted()
        service.give_up(chunks)
    assert not caplog.records


def test_bytes_that_are_no_request_harm_nobody(service):
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
    chunks = service.client.generate([5], max_tokens=1)
    request = service.next_request()
    service.instance.deliver(request, 0, [7], LENGTH)
    assert ids_of(chunks) == [7]
