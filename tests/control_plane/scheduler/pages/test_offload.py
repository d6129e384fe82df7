"""Pages outside the frames: when they are stowed, found, given up, fetched and forgotten."""

import pytest

from control_plane.scheduler.pages.tiers import OwnPage
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.values.offload import page_hashes
from nanocp.values.plan import (
    CARRY_PAGE,
    AbortRequested,
    Arrival,
    InstanceLost,
    Regrouped,
    Resubmitted,
    TermEnded,
    TransferDone,
    TransferFenced,
    TransferMissed,
    WrittenPage,
)


class Story(FollowedScheduler):
    """One instance with few frames; a test says what is written and copied."""

    def __init__(self, num_frames=4, host_pages=8, file_pages=0, carry_pages=0, **config):
        cluster = ClusterConfig(num_instances=1, num_frames=num_frames, carry_pages=carry_pages)
        slots = {"offload_host_pages": host_pages, "offload_file_pages": file_pages}
        super().__init__(cluster, **(slots | config))

    def submit(self, prompt, max_tokens=1, hashes=None):
        hashes = page_hashes(prompt) if hashes is None else hashes
        return self.arrive(len(prompt), max_tokens, page_hashes=hashes, needs_prefill=True)

    def write(self, *pages):
        """Report the oldest window in flight, in which these pages were written."""
        return self.step(written=pages)

    def keep(self, prompt, hashes=None):
        """A request's pages are written and stowed, and it ends."""
        self.arrived(self.arrived(self.submit(prompt, hashes=hashes)))
        self.plan(AbortRequested(self.num_requests))
        self.run_out()

    @property
    def slots(self):
        """Pages in memory and pages in the file, the least recently used first."""
        return [list(tier.kept) for tier in self.scheduler.offload.tiers[0]]


def used(number):
    """Hashes of such a prompt's pages: those of its end are given up first."""
    return list(reversed(page_hashes(prompt(number))))


def prompt(number, num_pages=2):
    """A prompt whose full pages nobody else has, and one token more."""
    return [number] * (64 * num_pages + 1)


def test_a_full_page_is_stowed_once_and_comes_back_when_its_frame_was_taken():
    story = Story()
    written = story.submit(prompt(1))
    assert not written.stows, "nothing is written yet"
    (stow,) = story.arrived(written).stows
    assert [slot for _, slot in stow.pages] == [0, 1]
    assert story.slots == [[], []], "a page that is being copied is not found"
    story.plan(TransferDone(stow.ticket, 0), AbortRequested(1))
    assert story.slots[0] == list(reversed(page_hashes(prompt(1))))
    story.run_out()
    story.keep(prompt(2, num_pages=3))  # takes the frames
    plan = story.submit(prompt(1))
    (fetch,), (transfer,) = plan.fetches, plan.transfers
    assert fetch.ticket == transfer.ticket
    assert [(page.page, page.slot) for page in fetch.pages] == [(0, 0), (1, 1)]
    assert story.scheduler.offload.num_hit_tokens == 128


def test_a_frame_is_quarantined_until_its_copy_is_answered():
    story = Story()
    (stow,) = story.arrived(story.submit(prompt(1))).stows
    story.plan(AbortRequested(1))
    story.run_out()
    assert story.quarantined() == [2]
    story.plan(TransferDone(stow.ticket, 0))
    assert story.free() == [4]


def test_pages_in_frames_are_shared_there_and_count_as_used():
    story = Story(num_frames=8)
    story.keep(prompt(1))
    story.keep(prompt(2))
    plan = story.submit(prompt(1))
    assert not plan.fetches and not plan.transfers
    assert story.slots[0] == [*used(2), *used(1)]


def test_the_least_recently_used_page_goes_to_the_file_and_then_away():
    story = Story(num_frames=3, host_pages=2, file_pages=2)
    for number in (1, 2, 3):
        story.keep(prompt(number))
    assert story.slots == [used(3), used(2)]
    plan = story.submit(prompt(2))
    assert sorted(page.slot for page in plan.fetches[0].pages) == [2, 3], "the file's come last"
    assert story.scheduler.offload.num_stowed == [6, 4]


def test_a_page_that_is_fetched_is_not_given_up_before_its_ticket_is_over():
    story = Story(num_frames=6, host_pages=2)
    story.keep(prompt(1))
    story.keep([2] * 330, hashes=())  # takes the frames, and brings no hashes
    assert story.slots[0] == used(1)
    fetching = story.submit(prompt(1))
    (fetch,) = fetching.fetches
    written = story.submit([3] * 65)
    assert not story.arrived(written).stows, "both slots are read"
    assert story.slots[0] == used(1)
    story.plan(TransferDone(fetch.ticket, 0))
    assert not story.scheduler.offload.pins


