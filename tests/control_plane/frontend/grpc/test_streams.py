"""Streams of the gRPC API over real sockets: tokens, text, stop strings, placements."""

import contextlib

import grpc
import pytest

from control_plane.frontend.validation import ModelLimits
from harness.services.frontend_fakes import TOKENIZER, params_of, running
from harness.services.kit import ids_of
from nanocp.client import InvalidArgument
from nanocp.values.plan import Ended, FinishReason, Placement
from nanocp.values.sampling import Token, TokenBatch, TokenLogprobs
from nanocp.wire.members import TOKENS
from nanocp.wire.rows import decode_row_input

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def test_tokens_and_text_stream_and_the_last_message_says_where_the_request_lived(service):
    ids = TOKENIZER.encode("the life of a fox \N{HOT BEVERAGE}!")
    prompt = "the quick brown fox " * 40
    chunks = service.client.generate(prompt, max_tokens=len(ids), request_id="fox")
    submission = service.submitted()
    assert list(submission.prompt_ids) == TOKENIZER.encode(prompt)
    assert (submission.arrival.prompt_len, submission.arrival.max_tokens) == (
        len(submission.prompt_ids),
        len(ids),
    )
    service.front_end.placed(
        Placement(submission.request_id, 2, submission.arrival.prompt_len, ((0, 0), (1, 2)))
    )
    instance = service.member(2)
    instance.deliver(submission.request_id, 0, ids[:1])
    first = next(chunks)
    assert (first.request_id, list(first.token_ids), first.finish) == ("fox", ids[:1], None)
    for index in range(1, len(ids)):
        instance.deliver(
            submission.request_id, index, [ids[index]], LENGTH if index == len(ids) - 1 else None
        )
    rest = list(chunks)
    instance.close()
    assert (
        first.text + "".join(chunk.text for chunk in rest) == "the life of a fox \N{HOT BEVERAGE}!"
    )
    assert ids_of(rest) == ids[1:]
    finish = rest[-1].finish
    assert finish is not None and all(chunk.finish is None for chunk in rest[:-1])
    assert (finish.reason, finish.prompt_tokens, finish.generated_tokens) == (
        LENGTH,
        submission.arrival.prompt_len,
        len(ids),
    )
    num_pages = -(-(submission.arrival.prompt_len + len(ids) - 1) // 64)
    assert num_pages > 1, "the prompt should be longer"
    assert (finish.cp_degree, finish.moe_binding, finish.kv_split) == (
        2,
        2,
        ((0, 1), (2, num_pages - 1)),
    )


def test_the_latest_placement_is_the_one_returned(service):
    chunks = service.client.generate([5] * 256, max_tokens=1)
    request = service.next_request()
    service.front_end.placed(Placement(request, 0, 256, ((0, 0),)))
    service.front_end.placed(Placement(request, 3, 256, ((0, 0), (1, 1), (2, 3))))
    with contextlib.closing(service.member(3)) as instance:
        instance.deliver(request, 0, [9], FinishReason.STOP)
        (chunk,) = chunks
    assert chunk.finish is not None
    assert (chunk.finish.reason, chunk.finish.cp_degree, chunk.finish.moe_binding) == (
        FinishReason.STOP,
        3,
        3,
    )


def test_tokens_of_two_instances_come_out_in_order_and_once(service):
    other = service.member(1)
    chunks = service.client.generate([5], max_tokens=6)
    request = service.next_request()
    service.front_end.placed(Placement(request, 1, 4, ()))  # From the fourth token on.
    other.deliver(request, 3, [13, 14, 15], LENGTH)
    other.deliver(request, 3, [13])
    service.instance.deliver(request, 0, [10])
    first = next(chunks)
    assert first.token_ids == (10,)
    service.instance.deliver(request, 0, [10, 11, 12])
    service.instance.deliver(request, 2, [12])
    rest = list(chunks)
    assert ids_of(rest) == [11, 12, 13, 14, 15]
    assert rest[-1].finish is not None and rest[-1].finish.generated_tokens == 6
    other.finish()
    other.close()


def test_tokens_of_unknown_and_ended_requests_are_ignored(service):
    chunks = service.client.generate([5], max_tokens=1)
    request = service.next_request()
    service.instance.deliver(request + 1000, 0, [1, 2, 3])
    service.instance.deliver(request, 5, [9])  # Beyond max_tokens.
    service.instance.deliver(request, 0, [10], LENGTH)
    assert [chunk.token_ids for chunk in chunks] == [(10,)]
    service.instance.deliver(request, 0, [10], LENGTH)
    service.front_end.ended(Ended(request, FinishReason.FAILED, "too late"))
    service.front_end.placed(Placement(request, 0, 1, ()))


def test_an_instance_that_sends_nonsense_loses_its_stream(service):
    other = service.member(1)
    other.deliver_raw(TOKENS.encode(TokenBatch(1, (Token("", 1, 0, 7, "tired"),))))
    with pytest.raises(grpc.RpcError) as raised:
        other.finish()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tired" in raised.value.details()
    other.close()


def test_the_row_carries_all_that_the_instance_needs(service):
    options = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "seed": 11,
    }  # fmt: skip
    for ignore_eos, stop_ids in ((False, (1, 42)), (True, (42,))):
        chunks = service.client.generate(
            [5, 6, 7], stop_token_ids=[42], ignore_eos=ignore_eos, **options
        )
        row = decode_row_input(service.submitted().arrival.row_start)
        assert (row.last_token, row.front_end, row.output_ids) == (
            7,
            service.front_end.members_address,
            (),
        )
        assert {name: getattr(row.params, name) for name in options} == options
        assert row.params.stop_token_ids == stop_ids
        service.give_up(chunks)


