"""Which instance may deliver which token, in examples."""

import pytest

from control_plane.frontend.access.token_owners import TokenOwners
from control_plane.frontend.client_stream import Choice
from control_plane.frontend.streams import ClientStreams
from harness.hash_clusters.kinds.hash_seeds import play
from harness.services.frontend_fakes import FakeController, Recorder
from nanocp.values.plan import Placement
from nanocp.values.sampling import SamplingParams, Token


def owners(prompt_len: int, steps_per_window: int, *placed: tuple[int, int]) -> TokenOwners:
    """The owners of a request with these (MoE binding, tokens) placements."""
    found = TokenOwners(prompt_len, steps_per_window)
    for moe_binding, num_tokens in placed:
        found.placed(Placement(1, moe_binding, num_tokens, ()))
    return found


def test_a_request_that_is_not_placed_has_no_owner():
    assert owners(10, 1).of(0) is None


def test_a_binding_owns_all_tokens_until_the_next_one():
    """The prompt has 10 tokens, and the second window gives the request its 14th of KV."""
    found = owners(10, 1, (3, 10), (5, 14))
    assert [found.of(index) for index in range(6)] == [3, 3, 3, 3, 5, 5]


def test_a_row_moves_at_the_edge_of_a_window():
    """Windows have 4 steps, so the second begins with token 4.

    In a last window that is not full, the length is all that the request can ever have.
    """
    for num_tokens in (15, 16, 17):
        found = owners(10, 4, (3, 10), (5, num_tokens))
        assert [found.of(index) for index in range(6)] == [3, 3, 3, 3, 5, 5]


def test_a_row_that_starts_where_it_was_placed_owns_from_the_first_token():
    """A request that needs no prefill is placed and in a window in one call."""
    assert owners(10, 4, (3, 13)).of(0) == 3


def test_pages_that_move_change_no_owner():
    found = owners(10, 1, (3, 10), (3, 14), (3, 20))
    assert [found.of(index) for index in (0, 4, 11)] == [3, 3, 3]


def test_a_preempted_request_goes_on_where_it_is_placed_again():
    found = owners(10, 4, (3, 10), (5, 17))
    found.begin_attempt(8)
    found.placed(Placement(1, 2, 18, ()))
    assert [found.of(index) for index in (7, 8, 11)] == [None, 2, 2]
    found.placed(Placement(1, 7, 25, ()))  # After the second window that it resumed for.
    assert [found.of(index) for index in (11, 12)] == [2, 7]


def test_with_drafts_both_bindings_may_generate_the_tokens_between_the_bounds():
    """The prompt has 10 tokens: KV of 9 is there when the first window begins, of 13 to 16 then."""
    found = TokenOwners(10, 1)
    found.placed(Placement(1, 3, 11, (), (9, 9)))
    found.placed(Placement(1, 5, 15, (), (13, 16)))
    may = [[found.may_generate(index, instance) for index in range(9)] for instance in (3, 5, 4)]
    assert may[0] == [True] * 7 + [False] * 2
    assert may[1] == [False] * 4 + [True] * 5
    assert not any(may[2])


def test_with_drafts_a_row_may_come_back_to_an_earlier_binding():
    found = TokenOwners(10, 1)
    for binding, least, most in ((3, 9, 9), (5, 13, 16), (3, 18, 21), (6, 22, 30)):
        found.placed(Placement(1, binding, 0, (), (least, most)))
    assert [found.may_generate(index, 3) for index in range(22)] == [
        *[True] * 7, False, False, *[True] * 12, False,
    ]  # fmt: skip
    assert not found.may_generate(12, 5) and found.may_generate(11, 5)


def test_with_drafts_a_new_attempt_begins_with_what_is_known():
    found = TokenOwners(10, 4)
    found.placed(Placement(1, 3, 11, (), (9, 9)))
    found.begin_attempt(8)
    assert not found.may_generate(8, 3)
    found.placed(Placement(1, 2, 18, (), (17, 17)))
    assert found.may_generate(8, 2) and not found.may_generate(7, 2)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_seeds_with_hand_offs_are_played_with_windows_of_one_and_of_four_steps(num_steps):
    """The control for what the harness asserts: there is something to see."""
    seed = {1: 8, 4: 27}[num_steps]
    cluster = play(seed)
    assert cluster.config.scheduler.steps_per_window == num_steps and cluster.num_hand_offs > 20


def test_tokens_are_taken_from_their_owner_alone():
    streams = ClientStreams("front:1", 100, Recorder())
    streams.connect(FakeController(streams.placed))
    (stream,) = streams.submit("one", [7], [Choice(SamplingParams(max_tokens=9))])

    def deliver(instance: int, index: int) -> None:
        streams.deliver(instance, [Token("front:1", stream.request_id, index, 100 + index, None)])

    deliver(0, 0)
    streams.placed(Placement(stream.request_id, 1, 3, ()))  # At instance 1 from the third on.
    deliver(1, 2)
    for instance, index, named in (
        (0, 2, "instance 0 delivered token 2 of request 1, which is at instance 1 then"),
        (1, 1, "instance 1 delivered token 1 of request 1, which is at instance 0 then"),
        (2, 1, "instance 2 delivered token 1"),
    ):
        with pytest.raises(PermissionError, match=named):
            deliver(instance, index)
    assert stream.output.ids == [100], "what the old instance still has under way may come"
    deliver(0, 1)
    assert stream.output.ids == [100, 101, 102]
    streams.deliver(
        5, [Token("front:1", 99, 0, 1, None)]
    )  # Tokens of unknown requests are dropped.
