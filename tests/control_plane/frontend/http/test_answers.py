"""Completions and chats of OpenAI's API: responses, streams, fields, names."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from control_plane.frontend.http.served_model import open_model
from harness.services.frontend_fakes import LIMITS, TOKENIZER, params_of, running
from harness.services.openai_service import (
    HELLO,
    LENGTH,
    MODEL,
    STOP,
    client_of,
    deliver,
    deliver_logprobs,
)
from harness.waits import WAIT_S, until
from nanocp.values.plan import Placement


def test_a_completion_is_answered(service, client, pool):
    answer = pool.submit(client.completions.create, model="tiny", prompt="the quick", max_tokens=9)
    deliver(service, [*HELLO, 1], STOP)
    completion = answer.result(WAIT_S)
    (choice,) = completion.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (
        0, "the fox", "stop", None,
    )  # fmt: skip
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


def test_a_chat_is_rendered_and_answered(service, client, pool):
    parts: Any = [{"type": "text", "text": "who"}, {"type": "text", "text": "are you"}]
    messages: Any = [{"role": "system", "content": "the fox"}, {"role": "user", "content": parts}]
    answer = pool.submit(client.chat.completions.create, model="tiny", messages=messages)
    submission = service.submitted()
    rendered = "<s>system: the fox\nuser: who\nare you\n"
    assert list(submission.prompt_ids) == TOKENIZER.encode(rendered, add_special_tokens=False)
    assert submission.arrival.max_tokens == LIMITS.max_model_len - submission.arrival.prompt_len, (
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


def test_a_chat_streams_its_role_its_text_its_end_and_its_usage(service, client, pool):
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


def test_the_asynchronous_client_streams_too(service, pool):
    async def complete() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{service.url}/v1", api_key="EMPTY", timeout=WAIT_S
        ) as client:
            stream = await client.completions.create(model="tiny", prompt=[5, 6], stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    answer = pool.submit(asyncio.run, complete())
    deliver(service, HELLO)
    assert answer.result(WAIT_S) == "the fox"


def test_several_prompts_with_choices_are_numbered_over_all(service, client, pool):
    extra: Any = {"return_token_ids": True}
    for is_stream in (False, True):
        answer = pool.submit(
            lambda is_stream=is_stream: client.completions.create(
                model="tiny", prompt=[[5], [6, 7]], n=2, stream=is_stream, extra_body=extra
            )
        )
        for _ in range(4):
            submission = service.submitted()
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


def test_fields_of_vllm_reach_the_row(service, client, pool):
    extra = {
        "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "ignore_eos": True, "min_tokens": 2,
        "priority": -3,
    }  # fmt: skip
    extra |= {
        "stop_token_ids": [42], "bad_words": ["fox"], "queue_timeout_ms": 9000, "such_a_field": 1,
    }  # fmt: skip
    options: Any = {
        "temperature": 0.5, "seed": -5, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "stop": ".",
    }  # fmt: skip
    answer = pool.submit(
        client.completions.create, model="tiny", prompt=[5], logit_bias={"9": -3}, extra_body=extra,
        **options,
    )  # fmt: skip
    submission = service.submitted()
    assert (submission.arrival.priority, submission.queue_timeout_us,
            submission.arrival.max_tokens) == (-3, 9_000_000, 16)  # fmt: skip
    params = params_of(submission)
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
    assert service.next_abort() == submission.request_id


def test_absent_fields_take_the_checkpoints_defaults_and_openais(service, pool):
    body = {
        "prompt": [5], "top_k": -1, "temperature": None, "max_tokens": None, "n": None,
        "stop": None, "seed": -1,
    }  # fmt: skip
    body |= {"best_of": 1, "guided_json": None}
    answer = pool.submit(httpx.post, f"{service.url}/v1/completions", json=body)
    submission = service.submitted()
    params = params_of(submission)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 0.5, 0, 16)
    service.instance.deliver(submission.request_id, 0, HELLO, LENGTH)
    assert answer.result(WAIT_S).status_code == 200


def test_defaults_of_the_checkpoint_are_checked_before_anybody_asks(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": -1, "temperature": 0.6, "top_p": None, "do_sample": True}))
    assert open_model(tmp_path, "").default_sampling == {"top_k": 0, "temperature": 0.6}
    # vLLM 0.32.0, ModelConfig.get_diff_sampling_param, reads these too.
    read = {"presence_penalty": 1.5, "frequency_penalty": -0.5}
    path.write_text(json.dumps({**read, "max_new_tokens": 20, "do_sample": False}))
    assert open_model(tmp_path, "").default_sampling == {**read, "max_tokens": 20}
    for field, value, sentence in (
        ("presence_penalty", 2.5, "it must be from -2 to 2"),
        ("frequency_penalty", "x", "it must be a number"),
        ("max_new_tokens", 0, "it must be at least 1"),
        ("max_new_tokens", 2.5, "it must be an integer"),
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


def test_the_text_may_begin_with_the_prompts(service, client, pool):
    for prompt, text in (("who? ", "who? "), (TOKENIZER.encode("who? "), "who? ")):
        answer = pool.submit(client.completions.create, model="tiny", prompt=prompt, echo=True)
        deliver(service, HELLO)
        assert answer.result(WAIT_S).choices[0].text == text + "the fox"


def test_an_echo_is_what_was_sent_alone_or_in_a_list(service, client, pool):
    """Special tokens that the tokenizer adds or that the text spells are not written anew."""
    sent = "</s> who?"
    for prompt in (sent, [sent], [sent, "why?"], [sent, sent]):
        answer = pool.submit(client.completions.create, model="tiny", prompt=prompt, echo=True, n=2)
        texts = [prompt] if isinstance(prompt, str) else prompt
        for _ in range(2 * len(texts)):
            deliver(service, HELLO)
        echoed = [choice.text for choice in answer.result(WAIT_S).choices]
        assert echoed == [text + "the fox" for text in texts for _ in range(2)]


def test_a_header_names_the_request_and_an_abort_by_that_name_is_an_answer(service, client, pool):
    headers = {"X-Request-Id": "mine"}
    num_first = service.observer.calls.count(("first",))
    answer = pool.submit(
        client.completions.create, model="tiny", prompt=[5], n=2, extra_headers=headers
    )
    first, second = (service.next_request() for _ in range(2))
    service.instance.deliver(first, 0, HELLO, LENGTH)
    service.instance.deliver(second, 0, HELLO[:1])
    until(lambda: service.observer.calls.count(("first",)) >= num_first + 2)
    service.client.abort("cmpl-mine")
    assert service.next_abort() == second
    completion = answer.result(WAIT_S)
    assert completion.id == "cmpl-mine"
    assert [choice.finish_reason for choice in completion.choices] == ["length", "abort"]


def test_continuous_usage_is_each_choices_own(service, client, pool):
    for is_asked in (True, False):
        # As in vLLM, one option without the other says nothing.
        options: Any = {"include_usage": is_asked, "continuous_usage_stats": True}
        fields: Any = {"prompt": [5, 6], "stream": True, "stream_options": options}
        answer = pool.submit(client.completions.create, model="tiny", **fields)
        deliver(service, HELLO)
        (*_, chunk) = [one for one in answer.result(WAIT_S) if one.choices]
        assert (chunk.usage is not None) == is_asked
        if is_asked:
            assert chunk.usage.completion_tokens == len(HELLO)
            assert chunk.usage.total_tokens == 2 + len(HELLO)


def test_special_tokens_are_in_the_text_of_who_asks(service, client, pool):
    for skips, text in ((True, "the fox"), (False, "the<s> fox")):
        extra = {"skip_special_tokens": skips}
        answer = pool.submit(client.completions.create, model="tiny", prompt=[5], extra_body=extra)
        deliver(service, [HELLO[0], 0, *HELLO[1:], 1], STOP)
        assert answer.result(WAIT_S).choices[0].text == text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_placement_of_a_request_is_returned_if_asked_for(service, pool, path, is_stream):
    prompt: dict[str, Any] = (
        {"messages": [{"role": "u", "content": "hi " * 60}]}
        if "chat" in path
        else {"prompt": [5] * 130}
    )
    for asks in (True, False):
        body = {**prompt, "return_placement": asks, "stream": is_stream}
        answer = pool.submit(httpx.post, f"{service.url}/v1/{path}", json=body)
        submission = service.submitted()
        service.front_end.placed(
            Placement(submission.request_id, 2, submission.arrival.prompt_len, ((0, 0), (1, 2)))
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
        pages = -(-(submission.arrival.prompt_len + 1) // 64)
        shares = [{"instance": 0, "pages": 1}, {"instance": 2, "pages": pages - 1}]
        expected = {"cp_degree": 2, "moe_binding": 2, "kv_split": shares}
        assert choice.get("placement") == (expected if asks else None)


def test_without_a_tokenizer_tokens_go_by_their_ids():
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
        held = {"structured_outputs": {"choice": ["a"]}}
        with pytest.raises(openai.BadRequestError, match="has no tokenizer") as caught:
            client.completions.create(model="tiny", prompt=[5], extra_body=held)
        assert caught.value.param == "structured_outputs.choice"