def test_penalties_reach_the_row_and_bring_the_prompt_that_they_need(service):
    options = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
    }
    chunks = service.client.generate(
        [7, 5, 7, 6], **options, logit_bias={9: -1.5, 3: 2.0}, bad_words=["quick", " zq"]
    )
    row = decode_row_input(service.submitted().arrival.row_start)
    assert {name: getattr(row.params, name) for name in options} == options
    assert row.params.logit_bias == ((3, 2.0), (9, -1.5))
    assert row.prompt_ids == (5, 6, 7)
    # " quick" is one token, "quick" two; " zq" ends as "zq".
    assert row.params.bad_words == tuple(
        tuple(TOKENIZER.encode(text)) for text in ("quick", " quick", "zq")
    )
    service.give_up(chunks)
    chunks = service.client.generate([7, 5, 7, 6], presence_penalty=1.0)
    assert decode_row_input(service.submitted().arrival.row_start).prompt_ids == ()
    service.give_up(chunks)


@pytest.mark.parametrize(("timeout_s", "queue_timeout_s", "range_us"), [
    (None, None, None),
    (None, 2.5, (2_500_000, 2_500_000)),
    (50.0, 7200, (40_000_000, 51_000_000)),
])  # fmt: skip
def test_priority_and_the_shorter_of_two_limits_reach_the_controller(
    service, timeout_s, queue_timeout_s, range_us
):
    chunks = service.client.generate(
        [5], priority=-7, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s
    )
    submission = service.submitted()
    assert (submission.arrival.priority, submission.arrival.resumes) == (-7, False)
    if range_us is None:
        assert submission.queue_timeout_us is None
    else:
        assert submission.queue_timeout_us is not None
        assert range_us[0] <= submission.queue_timeout_us <= range_us[1]
    service.give_up(chunks)


def test_absent_options_take_their_defaults_and_a_seed_is_drawn(service):
    rows = []
    for _ in range(2):
        chunks = service.client.generate([5])
        rows.append(service.next_params())
        service.give_up(chunks)
    assert (rows[0].max_tokens, rows[0].temperature, rows[0].top_k, rows[0].top_p) == (
        16, 0.0, 0, 1.0,
    )  # fmt: skip
    assert rows[0].seed != rows[1].seed


def test_request_ids_count_up_and_a_made_one_is_echoed(service):
    requests, names = [], set()
    for _ in range(3):
        chunks = service.client.generate([5], max_tokens=1)
        requests.append(service.next_request())
        service.instance.deliver(requests[-1], 0, [9], LENGTH)
        names |= {chunk.request_id for chunk in chunks}
    assert requests == [requests[0], requests[0] + 1, requests[0] + 2] and requests[0] > 0
    assert len(names) == 3 and all(names)


def test_a_prompt_of_a_hundred_thousand_tokens_fits(service):
    prompt = [299] * 100_000
    for asked in (prompt, "the life of a token, and then some words. " * 5_000):
        chunks = service.client.generate(asked, max_tokens=1)
        submission = service.submitted()
        assert submission.arrival.prompt_len == len(submission.prompt_ids) >= 100_000
        service.instance.deliver(submission.request_id, 0, [9], LENGTH)
        assert len(list(chunks)) == 1


def test_a_longer_model_takes_larger_messages():
    limits = ModelLimits(vocab_size=2**28, max_model_len=1_000_000)
    with (
        running(limits=limits) as service,
        pytest.raises(InvalidArgument, match="token_ids has 1500000 tokens"),
    ):
        next(service.client.generate([2**27] * 1_500_000))


