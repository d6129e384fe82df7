"""How many drafts a window has, and which pages, ends and reports follow from it."""

import pytest

from control_plane.scheduler.state.commitments import Commitments
from control_plane.scheduler.windows.drafts import Drafts
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Finished, FinishReason


def drafts(**settings):
    return Drafts(SchedulerConfig(**settings))


def test_a_window_has_as_many_as_the_configuration_says():
    assert [drafts(num_drafts=number).of_window(5, False, 1, 64) for number in (0, 1, 3)] == [
        0,
        1,
        3,
    ]


def test_once_a_row_is_parked_16_windows_have_none():
    found = drafts(num_drafts=2)
    given = [found.of_window(window, window in (3, 10), 1, 64) for window in range(30)]
    assert given == [2] * 3 + [0] * (7 + 16) + [2] * 4


def test_drawn_numbers_are_of_window_and_seed():
    one, same, other = (
        [drafts(num_drafts=3, drafting="random", chaos_seed=seed).of_window(window, False, 1, 64)
         for window in range(64)]
        for seed in (1, 1, 2)
    )  # fmt: skip
    assert one == same != other and set(one) == {0, 1, 2, 3}


TABLE = ((8, 1024, 1, 110), (8, 1024, 2, 130), (8, 65536, 1, 160), (64, 65536, 1, 190))


def measured(*, num_drafts=2, rows=4, tokens=1000, reports=()):
    """What windows of this size have, after so many reports."""
    found = drafts(num_drafts=num_drafts, drafting="measured", draft_table=TABLE)
    for window, report in enumerate(reports):
        found.of_window(window, False, rows, tokens)
        found.reported(report)
    return [found.of_window(window, False, rows, tokens) for window in (1001, 1002, 1024)]


RIGHT, WRONG = ((100, 95), (95, 90)), ((100, 3),)


@pytest.mark.parametrize(("asked", "numbers"), [
    ({}, [2, 2, 2]),
    ({"num_drafts": 1}, [1, 1, 1]),
    # Two drafts were not measured with so many tokens.
    ({"tokens": 2000}, [1, 1, 1]),
    # Between two sizes a step takes what lies between: 159 of 160, then 135.
    ({"tokens": 64_000, "reports": [((100, 60),)] * 4}, [0, 0, 1]),
    ({"tokens": 33_000, "reports": [((100, 60),)] * 4}, [1, 1, 1]),
    # With many rows a step with a draft takes too long for 0.8 of them.
    ({"rows": 9}, [0, 0, 1]),
    ({"rows": 1000}, [0, 0, 1]),
    ({"rows": 9, "reports": [RIGHT] * 4}, [0, 0, 1]),
    ({"tokens": 2000, "reports": [RIGHT] * 4}, [1, 1, 1]),
    ({"reports": [WRONG] * 4}, [0, 0, 1]),
    ({"reports": [WRONG] * 4 + [RIGHT] * 70}, [2, 2, 2]),
])  # fmt: skip
def test_a_window_has_the_drafts_that_promise_most_tokens_a_second(asked, numbers):
    """One in 256 has one also where none pays: else a change would never be seen."""
    assert measured(**asked) == numbers


@pytest.mark.parametrize(("committed", "number"), [
    ({}, 3),
    ({"rows": [2, 4]}, 3),
    ({"rows": [5, 1]}, 2),
    ({"rows": [9, 0]}, 0),
    ({"attention_rows": [8, 3]}, 2),
    ({"partials": [3, 0]}, 1),
    ({"links": [[0, 4], [0, 0]]}, 0),
])  # fmt: skip
def test_drafts_take_the_room_that_rows_leave(committed, number):
    bounds = BoundsConfig(max_rows=16, max_links=4, max_attention_rows=24, max_partials=8)
    commitments = Commitments(ClusterConfig(num_instances=2, bounds=bounds))
    for name, value in committed.items():
        setattr(commitments, name, value)
    assert drafts(num_drafts=3).within(3, commitments, bounds) == number
    assert drafts(num_drafts=3).within(0, commitments, bounds) == 0


def drafting(prompt_len, max_tokens=100, *, num_drafts, num_steps=1):
    """One instance, whose reports a test writes, and a request: (it, the plan of its arrival)."""
    story = FollowedScheduler(
        ClusterConfig(num_instances=1, num_frames=20),
        num_drafts=num_drafts, steps_per_window=num_steps, growth_promise="tokens:0",
        prefix_sharing=False,
    )  # fmt: skip
    return story, story.arrive(prompt_len, max_tokens)


@pytest.mark.parametrize(("prompt_len", "num_drafts", "num_steps", "num_pages"), [
    (64, 0, 1, 1),
    (63, 1, 1, 1),
    (64, 1, 1, 2),
    # A step writes up to position 61 + 2, and the second turn one more.
    (61, 2, 1, 1),
    (62, 2, 1, 2),
    (60, 3, 1, 2),
    (59, 3, 1, 1),
    (57, 1, 4, 1),
    (58, 1, 4, 2),
])  # fmt: skip
def test_a_row_has_the_pages_that_drafts_and_later_turns_may_write(
    prompt_len, num_drafts, num_steps, num_pages
):
    story, first = drafting(prompt_len, num_drafts=num_drafts, num_steps=num_steps)
    assert first.instances[0].num_drafts == num_drafts
    assert story.request().num_pages == num_pages


def test_pages_ahead_count_the_drafts_of_windows_in_flight():
    """After one window the row is at 58 at least and at 59 at most, and the next may write two."""
    story, _ = drafting(61, num_drafts=1)
    assert story.request().num_pages == 1
    story.plan()
    assert story.request().num_pages == 1
    story.step()
    assert story.request().num_pages == 2


def test_a_row_leaves_by_count_only_when_it_surely_has_all_tokens():
    story, first = drafting(10, 6, num_drafts=2)
    plans = [first, story.plan()]
    plans.append(story.step(advanced=(1, 1)))
    assert story.scheduler.requests.num_running == 1, (
        "three tokens are reported, three more may have come"
    )
    plans.append(story.step(advanced=(1,)))
    assert not any(plan.instances[0].ends for plan in plans if plan.instances)
    plans.append(story.step())
    assert [plan.instances[0].ends for plan in plans if plan.instances][-1] == (1,) or (
        story.scheduler.requests.num_running == 0
    )


def test_a_row_that_ends_by_drafts_is_reported_and_gives_its_frames_back():
    story, _ = drafting(60, 8, num_drafts=3)
    story.plan()
    story.step(advanced=(1, 1, 1))
    finished = Finished(1, 8, FinishReason.LENGTH)
    story.step(finished=(finished,))
    assert story.scheduler.requests.num_running == 0
    story.run_out()
    assert story.free() == [20]


def test_a_placement_says_when_the_row_begins_at_least_and_at_most():
    story, first = drafting(10, 50, num_drafts=2)
    (placement,) = first.placements
    assert placement.begins == (9, 9)
    (placement,) = story.arrive(10, 50).placements
    assert placement.begins == (9, 11), "the window in flight may bring two drafts"


def test_without_drafts_no_placement_has_bounds():
    story, first = drafting(10, 50, num_drafts=0)
    assert first.placements[0].begins is None
    assert story.plan().instances[0].num_drafts == 0
