"""Tokens come out in order and once, however they come (protocol.md, ordered tokens)."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from control_plane.frontend.client_request import Origin
from control_plane.frontend.client_stream import Choice, ClientStream
from control_plane.frontend.streams import ClientStreams
from harness.services.frontend_fakes import FakeController, Recorder
from nanocp.values.offload import page_hashes
from nanocp.values.plan import Ended, FinishReason, Preempted
from nanocp.values.sampling import SamplingParams, Token, TokenLogprobs
from nanocp.wire.rows import decode_row_input

FRONT_END = "front:1"


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, list[Token]]:
    """A request of n tokens (token i has id 100 + i), and deliveries of them."""
    num_tokens = draw(st.integers(1, 12))
    indices = draw(
        st.permutations(
            [*range(num_tokens), *draw(st.lists(st.integers(0, num_tokens - 1), max_size=12))]
        )
    )
    tokens = [
        Token(FRONT_END, 1, i, 100 + i, FinishReason.STOP if i == num_tokens - 1 else None)
        for i in indices
    ]
    for beyond in draw(st.lists(st.integers(num_tokens, 40), max_size=3)):
        tokens.insert(draw(st.integers(0, len(tokens))), Token(FRONT_END, 1, beyond, 999, None))
    return num_tokens, tokens


@given(deliveries())
def test_any_order_of_delivery_gives_the_tokens_in_order_and_once(delivery):
    num_tokens, tokens = delivery
    stream = ClientStream(1, "one", [7], Choice(SamplingParams(max_tokens=20)))
    taken: list[int] = []
    for num_delivered, token in enumerate(tokens, 1):
        assert (stream.output.add(token) > 0) == (len(stream.output.ids) > len(taken))
        seen_all = stream.output.finish_reason is not None
        taken += stream.take_new()
        assert taken == [100 + i for i in range(len(taken))]
        waiting = {
            early.index for early in tokens[:num_delivered] if len(taken) <= early.index < 20
        }
        assert seen_all or stream.output.num_undelivered == len(waiting), (
            "what was seen before is not held again"
        )
        assert seen_all == (len(taken) == num_tokens), (
            "the end is count == n, no sooner and no later"
        )
    assert taken == [100 + i for i in range(num_tokens)]
    assert stream.output.finish_reason is FinishReason.STOP


def connected(
    observer: Recorder | None = None, max_undelivered: int = 100, id_step: int = 1
) -> tuple[ClientStreams, FakeController]:
    """The streams of a front end, and the controller that it has."""
    streams = ClientStreams(FRONT_END, max_undelivered, observer or Recorder(), id_step)
    controller = FakeController(streams.placed)
    streams.connect(controller)
    return streams, controller


def streams_with(
    max_undelivered: int = 100, max_tokens: int = 9
) -> tuple[ClientStreams, ClientStream, FakeController]:
    """Streams with one request, whose prompt has one token; it, and their controller."""
    streams, controller = connected(max_undelivered=max_undelivered)
    (stream,) = streams.submit(
        "one", [7], [Choice(SamplingParams(max_tokens=max_tokens))], Origin(3, tenant="t")
    )
    return streams, stream, controller


def token(
    stream: ClientStream, index: int, token_id: int = 5, finish: FinishReason | None = None,
    attempt: int = 0,
) -> Token:  # fmt: skip
    return Token(FRONT_END, stream.request_id, index, token_id, finish, attempt=attempt)


def test_tokens_that_wait_for_an_earlier_one_count_as_undelivered():
    streams, stream, controller = streams_with(max_undelivered=3, max_tokens=100)
    streams.deliver(0, (token(stream, index) for index in (1, 2, 3)))
    assert stream.ended is None and stream.output.num_undelivered == 3
    streams.deliver(0, [token(stream, 4)])
    assert stream.ended is not None and stream.ended.reason is FinishReason.REFUSED
    assert controller.next_abort() == stream.request_id


@given(st.permutations(range(6)), st.integers(0, 6), st.integers(0, 6))
def test_a_preempted_request_comes_back_once_with_all_it_has_generated(
    order, num_generated, num_before
):
    """The preemption may be reported before, between or after the tokens."""
    streams, stream, controller = streams_with()
    first = controller.next_submission()
    early = [index for index in order if index < num_generated]
    told_after = min(num_before, num_generated)
    for number, index in enumerate([*early, None]):
        if number == told_after:
            streams.preempted(Preempted(stream.request_id, 1 + num_generated))
        assert controller.submissions.empty() == (number < num_generated or number < told_after)
        if index is not None:
            streams.deliver(0, [token(stream, index, 100 + index)])
    back = controller.next_submission()
    output_ids = tuple(100 + index for index in range(num_generated))
    assert (back.request_id, back.arrival.resumes, back.prompt_ids) == (
        first.request_id,
        True,
        (7, *output_ids),
    )
    assert (back.arrival.prompt_len, back.arrival.max_tokens, back.arrival.priority) == (
        1 + num_generated,
        9 - num_generated,
        3,
    )
    row = decode_row_input(back.arrival.row_start)
    assert (row.output_ids, row.last_token) == (output_ids, (7, *output_ids)[-1])
    assert row.params == decode_row_input(first.arrival.row_start).params, (
        "max_tokens counts from the first token"
    )
    attempt = back.arrival.attempt
    streams.deliver(0, [token(stream, num_generated, 5, FinishReason.STOP, attempt)])
    assert stream.output.ids == [*output_ids, 5] and controller.submissions.empty()


def test_a_preempted_request_takes_the_prompt_that_a_penalty_needs_along():
    streams, controller = connected()
    (stream,) = streams.submit(
        "one", [9, 7, 9], [Choice(SamplingParams(max_tokens=9, repetition_penalty=1.1))]
    )
    streams.deliver(0, [token(stream, 0, 8)])
    streams.preempted(Preempted(stream.request_id, 4))
    rows = [decode_row_input(controller.next_submission().arrival.row_start) for _ in range(2)]
    assert [(row.prompt_ids, row.output_ids) for row in rows] == [((7, 9), ()), ((7, 9), (8,))]


def test_pages_are_known_by_the_prompt_and_of_a_request_that_resumes_by_its_output_too():
    streams, controller = connected()
    prompt = list(range(127))
    choices = [
        Choice(SamplingParams(max_tokens=9)),
        Choice(SamplingParams(max_tokens=9), prompt_logprobs=0),
    ]
    stream, _ = streams.submit("two", prompt, choices)
    streams.deliver(0, (token(stream, index, 8) for index in (0, 1)))
    streams.preempted(Preempted(stream.request_id, 129))
    hashes = [controller.next_submission().arrival.page_hashes for _ in range(3)]
    assert hashes == [page_hashes(prompt), (), page_hashes([*prompt, 8, 8])], (
        "log probabilities need the prompt's prefill"
    )
    assert [len(each) for each in hashes] == [1, 0, 2]


def test_every_attempt_hashes_its_pages_with_the_salt():
    streams = ClientStreams(FRONT_END, 100, Recorder(), hashes_output=True)
    controller = FakeController(streams.placed)
    streams.connect(controller)
    prompt, salted = list(range(63)), Origin(cache_salt="mine")
    choices = [Choice(SamplingParams(max_tokens=9, temperature=1)) for _ in "ab"]
    stream, _ = streams.submit("two", prompt, choices, salted)
    streams.deliver(0, (token(stream, index, 8) for index in (0, 1)))
    streams.preempted(Preempted(stream.request_id, 65))
    streams.interrupted()
    streams.tokens_lost(stream.request_id, "lost")
    submissions = [controller.next_submission() for _ in range(6)]
    for number, submission in enumerate(submissions):
        known = submission.prompt_ids
        hashes = page_hashes(known, salted.salt)
        assert submission.arrival.page_hashes == hashes and len(hashes) == (len(known) > 64)
        row = decode_row_input(submission.arrival.row_start)
        assert submission.salt == salted.salt
        assert row.page_hash == (*hashes, salted.salt)[0], number
    assert [len(each.prompt_ids) for each in submissions] == [63, 63, 65, 65, 63, 65]


def test_a_request_that_ends_while_it_is_away_does_not_come_back():
    streams, stream, controller = streams_with()
    controller.next_submission()
    streams.preempted(Preempted(stream.request_id, 3))
    streams.client_gone([stream])
    streams.deliver(0, (token(stream, i) for i in (0, 1)))
    streams.preempted(Preempted(stream.request_id, 3))
    assert controller.next_abort() == stream.request_id and controller.submissions.empty()


def test_a_request_has_one_end():
    streams, stream, controller = streams_with(max_tokens=2)
    streams.deliver(0, [token(stream, 0), token(stream, 1, finish=FinishReason.LENGTH)])
    streams.ended(Ended(stream.request_id, FinishReason.FAILED, "late"))
    streams.client_gone([stream])
    streams.end_all("late")
    assert not streams.abort("one")
    assert (stream.output.finish_reason, stream.ended) == (FinishReason.LENGTH, None)
    assert controller.aborts.empty()


def test_a_waiting_reader_wakes_for_tokens_and_for_the_end():
    async def read() -> list[object]:
        streams, stream, _ = streams_with()
        seen: list[object] = []
        streams.deliver(0, [token(stream, 1, 6)])
        assert not stream.changed.is_set(), "nothing is in order yet"
        streams.deliver(0, [token(stream, 0)])
        await asyncio.wait_for(stream.changed.wait(), 60)
        seen.append(stream.take_new())
        streams.ended(Ended(stream.request_id, FinishReason.FAILED, "gone"))
        await asyncio.wait_for(stream.changed.wait(), 60)
        return [*seen, stream.take_new(), stream.ended]

    assert asyncio.run(read()) == [[5, 6], [], Ended(1, FinishReason.FAILED, "gone")]


def test_a_new_attempt_forgets_tokens_that_came_early_and_takes_no_older_ones():
    """A new attempt leaves no gap.

    A row that changed its instance delivers by two streams. If the older one dies, token 6 is here
    and token 5 never comes; the new attempt may generate another token 6.
    """
    streams, stream, controller = streams_with()
    first = controller.next_submission()
    tokens = [token(stream, index, 100 + index) for index in range(7)]
    streams.deliver(0, [*tokens[:5], tokens[6]])
    streams.interrupted()
    again = controller.next_submission()
    assert (again.arrival.attempt, again.arrival.resumes) == (first.arrival.attempt + 1, False)
    assert again.prompt_ids == (7, *range(100, 105))
    assert decode_row_input(again.arrival.row_start).attempt == again.arrival.attempt
    streams.deliver(0, [tokens[5], tokens[6]])
    assert stream.output.ids == [*range(100, 105)], "tokens of the attempt before are dropped"
    attempt = again.arrival.attempt
    streams.deliver(0, (token(stream, i, 200 + i, attempt=attempt) for i in (5, 6, 7)))
    assert stream.output.ids == [*range(100, 105), 205, 206, 207]


def test_tokens_that_are_lost_on_their_way_begin_a_new_attempt_three_times_in_a_row():
    streams, stream, controller = streams_with()
    controller.next_submission()

    def lose(times: int) -> None:
        for _ in range(times):
            streams.tokens_lost(stream.request_id, "instance 0: nobody takes the tokens")

    lose(3)
    streams.deliver(0, [token(stream, 0, 100, attempt=3)])
    lose(3)
    assert (stream.attempts.number, stream.output.ids, stream.ended) == (6, [100], None)
    again = [controller.next_submission() for _ in range(6)][-1]
    assert (again.prompt_ids, again.arrival.attempt, again.arrival.max_tokens) == ((7, 100), 6, 8)
    lose(1)
    assert stream.ended and stream.ended.reason is FinishReason.FAILED
    assert stream.ended.message == "instance 0: nobody takes the tokens"
    assert controller.next_abort() == stream.request_id


def test_the_token_after_a_pause_says_what_paused_it_first():
    recorder = Recorder()
    streams, _ = connected(recorder)
    (stream,) = streams.submit("one", [7], [Choice(SamplingParams(max_tokens=9))])

    def deliver(*indices: int) -> None:
        attempt = stream.attempts.number
        streams.deliver(0, (token(stream, index, attempt=attempt) for index in indices))

    streams.interrupted()  # before its first token: nobody waits for the next one
    deliver(0, 1)
    streams.preempted(Preempted(stream.request_id, 4))
    deliver(2)  # it was on its way
    deliver(3, 4)
    streams.tokens_lost(stream.request_id, "lost")
    deliver(5)
    streams.interrupted("controller")
    streams.interrupted()
    deliver(6)
    streams.interrupted()
    deliver(7)
    tokens = [paused_by for name, *paused_by in recorder.calls if name == "token"]
    assert tokens == [[], [], ["preempted"], [], ["tokens_lost"], ["controller"], ["term"]]


def test_missing_log_probabilities_of_the_prompt_are_asked_for_again():
    streams, controller = connected()
    choice = Choice(SamplingParams(max_tokens=9), prompt_logprobs=2)
    (stream,) = streams.submit("one", [7, 8, 9], [choice])
    streams.add_prompt_logprobs(stream.request_id, 1, [TokenLogprobs(-1.0, ())])
    streams.interrupted()
    streams.add_prompt_logprobs(stream.request_id, 1, [TokenLogprobs(-1.0, ())] * 2)
    streams.interrupted()
    submissions = [controller.next_submission() for _ in range(3)]
    assert [each.prompt_logprobs for each in submissions] == [2, 2, None]
    # A request that keeps its pages is prefilled all the same.
    assert [each.event(0).is_recomputed for each in submissions] == [False, True, False]
    assert stream.prompt_logprobs and len(stream.prompt_logprobs) == 2


def test_no_number_is_given_out_again_to_a_request_that_came_before_the_next_controller():
    streams, controller = connected(id_step=2)
    streams.connect(controller, 2)
    choices = [Choice(SamplingParams(max_tokens=9))]
    numbers = [streams.submit(name, [7], choices)[0].request_id for name in "ab"]
    # It was told that 2 is the newest.
    streams.connect(controller, 4)
    numbers += [streams.submit("c", [7], choices)[0].request_id]
    streams.connect(controller, 40)
    numbers += [streams.submit("d", [7], choices)[0].request_id]
    assert numbers == [2, 4, 6, 40]


def test_an_end_that_crosses_a_new_attempt_takes_it_back():
    streams, stream, controller = streams_with()
    streams.interrupted()
    streams.ended(Ended(stream.request_id, FinishReason.EXPIRED, "it waited too long"))
    assert controller.next_abort() == stream.request_id


def test_a_later_attempt_asks_again_for_the_log_probabilities_of_the_prompt_that_are_missing():
    streams, controller = connected()
    choices = [Choice(SamplingParams(max_tokens=9), prompt_logprobs=2)]
    (stream,) = streams.submit("one", list(range(130)), choices)
    logprobs = [TokenLogprobs(-float(position), ()) for position in range(1, 140)]
    streams.add_prompt_logprobs(stream.request_id, 1, logprobs[:50])
    streams.deliver(0, [token(stream, 0, 8)])
    streams.interrupted()
    controller.next_submission()
    again = controller.next_submission()
    assert (again.prompt_logprobs, again.front_end, again.arrival.page_hashes) == (2, FRONT_END, ())
    # That prefill computes the output's too.
    streams.add_prompt_logprobs(stream.request_id, 1, logprobs[:131])
    assert stream.prompt_logprobs == logprobs[:129]
    streams.interrupted()
    complete = controller.next_submission()
    assert complete.prompt_logprobs is None and len(complete.arrival.page_hashes) == 2
