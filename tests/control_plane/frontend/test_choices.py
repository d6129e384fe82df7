"""Several choices of one prompt, why each one stopped, and the same in one answer."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.http.answers.deltas import deltas
from control_plane.frontend.open_requests import OpenRequests, RequestError
from control_plane.frontend.streams import ClientStreams
from harness.services.frontend_fakes import (
    LIMITS,
    TOKENIZER,
    FakeController,
    Recorder,
    Service,
    params_of,
    running,
)
from harness.services.kit import ids_of
from harness.waits import WAIT_S
from nanocp.client import (
    Aborted,
    AsyncClient,
    Generation,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from nanocp.values.plan import Ended, FinishReason, Preempted
from nanocp.values.sampling import Token, TokenLogprobs

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
(Z,) = TOKENIZER.encode("z")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running() as service:
        yield service


@pytest.mark.parametrize("seed", [2**63 - 2, None])
def test_each_choice_is_a_request_with_a_seed_of_its_own(service, seed):
    seeds = {} if seed is None else {"seed": seed}
    chunks = service.client.generate(
        [5, 6], n=3, temperature=1.0, max_tokens=2, request_id="three", **seeds
    )
    submissions = [service.submitted() for _ in range(3)]
    assert [list(submission.prompt_ids) for submission in submissions] == [[5, 6]] * 3
    drawn = [params_of(submission).seed for submission in submissions]
    assert len(set(drawn)) == 3
    if seed is not None:
        assert drawn == [2**63 - 2, 2**63 - 1, 0], "choice i of a seed is what seed + i gives alone"
    requests = [submission.request_id for submission in submissions]
    for index in (2, 0, 1):
        service.instance.deliver(requests[index], 0, [10 + index, 20 + index], LENGTH)
    received = list(chunks)
    assert {chunk.request_id for chunk in received} == {"three"}
    of_choices = [[chunk for chunk in received if chunk.index == index] for index in range(3)]
    assert [ids_of(chunks) for chunks in of_choices] == [[10, 20], [11, 21], [12, 22]]
    finishes = {chunk.index: chunk.finish for chunk in received if chunk.finish}
    assert len(finishes) == len([chunk for chunk in received if chunk.finish]) == 3
    assert all(
        (finish.prompt_tokens, finish.generated_tokens) == (2, 2) for finish in finishes.values()
    )


def test_what_ends_one_choice_with_an_error_ends_all(service):
    chunks = service.client.generate([5], n=3, temperature=1.0, request_id="all")
    requests = [service.next_request() for _ in range(3)]
    service.instance.deliver(requests[0], 0, [7], STOP)
    assert next(chunks).finish is not None
    service.front_end.ended(
        Ended(requests[1], FinishReason.REFUSED, "max_queued_requests (7) is reached")
    )
    with pytest.raises(ResourceExhausted, match="max_queued_requests"):
        list(chunks)
    assert service.next_abort() == requests[2]
    assert service.controller.aborts.empty()


def test_an_abort_by_name_ends_every_choice_and_frees_the_name(service):
    chunks = service.client.generate([5], n=2, temperature=1.0, request_id="two")
    requests = [service.next_request() for _ in range(2)]
    with pytest.raises(InvalidArgument, match="request_id 'two' is running"):
        next(service.client.generate([5], request_id="two"))
    assert service.client.abort("two") == ("two",)
    assert [service.next_abort() for _ in range(2)] == requests
    with pytest.raises(Aborted):
        list(chunks)
    again = service.client.generate([5], request_id="two")
    service.submitted()
    service.give_up(again)


@pytest.mark.parametrize(
    ("options", "last_id", "stop_reason", "text"),
    [
        ({}, 1, None, "xy"),  # The model's end of sequence.
        ({"ignore_eos": True, "stop_token_ids": [1]}, 1, 1, "xy"),
        ({"stop_token_ids": [Z]}, Z, Z, "xy"),
        ({"stop_token_ids": [Z], "include_stop_str_in_output": True}, Z, Z, "xyz"),
        # What is held back as the start of a stop string comes out when a stop token ends the text.
        ({"stop": ["yq"], "stop_token_ids": [Z]}, Z, Z, "xy"),
        ({"stop": ["q", "yz"]}, Z, "yz", "x"),
    ],
)
def test_the_end_says_what_stopped_it_and_drops_a_stop_tokens_text(
    service, options, last_id, stop_reason, text
):
    ids = [TOKENIZER.encode("x")[0], TOKENIZER.encode("y")[0], last_id]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            service.client.generate_unary, [5], max_tokens=5, timeout_s=WAIT_S, **options
        )
        service.answer(ids, None if isinstance(stop_reason, str) else STOP)
        (choice,) = answer.result(WAIT_S).choices
    if isinstance(stop_reason, str):
        service.next_abort()
    assert list(choice.token_ids) == ids, "the token itself is delivered"
    assert (choice.finish.reason, choice.text) == (STOP, text)
    assert choice.finish.stop_reason == (last_id if isinstance(stop_reason, int) else stop_reason)


def test_one_answer_holds_what_the_stream_would_have_brought(service):
    async def ask() -> Generation:
        async with AsyncClient(service.address) as client:
            options = {"n": 2, "temperature": 1.0, "max_tokens": 2, "logprobs": 0}
            return await client.generate_unary(
                "the fox", **options, request_id="one answer", timeout_s=WAIT_S
            )

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asyncio.run, ask())
        requests = [service.next_request() for _ in range(2)]
        (x_id,) = TOKENIZER.encode("x")
        for index, request in enumerate(requests):
            for position in range(2):
                reason = LENGTH if position == 1 else None
                logprobs = TokenLogprobs(-index - position / 2, ())
                service.instance.deliver_tokens(
                    [Token("", request, position, x_id + index, reason, logprobs)]
                )
        generation = answer.result(WAIT_S)
    assert generation.request_id == "one answer"
    assert [(choice.index, choice.text) for choice in generation.choices] == [(0, "xx"), (1, "yy")]
    assert [[item.logprob for item in choice.logprobs] for choice in generation.choices] == [
        [0.0, -0.5],
        [-1.0, -1.5],
    ]
    assert all(choice.finish.reason is LENGTH for choice in generation.choices)
    with pytest.raises(InvalidArgument, match="max_tokens is 0"):
        service.client.generate_unary([5], max_tokens=0)


def test_a_call_in_one_answer_that_is_given_up_is_aborted(service):
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            service.client.generate_unary, [5], n=2, temperature=1.0, timeout_s=2.0
        )
        requests = [service.next_request() for _ in range(2)]
        assert [service.next_abort() for _ in range(2)] == requests
        assert "timeout_s ran out" in str(answer.exception(WAIT_S))


# --- without any API ---


def test_the_core_needs_no_api():
    """The core works without an API.

    Without max_tokens a request may use all that the model's length leaves. No special tokens are
    added twice.
    """

    async def ask() -> None:
        streams = ClientStreams("front:1", 100, Recorder())
        controller = FakeController(streams.placed)
        streams.connect(controller)
        open_requests = OpenRequests(streams, LIMITS, TOKENIZER, max_open=2)
        open_requests.closed_because = ""
        request = ClientRequest(
            "the fox", "messages", max_tokens=None, temperature=1.0, n=2, add_special_tokens=False
        )
        async with open_requests.begin(request) as open_request:
            assert open_request.prompt_ids == TOKENIZER.encode("the fox", add_special_tokens=False)
            first = controller.next_submission()
            assert first.arrival.max_tokens == LIMITS.max_model_len - len(open_request.prompt_ids)
            with pytest.raises(RequestError, match="2 requests are open") as raised:
                await open_requests.begin(ClientRequest([5], "prompt")).__aenter__()
            assert raised.value.reason is FinishReason.REFUSED
            streams.deliver(0, [Token("", first.request_id, 0, 7, LENGTH)])
            output = await anext(open_request)
            assert (output.index, output.token_ids, output.finish.reason) == (0, [7], LENGTH)
            assert not open_requests.idle.is_set()
        assert open_requests.idle.is_set()
        assert controller.next_abort() == controller.next_submission().request_id
        with pytest.raises(
            RequestError, match="messages is empty; a prompt has at least one token"
        ):
            await open_requests.begin(ClientRequest("", "messages")).__aenter__()

    asyncio.run(ask())


# --- log probabilities of the prompt ---


def logprobs_of(first: int, count: int) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(-position / 4, ((position, -0.5),))
        for position in range(first, first + count)
    ]


def test_logprobs_of_the_prompt_come_first_once_and_for_one_choice(service):
    prompt = [position % 300 for position in range(3000)]
    chunks = service.client.generate(prompt, n=2, temperature=1.0, max_tokens=1, prompt_logprobs=1)
    first, second = (service.submitted() for _ in range(2))
    assert (first.prompt_logprobs, second.prompt_logprobs) == (1, None)
    assert first.front_end == service.front_end.members_address
    service.instance.deliver(first.request_id, 0, [7], LENGTH)
    service.instance.deliver(second.request_id, 0, [8], LENGTH)
    # A prefill that began anew says things twice; what leaves a gap is not taken.
    for begin, count in ((1, 900), (1, 1000), (2000, 999), (950, 1050), (2000, 1000)):
        service.prefill.send_prompt_logprobs(first.request_id, begin, logprobs_of(begin, count))
    received = list(chunks)
    assert [item for chunk in received for item in chunk.prompt_logprobs] == logprobs_of(1, 2999)
    assert [len(chunk.prompt_logprobs) for chunk in received] == [1024, 1024, 951, 0, 0]
    assert {chunk.index: chunk.token_ids for chunk in received[3:]} == {0: (7,), 1: (8,)}


def test_one_token_has_no_logprobs_of_a_prompt_and_one_answer_has_them_all(service):
    for prompt in ([5], [5, 6]):
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(
                service.client.generate_unary, prompt, max_tokens=1, prompt_logprobs=0
            )
            request = service.next_request()
            service.prefill.send_prompt_logprobs(request, 1, logprobs_of(1, len(prompt) - 1))
            service.instance.deliver(request, 0, [7], LENGTH)
            assert list(answer.result(WAIT_S).prompt_logprobs) == logprobs_of(1, len(prompt) - 1)


def test_a_request_that_ends_while_it_waits_for_its_prompts_logprobs_says_why(service):
    chunks = service.client.generate([5, 6], prompt_logprobs=0)
    service.front_end.ended(Ended(
        service.next_request(), FinishReason.REFUSED,
        "no room in max_queued_tokens",
    ))  # fmt: skip
    with pytest.raises(ResourceExhausted, match="max_queued_tokens"):
        next(chunks)


@pytest.mark.parametrize("has_ended", [False, True])
def test_log_probabilities_of_the_prompt_that_were_lost_are_asked_for_by_another_request(
    service, monkeypatch, has_ended
):
    """The prefill died after its pages, and before these left it."""
    monkeypatch.setattr("control_plane.frontend.open_requests._LATE_PROMPT_LOGPROBS_S", 0.05)
    chunks = service.client.generate([5, 6, 9], max_tokens=2, prompt_logprobs=2, seed=3)
    request = service.next_request()
    service.instance.deliver(
        request, 0, [7, 8] if has_ended else [7], LENGTH if has_ended else None
    )
    again = service.submitted()
    assert (list(again.prompt_ids), again.prompt_logprobs, again.arrival.max_tokens) == (
        [5, 6, 9],
        2,
        1,
    )
    assert again.arrival.attempt > 0, "the queue's caps do not refuse it"
    service.prefill.send_prompt_logprobs(again.request_id, 1, logprobs_of(1, 2))
    # Nobody reads what it generates.
    assert service.next_abort() == again.request_id
    if not has_ended:
        first = next(chunks)
        assert list(first.prompt_logprobs) == logprobs_of(1, 2)
        service.instance.deliver(request, 1, [8], LENGTH)
        received = [first, *chunks]
    else:
        received = list(chunks)
    assert [item for chunk in received for item in chunk.prompt_logprobs] == logprobs_of(1, 2)
    assert ids_of(received) == [7, 8]


def test_a_request_whose_prompts_log_probabilities_are_lost_each_time_fails(service, monkeypatch):
    monkeypatch.setattr("control_plane.frontend.open_requests._LATE_PROMPT_LOGPROBS_S", 0.05)
    chunks = service.client.generate([5, 6], prompt_logprobs=0)
    requests = [service.submitted()]
    service.instance.deliver(requests[0].request_id, 0, [7])
    for _ in range(2):
        requests.append(again := service.submitted())
        service.instance.deliver(again.request_id, 0, [7], LENGTH, again.arrival.attempt)
    with pytest.raises(Unavailable, match="log probabilities of the prompt were lost"):
        next(chunks)
    assert service.next_abort() == requests[0].request_id
    assert service.controller.aborts.empty()


def test_a_resumed_request_does_not_ask_for_its_prompt_again(service):
    chunks = service.client.generate([5, 6], max_tokens=2, prompt_logprobs=0)
    request = service.next_request()
    service.prefill.send_prompt_logprobs(request, 1, logprobs_of(1, 1))
    service.instance.deliver(request, 0, [7])
    first = next(chunks)
    assert first.prompt_logprobs, "they are complete before the request goes away"
    service.front_end.preempted(Preempted(request, 3))
    again = service.submitted()
    assert (again.arrival.resumes, again.prompt_logprobs) == (True, None)
    service.instance.deliver(request, 1, [8], LENGTH, again.arrival.attempt)
    ids = [token_id for chunk in (first, *chunks) for token_id in chunk.token_ids]
    assert ids == [7, 8]


@pytest.mark.parametrize(("num_top", "prompt_len", "sentence"), [
    (-1, 2, "prompt_logprobs is -1; it must be from 0 to 20"),
    (21, 2, "prompt_logprobs is 21"),
    (20, 20_000,
     ("prompt_logprobs is 20; with a prompt of 20000 tokens it must be less: "
      "at most 262144 numbers")),
])  # fmt: skip
def test_too_many_logprobs_of_a_prompt_are_refused(service, num_top, prompt_len, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        next(service.client.generate([5] * prompt_len, prompt_logprobs=num_top))


def test_nothing_is_known_of_a_prompt_with_synthetic_kv():
    sentence = "prompt_logprobs cannot be used: KV is synthetic"
    with (
        running(limits=replace(LIMITS, has_prefill=False)) as service,
        pytest.raises(InvalidArgument, match=sentence),
    ):
        next(service.client.generate([5], prompt_logprobs=0))


@pytest.mark.parametrize(("num_prompts", "n", "sentence"), [
    (1, 5, "n is 5; this cluster can hold and queue 4 choices"),
    (2, 3, "prompt has 2 prompts, and n is 3; this cluster can hold and queue 4 choices"),
    (5, 1, "prompt has 5 prompts, and n is 1; this cluster can hold and queue 4 choices"),
])  # fmt: skip
def test_more_choices_than_ever_fit_are_the_clients_mistake(num_prompts, n, sentence):
    """Before any of them is submitted; what a later attempt may get is refused as before."""
    controller = FakeController()

    async def refused(num_open: int) -> RequestError:
        streams = ClientStreams("here:1", 100, Recorder())
        streams.connect(controller)
        open_requests = OpenRequests(streams, LIMITS, TOKENIZER, max_open=4)
        open_requests.closed_because, open_requests.num_open = "", num_open
        asked = [
            ClientRequest([5], "prompt", n=n, temperature=1.0, prompt_number=number)
            for number in range(num_prompts)
        ]
        with pytest.raises(RequestError) as raised:
            await anext(deltas(open_requests, asked))
        return raised.value

    error = asyncio.run(refused(0))
    assert error.reason is FinishReason.INVALID and str(error).startswith(sentence)
    assert controller.submissions.empty()
    n, num_prompts = 4, 1
    assert asyncio.run(refused(1)).reason is FinishReason.REFUSED