def test_output_pages_are_found_even_if_they_are_reported_after_the_end():
    story = Story(num_frames=4)
    story.arrived(story.submit([5] * 60, max_tokens=6))
    for _ in range(4):
        story.step()
    story.plan(AbortRequested(1))
    assert not story.scheduler._state.requests
    ids = [5] * 64
    (page_hash,) = page_hashes([*ids, 0])
    (stow,) = story.write(WrittenPage(1, 0, 0, page_hash)).stows
    story.plan(TransferDone(stow.ticket, 0))
    assert story.slots[0] == [page_hash]


def test_a_report_of_another_attempt_is_ignored():
    story = Story(num_frames=4)
    story.arrived(story.submit([5] * 60, max_tokens=6))
    (page_hash,) = page_hashes([5] * 65)
    assert not story.write(WrittenPage(1, 1, 0, page_hash)).stows


def test_what_an_instance_could_not_write_is_never_found():
    story = Story()
    (stow,) = story.arrived(story.submit(prompt(1))).stows
    story.plan(TransferFenced(stow.ticket, 0))
    assert story.slots == [[], []]


def test_a_page_that_cannot_be_read_is_forgotten_and_its_request_comes_back():
    story = Story()
    story.keep(prompt(1))
    story.keep(prompt(2, num_pages=3))
    plan = story.submit(prompt(1))
    missed = story.plan(TransferMissed(plan.fetches[0].ticket, 0))
    assert [(p.request_id, p.num_tokens) for p in missed.preempted] == [(3, 129)]
    assert [fence.ticket for fence in missed.fences] == [plan.transfers[0].ticket]
    hashes = page_hashes(prompt(1))
    again = story.plan(
        TransferFenced(plan.transfers[0].ticket, 0),
        Arrival(3, 129, 1, resumes=True, page_hashes=hashes),
    )
    assert again.transfers and not again.fetches


def preempted(**config):
    """A story whose request was preempted, and is away: (story, the plan that says so, the ask)."""
    promise = {"growth_promise": "tokens:0", "steps_per_window": 4, "held_timeout_us": 500}
    story = Story(num_frames=2, **promise, **config)
    story.submit([1] * 50, max_tokens=40)
    story.submit([2] * 51, max_tokens=40)
    plan = story.plan(TransferDone(1, 0), TransferDone(2, 0))
    while not plan.preempted:
        plan = story.step()
    return story, plan.preempted[0], plan.stows[0]


def test_a_preempted_request_comes_back_from_slots_with_its_last_page():
    story, (request_id, num_tokens, *_), stow = preempted()
    assert len(stow.pages) == 1 and story.quarantined() == [1]
    story.plan(TransferDone(stow.ticket, 0))
    assert story.slots[0] == [OwnPage(request_id, stow.ticket, 0)]
    plan = come_back(story, request_id, num_tokens)
    (page,) = plan.fetches[0].pages
    assert (page.page, page.slot) == (0, stow.pages[0][1])
    story.plan(TransferDone(plan.transfers[0].ticket, 0))
    assert story.slots[0] == [], "a last page is read once"


def come_back(story, request_id, num_tokens):
    """The other request ends, and the one that is away comes with so many tokens."""
    story.plan(AbortRequested(3 - request_id))
    story.run_out()
    return story.plan(Arrival(request_id, num_tokens, 20, resumes=True))


@pytest.mark.parametrize(
    ("host_pages", "num_more", "stowed", "fetched"),
    [
        (8, 0, 3, [0, CARRY_PAGE, CARRY_PAGE + 1]),
        (8, 1, 3, []),  # a state and a last page are of one position
        (2, 0, 2, [0]),  # half a state is none
        (1, 0, 1, [0]),
    ],
)
def test_a_preempted_request_comes_back_with_its_state(host_pages, num_more, stowed, fetched):
    story, (request_id, num_tokens, *_), stow = preempted(carry_pages=2, host_pages=host_pages)
    frames = [frame for frame, _ in stow.pages]
    assert len(frames) == stowed and all(frame >= 2 for frame in frames[1:]), "behind KV"
    assert story.quarantined() == [1]
    story.plan(TransferDone(stow.ticket, 0))
    plan = come_back(story, request_id, num_tokens + num_more)
    pages = [page for fetch in plan.fetches for page in fetch.pages]
    assert [page.page for page in pages] == fetched
    assert [page.slot for page in pages] == [slot for _, slot in stow.pages][: len(fetched)]
    assert plan.transfers[0].targets[-1].first_page == CARRY_PAGE
    assert story.scheduler.offload.num_hit_tokens == (num_tokens - 1 if fetched else 0)
    story.plan(TransferDone(plan.transfers[0].ticket, 0))
    assert story.slots[0] == []


