"""What a client can do at the ports of a running service, with and without an API key."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from control_plane.ports.members_port import REFUSED, MemberSecrets
from harness.exact.settings import configured
from harness.services.hash_service import (
    CONFIG,
    expected,
    generate,
    hash_service,
    process_launcher,
    prompt,
    served,
)
from harness.services.kit import ids_of
from nanocp.client import Client
from nanocp.serve.service import Service
from nanocp.values.commands import Shutdown
from nanocp.values.members import PREFILL, Failure, Hello, Member, Peer
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import PromptPart, Token, TokenBatch
from nanocp.wire.member_metadata import NAME, SECRET, member_metadata
from nanocp.wire.members import CONTROLLER, FROM_INSTANCE, TO_INSTANCE, TOKEN_SINK, TOKENS

WAIT_S = 60.0
KEY = "a key"
SLOW = "harness.services.hash_members:build_slow"
SMALL = configured(CONFIG, num_instances=2)
NUM_TOKENS = 800
"""Tokens of a request that is attacked: it runs for 4 s at least, and an attack takes less."""
FORGED = 11
Metadata = Sequence[tuple[str, str]]


@pytest.fixture(
    scope="module", params=[pytest.param("without keys", marks=pytest.mark.system), "with keys"]
)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    keys = (KEY,) if request.param == "with keys" else ()
    config = configured(SMALL, api_keys=keys, public_status=True)
    with hash_service(config, SLOW) as service:
        yield service


def secret_of(service: Service, member: object) -> str:
    return service._member_secrets._secrets[str(member)]


def of_member(service: Service, member: object) -> Metadata:
    """What the member itself sends."""
    return member_metadata(str(member), secret_of(service, member))


def sink_of(service: Service) -> str:
    return service._front_ends.members_address


def code_of(call: Any) -> grpc.StatusCode:
    """How the call ends."""
    with pytest.raises(grpc.RpcError) as raised:
        list(call) if hasattr(call, "__next__") else call.result()
    code: grpc.StatusCode = raised.value.code()
    return code


@dataclass
class Victim:
    """A request that another client has running."""

    request_id: int
    moe_binding: int
    chunks: Iterator[Any]
    received: list[int]
    open_requests: Mapping[int, object]

    @property
    def is_running(self) -> bool:
        """Whether the front end still takes tokens for it."""
        return self.request_id in self.open_requests

    def tokens(self) -> list[int]:
        """All its tokens, once it has ended."""
        return self.received + ids_of(self.chunks)


def bindings(service: Service) -> dict[int, int]:
    """MoE binding by request, as the cluster page shows them."""
    url = f"http://{service.metrics_address}/cluster/snapshot.json"
    snapshot = httpx.get(url, timeout=WAIT_S).json()
    return {shown["id"]: shown["moe_binding"] for shown in snapshot["requests"]}


@contextlib.contextmanager
def victim(service: Service) -> Iterator[Victim]:
    with Client(service.address, KEY) as client:
        chunks = client.generate(prompt(20, 1), max_tokens=NUM_TOKENS, seed=1, timeout_s=WAIT_S)
        received = list(next(chunks).token_ids)
        open_requests = service._front_ends._streams._by_request
        (request_id,) = open_requests
        while request_id not in (shown := bindings(service)):
            time.sleep(0.05)
        yield Victim(request_id, shown[request_id], chunks, received, open_requests)
        chunks.close()


def forged(instance: int, request_id: int) -> TokenBatch:
    """A token at every place of the request that may come next, and a stop."""
    tokens = [Token("", request_id, index, FORGED, None) for index in range(NUM_TOKENS)]
    tokens[-1] = tokens[-1]._replace(finish_reason=FinishReason.STOP)
    return TokenBatch(instance, tuple(tokens))


def deliver(address: str, batch: TokenBatch, metadata: Metadata) -> grpc.StatusCode:
    """Deliver the batch as an instance would; returns how that ends."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_unary(f"/{TOKEN_SINK}/Deliver", TOKENS.encode).future(
            iter([batch]), metadata=metadata, timeout=WAIT_S
        )
        try:
            call.result()
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK


def guesses(service: Service) -> list[Metadata]:
    """What a client may try: its key, a name, parts of a secret, another member's."""
    secret = secret_of(service, "instance 0")
    return [
        (),
        (("authorization", f"Bearer {KEY}"),),
        ((NAME, "instance 0"),),
        ((SECRET, secret),),
        *(
            member_metadata("instance 0", guess)
            for guess in ("", KEY, secret[:-1], secret.upper() + " ", secret_of(service, PREFILL))
        ),
        member_metadata("a stranger", secret),
        member_metadata("", ""),
    ]


