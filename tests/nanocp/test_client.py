"""The Python clients and `nanocp generate` against a scripted service: every status, streams,
aborts, exit codes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import typer
from typer.testing import CliRunner

from nanocp import client as nanocp_client
from nanocp.cli.generate import generate
from nanocp.client import AsyncClient, Chunk, Client, Finish, ServiceError
from nanocp.plan import FinishReason
from nanocp.sampling import TokenLogprobs
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

WAIT_S = 60.0
FINISH = pb.Finish(
    reason=pb.Finish.LENGTH,
    prompt_tokens=2,
    generated_tokens=3,
    cp_degree=2,
    moe_binding=1,
    kv_split=[pb.KvShare(instance=0, pages=4), pb.KvShare(instance=1, pages=5)],
)
ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: "InvalidArgument",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "ResourceExhausted",
    grpc.StatusCode.UNAVAILABLE: "Unavailable",
    grpc.StatusCode.CANCELLED: "Aborted",
    grpc.StatusCode.NOT_FOUND: "NotFound",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DeadlineExceeded",
    grpc.StatusCode.INTERNAL: "ServiceError",
}


class Script(rpc.InferenceServicer, rpc.ControlServicer):
    """Answers by the request's id: `fail CODE`, `break` (a failure after one message), `hang`,
    `ids`, else a stream."""

    def __init__(self) -> None:
        self.last = pb.GenerateRequest()
        self.cancelled = threading.Event()

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.last = request
        word, _, rest = request.request_id.partition(" ")
        if word == "fail":
            context.abort(grpc.StatusCode[rest], f"a sentence about {rest}")
        if word == "hang":
            context.add_callback(self.cancelled.set)
        if request.sampling.n > 1:
            prompt_logprobs = [pb.Logprobs(logprob=-2.5)] * request.sampling.HasField(
                "prompt_logprobs"
            )
            yield pb.GenerateResponse(request_id="named", prompt_logprobs=prompt_logprobs)
            for index in reversed(range(request.sampling.n)):
                finish = pb.Finish(
                    reason=pb.Finish.STOP, stop_string="q", prompt_tokens=2, generated_tokens=1
                )
                text = "" if word == "ids" else f"text {index}"
                yield pb.GenerateResponse(
                    request_id="named", index=index, token_ids=[7 + index], text=text, finish=finish
                )
            return
        first, last = ("", "") if word == "ids" else ("\x1b[2Jhi", "!")
        logprobs = [pb.Logprobs(logprob=-0.5, top_token_ids=[7, 3], top_logprobs=[-0.5, -1.5])]
        if not request.sampling.HasField("logprobs"):
            logprobs = []
        yield pb.GenerateResponse(request_id="named", token_ids=[7], text=first, logprobs=logprobs)
        if word == "break":
            context.abort(grpc.StatusCode.UNAVAILABLE, "instance 2 was lost")
        if word == "hang":
            self.cancelled.wait(WAIT_S)
        yield pb.GenerateResponse(request_id="named", token_ids=[8, 9], text=last, finish=FINISH)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        if "nobody" in request.request_ids:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return pb.AbortResponse(aborted=request.request_ids[:1])


class Server:
    def __init__(self) -> None:
        self.script = Script()
        self.server = grpc.server(ThreadPoolExecutor(4))
        rpc.add_InferenceServicer_to_server(self.script, self.server)
        rpc.add_ControlServicer_to_server(self.script, self.server)
        self.target = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.server.stop(0).wait()


CHUNKS = [
    Chunk("named", (7,), "\x1b[2Jhi", None),
    Chunk("named", (8, 9), "!", Finish(FinishReason.LENGTH, 2, 3, 2, 1, ((0, 4), (1, 5)))),
]


def test_the_package_has_the_clients_and_does_not_import_them_before() -> None:
    program = (
        "import sys, nanocp; assert 'grpc' not in sys.modules; from nanocp import AsyncClient, Client; "
        "import nanocp.client; assert (Client, AsyncClient) == (nanocp.client.Client, nanocp.client.AsyncClient); "
        "assert not hasattr(nanocp, 'Clint')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_stream_becomes_chunks(server: Server) -> None:
    with Client(server.target) as client:
        assert list(client.generate("hello")) == CHUNKS
        assert server.script.last == pb.GenerateRequest(
            text="hello", sampling=pb.SamplingParameters()
        )


def test_options_reach_the_service_and_absent_ones_stay_absent(server: Server) -> None:
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


def test_every_control_reaches_the_service_from_python_and_from_the_command_line(
    server: Server,
) -> None:
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
    options = [
        word
        for name, value in penalties.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    biases = ("--logit-bias", "3:-1.5", "--logit-bias", "8:2")
    texts = ("--bad-word", "no", "--stop", "end", "--stop", "\n\n", "--include-stop-str-in-output")
    code, _, err = run("--target", server.target, "--prompt", "x", *options, *biases, *texts)
    assert (code, server.script.last.sampling) == (0, asked), err
    for wrong in ("3", "3:", "x:1", "3=1"):
        code, _, err = run("--target", server.target, "--prompt", "x", "--logit-bias", wrong)
        assert (code, err) == (
            2,
            f"nanocp generate: --logit-bias is '{wrong}'; it must be ID:BIAS, as in 42:-1.5\n",
        )


def test_logprobs_come_beside_their_tokens(server: Server) -> None:
    told = TokenLogprobs(-0.5, ((7, -0.5), (3, -1.5)))
    with Client(server.target) as client:
        assert [chunk.logprobs for chunk in client.generate("x", logprobs=2)] == [(told,), ()]
    assert server.script.last.sampling.logprobs == 2
    code, out, _ = run("--target", server.target, "--prompt", "x", "--logprobs", "0", "--json")
    assert (code, server.script.last.sampling.logprobs) == (0, 0)
    assert json.loads(out)["logprobs"] == [{"logprob": -0.5, "top": [[7, -0.5], [3, -1.5]]}]
    code, _, err = run("--target", server.target, "--prompt", "x", "--logprobs", "2")
    assert (code, err) == (2, "nanocp generate: --logprobs is shown with --json only; give both\n")


def test_several_choices_are_told_apart(server: Server) -> None:
    asked = ("--target", server.target, "--prompt", "x", "--temperature", "1", "--n", "2")
    with Client(server.target) as client:
        chunks = list(client.generate("x", n=2, temperature=1.0, prompt_logprobs=0))
    assert [(chunk.index, chunk.text) for chunk in chunks] == [
        (0, ""),
        (1, "text 1"),
        (0, "text 0"),
    ]
    assert [chunk.prompt_logprobs for chunk in chunks] == [(TokenLogprobs(-2.5, ()),), (), ()]
    assert chunks[1].finish is not None and chunks[1].finish.stop_reason == "q"
    code, out, err = run(*asked)
    assert (code, out) == (0, "[0] text 0\n[1] text 1\n") and err.count(
        "1 generated tokens, stop"
    ) == 2
    code, out, _ = run(*asked, "--json", "--prompt-logprobs", "0")
    summary = json.loads(out)
    assert [
        (choice["text"], choice["token_ids"], choice["stop_reason"])
        for choice in summary["choices"]
    ] == [
        ("text 0", [7], "q"),
        ("text 1", [8], "q"),
    ]
    assert (summary["prompt_tokens"], summary["prompt_logprobs"]) == (
        2,
        [{"logprob": -2.5, "top": []}],
    )
    code, _, err = run(*asked, "--prompt-logprobs", "0")
    assert (code, err) == (
        2,
        "nanocp generate: --prompt-logprobs is shown with --json only; give both\n",
    )


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: code.name)
def test_every_status_is_an_error_of_its_own_with_the_services_sentence(
    server: Server, code: grpc.StatusCode
) -> None:
    with (
        Client(server.target) as client,
        pytest.raises(ServiceError, match=f"a sentence about {code.name}") as raised,
    ):
        next(client.generate("x", request_id=f"fail {code.name}"))
    assert type(raised.value) is getattr(nanocp_client, ERRORS[code])


def test_a_failure_comes_after_what_was_streamed(server: Server) -> None:
    with Client(server.target) as client:
        chunks = client.generate("x", request_id="break")
        assert next(chunks) == CHUNKS[0]
        with pytest.raises(nanocp_client.Unavailable, match="instance 2 was lost"):
            next(chunks)


def test_closing_the_chunks_aborts(server: Server) -> None:
    with Client(server.target) as client:
        chunks = client.generate("x", request_id="hang")
        assert next(chunks) == CHUNKS[0]
        chunks.close()
        assert server.script.cancelled.wait(WAIT_S)


def test_abort_returns_what_was_aborted(server: Server) -> None:
    with Client(server.target) as client:
        assert client.abort("a", "b") == ("a",)
        with pytest.raises(nanocp_client.NotFound, match="no such request"):
            client.abort("nobody")


def test_priority_and_queue_timeout_reach_the_service(server: Server) -> None:
    with Client(server.target) as client:
        list(client.generate("x", priority=-3, queue_timeout_s=0.0001))
    assert (server.script.last.priority, server.script.last.queue_timeout_ms) == (-3, 1)
    run("--target", server.target, "--prompt", "x", "--priority", "4", "--queue-timeout-s", "1.5")
    assert (server.script.last.priority, server.script.last.queue_timeout_ms) == (4, 1500)
    code, _, err = run("--target", server.target, "--prompt", "x", "--queue-timeout-s", "0")
    assert (code, err) == (
        2,
        "nanocp generate: --queue-timeout-s is 0; it must be above 0 and at most 1e+06\n",
    )
    code, _, err = run("--target", server.target, "--prompt", "x", "--timeout-s", "1e30")
    assert (code, err) == (
        2,
        "nanocp generate: --timeout-s is 1e+30; it must be above 0 and at most 1e+06\n",
    )


def test_an_impossible_option_is_refused_before_anything_is_sent(server: Server) -> None:
    with Client(server.target) as client:
        with pytest.raises(ValueError, match="range"):
            client.generate("x", max_tokens=2**40)
        with pytest.raises(ValueError, match="no_such_option"):
            client.generate("x", no_such_option=1)  # type: ignore[call-arg]


def test_nobody_at_the_target_is_said_so() -> None:
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


def test_the_asynchronous_client_does_the_same(server: Server) -> None:
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


# --- nanocp generate ---

APP = typer.Typer()
APP.command()(generate)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(APP, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_generate_streams_text_and_sums_up_on_standard_error(server: Server) -> None:
    code, out, err = run(
        "--target", server.target, "--prompt", "hello", "--max-tokens", "3", "--stop-token-id", "4"
    )
    assert (code, out) == (0, "\x1b[2Jhi!\n")
    assert "2 prompt and 3 generated tokens, length; CP degree 2, MoE binding 1" in err
    assert "4 on instance 0, 5 on instance 1" in err
    assert (server.script.last.text, server.script.last.sampling.max_tokens) == ("hello", 3)
    assert list(server.script.last.sampling.stop_token_ids) == [4]
    assert not server.script.last.sampling.HasField("temperature")


def test_generate_prints_one_json_object(server: Server) -> None:
    code, out, err = run("--target", server.target, "--prompt", "hello", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "request_id": "named",
        "text": "\x1b[2Jhi!",
        "token_ids": [7, 8, 9],
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_tokens": 2,
        "generated_tokens": 3,
        "cp_degree": 2,
        "moe_binding": 1,
        "kv_split": [[0, 4], [1, 5]],
    }


def test_generate_reads_prompts_from_files(server: Server, tmp_path: Path) -> None:
    text, ids = tmp_path / "prompt.txt", tmp_path / "ids.json"
    text.write_text("from a file\n", encoding="utf-8")
    ids.write_text("[1, 2, 3]")
    assert run("--target", server.target, "--prompt-file", str(text))[0] == 0
    assert server.script.last.text == "from a file\n"
    assert run("--target", server.target, "--prompt-ids", str(ids))[0] == 0
    assert list(server.script.last.token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1, -2]", "JSON array of token ids"),
        ("{}", "JSON array"),
        ("1 2", "is not JSON"),
        ("[true]", "JSON array"),
    ],
)
def test_a_file_without_ids_is_named(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    code, out, err = run("--prompt-ids", str(path))
    assert (code, out) == (2, "")
    assert str(path) in err and sentence in err


def test_generate_wants_exactly_one_prompt(tmp_path: Path) -> None:
    for arguments in (
        (),
        ("--prompt", "x", "--prompt-file", "y"),
        ("--prompt", "", "--prompt-ids", "y"),
    ):
        code, _, err = run(*arguments)
        assert code == 2 and "exactly one of --prompt, --prompt-file and --prompt-ids" in err
    assert "cannot be read" in run("--prompt-file", str(tmp_path / "absent"))[2]


def test_a_failed_request_is_one_sentence_and_an_exit_status(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("--target", "127.0.0.1:9", "--prompt", "x")
    assert (code, out) == (2, "")
    assert (
        err.startswith("nanocp generate: no service answers at 127.0.0.1:9")
        and err.count("\n") == 1
    )

    for name, status in (
        ("fail INVALID_ARGUMENT", 2),
        ("fail RESOURCE_EXHAUSTED", 1),
        ("break", 1),
    ):
        real = Client.generate
        monkeypatch.setattr(
            Client, "generate", lambda *a, n=name, r=real, **k: r(*a, **{**k, "request_id": n})
        )
        code, _, err = run("--target", server.target, "--prompt", "x")
        monkeypatch.undo()
        assert code == status, name
        assert "nanocp generate: " in err


def test_a_service_without_text_shows_ids(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Client.generate
    monkeypatch.setattr(Client, "generate", lambda *a, **k: real(*a, **{**k, "request_id": "ids"}))
    assert run("--target", server.target, "--prompt", "x")[1] == "7 8 9\n"


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanocp.cli.generate import _printable

    assert _printable("a\x1b[2J\n\tb") == "a\x1b[2J\n\tb"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _printable("a\x1b[2J\n\tb\x07") == "a\ufffd[2J\n\tb\ufffd"


def test_the_command_imports_quickly() -> None:
    program = "import sys, nanocp.cli.generate; assert not {'grpc', 'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    program = "import sys, nanocp.client; assert not {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_option_that_cannot_be_sent_is_named() -> None:
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


def test_an_asynchronous_client_outside_a_loop_is_a_sentence() -> None:
    with pytest.raises(RuntimeError, match="must be made inside the event loop that uses it"):
        AsyncClient("127.0.0.1:1")
