"""The promise: frames for all of max_tokens, for a number, or for what most requests needed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.state.promise import Promise
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Finished, FinishReason


@given(st.lists(st.integers(1, 5000), max_size=400), st.integers(1, 100), st.integers(1, 5000))
def test_a_percentile_is_that_of_the_latest_256_once_there_are_32(lengths, percent, most):
    promise = Promise(SchedulerConfig(growth_promise=f"percentile:{percent}"))
    for length in lengths:
        promise.ended(length)
    latest = sorted(lengths[-256:])
    wanted = latest[math.ceil(percent * len(latest) / 100) - 1] if len(latest) >= 32 else most
    assert promise.num_tokens(most) == min(wanted, most)


def test_all_and_a_number():
    assert Promise(SchedulerConfig()).num_tokens(7) == 7
    number = Promise(SchedulerConfig(growth_promise="tokens:64"))
    assert (number.num_tokens(100), number.num_tokens(5)) == (64, 5)


@pytest.mark.parametrize(
    "bad", ["", "p90", "percentile:0", "percentile:101", "tokens", "tokens:-1", "max_tokens:3"]
)
def test_what_is_no_promise_is_refused_with_what_would_be(bad):
    with pytest.raises(
        ValueError, match=r"growth_promise is '.*'; it must be max_tokens, percentile:N with N from"
    ):
        SchedulerConfig(growth_promise=bad)


@pytest.mark.parametrize(
    ("growth_promise", "num_frames"), [("max_tokens", 63), ("percentile:50", 2)]
)
def test_admission_ships_the_frames_that_most_of_those_that_ended_needed(
    growth_promise, num_frames
):
    """32 requests end after 70 of 4,000 tokens each; half of the next ones then need two frames."""
    cluster = ClusterConfig(num_instances=1, num_frames=4000)
    scheduler = FollowedScheduler(cluster, growth_promise=growth_promise)
    scheduler.arrive_all(*[1] * 32, max_tokens=4000)
    scheduler.step(finished=tuple(Finished(i, 70, FinishReason.STOP) for i in range(1, 33)))
    plan = scheduler.arrive(1, 4000)
    assert [run.num_pages for run in plan.instances[0].changes.pages] == [num_frames]