def test_an_incomplete_character_is_held_back_and_shown_at_the_end(service):
    first, *others = TOKENIZER.encode("\N{HOT BEVERAGE}")
    assert len(others) == 2
    chunks = service.client.generate([5], max_tokens=4)
    request = service.next_request()
    texts = []
    for index, token_id in enumerate([first, *others, first]):
        service.instance.deliver(request, index, [token_id], LENGTH if index == 3 else None)
        texts.append(next(chunks).text)
    assert texts == ["", "", "\N{HOT BEVERAGE}", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_stop_string_across_tokens_ends_the_request_and_its_row(service, is_included, is_late):
    """A stop string ends the request, however late the client reads.

    That holds if the row has run on meanwhile, and if the last token that it may generate completes
    the string.
    """
    ids = [TOKENIZER.encode(piece)[0] for piece in ("x", "y", "q", "z")]
    chunks = service.client.generate(
        [5], max_tokens=6, stop=["yq", "never"], include_stop_str_in_output=is_included
    )
    request = service.next_request()
    if is_late:
        service.instance.deliver(request, 0, [*ids, 9, 9], LENGTH)
    else:
        service.instance.deliver(request, 0, ids[:2])
        assert next(chunks).text == ("xy" if is_included else "x"), (
            "what may be the start of a stop string stays back"
        )
        service.instance.deliver(request, 2, ids[2:3])
    received = list(chunks)
    assert received[-1].finish is not None
    assert (received[-1].finish.reason, received[-1].finish.generated_tokens) == (STOP, 3)
    token_ids = ids_of(received)
    assert token_ids == (ids[:3] if is_late else ids[2:3])
    texts = "".join(chunk.text for chunk in received)
    assert (
        texts
        == {(False, True): "x", (True, True): "xyq", (False, False): "", (True, False): "q"}[
            is_included, is_late
        ]
    )
    assert service.next_abort() == request
    # What the row generates before the scheduler has ended it is dropped.
    service.instance.deliver(request, 3, [9, 9], None)
    service.front_end.ended(Ended(request, FinishReason.ABORTED, "aborted"))
    assert ("finished", STOP, 3) in service.observer.calls


def test_a_stop_string_in_the_last_token_needs_no_abort(service):
    (token_id,) = TOKENIZER.encode("z")
    chunks = service.client.generate([5], max_tokens=1, stop="z")
    service.answer([token_id])
    (chunk,) = chunks
    assert (chunk.text, chunk.finish.reason) == ("", STOP)
    assert service.controller.aborts.empty()


def test_stop_strings_and_bad_words_need_a_tokenizer():
    with running(with_tokenizer=False) as service:
        for name, instead in (("stop", "stop_token_ids"), ("bad_words", "logit_bias")):
            sentence = (
                f"{name} cannot be used: the checkpoint has no tokenizer.json; give {instead}"
            )
            with pytest.raises(InvalidArgument, match=sentence):
                next(service.client.generate([5], **{name: ["x"]}))


def test_logprobs_come_with_their_tokens_however_these_arrive(service):
    chunks = service.client.generate([5], max_tokens=4, logprobs=2, stop="q")
    submission = service.submitted()
    assert params_of(submission).logprobs == 2
    (q_id,) = TOKENIZER.encode("q")
    tokens = [
        Token(
            service.address,
            submission.request_id,
            i,
            q_id if i == 2 else 9,
            LENGTH if i == 3 else None,
            logprobs,
        )
        for i, logprobs in enumerate(
            TokenLogprobs(-0.5 * i, ((9, -0.25), (i, -1.5))) for i in range(4)
        )
    ]
    service.instance.deliver_tokens([tokens[1], tokens[0], tokens[0]])
    service.instance.deliver_tokens([tokens[3], tokens[2]])
    received = list(chunks)
    assert [len(chunk.logprobs) for chunk in received] == [
        len(chunk.token_ids) for chunk in received
    ]
    # The stop string is complete with the third.
    assert [logprobs for chunk in received for logprobs in chunk.logprobs] == [
        t.logprobs for t in tokens[:3]
    ]
    assert service.next_abort() == submission.request_id


def test_many_streams_at_once_each_get_their_own_tokens(service):
    all_chunks = [
        service.client.generate([5, i], max_tokens=20, request_id=f"many-{i}") for i in range(32)
    ]
    submissions = [service.submitted() for _ in all_chunks]
    for index in range(20):
        for submission in submissions:
            token_id = (submission.prompt_ids[1] * 7 + index) % 256
            service.instance.deliver(
                submission.request_id, index, [token_id], LENGTH if index == 19 else None
            )
    for i, chunks in enumerate(all_chunks):
        ids = ids_of(chunks)
        assert ids == [(i * 7 + index) % 256 for index in range(20)]
