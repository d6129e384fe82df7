"""Log probabilities of OpenAI's API, of the output and of the prompt."""

from typing import Any

import pytest

from harness.services.frontend_fakes import TOKENIZER
from harness.services.openai_service import HELLO, LENGTH, deliver_logprobs
from harness.waits import WAIT_S
from nanocp.values.sampling import Token, TokenLogprobs


def test_logprobs_of_a_completion(service, client, pool):
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
    # Three pieces of characters, whose text is the same.
    pieces = ("\N{REPLACEMENT CHARACTER}", r"bytes:\xa0", r"bytes:\x9f")
    expected = {logprobs.tokens[0]: -0.5} | dict(zip(pieces, (0.0, -1.0, -9999.0), strict=True))
    assert logprobs.top_logprobs[0] == expected


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_of_a_chat(service, client, pool, is_stream):
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


def logprobs_of(num_top: int, count: int) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(-float(i), tuple((256 + rank, -0.5 * rank) for rank in range(num_top)))
        for i in range(count)
    ]


@pytest.mark.parametrize("is_chat", [False, True])
def test_prompt_logprobs_have_vllms_form(service, client, pool, is_chat):
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
    first, second = (service.submitted() for _ in range(2))
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
    service, client, pool, max_tokens, is_stream
):
    def complete() -> tuple[str, Any, str, int]:
        options: Any = {"stream_options": {"include_usage": True}} if is_stream else {}
        got: Any = client.completions.create(
            model="tiny", prompt="who", echo=True, logprobs=1, max_tokens=max_tokens,
            stream=is_stream, **options,
        )  # fmt: skip
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
    submission = service.submitted()
    assert submission.arrival.max_tokens == max(max_tokens, 1) and submission.prompt_logprobs == 1
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
