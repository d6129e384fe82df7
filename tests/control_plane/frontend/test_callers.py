"""API keys, request ids in headers and metadata, and one client too many, for both APIs."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.frontend.access.api_keys import ApiKeys
from control_plane.frontend.http.middleware import PUBLIC_PATHS
from control_plane.frontend.http.served_model import ServedModel
from control_plane.observe.status_server import DATA_PATHS
from harness.exact.settings import configured
from harness.programs.command_line import nanocp
from harness.services.frontend_fakes import Service, make_config, running
from harness.waits import WAIT_S
from nanocp.client import Client, NotFound, Unauthenticated
from nanocp.config.service import ServiceConfig
from nanocp.values.plan import FinishReason
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc

MODEL = ServedModel("tiny", "checkpoints/tiny")
KEYS = ("first key", "second")
STRANGE = "caf\N{LATIN SMALL LETTER E WITH ACUTE}\r\nX-Forged: yes"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=MODEL) as service:
        yield service


@pytest.fixture(scope="module")
def guarded() -> Iterator[Service]:
    with running(configured(make_config(), api_keys=KEYS), model=MODEL) as service:
        yield service


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def openai_client(service: Service, key: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{service.url}/v1", api_key=key, timeout=WAIT_S, **{"max_retries": 0} | options
    )


def models_as(service: Service, authorization: str) -> httpx.Response:
    return httpx.get(f"{service.url}/v1/models", headers={"Authorization": authorization})


# --- keys ---


@pytest.mark.parametrize("key", KEYS)
def test_a_client_with_a_key_is_served_by_both_apis(guarded, pool, key):
    answer = pool.submit(openai_client(guarded, key).completions.create, model="tiny", prompt=[5])
    guarded.answer([5])
    assert answer.result(WAIT_S).usage.total_tokens == 2
    with Client(guarded.address, key) as client:
        chunks = client.generate([5])
        guarded.answer([5])
        assert [chunk.token_ids for chunk in chunks] == [(5,)]
        assert client.server_info().version
        with pytest.raises(NotFound):
            client.abort("unknown")


def tenants_of(service: Service, key: str, pool: ThreadPoolExecutor, user: str) -> set[str]:
    """Tenants of one request over each API."""
    tenants = set()
    client = openai_client(service, key)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), user=user)
    metadata = (("x-api-key", key),)
    with grpc.insecure_channel(service.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for call in (
            lambda: client.completions.create(model="tiny", prompt=[1], max_tokens=1, user=user),
            lambda: stub.GenerateUnary(message, metadata=metadata),
        ):
            answer = pool.submit(call)
            submission = service.submitted()
            tenants.add(submission.event(0).tenant)
            answered = (submission.request_id, 0, [5], FinishReason.LENGTH)
            service.instance.deliver(*answered)
            answer.result(WAIT_S)
    return tenants


def test_the_tenant_is_the_key_or_without_keys_the_user(service, guarded, pool):
    assert tenants_of(service, "any", pool, "ann") == {"ann"}
    (first,) = tenants_of(guarded, KEYS[0], pool, "ann")
    (second,) = tenants_of(guarded, KEYS[1], pool, "ann")
    assert first == ApiKeys(KEYS).tenant({"x-api-key": KEYS[0]}) != second
    assert not {KEYS[0], "ann", ""} & {first, second}


def test_a_request_without_a_key_is_refused_in_openais_shape(guarded):
    with pytest.raises(openai.AuthenticationError) as raised:
        openai_client(guarded, "first  key").models.list()
    assert raised.value.type == "AuthenticationError" and raised.value.code == "401"
    assert "Authorization: Bearer KEY" in raised.value.body["message"]
    response = httpx.post(f"{guarded.url}/tokenize", json={"prompt": "x"})
    assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
    for authorization in ("", "first key", "Basic second", "Bearer", "Bearer second,first key"):
        assert models_as(guarded, authorization).status_code == 401
    assert models_as(guarded, "bearer second").status_code == 200


def test_a_key_may_come_as_x_api_key_and_not_beside_another_one(guarded):
    first, second = KEYS
    for status, headers in (
        (200, {"x-api-key": first}),
        (200, {"X-API-Key": first, "Authorization": f"Bearer {first}"}),
        (200, {"x-api-key": second, "Authorization": ""}),
        (200, {"x-api-key": "", "Authorization": f"Bearer {second}"}),
        (401, {"x-api-key": ""}),
        (401, {"x-api-key": f"Bearer {first}"}),
        (401, {"x-api-key": "third"}),
        (401, {"x-api-key": first, "Authorization": f"Bearer {second}"}),
        (401, {"x-api-key": "third", "Authorization": f"Bearer {second}"}),
        (401, {"x-api-key": first, "Authorization": "Bearer third"}),
        (401, {"x-api-key": first, "Authorization": f"Basic {first}"}),
        (401, {"x-api-key": first, "Authorization": "Bearer"}),
    ):
        answer = httpx.get(f"{guarded.url}/v1/models", headers=headers)
        assert answer.status_code == status, headers
        assert status == 200 or "`x-api-key: KEY`" in answer.json()["error"]["message"]
    with grpc.insecure_channel(guarded.address) as channel:
        server_info = inference_pb2_grpc.ControlStub(channel).GetServerInfo
        asked = partial(server_info, pb.GetServerInfoRequest(), timeout=WAIT_S)
        assert asked(metadata=(("x-api-key", first),)).vocab_size
        with pytest.raises(grpc.RpcError, match="an API key is required"):
            asked(metadata=(("x-api-key", first), ("authorization", f"Bearer {second}")))


def test_a_request_without_a_key_is_refused_by_grpc(guarded):
    for key in ("", "third"):
        with Client(guarded.address, key) as client:
            for call in (
                lambda: next(client.generate([5])),
                lambda: client.abort("x"),
                client.loads,
            ):
                with pytest.raises(Unauthenticated, match="an API key is required"):
                    call()
    command = ("generate", "--target", guarded.address, "--prompt", "x")
    result = nanocp(*command, OPENAI_API_KEY="third")
    assert result.exit_code == 2 and result.stderr.startswith(
        "nanocp generate: an API key is required"
    )
    assert "--api-key" in result.stderr
    command = ("bench", "serve", "--base-url", guarded.url, "--num-prompts", "1")
    result = nanocp(*command, OPENAI_API_KEY="third")
    assert (
        result.exit_code == 2
        and f"{guarded.url} asks for an API key: set OPENAI_API_KEY" in result.stderr
    )


def test_probes_need_no_key_and_data_of_the_service_does(guarded):
    for path in PUBLIC_PATHS:
        assert httpx.get(guarded.url + path).status_code == 200, path
    for path in DATA_PATHS:
        for key in ("none", *KEYS):
            refused = httpx.get(guarded.url + path, headers={"Authorization": f"Bearer {key}"})
            assert refused.status_code == 401, path
            assert "an operator's key is required" in refused.json()["error"]["message"]
    paths = {
        path.partition("/{")[0] for path in httpx.get(f"{guarded.url}/openapi.json").json()["paths"]
    }
    for path in paths - set(PUBLIC_PATHS):
        assert httpx.post(guarded.url + path).status_code == 401, path
    with grpc.insecure_channel(guarded.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=WAIT_S
        )
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_public_status_needs_no_key_and_the_rest_does():
    config = configured(make_config(), api_keys=KEYS, public_status=True)
    with running(config, model=MODEL) as service:
        for path in DATA_PATHS:
            assert httpx.get(service.url + path).status_code == 200, path
        assert httpx.get(f"{service.url}/v1/models").status_code == 401


def test_without_keys_every_client_is_admitted():
    assert ApiKeys(()).admit({}) and not ApiKeys(("x",)).admit({})


@pytest.mark.parametrize("key", ["", " x", "x\n", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(ValueError, match="api_keys has a key that no header can carry") as raised:
        ServiceConfig(api_keys=("fine", key))
    assert "fine" not in str(raised.value), "keys are not repeated"


# --- names ---


def test_an_answer_over_http_names_its_request(service, pool):
    client = openai_client(service, "EMPTY")
    for headers, body, name in (
        ({}, {}, None),
        ({"X-Request-Id": "mine"}, {}, "mine"),
        ({}, {"request_id": "of the body"}, "of the body"),
        ({"X-Request-Id": "mine"}, {"request_id": "of the body"}, "mine"),
    ):
        options: Any = {"extra_headers": headers, "extra_body": body}
        answer = pool.submit(client.completions.create, model="tiny", prompt=[5], **options)
        service.answer([5])
        completion = answer.result(WAIT_S)
        assert completion.id == f"cmpl-{completion._request_id}"
        assert name in (None, completion._request_id)


def test_refusals_are_named_too_and_no_name_can_forge_a_header(service):
    body = {"prompt": [5], "max_tokens": -1}
    response = httpx.post(
        f"{service.url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}
    )
    assert (response.status_code, response.headers["X-Request-Id"]) == (400, "mine")
    first, second = (httpx.get(f"{service.url}/v2").headers["X-Request-Id"] for _ in range(2))
    assert len(first) == 32 and first != second
    response = httpx.post(f"{service.url}/v1/completions", json=body | {"request_id": STRANGE})
    assert response.headers["X-Request-Id"] == "caf%C3%A9%0D%0AX-Forged%3A%20yes"
    assert "X-Forged" not in response.headers


@pytest.mark.parametrize(("request_id", "metadata", "name"), [
    ("mine", (), "mine"),
    ("", (("x-request-id", "theirs"),), "theirs"),
    (STRANGE, (), "caf%C3%A9%0D%0AX-Forged"),
])  # fmt: skip
def test_an_answer_over_grpc_names_its_request(service, request_id, metadata, name):
    message = pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=[5]))
    with grpc.insecure_channel(service.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        streamed = stub.Generate(message, timeout=WAIT_S, metadata=metadata)
        assert dict(streamed.initial_metadata())["x-request-id"].startswith(name), (
            "before there is a token"
        )
        service.answer([5])
        assert {response.request_id for response in streamed} == {request_id or name}
        unary = stub.GenerateUnary.future(message, timeout=WAIT_S, metadata=metadata)
        service.answer([5])
        assert dict(unary.initial_metadata())["x-request-id"].startswith(name)
        assert unary.result().request_id == request_id or name


# --- one too many ---


def test_one_connection_too_many_learns_when_to_retry():
    with running(make_config(max_http_connections=1), model=MODEL) as service:
        host, port = service.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):
            response = httpx.get(f"{service.url}/v1/models")
            assert (response.status_code, response.headers["Connection"]) == (503, "close")
            assert response.headers["Retry-After"] == "1"
            with pytest.raises(openai.InternalServerError, match="max_http_connections") as raised:
                openai_client(service, "EMPTY").models.list()
            assert raised.value.type == "ServiceUnavailableError"
        # The client retries by itself, and is served.
        assert openai_client(service, "EMPTY", max_retries=5).models.list().data[0].id == "tiny"


def test_keys_of_a_file_change_while_the_service_runs(tmp_path, caplog, monkeypatch):
    """A file that has no key, or is gone, changes nothing: it would open the service."""
    monkeypatch.setattr("control_plane.frontend.access.api_keys._LOOK_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n")
    keys = ApiKeys(("own",), str(file))

    def valid() -> set[str]:
        names = ("own", "first", "second", "# of the team", "")
        return {name for name in names if keys.admit({"authorization": f"Bearer {name}"})}

    assert valid() == {"own", "first"} and not keys.admit({})
    file.write_text("first\nsecond\n")
    assert valid() == {"own", "first", "second"}
    file.write_text("second\n")
    assert valid() == {"own", "second"}
    for broken in ("", "# nobody\n", "schlüssel\n"):
        file.write_text(broken)
        assert valid() == {"own", "second"}
    file.unlink()
    assert valid() == {"own", "second"}
    assert caplog.text.count("the former keys stay") == 4
    with pytest.raises(ValueError, match="cannot be read"):
        ApiKeys((), str(file))
