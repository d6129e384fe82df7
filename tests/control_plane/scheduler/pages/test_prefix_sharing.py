"""Prefix sharing in the scheduler: what is shared and when, what it counts as, where it leads."""

import pytest

from control_plane.scheduler.invariants import _pages
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.values.offload import page_hashes
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    FinishReason,
    TargetRun,
    TransferDone,
    TransferFenced,
)
from nanocp.values.table_changes import PageRun

PROMPT = list(range(300))


class Story(FollowedScheduler):
    """A small cluster: a test submits prompts, says when pages are written, plays the instances."""

    def __init__(self, num_frames=40, num_instances=2, bounds=None, **config):
        cluster = ClusterConfig(
            num_instances=num_instances, num_frames=num_frames, bounds=bounds or BoundsConfig()
        )
        super().__init__(cluster, **({"cp_degree_buckets": ((10_000, 1),)} | config))

    def submit(self, prompt, max_tokens=30):
        hashes = page_hashes(prompt)
        return self.arrive(len(prompt), max_tokens, needs_prefill=True, page_hashes=hashes)

    def abort(self, request_id):
        """It ends, and everybody reports the windows that were sent."""
        self.plan(AbortRequested(request_id))
        for _ in range(2):
            self.step()

    def total(self, name):
        return sum(self.loads(name))


def test_pages_that_begin_alike_are_shared_and_only_the_others_are_written():
    story = Story()
    story.arrived(story.submit(PROMPT))
    frames, tokens = story.total("frames_committed"), story.total("kv_tokens")
    plan = story.submit([*PROMPT[:200], *range(1000, 1050)])
    (transfer,) = plan.transfers
    first, second = story.request(1).runs, story.request(2).runs
    assert second[0] == first[0]._replace(num_pages=3), "200 tokens fill three pages"
    assert (
        transfer.targets == (TargetRun(3, 1, second[1].instance, second[1].frame),)
        and transfer.num_tokens == 249
    )
    assert story.total("frames_committed") == frames + 2, (
        "frames count once: one for its prompt, one for its output"
    )
    assert story.total("kv_tokens") == tokens + 249 + 1, (
        "attention reads them for each; a window was planned"
    )
    sharing = story.scheduler.prefix_sharing
    assert (sharing.num_queried_tokens, sharing.num_hit_tokens, sharing.hit_rate) == (
        550,
        192,
        192 / 550,
    )
    story.arrived(plan)
    assert (
        PageRun(2, 0, 3, first[0].frame) in story.step().instances[second[0].instance].changes.pages
    )


def test_a_prompt_that_is_there_up_to_its_last_token_needs_no_transfer():
    story = Story(num_instances=1)
    story.arrived(story.submit(PROMPT))
    plan = story.submit(PROMPT[:257])
    assert not plan.transfers and story.request(2).num_shared == 4
    assert story.submit(PROMPT[:256]).transfers[0].targets[0].first_page == 3, (
        "its last page gets the last token"
    )


def test_a_page_is_shared_once_its_receivers_have_it_and_not_before():
    story = Story(num_instances=1)
    first = story.submit(PROMPT)
    second = story.submit(PROMPT)
    assert second.transfers[0].targets[0].first_page == 0, "the first is still being written"
    story.arrived(second)
    assert story.submit(PROMPT).transfers[0].targets[0].first_page == 4
    assert story.request(3).runs[0].frame == story.request(2).runs[0].frame
    story.arrived(first)


def test_a_failed_prefill_leaves_nothing_to_share():
    story = Story()
    (transfer,) = story.submit(PROMPT).transfers
    story.plan(AbortRequested(1))
    story.plan(*(TransferFenced(transfer.ticket, instance) for instance in transfer.receivers))
    assert story.submit(PROMPT).transfers[0].targets[0].first_page == 0


def test_pages_outlive_their_request_until_their_frames_are_needed():
    story = Story(num_frames=8, num_instances=1)
    story.arrived(story.submit(PROMPT, max_tokens=1))
    story.abort(1)
    assert story.total("frames_free") == 8
    story.submit(PROMPT[:257], max_tokens=1)
    assert story.request(2).num_shared == 4 and story.total("frames_free") == 3
    story.abort(2)
    story.arrived(story.submit([7] * 380, max_tokens=1))
    story.abort(3)
    story.submit(PROMPT, max_tokens=1)
    assert story.request(4).num_shared == 2, (
        "six frames were wanted, four were free without a page: the last pages went"
    )


