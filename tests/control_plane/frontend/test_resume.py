"""A client resumes an answer whose stream broke: at another front end, from the tokens it has."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from control_plane.ports.controller_interface import Submission
from harness.services.frontend_fakes import TOKENIZER, Service, running
from harness.services.kit import ids_of
from harness.services.openai_service import MODEL
from harness.waits import WAIT_S
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import RowInput
from nanocp.wire.rows import decode_row_input
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
WORDS = TOKENIZER.encode("the quick brown fox")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=MODEL) as service:
        yield service


@pytest.fixture
def stub(service: Service) -> Iterator[rpc.InferenceStub]:
    with grpc.insecure_channel(service.address) as channel:
        yield rpc.InferenceStub(channel)


def request(
    *choices: tuple[int, list[int]], attempt: int = 1, request_id: str = "", **sampling: Any
) -> pb.GenerateRequest:
    resumed = [pb.ResumedChoice(index=index, output_ids=ids) for index, ids in choices]
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParameters(**sampling),
        resume=pb.Resume(choices=resumed, attempt=attempt),
    )


def row_of(submission: Submission) -> RowInput:
    return decode_row_input(submission.arrival.row_start)


def test_the_next_attempt_has_all_that_the_first_had_and_the_clients_tokens(service, stub):
    sampling = {
        "temperature": 0.5, "seed": 11, "repetition_penalty": 1.5, "max_tokens": 5, "logprobs": 1,
    }  # fmt: skip
    call = stub.Generate(request((0, [20, 21]), attempt=3, **sampling), timeout=WAIT_S)
    submission = service.submitted()
    row = row_of(submission)
    assert list(submission.prompt_ids) == [5, 6, 7, 20, 21]
    assert (submission.arrival.attempt, submission.arrival.max_tokens) == (3, 3)
    assert (row.attempt, row.last_token, row.output_ids) == (3, 21, (20, 21))
    assert (row.params.seed, row.params.repetition_penalty, row.params.max_tokens) == (11, 1.5, 5)
    assert row.prompt_ids == (5, 6, 7), "penalties need the prompt without the output"
    service.instance.deliver(submission.request_id, 2, [22, 23, 24], LENGTH, attempt=3)
    responses = list(call)
    assert ids_of(responses) == [22, 23, 24]
    assert responses[-1].finish.prompt_tokens == 3
    assert responses[-1].finish.generated_tokens == 5


def test_tokens_of_an_attempt_before_the_clients_are_dropped(service, stub):
    call = stub.Generate(request((0, [20]), attempt=2, max_tokens=3), timeout=WAIT_S)
    number = service.next_request()
    service.instance.deliver(number, 1, [98, 99], LENGTH, attempt=0)
    service.instance.deliver(number, 1, [21, 22], LENGTH, attempt=2)
    assert ids_of(call) == [21, 22]


@pytest.mark.parametrize("cut", range(len(WORDS)))
def test_text_and_stop_strings_go_on_across_the_cut(service, stub, cut):
    asked = {"stop": ["wn f"], "max_tokens": len(WORDS)}
    first = stub.Generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParameters(**asked)),
        timeout=WAIT_S,
    )
    number = service.next_request()
    known, before = 0, ""
    for index in range(cut):
        service.instance.deliver(number, index, [WORDS[index]])
        while known <= index:
            response = next(first)
            if response.HasField("finish"):
                return
            known += len(response.token_ids)
            before += response.text
    first.cancel()
    call = stub.Generate(request((0, WORDS[:cut]), **asked), timeout=WAIT_S)
    number = service.next_request()
    service.instance.deliver(number, cut, WORDS[cut:], LENGTH, attempt=1)
    responses = list(call)
    assert before + "".join(response.text for response in responses) == "the quick bro"
    assert responses[-1].finish.stop_string == "wn f"


def test_only_choices_that_have_not_ended_go_on(service, stub):
    asked = request((2, []), (0, [9]), n=3, temperature=1.0, seed=40, max_tokens=2)
    answer = stub.GenerateUnary.future(asked, timeout=WAIT_S)
    submissions = [service.submitted() for _ in range(2)]
    assert [row_of(submission).params.seed for submission in submissions] == [42, 40]
    service.instance.deliver(submissions[0].request_id, 0, [3, 4], LENGTH, attempt=1)
    service.instance.deliver(submissions[1].request_id, 1, [8], LENGTH, attempt=1)
    choices = answer.result().choices
    assert [(choice.index, list(choice.token_ids)) for choice in choices] == [(0, [8]), (2, [3, 4])]


def test_a_later_attempt_takes_the_place_of_an_earlier_one(service, stub):
    def begin(attempt: int) -> Any:
        return stub.Generate(
            request((0, [9]), attempt=attempt, request_id="mine", max_tokens=3), timeout=WAIT_S
        )

    first = begin(1)
    number = service.next_request()
    with pytest.raises(grpc.RpcError, match="request_id 'mine' is running"):
        list(begin(1))
    second = begin(2)
    while service.next_abort() != number:
        pass  # one of a test before
    number = service.next_request()
    with pytest.raises(grpc.RpcError, match="the client has resumed the request"):
        list(first)
    service.instance.deliver(number, 1, [10, 11], LENGTH, attempt=2)
    assert ids_of(second) == [10, 11]


LATE = {"max_tokens": 4, "stop_token_ids": [30], "ignore_eos": True}


@pytest.mark.parametrize(("message", "sentence"), [
    (request((0, [9] * 4), **LATE), "output_ids has 4 ids; max_tokens is 4, so the choice"),
    (request((0, [9] * 5), **LATE), "output_ids has 5 ids; max_tokens is 4, so the choice"),
    (request((0, [9, 300]), **LATE), "output_ids has 300; ids must be below the vocabulary"),
    (request((0, [30, 9]), **LATE), "output_ids has the stop token 30 at 0, so the choice has"),
    (request((0, [1]), max_tokens=4), "output_ids has the stop token 1 at 0"),
    (request((0, WORDS[:-1]), stop=["quick"], max_tokens=50),
     "output_ids has the stop string 'quick', so the choice has ended"),
    (request(), "resume.choices is empty; it must name the choices"),
    (request((1, [])), "resume.choices.0.index is 1; it must be below n (1), and no other"),
    (request((0, []), (0, [])), "resume.choices.1.index is 0; it must be below n (1)"),
    (request((0, []), attempt=0), "resume.attempt is 0; it must be from 1 to 1,000,000"),
])  # fmt: skip
def test_a_resume_that_cannot_be_is_refused_by_its_field(stub, message, sentence):
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(message, timeout=WAIT_S))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith("resume.") and sentence in raised.value.details()


# --- HTTP ---


def events(service: Service, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body |= {"stream": True, "return_token_ids": True, "temperature": 0}
    with httpx.stream("POST", f"{service.url}{path}", json=body, timeout=WAIT_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_http_resumes_by_the_same_fields(service):
    resume = {"attempt": 2, "choices": [{"output_ids": WORDS[:2]}]}
    body = {"prompt": [5, 6], "max_tokens": len(WORDS), "resume": resume}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(events, service, "/v1/completions", body)
        submission = service.submitted()
        assert list(submission.prompt_ids) == [5, 6, *WORDS[:2]]
        service.instance.deliver(submission.request_id, 2, WORDS[2:], LENGTH, attempt=2)
        chunks = answer.result(WAIT_S)
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == WORDS[2:]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert TOKENIZER.decode(WORDS[:2]) + text == "the quick brown fox"


@pytest.mark.parametrize(("more", "sentence"), [
    ({"stream": False}, "resume is given; it needs stream to be true"),
    ({"prompt": ["a", "b"]}, "resume is given; it needs one prompt"),
    ({"echo": True}, "resume is given; it needs one prompt, and echo to be false"),
    ({"resume": {"choices": [{"output_ids": [-1]}]}}, "resume.choices.0.output_ids.0 is -1"),
    ({"resume": {"choices": [{"output_ids": [300]}]}}, "resume.choices.0.output_ids has 300"),
    ({"resume": {"attempt": 1}}, "resume.choices is absent"),
])  # fmt: skip
def test_http_refuses_a_resume_that_cannot_be(service, more, sentence):
    body = {"prompt": "a", "stream": True, "resume": {"choices": [{}]}} | more
    response = httpx.post(f"{service.url}/v1/completions", json=body, timeout=WAIT_S)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(sentence)
    assert response.json()["error"]["param"].startswith("resume")
