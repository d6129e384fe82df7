"""OpenAI's API beside completions: models, tokens, health; ends, disconnects, bounds."""

import contextlib
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from control_plane.frontend.http import server
from harness.services.frontend_fakes import LIMITS, TOKENIZER, Service, make_config, running
from harness.services.openai_service import HELLO, MODEL, address_of, client_of, connection, send
from harness.waits import WAIT_S
from nanocp.values.plan import Ended, FinishReason
from nanocp.values.sampling import Token, TokenLogprobs


def test_the_model_and_the_version_are_returned(service, client):
    (card,) = client.models.list().data
    assert (card.id, card.owned_by, card.model_extra and card.model_extra["max_model_len"]) == (
        "tiny",
        "nanocp",
        LIMITS.max_model_len,
    )
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{service.url}/version").json()["version"]


def test_texts_and_chats_are_tokenized_and_back(service):
    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{service.url}/{path}", json=body).json()

    answer = post("tokenize", prompt="the fox", return_token_strs=True)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (
        HELLO,
        len(HELLO),
        LIMITS.max_model_len,
    )
    assert "".join(answer["token_strs"]) == "theĠfox"
    chat = post("tokenize", messages=[{"role": "user", "content": "hi"}])
    assert (
        chat["tokens"] == TOKENIZER.encode("<s>user: hi\n", add_special_tokens=False)
        and not chat["token_strs"]
    )
    assert post("detokenize", tokens=chat["tokens"]) == {"prompt": "<s>user: hi\n"}


def test_health_and_readiness_follow_the_cluster():
    service = Service(make_config(), LIMITS, model=MODEL)
    try:
        states: list[tuple[int, int]] = []

        def look() -> None:
            paths = ("health", "ready")
            states.append(tuple(httpx.get(f"{service.url}/{path}").status_code for path in paths))  # type: ignore[arg-type]

        look()
        with pytest.raises(openai.InternalServerError, match="starting") as raised:
            client_of(service).completions.create(model="tiny", prompt=[5])
        assert (raised.value.status_code, raised.value.response.headers["Retry-After"]) == (
            503,
            "1",
        )
        service.front_end.open(service.controller)
        look()
        assert service.front_end.drain()
        look()
        assert states == [(503, 503), (200, 200), (200, 503)]
        with pytest.raises(openai.InternalServerError, match="draining"):
            client_of(service).completions.create(model="tiny", prompt=[5])
    finally:
        service.close()


def test_a_port_in_use_is_a_sentence_and_the_front_end_ends():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = make_config()
        object.__setattr__(config.service, "http_port", port)
        with pytest.raises(
            OSError,
            match=rf"cannot listen on port {port} of 127.0.0.1: .*in use \(service.http_port\)",
        ):
            Service(config, LIMITS, model=MODEL)


# --- ends, and clients that go away ---


@pytest.mark.parametrize(("reason", "status"), [
    (FinishReason.REFUSED, 503),
    (FinishReason.INVALID, 400),
    (FinishReason.EXPIRED, 504),
    (FinishReason.FAILED, 503),
])  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_scheduler_ends_before_a_token_is_a_status(
    service, pool, reason, status, is_stream
):
    body = {"prompt": [5], "stream": is_stream}
    answer = pool.submit(httpx.post, f"{service.url}/v1/completions", json=body)
    service.front_end.ended(Ended(service.next_request(), reason, "a sentence"))
    response = answer.result(WAIT_S)
    says = "; send the request again" if reason is FinishReason.FAILED else ""
    assert response.status_code == status
    assert response.json()["error"]["message"] == f"a sentence{says}"
    assert response.json()["error"]["code"] == status
    assert response.headers.get("Retry-After") == ("1" if status == 503 else None)