# --- tokens ---


def test_a_client_cannot_deliver_tokens(service):
    with victim(service) as running:
        batch = forged(running.moe_binding, running.request_id)
        for metadata in guesses(service):
            assert deliver(service.address, batch, metadata) is grpc.StatusCode.UNIMPLEMENTED
            assert deliver(sink_of(service), batch, metadata) is grpc.StatusCode.UNAUTHENTICATED
        assert running.is_running
        assert running.tokens() == expected(prompt(20, 1), NUM_TOKENS)


def test_the_control_where_no_secret_is_asked_for_forged_tokens_arrive(service, monkeypatch):
    monkeypatch.setattr(MemberSecrets, "admit", lambda self, metadata: True)
    with victim(service) as running:
        batch = forged(running.moe_binding, running.request_id)
        name = ((NAME, f"instance {running.moe_binding}"),)
        assert deliver(sink_of(service), batch, name) is grpc.StatusCode.OK
        assert running.tokens()[-3:] == [FORGED] * 3


def test_an_instance_cannot_deliver_tokens_of_a_request_at_another(service):
    with victim(service) as running:
        other = Member("instance", 1 - running.moe_binding)
        for instance in (other.instance, running.moe_binding):
            assert instance is not None
            batch = forged(instance, running.request_id)
            code = deliver(sink_of(service), batch, of_member(service, other))
            assert code is grpc.StatusCode.PERMISSION_DENIED, "by its own name and by the owner's"
        batch = forged(0, running.request_id)
        code = deliver(sink_of(service), batch, of_member(service, PREFILL))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        prompts = TokenBatch(prompts=(PromptPart(running.request_id, 1, ()),))
        code = deliver(sink_of(service), prompts, of_member(service, other))
        assert code is grpc.StatusCode.PERMISSION_DENIED, "prompts are the prefill's"
        assert deliver(sink_of(service), prompts, of_member(service, PREFILL)) is (
            grpc.StatusCode.OK
        )
        assert running.is_running
        assert running.tokens() == expected(prompt(20, 1), NUM_TOKENS)


# --- members ---


def hello(instance: int) -> Iterator[bytes]:
    yield FROM_INSTANCE.encode(Hello(instance, Peer()))


def failure() -> Iterator[bytes]:
    yield FROM_INSTANCE.encode(Failure("instance 1: a forged failure"))


def test_a_client_cannot_end_the_cluster_in_a_members_name(service):
    controller = service._controller._bound.result()
    for address, code in (
        (service.address, grpc.StatusCode.UNIMPLEMENTED),
        (controller, grpc.StatusCode.UNAUTHENTICATED),
    ):
        with grpc.insecure_channel(address) as channel:
            attach_instance = channel.stream_stream(f"/{CONTROLLER}/AttachInstance")
            attach_prefill = channel.stream_stream(f"/{CONTROLLER}/AttachPrefill")
            for metadata in guesses(service):
                options: Any = {"metadata": metadata, "timeout": WAIT_S}
                assert code_of(attach_instance(failure(), **options)) is code
                assert code_of(attach_instance(hello(0), **options)) is code
                assert code_of(attach_prefill(iter(()), **options)) is code
    assert not service.failure.done()
    assert generate_with_key(service) == expected(prompt(30, 2), 5)