def test_a_frame_is_free_when_nobody_reads_it_any_more():
    story = Story(num_frames=8, num_instances=1)
    story.arrived(story.submit(PROMPT, max_tokens=1000 // 16))
    story.submit(PROMPT[:257], max_tokens=60)
    story.abort(1)
    assert story.total("frames_committed") == 5, (
        "four are shared by the second, which has one of its own"
    )
    story.plan(AbortRequested(2))
    assert (story.total("frames_committed"), story.total("frames_quarantined")) == (0, 5)
    third = story.submit(PROMPT[:257], max_tokens=1)
    assert not third.transfers and story.total("frames_quarantined") == 1, (
        "nobody writes a page that is written"
    )
    for _ in range(3):
        story.step()
    assert story.total("frames_quarantined") == 0


def test_a_request_goes_where_its_prefix_is_and_a_hot_prefix_is_soon_in_several_places():
    story = Story(num_instances=4, num_frames=100)
    story.arrived(story.submit(PROMPT))
    home = story.request(1).moe_binding
    for _ in range(11):
        plan = story.submit(PROMPT)
        if plan.transfers and story.request(story.num_requests).num_shared == 0:
            story.arrived(plan)
    rows = story.loads("num_rows")
    assert story.request(2).moe_binding == home and max(rows) - min(rows) <= 1, rows
    assert sum(story.request(number).num_shared > 0 for number in range(1, 13)) == 8, (
        "each of four wrote it once"
    )


@pytest.mark.parametrize(("load", "is_shared"), [(500, True), (700, False)])
def test_sharing_raises_the_peak_by_two_prompt_lengths_and_no_more(load, is_shared):
    """The prefix of 300 tokens is where the load is; the policy would place it elsewhere."""
    story = Story(num_frames=100)
    story.arrived(story.submit(PROMPT, max_tokens=1))
    home = story.request(1).moe_binding

    policy = story.scheduler._policy
    propose = policy.place

    def place_at(instance):
        policy.place = lambda state, arrival, window: propose(state, arrival, window)._replace(
            moe_binding=instance, shares={instance: -(-arrival.prompt_len // 64)}
        )

    place_at(home)
    story.arrived(story.submit([5] * load, max_tokens=1))
    place_at(1 - home)
    story.submit(PROMPT)
    assert (story.request(3).num_shared > 0) == is_shared
    assert (story.request(3).moe_binding == home) == is_shared


@pytest.mark.parametrize(
    "policy",
    ["dual_balanced", "cost_aware", "least_batch", "uniform_cp:2", "fixed_degree:2", "chaos"],
)
def test_every_policy_is_drawn_to_a_split_prefix(policy):
    story = Story(
        num_instances=4, policy=policy, cp_degree_buckets=((200, 1), (2000, 2)), num_frames=200
    )
    prompt = list(range(1000))
    story.arrived(story.submit(prompt))
    story.submit([*prompt[:900], 5])
    assert story.request(2).num_shared == 14
    shared = [page for page in _pages(story.request(2).runs) if page[0] < 14]
    assert shared == [page for page in _pages(story.request(1).runs) if page[0] < 14]
    assert story.request(2).moe_binding in story.request(1).pages_on


def test_a_request_that_cannot_share_within_the_bounds_is_placed_without():
    story = Story(bounds=BoundsConfig(max_rows=1, max_attention_rows=1))
    story.arrived(story.submit(PROMPT))
    story.submit(PROMPT)
    assert (
        story.request(2).num_shared == 0
        and story.request(1).moe_binding != story.request(2).moe_binding
    )


def test_a_page_that_moves_is_shared_no_more_by_its_request():
    story = Story()
    story.arrived(story.submit(PROMPT))
    story.arrived(story.submit(PROMPT))
    for _ in range(4):
        story.step()
    home = story.request(2).runs[0].instance
    story.scheduler._policy.moves = lambda state, window: [
        (state.requests[2], range(1, 3), 1 - home)
    ]
    (transfer,) = story.step().transfers
    story.scheduler._policy.moves = lambda state, window: []
    before = story.total("frames_committed")
    story.step(TransferDone(transfer.ticket, 1 - home))
    assert story.total("frames_committed") == before, "the first request still has the old frames"
    assert story.request(1).pages_on == {home: 6} and story.request(2).pages_on == {
        home: 4,
        1 - home: 2,
    }
    for request_id in (1, 2):
        story.abort(request_id)
    for _ in range(3):
        story.step()
    assert story.total("frames_free") == 80


def test_without_prefix_sharing_and_without_hashes_nothing_is_shared():
    story = Story(prefix_sharing=False)
    story.arrived(story.submit(PROMPT))
    story.submit(PROMPT)
    assert story.request(2).num_shared == 0 and story.scheduler.prefix_sharing.hit_rate == 0


def test_more_hashes_than_full_pages_are_refused():
    plan = Story().plan(Arrival(1, 128, 5, page_hashes=(b"a", b"b")))
    assert plan.ended[0].reason is FinishReason.INVALID
    assert plan.ended[0].message == "a prompt of 128 tokens has 2 page_hashes; it fills 1 pages"


def test_a_hash_is_of_everything_up_to_the_pages_end():
    hashes = page_hashes(PROMPT)
    assert (
        len(hashes) == 4
        and page_hashes(PROMPT[:257]) == hashes
        and page_hashes(PROMPT[:256]) == hashes[:3]
    )
    assert (
        page_hashes([1, *PROMPT[1:]])[0] != hashes[0]
        and page_hashes([1, *PROMPT[1:]])[3] != hashes[3]
    )
    assert page_hashes([*PROMPT[:200], 1, *PROMPT[201:]])[:3] == hashes[:3]
    assert page_hashes([5]) == () and len({*hashes}) == 4