def test_what_fails_within_a_stream_is_an_event(service, client):
    def begin() -> Any:
        return client.completions.create(model="tiny", prompt=[5], stream=True)

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(begin)
        request = service.next_request()
        service.instance.deliver(request, 0, HELLO[:1])
        stream = iter(answer.result(WAIT_S))
        assert next(stream).choices[0].text
        service.front_end.ended(Ended(request, FinishReason.FAILED, "an instance was lost"))
        with pytest.raises(openai.APIError, match="an instance was lost; send the request again"):
            list(stream)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_client_that_goes_away_aborts_every_choice(service, is_stream, num_tokens):
    with connection(service) as client:
        send(client, {"prompt": [[5], [6]], "n": 2, "max_tokens": 9, "stream": is_stream})
        requests = [service.next_request() for _ in range(4)]
        for request in requests[: 4 * num_tokens]:
            service.instance.deliver(request, 0, HELLO[:1])
        if is_stream and num_tokens:
            assert b"200 OK" in client.recv(1 << 16)
    assert {service.next_abort() for _ in range(4)} == set(requests)


def test_a_client_that_does_not_read_loses_its_request():
    with running(make_config(max_undelivered_tokens=64), model=MODEL) as service:
        client = idle_reader(service)
        request = service.next_request()
        flood(service, request)
        assert service.next_abort() == request
        # What it gets, should it ever read, says why.
        received = b""
        client.settimeout(WAIT_S)
        while b"[DONE]" not in received:
            received = received[-2000:] + client.recv(1 << 20)
        assert b"the client is too slow" in received and b'"code":503' in received
        client.close()


def test_a_client_that_never_reads_is_cut(monkeypatch):
    monkeypatch.setattr(server, "UNREAD_TIMEOUT_S", 1)
    with (
        running(make_config(max_undelivered_tokens=64), model=MODEL) as service,
        idle_reader(service),
    ):
        flood(service, service.next_request())
        begun_s = time.monotonic()
        assert service.front_end.drain(), "a request of a client that reads nothing stays open"
        assert time.monotonic() - begun_s < WAIT_S


def idle_reader(service: Service) -> socket.socket:
    """A client that asks for a very long stream."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address_of(service))
    send(
        client,
        {"prompt": [5], "max_tokens": 150_000, "stream": True, "logprobs": 0, "ignore_eos": True},
    )
    return client


def flood(service: Service, request: int) -> None:
    """Deliver tokens until the request is aborted for them."""
    deadline = time.monotonic() + WAIT_S
    for index in range(0, 150_000, 32):
        if not service.controller.aborts.empty():
            return
        assert time.monotonic() < deadline, (
            f"{index} tokens were taken for a client that reads nothing"
        )
        tokens = [
            Token(service.address, request, index + i, 260, None, TokenLogprobs(-0.5, ()))
            for i in range(32)
        ]
        service.instance.deliver_tokens(tokens)
        time.sleep(0.002)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", b"POST /tokenize HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_client_that_does_not_say_what_it_wants_is_cut(sent):
    with (
        running(make_config(http_request_timeout_ms=200), model=MODEL) as service,
        connection(service) as client,
    ):
        client.settimeout(20)  # less than by default
        with contextlib.suppress(ConnectionError):  # cut before it had sent that much
            client.sendall(sent)
            assert client.recv(100) == b""


def test_connections_are_bounded():
    with (
        running(make_config(max_http_connections=2), model=MODEL) as service,
        connection(service) as idle,
    ):
        assert httpx.get(f"{service.url}/version").status_code == 200
        with connection(service):
            assert httpx.get(f"{service.url}/version").status_code == 503
        idle.close()
        deadline = time.monotonic() + WAIT_S
        while httpx.get(f"{service.url}/version").status_code != 200:
            assert time.monotonic() < deadline, "closed connections still count"


def test_streams_end_with_a_sentence_when_the_service_stops():
    service = Service(make_config(), LIMITS, model=MODEL)
    service.front_end.open(service.controller)
    with ThreadPoolExecutor() as pool:
        answer: Future[Any] = pool.submit(
            client_of(service).completions.create, model="tiny", prompt=[5], stream=True
        )
        request = service.next_request()
        service.instance.deliver(request, 0, HELLO[:1])
        stream = iter(answer.result(WAIT_S))
        next(stream)
        stopping = threading.Thread(target=service.front_end.stop, args=("instance 1 was lost",))
        stopping.start()
        with pytest.raises(openai.APIError, match="instance 1 was lost"):
            list(stream)
        stopping.join(WAIT_S)
    service.close()
