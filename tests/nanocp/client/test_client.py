"""The Python clients against a scripted service: every status, streams, aborts."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from harness.programs.imports import assert_not_imported
from harness.services import sync_client
from harness.services.scripted_service import CHUNKS, WAIT_S, ScriptedService
from nanocp import client as nanocp_client
from nanocp.client import AsyncClient, Client, ServiceError
from nanocp.values.sampling import TokenLogprobs
from nanocp.wire.v1 import inference_pb2 as pb

ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: "InvalidArgument",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "ResourceExhausted",
    grpc.StatusCode.UNAVAILABLE: "Unavailable", grpc.StatusCode.CANCELLED: "Aborted",
    grpc.StatusCode.NOT_FOUND: "NotFound", grpc.StatusCode.DEADLINE_EXCEEDED: "DeadlineExceeded",
    grpc.StatusCode.INTERNAL: "ServiceError",
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[ScriptedService]:
    service = ScriptedService()
    yield service
    service.server.stop(0).wait()


def test_the_package_has_the_clients_and_does_not_import_them_before():
    program = (
        "import sys, nanocp; assert 'grpc' not in sys.modules; "
        "from nanocp import AsyncClient, Client; import nanocp.client; "
        "assert (Client, AsyncClient) == (nanocp.client.Client, nanocp.client.AsyncClient); "
        "assert not hasattr(nanocp, 'Clint')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_stream_becomes_chunks(server):
    with Client(server.target) as client:
        assert list(client.generate("hello")) == CHUNKS
        assert server.script.last == pb.GenerateRequest(
            text="hello", sampling=pb.SamplingParameters()
        )


def test_options_reach_the_service_and_absent_ones_stay_absent(server):
    with Client(server.target) as client:
        list(
            client.generate(
                [1, 2], request_id="x", max_tokens=0, top_p=0.5, stop_token_ids=[3], ignore_eos=True
            )
        )
    assert server.script.last == pb.GenerateRequest(
        request_id="x",
        token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.SamplingParameters(
            max_tokens=0, top_p=0.5, stop_token_ids=[3], ignore_eos=True
        ),
    )
    assert not server.script.last.sampling.HasField("temperature")


def test_every_control_reaches_the_service(server):
    penalties = {
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
    }
    with Client(server.target) as client:
        stop = {"stop": ["end", "\n\n"], "include_stop_str_in_output": True}
        list(
            client.generate("x", **penalties, logit_bias={3: -1.5, 8: 2}, bad_words=["no"], **stop)
        )
        asked = pb.SamplingParameters(
            **penalties, logit_bias={3: -1.5, 8: 2.0}, bad_words=["no"], **stop
        )
        assert server.script.last.sampling == asked
        list(client.generate("x", stop="end", bad_words="no"))
        assert server.script.last.sampling == pb.SamplingParameters(stop=["end"], bad_words=["no"])


def test_logprobs_come_beside_their_tokens(server):
    sent = TokenLogprobs(-0.5, ((7, -0.5), (3, -1.5)))
    with Client(server.target) as client:
        assert [chunk.logprobs for chunk in client.generate("x", logprobs=2)] == [(sent,), ()]
    assert server.script.last.sampling.logprobs == 2


def test_chunks_of_several_choices_have_their_index(server):
    with Client(server.target) as client:
        chunks = list(client.generate("x", n=2, temperature=1.0, prompt_logprobs=0))
    assert [(chunk.index, chunk.text) for chunk in chunks] == [
        (0, ""),
        (1, "text 1"),
        (0, "text 0"),
    ]
    assert [chunk.prompt_logprobs for chunk in chunks] == [(TokenLogprobs(-2.5, ()),), (), ()]
    assert chunks[1].finish is not None and chunks[1].finish.stop_reason == "q"


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: code.name)
def test_every_status_is_an_error_of_its_own_with_the_services_sentence(server, code):
    with (
        Client(server.target) as client,
        pytest.raises(ServiceError, match=f"a sentence about {code.name}") as raised,
    ):
        next(client.generate("x", request_id=f"fail {code.name}"))
    assert type(raised.value) is getattr(nanocp_client, ERRORS[code])


def test_a_failure_comes_after_what_was_streamed(server):
    with Client(server.target) as client:
        chunks = client.generate("x", request_id="break")
        assert next(chunks) == CHUNKS[0]
        with pytest.raises(nanocp_client.Unavailable, match="instance 2 was lost"):
            next(chunks)


def test_closing_the_chunks_aborts(server):
    with Client(server.target) as client:
        chunks = client.generate("x", request_id="hang")
        assert next(chunks) == CHUNKS[0]
        chunks.close()
        assert server.script.cancelled.wait(WAIT_S)


def test_abort_returns_what_was_aborted(server):
    with Client(server.target) as client:
        assert client.abort("a", "b") == client.abort(["a", "b"]) == ("a",)
        with pytest.raises(nanocp_client.NotFound, match="no such request"):
            client.abort("nobody")


def test_priority_and_queue_timeout_reach_the_service(server):
    with Client(server.target) as client:
        list(client.generate("x", priority=-3, queue_timeout_s=0.0001, user="ada"))
    last = server.script.last
    assert (last.priority, last.queue_timeout_ms, last.user) == (-3, 1, "ada")


def test_an_impossible_option_is_refused_before_anything_is_sent(server):
    with Client(server.target) as client:
        with pytest.raises(ValueError, match="range"):
            client.generate("x", max_tokens=2**40)
        with pytest.raises(ValueError, match="no_such_option"):
            client.generate("x", no_such_option=1)  # type: ignore[call-arg]


def test_an_absent_service_is_a_sentence():
    with Client("127.0.0.1:9") as client:
        with pytest.raises(
            nanocp_client.Unavailable, match=r"no service answers at 127\.0\.0\.1:9"
        ):
            next(client.generate("x"))
        with pytest.raises(
            nanocp_client.Unavailable, match=r"no service answers at 127\.0\.0\.1:9"
        ):
            client.abort("x")
    sentence = r"no service answers at http://127\.0\.0\.1:9"
    with (
        Client("http://127.0.0.1:9") as client,
        pytest.raises(nanocp_client.Unavailable, match=sentence),
    ):
        next(client.generate("x"))


def test_the_asynchronous_client_does_the_same(server):
    async def use() -> None:
        async with AsyncClient(server.target) as client:
            assert [chunk async for chunk in client.generate("hello")] == CHUNKS
            assert await client.abort("a", "b") == ("a",)
            with pytest.raises(nanocp_client.NotFound):
                await client.abort("nobody")
            with pytest.raises(
                nanocp_client.ResourceExhausted, match="a sentence about RESOURCE_EXHAUSTED"
            ):
                await anext(client.generate("x", request_id="fail RESOURCE_EXHAUSTED"))
            chunks = client.generate("x", request_id="hang")
            assert await anext(chunks) == CHUNKS[0]
            chunks.close()
            assert await asyncio.to_thread(server.script.cancelled.wait, WAIT_S)

    asyncio.run(use())


def test_an_option_that_cannot_be_sent_is_named():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="max_tokens is 10000000000, which cannot be sent"):
            client.generate("x", max_tokens=10**10)
        with pytest.raises(ValueError, match=r"stop_token_ids is \[-1\]"):
            client.generate("x", max_tokens=1, stop_token_ids=[-1])
        for option, value in (
            ("priority", 10**10),
            ("priority", 1.5),
            ("queue_timeout_s", 1e300),
            ("queue_timeout_s", float("nan")),
            ("queue_timeout_s", "5"),
            ("request_id", 7),
            ("stop", "\ud800"),
            ("max_tokens", 1.5),
            ("logit_bias", {"5": 1.0}),
        ):
            with pytest.raises(ValueError, match=rf"^{option} is .*, which cannot be sent"):
                client.generate("x", **{option: value})  # type: ignore[arg-type]
        for prompt in (None, 5, b"abc", [1, -1], ["a"], "\ud800"):
            with pytest.raises(ValueError, match=r"^prompt is .*, which cannot be sent"):
                client.generate(prompt)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"^prompt is .*, which cannot be sent"):
                client.generate_unary(prompt)  # type: ignore[arg-type]


def test_an_asynchronous_client_outside_a_loop_is_a_sentence():
    with pytest.raises(RuntimeError, match="must be made inside the event loop that uses it"):
        AsyncClient("127.0.0.1:1")


def test_the_client_imports_nothing_heavy():
    assert_not_imported("import nanocp.client", "torch", "ray", "transformers", "numpy")


def test_the_client_for_threads_is_what_the_one_for_event_loops_says():
    assert sync_client.TARGET.read_text() == sync_client.generated(), "run `make client`"


def test_a_pattern_of_the_table_that_is_nowhere_is_named(monkeypatch):
    monkeypatch.setitem(sync_client.REPLACED, "no such word", "")
    with pytest.raises(ValueError, match=r"'no such word' is nowhere in async_client\.py"):
        sync_client.generated()