def test_pages_of_two_copies_do_not_come_together():
    """The first may be answered when the request was preempted for the second time."""
    story = Story(carry_pages=2)
    story.submit([1] * 50, max_tokens=40)
    story.plan(TransferDone(1, 0))
    request, offload = story.request(), story.scheduler.offload
    (first, _), (second, _) = offload.stow_all(request), offload.stow_all(request)
    story.plan(TransferDone(first, 0))
    assert story.slots[0] == []
    story.plan(TransferDone(second, 0))
    assert {key.ticket for key in story.slots[0]} == {second} and len(story.slots[0]) == 3
    request.carry_source = request.carry
    third, _ = offload.stow_all(request)
    request.carry_source = None
    story.plan(TransferDone(third, 0))
    assert len(story.slots[0]) == 1, "a state that is under way is in neither place as a whole"


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("end", ["aborted", "aborted in the queue", "expired", "stays away"])
def test_a_preempted_request_that_ends_while_it_waits_is_forgotten(end, is_copied):
    story, (request_id, num_tokens, *_), stow = preempted()
    if is_copied:
        story.plan(TransferDone(stow.ticket, 0))
    if end in ("aborted in the queue", "expired"):
        story.plan(Arrival(request_id, num_tokens, 20, resumes=True, deadline_us=500))
        assert request_id in story.scheduler._admission.queue
    if end in ("aborted", "aborted in the queue"):
        story.plan(AbortRequested(request_id))
    else:
        story.scheduler.plan_window([], 1000)
    if not is_copied:
        story.scheduler.plan_window([TransferDone(stow.ticket, 0)], 1000)
    assert story.slots == [[], []] and not story.scheduler.offload._preempted


def test_a_preempted_request_that_stays_away_stops_others_for_a_bounded_time():
    story, (request_id, *_), stow = preempted()
    story.plan(TransferDone(stow.ticket, 0), AbortRequested(3 - request_id))
    story.run_out()
    assert not story.submit([3] * 50).transfers, "it has tokens to continue, and goes first"
    assert story.scheduler.plan_window([], 1000).transfers


def test_pages_that_wait_to_be_stowed_are_no_more_than_frames():
    story = Story(num_frames=20, host_pages=40)
    for number in range(50):
        plan = story.submit([number] * 65)
        story.plan(*(TransferDone(each.ticket, 0) for each in plan.transfers))  # no copy
        story.plan(AbortRequested(story.num_requests))
        story.run_out()
    offload = story.scheduler.offload
    assert len(offload._copying) == 16
    assert list(offload._queued[0]) == [page_hashes([n] * 65)[0] for n in range(30, 50)]


def test_a_row_that_starts_again_before_a_page_that_others_may_find_gets_new_frames():
    story = Story(num_frames=4)
    story.arrived(story.submit([5] * 60, max_tokens=20))
    (page_hash,) = page_hashes([5] * 65)
    for _ in range(5):
        story.step()
    story.write(WrittenPage(1, 0, 0, page_hash))
    story.plan(TermEnded())
    story.plan(Regrouped(2))
    # The front end has lost the last tokens, and the row may sample others this time.
    again = story.plan(Arrival(1, 62, 18, attempt=1), Resubmitted())
    assert again.transfers, "its page is not written over"


def test_a_lost_instance_loses_its_slots():
    story = Story()
    story.keep(prompt(1))
    story.plan(InstanceLost(0))
    story.plan(Regrouped(2), Resubmitted())
    assert story.slots == [[], []]
    assert not story.submit(prompt(1)).fetches


def test_copies_that_were_under_way_when_a_term_ended_count_for_nothing():
    story = Story()
    (stow,) = story.arrived(story.submit(prompt(1))).stows
    assert len(story.scheduler.offload.tiers[0][0].free) == 6
    story.plan(Regrouped(2), Resubmitted())
    assert len(story.scheduler.offload.tiers[0][0].free) == 8
    story.plan(TransferDone(stow.ticket, 0))
    assert story.slots == [[], []]


@pytest.mark.parametrize("host_pages", [0, 4])
def test_without_slots_nothing_is_copied(host_pages):
    story = Story(host_pages=host_pages)
    assert bool(story.arrived(story.submit(prompt(1))).stows) == bool(host_pages)