def test_a_client_cannot_send_plans(service):
    """A plan comes down the stream that its member opened: members themselves serve no gRPC."""
    plan = TO_INSTANCE.encode(Shutdown("forged"))
    ports = [
        connection.laddr
        for process in (one.process for one in service.launcher._processes.values())
        for connection in psutil.Process(process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert ports, "the control: instances do listen, for peers on other nodes"
    for address in ports:
        with grpc.insecure_channel(f"{address.ip}:{address.port}") as channel:
            send = channel.stream_stream(f"/{CONTROLLER}/AttachInstance")
            assert code_of(send(iter([plan]), timeout=WAIT_S)) is grpc.StatusCode.UNAVAILABLE
    assert generate_with_key(service) == expected(prompt(30, 2), 5)


def generate_with_key(service: Service) -> list[int]:
    return generate(service.address, prompt(30, 2), 5, api_key=KEY)


class Intruder:
    """A launcher that attaches in the members' places, while the controller waits for them."""

    def __init__(self) -> None:
        self.codes: dict[str, grpc.StatusCode] = {}
        self.welcomed: list[grpc.StatusCode] = []

    def start(self, specs: Any, exited: Any) -> None:
        first, second, prefill = specs.values()
        with grpc.insecure_channel(first.controller) as channel:
            attach_instance = channel.stream_stream(f"/{CONTROLLER}/AttachInstance")
            attach_prefill = channel.stream_stream(f"/{CONTROLLER}/AttachPrefill")
            attempts = {
                "a stranger as instance 0": attach_instance(hello(0), timeout=WAIT_S),
                "a stranger as the prefill": attach_prefill(iter(()), timeout=WAIT_S),
                "instance 1 as instance 0": attach_instance(hello(0), metadata=second.metadata,
                                                            timeout=WAIT_S),
                "the prefill as instance 0": attach_instance(hello(0), metadata=prefill.metadata,
                                                             timeout=WAIT_S),
                "instance 0 as the prefill": attach_prefill(iter(()), metadata=first.metadata,
                                                            timeout=WAIT_S),
            }  # fmt: skip
            self.codes = {name: code_of(call) for name, call in attempts.items()}
            for call in (
                attach_instance(hello(0), metadata=first.metadata, timeout=WAIT_S),
                attach_prefill(iter(()), metadata=prefill.metadata, timeout=WAIT_S),
            ):
                assert not list(call), "the cluster is not complete: nobody joins yet"
                self.welcomed.append(call.code())
        raise RuntimeError("seen enough")

    def stop(self, timeout_s: float) -> Sequence[Member]:
        return ()

    def kill(self, member: Member) -> None:
        """The members whose streams ended; they are no processes."""


def test_no_stranger_attaches_as_a_member_and_the_control_with_a_secret_does():
    intruder = Intruder()
    service = Service(SMALL, served(), intruder)
    with pytest.raises(RuntimeError, match="seen enough"):
        service.start(lambda step: None)
    service.stop()
    unauthenticated, denied = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
    assert intruder.codes == {
        "a stranger as instance 0": unauthenticated,
        "a stranger as the prefill": unauthenticated,
        "instance 1 as instance 0": denied,
        "the prefill as instance 0": denied,
        "instance 0 as the prefill": denied,
    }
    assert intruder.welcomed == [grpc.StatusCode.OK] * 2


# --- secrets and ports ---


def test_secrets_stand_in_no_log_command_line_snapshot_or_metric(tmp_path, caplog, capfd):
    log = tmp_path / "events"
    config = configured(SMALL, event_log=str(log))
    launcher = process_launcher()  # A fork has the command line of its parent.
    with caplog.at_level(logging.DEBUG), hash_service(config, launcher=launcher) as service:
        generate(service.address, prompt(30, 2), 5)
        assert deliver(sink_of(service), forged(0, 1), of_member(service, PREFILL)) is (
            grpc.StatusCode.PERMISSION_DENIED
        )
        seen = {
            "snapshot": httpx.get(f"http://{service.metrics_address}/cluster/snapshot.json").text,
            "metrics": httpx.get(f"http://{service.metrics_address}/metrics").text,
        }
        for process in (one.process for one in service.launcher._processes.values()):
            for name in ("cmdline", "environ"):
                seen[f"{name} of {process.pid}"] = Path(f"/proc/{process.pid}/{name}").read_text()
    seen["spec"] = repr(service._spec(Member("instance", 1), "controller:1"))
    secrets = list(service._member_secrets._secrets.values())
    seen |= {
        "event log": log.read_text(),
        "log": caplog.text,
        "terminal": "".join(capfd.readouterr()),
    }
    assert len(set(secrets)) == 3 and all(len(secret) == 32 for secret in secrets)
    assert "controller:1" in seen["spec"], "the control"
    assert "a delivery of tokens is refused" in seen["log"], "the control"
    for place, text in seen.items():
        assert not [secret for secret in secrets if secret in text], place


def test_a_start_makes_new_secrets():
    secrets = MemberSecrets()
    first = member_metadata("instance 0", secrets.issue("instance 0"))
    assert secrets.admit(dict(first))
    second = member_metadata("instance 0", secrets.issue("instance 0"))
    assert secrets.admit(dict(second)) and not secrets.admit(dict(first))
    assert REFUSED not in str(second)
