"""OpenAI's API over real sockets: responses, streams, ends, disconnects, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from control_plane.frontend.http import protocol, server
from control_plane.frontend.http.chat_template import ChatTemplate
from control_plane.frontend.http.served_model import ServedModel, open_model
from harness.frontend_fakes import LIMITS, TOKENIZER, WAIT_S, Service, make_config, running
from harness.paths import ROOT
from nanocp.plan import Ended, FinishReason, Placement
from nanocp.sampling import Token, TokenLogprobs
from nanocp.wire.convert import decode_row_input

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    {"bos_token": "<s>"},
)
MODEL = ServedModel("tiny", "checkpoints/tiny", TEMPLATE, {"top_p": 0.5})
HELLO = TOKENIZER.encode("the fox")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=MODEL) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> OpenAI:
    return client_of(service)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def client_of(service: Service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0, timeout=WAIT_S)


def deliver(service: Service, ids: list[int], finish: FinishReason = LENGTH) -> None:
    """Answer the next request, a token a message."""
    request = service.controller.next_submission().request_id
    for index, token_id in enumerate(ids):
        service.instance.deliver(
            request, index, [token_id], finish if index == len(ids) - 1 else None
        )


def deliver_logprobs(service: Service, ids: list[int], num_top: int) -> None:
    request = service.controller.next_submission().request_id
    top = tuple(
        (257 - rank, -float(rank) if rank < 2 else -float("inf")) for rank in range(num_top)
    )
    reasons = [None] * (len(ids) - 1) + [LENGTH]
    tokens = [
        Token(service.address, request, index, token_id, reason, TokenLogprobs(-0.5, top))
        for index, (token_id, reason) in enumerate(zip(ids, reasons, strict=True))
    ]
    service.instance.deliver_tokens(tokens)


# --- answers ---


def test_a_completion_is_answered(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    answer = pool.submit(client.completions.create, model="tiny", prompt="the quick", max_tokens=9)
    deliver(service, [*HELLO, 1], STOP)
    completion = answer.result(WAIT_S)
    (choice,) = completion.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (
        0,
        "the fox",
        "stop",
        None,
    )
    assert completion.id.startswith("cmpl-") and (completion.object, completion.model) == (
        "text_completion",
        "tiny",
    )
    assert completion.usage is not None
    prompt_len = len(TOKENIZER.encode("the quick"))
    usage = (
        completion.usage.prompt_tokens,
        completion.usage.completion_tokens,
        completion.usage.total_tokens,
    )
    assert usage == (prompt_len, len(HELLO) + 1, prompt_len + len(HELLO) + 1)


def test_a_chat_is_rendered_and_answered(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    parts: Any = [{"type": "text", "text": "who"}, {"type": "text", "text": "are you"}]
    messages: Any = [{"role": "system", "content": "the fox"}, {"role": "user", "content": parts}]
    answer = pool.submit(client.chat.completions.create, model="tiny", messages=messages)
    submission = service.controller.next_submission()
    rendered = "<s>system: the fox\nuser: who\nare you\n"
    assert list(submission.prompt_ids) == TOKENIZER.encode(rendered, add_special_tokens=False)
    assert submission.max_tokens == LIMITS.max_model_len - submission.prompt_len, (
        "as many as the model's length leaves"
    )
    service.instance.deliver(submission.request_id, 0, [*HELLO, 1], STOP)
    completion = answer.result(WAIT_S)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "the fox",
        "stop",
    )
    assert completion.id.startswith("chatcmpl-") and completion.object == "chat.completion"


def test_a_chat_streams_its_role_its_text_its_end_and_its_usage(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    def chat() -> list[Any]:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
        messages: Any = [{"role": "user", "content": "hi"}]
        return list(client.chat.completions.create(model="tiny", messages=messages, **options))

    answer = pool.submit(chat)
    for _ in range(2):
        deliver(service, HELLO)
    chunks = answer.result(WAIT_S)
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {
        "chat.completion.chunk"
    }
    for index in range(2):
        mine = [
            chunk.choices[0]
            for chunk in chunks
            if chunk.choices and chunk.choices[0].index == index
        ]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in mine[1:])
        assert "".join(choice.delta.content for choice in mine) == "the fox"
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 * len(HELLO)


def test_the_asynchronous_client_streams_too(service: Service, pool: ThreadPoolExecutor) -> None:
    async def complete() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{service.url}/v1", api_key="EMPTY", timeout=WAIT_S
        ) as client:
            stream = await client.completions.create(model="tiny", prompt=[5, 6], stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    answer = pool.submit(asyncio.run, complete())
    deliver(service, HELLO)
    assert answer.result(WAIT_S) == "the fox"


def test_several_prompts_with_choices_are_numbered_over_all(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    extra: Any = {"return_token_ids": True}
    for is_stream in (False, True):
        answer = pool.submit(
            lambda is_stream=is_stream: client.completions.create(
                model="tiny", prompt=[[5], [6, 7]], n=2, stream=is_stream, extra_body=extra
            )
        )
        for _ in range(4):
            submission = service.controller.next_submission()
            service.instance.deliver(
                submission.request_id, 0, [200 + submission.request_id % 50], LENGTH
            )
        got = answer.result(WAIT_S)
        choices = [chunk.choices[0] for chunk in got] if is_stream else got.choices  # type: ignore[union-attr]
        by_index = {choice.index: choice.model_extra for choice in choices}
        assert list(by_index) == list(range(4)) or is_stream
        assert [by_index[index]["prompt_token_ids"] for index in range(4)] == [
            [5],
            [5],
            [6, 7],
            [6, 7],
        ]
        assert len({tuple(extras["token_ids"]) for extras in by_index.values()}) == 4
        if not is_stream:
            assert got.usage.prompt_tokens == 3, "a prompt counts once"  # type: ignore[union-attr]


def test_logprobs_of_a_completion(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    answer = pool.submit(client.completions.create, model="tiny", prompt=[5], logprobs=3)
    ids = [*HELLO, 1]
    deliver_logprobs(service, ids, 3)
    logprobs = answer.result(WAIT_S).choices[0].logprobs
    assert (
        logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    )
    assert "".join(logprobs.tokens) == "the fox</s>" and logprobs.token_logprobs == [-0.5] * len(
        ids
    )
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:index])) for index in range(len(ids))
    ]
    tops = [TOKENIZER.token_bytes(257 - rank).decode(errors="replace") for rank in range(3)]
    expected = {logprobs.tokens[0]: -0.5} | dict(zip(tops, (0.0, -1.0, -9999.0), strict=True))
    assert logprobs.top_logprobs[0] == expected


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_of_a_chat(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor, is_stream: bool
) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]

    def chat() -> list[Any]:
        got: Any = client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=2, stream=is_stream
        )
        choices = [chunk.choices[0] for chunk in got] if is_stream else got.choices
        return [token for choice in choices if choice.logprobs for token in choice.logprobs.content]

    answer = pool.submit(chat)
    half = TOKENIZER.encode("é")[:1]
    deliver_logprobs(service, [*HELLO, *half], 2)
    tokens = answer.result(WAIT_S)
    assert "".join(token.token for token in tokens) == "the fox\N{REPLACEMENT CHARACTER}"
    assert b"".join(bytes(token.bytes) for token in tokens) == b"the fox\xc3"
    assert [(top.logprob, len(top.bytes) > 0) for top in tokens[0].top_logprobs] == [
        (0.0, True),
        (-1.0, True),
    ]


def test_fields_of_vllm_reach_the_row(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    extra = {
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "min_tokens": 2,
        "priority": -3,
    }
    extra |= {
        "stop_token_ids": [42],
        "bad_words": ["fox"],
        "queue_timeout_ms": 9000,
        "such_a_field": 1,
    }
    options: Any = {
        "temperature": 0.5,
        "seed": -5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ".",
    }
    answer = pool.submit(
        client.completions.create,
        model="tiny",
        prompt=[5],
        logit_bias={"9": -3},
        extra_body=extra,
        **options,
    )
    submission = service.controller.next_submission()
    assert (submission.priority, submission.queue_timeout_us, submission.max_tokens) == (
        -3,
        9_000_000,
        16,
    )
    params = decode_row_input(submission.row_start).params
    assert (params.temperature, params.top_k, params.min_p, params.top_p) == (0.5, 7, 0.25, 0.5)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.5,
        0.5,
        -0.5,
    )
    assert (params.stop_token_ids, params.min_tokens, params.logit_bias) == ((42,), 2, ((9, -3.0),))
    assert params.bad_words and params.seed == 2**63 - 5
    service.instance.deliver(submission.request_id, 0, [*HELLO, TOKENIZER.encode(".")[0]])
    choice = answer.result(WAIT_S).choices[0]
    assert (choice.text, choice.finish_reason) == ("the fox", "stop")
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == "."
    assert service.controller.next_abort() == submission.request_id


def test_absent_fields_take_the_checkpoints_defaults_and_openais(
    service: Service, pool: ThreadPoolExecutor
) -> None:
    body = {
        "prompt": [5],
        "top_k": -1,
        "temperature": None,
        "max_tokens": None,
        "n": None,
        "stop": None,
        "seed": -1,
    }
    body |= {"best_of": 1, "guided_json": None}
    answer = pool.submit(httpx.post, f"{service.url}/v1/completions", json=body)
    submission = service.controller.next_submission()
    params = decode_row_input(submission.row_start).params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 0.5, 0, 16)
    service.instance.deliver(submission.request_id, 0, HELLO, LENGTH)
    assert answer.result(WAIT_S).status_code == 200


def test_defaults_of_the_checkpoint_are_checked_before_anybody_asks(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": -1, "temperature": 0.6, "top_p": None, "do_sample": True}))
    assert open_model(tmp_path, "").default_sampling == {"top_k": -1, "temperature": 0.6}
    for field, value, sentence in (
        ("temperature", "hot", "it must be a number"),
        ("temperature", -1, "it must be a finite number, 0"),
        ("top_p", 0, "it must be above 0"),
        ("top_p", True, "it must be a number"),
        ("top_k", 2.5, "it must be an integer"),
        ("top_k", -2, "it must be 0"),
    ):
        path.write_text(json.dumps({field: value}))
        with pytest.raises(
            ValueError, match=rf"generation_config\.json: {field} is {value!r}; {sentence}"
        ):
            open_model(tmp_path, "")


def test_the_text_may_begin_with_the_prompts(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    for prompt, text in (("who? ", "who? "), (TOKENIZER.encode("who? "), "who? ")):
        answer = pool.submit(client.completions.create, model="tiny", prompt=prompt, echo=True)
        deliver(service, HELLO)
        assert answer.result(WAIT_S).choices[0].text == text + "the fox"


def logprobs_of(num_top: int, count: int) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(-float(i), tuple((256 + rank, -0.5 * rank) for rank in range(num_top)))
        for i in range(count)
    ]


@pytest.mark.parametrize("is_chat", [False, True])
def test_prompt_logprobs_have_vllms_form(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor, is_chat: bool
) -> None:
    extra: Any = {"prompt_logprobs": 2, "n": 2}
    if is_chat:
        messages: Any = [{"role": "user", "content": ""}]
        answer: Any = pool.submit(
            client.chat.completions.create, model="tiny", messages=messages, extra_body=extra
        )
    else:
        answer = pool.submit(
            client.completions.create, model="tiny", prompt="<s>user: \n", extra_body=extra
        )
    first, second = (service.controller.next_submission() for _ in range(2))
    prompt_ids = list(first.prompt_ids)
    service.prefill.send_prompt_logprobs(first.request_id, 1, logprobs_of(2, len(prompt_ids) - 1))
    for submission in (first, second):
        service.instance.deliver(submission.request_id, 0, HELLO, LENGTH)
    got = answer.result(WAIT_S)
    logprobs = (
        [got.prompt_logprobs] if is_chat else [choice.prompt_logprobs for choice in got.choices]
    )
    for one in logprobs:
        assert one[0] is None and [set(map(int, of_token)) for of_token in one[1:]] == [
            {token_id, 256, 257} for token_id in prompt_ids[1:]
        ]
        assert one[2]["257"] == {
            "logprob": -0.5,
            "rank": 2,
            "decoded_token": "\N{REPLACEMENT CHARACTER}",
        }
        own = one[2][str(prompt_ids[2])]
        assert (own["logprob"], own["rank"]) == (-1.0, None)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_with_logprobs_begins_with_those_of_the_prompt(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor, max_tokens: int, is_stream: bool
) -> None:
    def complete() -> tuple[str, Any, str, int]:
        options: Any = {"stream_options": {"include_usage": True}} if is_stream else {}
        got: Any = client.completions.create(
            model="tiny",
            prompt="who",
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            stream=is_stream,
            **options,
        )
        chunks = list(got) if is_stream else [got]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        fields = ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        lists = {
            name: [item for choice in choices for item in getattr(choice.logprobs, name)]
            for name in fields
        }
        return (
            "".join(c.text for c in choices),
            lists,
            choices[-1].finish_reason,
            chunks[-1].usage.completion_tokens,
        )

    answer = pool.submit(complete)
    submission = service.controller.next_submission()
    assert submission.max_tokens == max(max_tokens, 1) and submission.prompt_logprobs == 1
    prompt_ids = list(submission.prompt_ids)
    service.prefill.send_prompt_logprobs(
        submission.request_id, 1, logprobs_of(3, len(prompt_ids) - 1)
    )
    ids = HELLO[: max(max_tokens, 1)]
    tokens = [
        Token(
            service.address,
            submission.request_id,
            i,
            token_id,
            None if i < len(ids) - 1 else LENGTH,
            logprobs_of(1, 1)[0],
        )
        for i, token_id in enumerate(ids)
    ]
    service.instance.deliver_tokens(tokens)
    text, lists, finish_reason, num_generated = answer.result(WAIT_S)
    assert (
        "".join(lists["tokens"]) == text == ("who" if not max_tokens else "whothe fox"[: len(text)])
    )
    assert lists["token_logprobs"] == [
        None,
        *(-float(i) for i in range(len(prompt_ids) - 1)),
        *[0.0] * max_tokens,
    ]
    assert lists["text_offset"] == [
        len("".join(lists["tokens"][:i])) for i in range(len(lists["tokens"]))
    ]
    assert lists["top_logprobs"][0] is None and all(
        len(top) <= 2 for top in lists["top_logprobs"][1:]
    )
    assert (finish_reason, num_generated) == ("length", max_tokens)


def test_a_header_names_the_request_and_an_abort_by_that_name_is_an_answer(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    headers = {"X-Request-Id": "mine"}
    num_first = service.observer.calls.count(("first",))
    answer = pool.submit(
        client.completions.create, model="tiny", prompt=[5], n=2, extra_headers=headers
    )
    first, second = (service.controller.next_submission().request_id for _ in range(2))
    service.instance.deliver(first, 0, HELLO, LENGTH)
    service.instance.deliver(second, 0, HELLO[:1])
    deadline = time.monotonic() + WAIT_S
    while service.observer.calls.count(("first",)) < num_first + 2:
        assert time.monotonic() < deadline, "not both have begun"
        time.sleep(0.01)
    service.client.abort("cmpl-mine")
    assert service.controller.next_abort() == second
    completion = answer.result(WAIT_S)
    assert completion.id == "cmpl-mine"
    assert [choice.finish_reason for choice in completion.choices] == ["length", "abort"]


def test_continuous_usage_is_each_choices_own(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    options: Any = {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}

    def complete() -> list[Any]:
        return list(client.completions.create(model="tiny", prompt=[5, 6], stream=True, **options))

    answer = pool.submit(complete)
    deliver(service, HELLO)
    chunks = answer.result(WAIT_S)
    assert chunks[-1].choices and chunks[-1].usage.completion_tokens == len(HELLO)
    assert chunks[-1].usage.total_tokens == 2 + len(HELLO)


def test_special_tokens_are_in_the_text_of_who_asks(
    service: Service, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    for skips, text in ((True, "the fox"), (False, "the<s> fox")):
        extra = {"skip_special_tokens": skips}
        answer = pool.submit(client.completions.create, model="tiny", prompt=[5], extra_body=extra)
        deliver(service, [HELLO[0], 0, *HELLO[1:], 1], STOP)
        assert answer.result(WAIT_S).choices[0].text == text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_placement_of_a_request_is_returned_if_asked_for(
    service: Service, pool: ThreadPoolExecutor, path: str, is_stream: bool
) -> None:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "u", "content": "hi " * 60}]}
        if "chat" in path
        else {"prompt": [5] * 130}
    )
    for asks in (True, False):
        body = {**prompt, "return_placement": asks, "stream": is_stream}
        answer = pool.submit(httpx.post, f"{service.url}/v1/{path}", json=body)
        submission = service.controller.next_submission()
        service.front_end.placed(
            Placement(submission.request_id, 2, submission.prompt_len, ((0, 0), (1, 2)))
        )
        with contextlib.closing(service.member(2)) as instance:
            for index, reason in enumerate((None, LENGTH)):
                instance.deliver(submission.request_id, index, [260], reason)
            response = answer.result(WAIT_S)
        text = response.text
        if is_stream:
            text = next(line for line in text.splitlines() if '"length"' in line).removeprefix(
                "data: "
            )
        (choice,) = json.loads(text)["choices"]
        pages = -(-(submission.prompt_len + 1) // 64)
        shares = [{"instance": 0, "pages": 1}, {"instance": 2, "pages": pages - 1}]
        expected = {"cp_degree": 2, "moe_binding": 2, "kv_split": shares}
        assert choice.get("placement") == (expected if asks else None)


def test_without_a_tokenizer_tokens_go_by_their_ids() -> None:
    with running(model=MODEL, with_tokenizer=False) as service, ThreadPoolExecutor() as pool:
        client = client_of(service)
        options: Any = {"logprobs": 1, "extra_body": {"return_token_ids": True}}
        answer = pool.submit(client.completions.create, model="tiny", prompt=[5], **options)
        deliver_logprobs(service, [7, 8], 1)
        (choice,) = answer.result(WAIT_S).choices
        assert choice.logprobs is not None and choice.logprobs.tokens == [
            "token_id:7",
            "token_id:8",
        ]
        assert (choice.text, choice.model_extra and choice.model_extra["token_ids"]) == ("", [7, 8])
        with pytest.raises(openai.BadRequestError, match="the checkpoint has no tokenizer"):
            client.completions.create(model="tiny", prompt="text")


# --- beside them ---


def test_the_model_and_the_version_are_returned(service: Service, client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.owned_by, card.model_extra and card.model_extra["max_model_len"]) == (
        "tiny",
        "nanocp",
        LIMITS.max_model_len,
    )
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{service.url}/version").json()["version"]


def test_texts_and_chats_are_tokenized_and_back(service: Service) -> None:
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


def test_health_and_readiness_follow_the_cluster() -> None:
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


def test_a_port_in_use_is_a_sentence_and_the_front_end_ends() -> None:
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


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.REFUSED, 503),
        (FinishReason.INVALID, 400),
        (FinishReason.EXPIRED, 504),
        (FinishReason.FAILED, 503),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_brain_ends_before_a_token_is_a_status(
    service: Service, pool: ThreadPoolExecutor, reason: FinishReason, status: int, is_stream: bool
) -> None:
    body = {"prompt": [5], "stream": is_stream}
    answer = pool.submit(httpx.post, f"{service.url}/v1/completions", json=body)
    service.front_end.ended(
        Ended(service.controller.next_submission().request_id, reason, "a sentence")
    )
    response = answer.result(WAIT_S)
    assert response.status_code == status and response.json()["error"]["message"] == "a sentence"
    assert response.json()["error"]["code"] == status
    assert response.headers.get("Retry-After") == ("1" if status == 503 else None)


def test_what_fails_within_a_stream_is_an_event(service: Service, client: OpenAI) -> None:
    def begin() -> Any:
        return client.completions.create(model="tiny", prompt=[5], stream=True)

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(begin)
        request = service.controller.next_submission().request_id
        service.instance.deliver(request, 0, HELLO[:1])
        stream = iter(answer.result(WAIT_S))
        assert next(stream).choices[0].text
        service.front_end.ended(Ended(request, FinishReason.FAILED, "an instance was lost"))
        with pytest.raises(openai.APIError, match="an instance was lost"):
            list(stream)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_client_that_goes_away_aborts_every_choice(
    service: Service, is_stream: bool, num_tokens: int
) -> None:
    with connection(service) as client:
        send(client, {"prompt": [[5], [6]], "n": 2, "max_tokens": 9, "stream": is_stream})
        requests = [service.controller.next_submission().request_id for _ in range(4)]
        for request in requests[: 4 * num_tokens]:
            service.instance.deliver(request, 0, HELLO[:1])
        if is_stream and num_tokens:
            assert b"200 OK" in client.recv(1 << 16)
    assert {service.controller.next_abort() for _ in range(4)} == set(requests)


def test_a_client_that_does_not_read_loses_its_request() -> None:
    with running(make_config(max_undelivered_tokens=64), model=MODEL) as service:
        client = idle_reader(service)
        request = service.controller.next_submission().request_id
        flood(service, request)
        assert service.controller.next_abort() == request
        # What it gets, should it ever read, says why.
        received = b""
        client.settimeout(WAIT_S)
        while b"[DONE]" not in received:
            received = received[-2000:] + client.recv(1 << 20)
        assert b"the client is too slow" in received and b'"code":503' in received
        client.close()


def test_a_client_that_never_reads_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_TIMEOUT_S", 1)
    with (
        running(make_config(max_undelivered_tokens=64), model=MODEL) as service,
        idle_reader(service),
    ):
        flood(service, service.controller.next_submission().request_id)
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
def test_a_client_that_does_not_say_what_it_wants_is_cut(sent: bytes) -> None:
    with (
        running(make_config(http_request_timeout_ms=200), model=MODEL) as service,
        connection(service) as client,
    ):
        client.settimeout(20)  # less than by default
        with contextlib.suppress(ConnectionError):  # cut before it had sent that much
            client.sendall(sent)
            assert client.recv(100) == b""


def test_connections_are_bounded() -> None:
    with (
        running(make_config(max_http_connections=2), model=MODEL) as service,
        connection(service) as idle,
    ):
        assert httpx.get(f"{service.url}/health").status_code == 200
        with connection(service):
            assert httpx.get(f"{service.url}/health").status_code == 503
        idle.close()
        deadline = time.monotonic() + WAIT_S
        while httpx.get(f"{service.url}/health").status_code != 200:
            assert time.monotonic() < deadline, "closed connections still count"


def test_streams_end_with_a_sentence_when_the_service_stops() -> None:
    service = Service(make_config(), LIMITS, model=MODEL)
    service.front_end.open(service.controller)
    with ThreadPoolExecutor() as pool:
        answer: Future[Any] = pool.submit(
            client_of(service).completions.create, model="tiny", prompt=[5], stream=True
        )
        request = service.controller.next_submission().request_id
        service.instance.deliver(request, 0, HELLO[:1])
        stream = iter(answer.result(WAIT_S))
        next(stream)
        stopping = threading.Thread(target=service.front_end.stop, args=("instance 1 was lost",))
        stopping.start()
        with pytest.raises(openai.APIError, match="instance 1 was lost"):
            list(stream)
        stopping.join(WAIT_S)
    service.close()


# --- mistakes ---


BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("completions", {}, 400, "prompt", "prompt is absent; it is required"),
    ("completions", {"prompt": 3}, 400, "prompt", "prompt is 3: "),
    ("completions", {"prompt": ""}, 400, None, "prompt is empty"),
    ("completions", {"prompt": []}, 400, "prompt", "prompt is "),
    ("completions", {"prompt": [[]]}, 400, None, "prompt is empty"),
    ("completions", {"prompt": [5, 300]}, 400, None, r"prompt has 300; ids must be below"),
    ("completions", {"prompt": [5, -1]}, 400, "prompt.1", "greater than or equal to 0"),
    (
        "completions",
        {"prompt": [5], "model": "huge"},
        404,
        "model",
        "'huge' is not served here; 'tiny' is",
    ),
    (
        "completions",
        {"prompt": [5], "temperature": "hot"},
        400,
        "temperature",
        "temperature is 'hot': ",
    ),
    ("completions", {"prompt": [5], "temperature": -1}, 400, None, "temperature is -1"),
    ("completions", {"prompt": [5], "max_tokens": 0}, 400, None, "max_tokens is 0"),
    ("completions", {"prompt": [5], "max_tokens": 10**30}, 400, None, "max_tokens is 1000000"),
    ("completions", {"prompt": [5], "n": 0}, 400, None, "n is 0"),
    ("completions", {"prompt": [5], "n": 2, "temperature": 0}, 400, None, "greedy"),
    ("completions", {"prompt": [5], "top_k": -2}, 400, None, "top_k is -2"),
    (
        "completions",
        {"prompt": [5], "logit_bias": {"the": 1}},
        400,
        "logit_bias",
        "'the'; its keys must be token ids",
    ),
    ("completions", {"prompt": [5], "logprobs": 21}, 400, None, "logprobs is 21"),
    ("completions", {"prompt": [5], "stop": [""]}, 400, None, "stop has a string of 0 characters"),
    (
        "completions",
        {"prompt": [5], "stream_options": {}},
        400,
        "stream_options",
        "it needs stream to be true",
    ),
    ("completions", {"prompt": [5], "suffix": "."}, 400, "suffix", "suffix is not supported"),
    (
        "completions",
        {"prompt": [5], "use_beam_search": True},
        400,
        "use_beam_search",
        "is not supported",
    ),
    (
        "completions",
        {"prompt": [5], "response_format": {"type": "json_object"}},
        400,
        "response_format",
        "only 'text'",
    ),
    (
        "completions",
        {"prompt": [5], "structured_outputs": {"regex": "a"}},
        400,
        "structured_outputs",
        "not supported",
    ),
    (
        "completions",
        {"prompt": [5], "guided_choice": ["a"]},
        400,
        "guided_choice",
        "guided_choice is not supported",
    ),
    (
        "completions",
        {"prompt": [5], "best_of": 2},
        400,
        "best_of",
        "best_of is 2; it must be at most n (1)",
    ),
    (
        "completions",
        {"prompt": [5], "best_of": 4, "n": 3},
        400,
        "best_of",
        "it must be at most n (3)",
    ),
    (
        "completions",
        {"prompt": [5], "request_id": "x" * 200},
        400,
        None,
        "request_id has 205 characters",
    ),
    ("completions", {"prompt": [5], "priority": 101}, 400, None, "priority is 101"),
    ("completions", {"prompt": [5], "seed": 1 << 64}, 400, "seed", "seed is 18446744073709551616"),
    (
        "completions",
        {"prompt": [5], "prompt_logprobs": 1, "stream": True},
        400,
        "prompt_logprobs",
        "stream to be false",
    ),
    ("completions", {"prompt": [5], "echo": True, "logprobs": 21}, 400, None, "logprobs is 21"),
    ("completions", {"prompt": ["\ud800"]}, 400, None, "the body is not Unicode text"),
    ("chat/completions", {"messages": []}, 400, "messages", "messages is "),
    (
        "chat/completions",
        {"messages": [{"content": "hi"}]},
        400,
        "messages.0.role",
        "messages.0.role is absent",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": 3}]},
        400,
        "messages.0.content",
        "content is 3",
    ),
    (
        "chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        400,
        "messages.0.content",
        "a part of type 'image_url'; only text parts",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "u"}], "chat_template": "x"},
        400,
        "chat_template",
        "only the model's own",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "u"}], "tools": [{}]},
        400,
        "tool_choice",
        "tool calls are not parsed",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "u"}], "top_logprobs": 2},
        400,
        "top_logprobs",
        "needs logprobs",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "sentence"), BAD, ids=lambda value: str(value)[:40]
)
def test_a_mistake_is_a_status_and_a_sentence_that_names_it(
    service: Service, path: str, body: dict[str, Any], status: int, param: str | None, sentence: str
) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{service.url}/v1/{path}", content=json.dumps(body), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, param), error
    assert sentence in error["message"] and error["type"].endswith("Error")
    assert service.controller.submissions.empty()


def test_one_bad_prompt_of_several_ends_the_others(service: Service) -> None:
    response = httpx.post(f"{service.url}/v1/completions", json={"prompt": [[5], [6], [300]]})
    assert response.status_code == 400 and "prompt has 300" in response.json()["error"]["message"]
    submitted = [service.controller.next_submission().request_id for _ in range(2)]
    assert sorted(service.controller.next_abort() for _ in range(2)) == submitted


@pytest.mark.parametrize(
    ("content", "kind", "status", "sentence"),
    [
        (
            b'{"prompt": ',
            "application/json",
            400,
            "the body is not JSON: Expecting value at character 11",
        ),
        (b"[]", "application/json", 400, "the body is not a JSON object"),
        (b"", "application/json", 400, "the body is not a JSON object"),
        (b'{"prompt": "\xff"}', "application/json", 400, "the body "),
        (b"[" * 100_000, "application/json", 400, "not nested too deeply"),
        (
            b'{"prompt": "a"}',
            "text/plain",
            415,
            "the Content-Type is text/plain; it must be application/json",
        ),
        (
            b'{"prompt": "%b"}' % (b"x" * (5 << 20)),
            "application/json",
            413,
            "the body is larger than any request",
        ),
    ],
)
def test_a_body_that_is_none_is_a_sentence(
    service: Service, content: bytes, kind: str, status: int, sentence: str
) -> None:
    response = httpx.post(
        f"{service.url}/v1/completions", content=content, headers={"Content-Type": kind}
    )
    assert response.status_code == status and sentence in response.json()["error"]["message"], (
        response.text
    )


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("GET", "/v2", 404)]
)
def test_what_is_not_there_is_a_sentence_too(
    service: Service, method: str, path: str, status: int
) -> None:
    response = httpx.request(method, service.url + path)
    assert response.status_code == status and path in response.json()["error"]["message"]


def test_the_page_of_the_api_names_every_field_and_endpoint(service: Service) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"`([\w/]+)`", page)) | set(re.findall(r"(?:GET|POST) (/[\w/.]+)", page))
    fields = {*protocol.CompletionRequest.model_fields, *protocol.ChatRequest.model_fields}
    paths = {
        path.partition("/{")[0] for path in httpx.get(f"{service.url}/openapi.json").json()["paths"]
    }
    assert fields | paths <= named


# --- sockets ---


def address_of(service: Service) -> tuple[str, int]:
    host, port = service.url.removeprefix("http://").split(":")
    return host, int(port)


def connection(service: Service) -> socket.socket:
    return socket.create_connection(address_of(service))


def send(client: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    client.sendall(head.encode() + b"\r\n\r\n" + content)
