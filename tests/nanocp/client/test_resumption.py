"""A client with several endpoints: a request whose stream breaks goes on at the next one."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from nanocp.client import Aborted, AsyncClient, Chunk, Client, InvalidArgument, Unavailable
from nanocp.client.resumption import Resumption
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

ANSWER = [10, 11, 12, 13, 14, 15]
FINISH = pb.Finish(reason=pb.Finish.LENGTH)


class Flaky(rpc.InferenceServicer, rpc.ControlServicer):
    """Answers with ANSWER from where the request says; each call breaks after some tokens."""

    def __init__(self, lives: list[int | None]) -> None:
        """lives: tokens until each call breaks; None: it does not, negative: it is refused."""
        self.lives = lives
        self.asked: list[pb.GenerateRequest] = []

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.asked.append(request)
        life = self.lives.pop(0) if self.lives else None
        if life == -1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the service is draining")
        if life == -2:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty")
        context.send_initial_metadata((("x-request-id", request.request_id),))
        known = dict.fromkeys(range(request.sampling.n or 1), 0)
        if request.HasField("resume"):
            known = {choice.index: len(choice.output_ids) for choice in request.resume.choices}
        if request.sampling.HasField("prompt_logprobs"):
            for logprob in (-1.0, -2.0, -3.0):
                logprobs = [pb.Logprobs(logprob=logprob)]
                yield pb.GenerateResponse(request_id=request.request_id, prompt_logprobs=logprobs)
                if logprob == -2.0 and life == 0:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "front end 1 was lost")
        for number in range(len(ANSWER)):
            for index, num_known in known.items():
                if number >= num_known:
                    yield pb.GenerateResponse(
                        request_id=request.request_id,
                        index=index,
                        token_ids=[ANSWER[number] + 100 * index],
                        finish=FINISH if number == len(ANSWER) - 1 - index else None,
                    )
            if number + 1 == life:
                context.abort(grpc.StatusCode.UNAVAILABLE, "front end 1 was lost")
            known = {i: n for i, n in known.items() if number < len(ANSWER) - 1 - i}

    def GenerateUnary(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> pb.GenerateUnaryResponse:
        self.asked.append(request)
        if self.lives and self.lives.pop(0) is not None:
            context.send_initial_metadata((("x-request-id", request.request_id),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "front end 1 was lost")
        choice = pb.Choice(token_ids=ANSWER, finish=FINISH)
        return pb.GenerateUnaryResponse(request_id=request.request_id, choices=[choice])

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        if "known" not in request.request_ids or self.lives:
            context.abort(grpc.StatusCode.NOT_FOUND, "no request is running")
        return pb.AbortResponse(aborted=["known"])


Serve = Callable[[list[int | None]], tuple[str, Flaky]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(lives: list[int | None]) -> tuple[str, Flaky]:
        servicer = Flaky(lives)
        server = grpc.server(ThreadPoolExecutor(4))
        rpc.add_InferenceServicer_to_server(servicer, server)
        rpc.add_ControlServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}", servicer

    yield start
    for server in servers:
        server.stop(0).wait()


def nobody() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def ids(chunks: list[Chunk], index: int = 0) -> list[int]:
    return [i for chunk in chunks if chunk.index == index for i in chunk.token_ids]


def collect(targets: list[str], is_async: bool, **sampling: object) -> list[Chunk]:
    if not is_async:
        with Client(targets) as client:
            return list(client.generate([1, 2], **sampling))

    async def run() -> list[Chunk]:
        async with AsyncClient(targets) as client:
            return [chunk async for chunk in client.generate([1, 2], **sampling)]

    return asyncio.run(run())


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_has_no_gap_and_no_doubled_token(serve, is_async):
    (first, one), (second, two) = serve([2]), serve([3, 4])
    chunks = collect([nobody(), first, second], is_async, temperature=1.0)
    assert ids(chunks) == ANSWER
    assert sum(chunk.finish is not None for chunk in chunks) == 1
    asked = [*one.asked, *two.asked]
    known = [list(choice.output_ids) for request in asked for choice in request.resume.choices]
    assert known == [ANSWER[:3], ANSWER[:2]]
    assert len({request.request_id for request in asked}) == 1, "the id is the same at each"
    assert len({request.sampling.seed for request in asked}) == 1, "and the seed"
    assert [request.resume.attempt for request in asked] == [0, 2, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_choices_that_have_ended_do_not_go_on(serve, is_async):
    (first, one), (second, two) = serve([5]), serve([])
    chunks = collect([first, second], is_async, n=2, temperature=1.0, seed=3)
    assert ids(chunks, 0) == ANSWER
    assert ids(chunks, 1) == [token_id + 100 for token_id in ANSWER[:-1]]
    assert [choice.index for choice in two.asked[0].resume.choices] == [0]
    assert len(one.asked) == 1


def test_log_probabilities_of_a_prompt_come_once(serve):
    (first, _), (second, two) = serve([0]), serve([2])
    chunks = collect([first, second], False, prompt_logprobs=0)
    logprobs = [one.logprob for chunk in chunks for one in chunk.prompt_logprobs]
    assert logprobs == [-1.0, -2.0, -3.0] and ids(chunks) == ANSWER
    assert not two.asked[0].resume.choices[0].output_ids


@pytest.mark.parametrize("is_async", [False, True])
def test_a_whole_answer_is_asked_for_again(serve, is_async):
    (first, one), (second, two) = serve([1]), serve([])

    async def run() -> tuple[int, ...]:
        async with AsyncClient([first, second]) as client:
            return (await client.generate_unary([1])).choices[0].token_ids

    if is_async:
        token_ids = asyncio.run(run())
    else:
        with Client([first, second]) as client:
            token_ids = client.generate_unary([1]).choices[0].token_ids
    assert list(token_ids) == ANSWER
    assert [request.resume.attempt for request in (*one.asked, *two.asked)] == [0, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_it_gives_up_after_the_stated_time_with_the_services_sentence(serve, is_async):
    targets = [serve([-1] * 100)[0] for _ in range(2)]

    async def run() -> None:
        async with AsyncClient(targets, resume_timeout_s=0.5) as client:
            await anext(client.generate([1]))

    with pytest.raises(Unavailable, match="the service is draining"):
        if is_async:
            asyncio.run(run())
        else:
            with Client(targets, resume_timeout_s=0.5) as client:
                next(client.generate([1]))


def test_it_does_not_give_up_before_the_stated_time():
    """However often it is refused meanwhile: a service may need minutes to begin again."""

    class Refused(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "the cluster is starting"

        def initial_metadata(self) -> None:
            """Nothing was sent before."""

    resumption = Resumption([1], {}, 2, resume_timeout_s=600.0)
    pauses = [resumption.pause_s("host:1", Refused()) for _ in range(5000)]
    assert pauses == sorted(pauses) and 1 < pauses[-1] <= 2
    late = Resumption([1], {}, 2, resume_timeout_s=-1.0)
    with pytest.raises(Unavailable, match="the cluster is starting"):
        late.pause_s("host:1", Refused())


def test_one_endpoint_and_other_errors_are_the_end(serve):
    target, servicer = serve([2])
    with Client(target) as client:
        chunks = client.generate([1], temperature=1.0)
        with pytest.raises(Unavailable, match="front end 1 was lost"):
            list(chunks)
    assert len(servicer.asked) == 1 and not servicer.asked[0].sampling.HasField("seed")
    with pytest.raises(ValueError, match="target is empty"):
        Client([])


def test_closing_ends_the_wait_for_an_endpoint():
    with Client([nobody(), nobody()]) as client:
        chunks = client.generate([1])
        threading.Timer(0.3, chunks.close).start()
        with pytest.raises((Aborted, Unavailable)):
            next(chunks)


def test_an_abort_asks_every_endpoint(serve):
    (first, _), (second, _) = serve([None]), serve([])
    with Client([first, second]) as client:
        assert client.abort("known") == ("known",)
        with pytest.raises(Exception, match="no request is running"):
            client.abort("other")


def test_a_request_that_is_refused_goes_nowhere_else(serve):
    (first, one), (second, two) = serve([-2]), serve([])
    with Client([first, second]) as client, pytest.raises(InvalidArgument, match="prompt is empty"):
        next(client.generate([1]))
    assert len(one.asked) == 1 and not two.asked
