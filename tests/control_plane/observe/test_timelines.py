"""Where the time of a request goes: each part is counted once, and the parts are all of it."""

import pickle

import pytest

from control_plane.observe.timelines import Timelines, sentences
from control_plane.scheduler.scheduler import Scheduler
from harness.hash_clusters.kinds import hash_seeds
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.offload import page_hashes
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    Finished,
    FinishReason,
    TransferDone,
    WindowDone,
)


class Story:
    """A scheduler with one instance, its timelines, and a clock."""

    def __init__(self, **cluster):
        sizes = {"num_instances": 1, "num_frames": 8, "max_model_len": 512, **cluster}
        self.cluster = ClusterConfig(**sizes)
        self.scheduler = Scheduler(self.cluster, SchedulerConfig())
        self.timelines = Timelines(self.cluster.num_frames)

    def plan(self, now_us, *events):
        plan = self.scheduler.plan_window(events, now_us)
        self.timelines.planned(now_us, events, plan, self.scheduler.noted)
        return plan

    def told(self, name, now_us):
        return sentences(self.find(name, now_us).timeline)

    def find(self, name, now_us):
        (found,) = self.timelines.find(name, now_us)
        return found


def milliseconds(found):
    return {part.value: us / 1000 for part, us in found.account.parts_us.items() if us}


def test_each_part_has_its_time():
    story = Story()
    (first,) = story.plan(0, Arrival(1, 300, 200)).transfers
    story.plan(5_000, Arrival(2, 300, 100, client_id="chatcmpl-mine"))
    story.plan(8_000, Arrival(3, 300, 100, client_id="other"))
    assert milliseconds(story.find("mine", 9_000)) == {"queue": 4}
    story.plan(10_000, TransferDone(first.ticket, 0))
    assert milliseconds(story.find("1", 16_000)) == {"prefill": 10, "decode": 6}
    done = WindowDone(0, 0, (Finished(1, 3, FinishReason.STOP),), step_us=7_000)
    (second,) = story.plan(20_000, done).transfers
    story.plan(50_000, TransferDone(second.ticket, 0))
    story.plan(60_000, WindowDone(0, 1, step_us=2_000))
    story.plan(75_000, WindowDone(0, 2, (Finished(2, 2, FinishReason.LENGTH),), step_us=4_000))
    found = story.find("chatcmpl-mine", 99_000)
    assert found.part is None
    assert milliseconds(found) == {"queue": 15, "prefill": 30, "decode": 25}
    assert (found.account.num_windows, found.account.step_us) == (2, 6_000)
    assert found.account.num_queued_before == 0
    assert story.find("other", 99_000).account.num_queued_before == 1
    one = story.find("1", 99_000)
    assert (one.account.num_windows, one.account.step_us) == (1, 7_000)


@pytest.mark.parametrize("client_id", ["cmpl-a", "chatcmpl-a", "msg_a", "resp_0_a", "resp_12_a"])
def test_a_request_is_found_by_its_number_its_id_and_without_the_prefix(client_id):
    assert Arrival(7, 300, 100, client_id=client_id).names == ("7", client_id, "a")


def test_a_name_of_a_clients_own_stays_whole():
    for client_id in ("resp_a", "a-b", "amsg_b"):
        assert Arrival(7, 300, 100, client_id=client_id).names == ("7", client_id)
    assert Arrival(7, 300, 100).names == Arrival(7, 300, 100, client_id="7").names == ("7",)


def test_a_timeline_says_why_a_request_is_where_it_is_or_waits():
    story = Story(num_instances=2)
    story.plan(0, Arrival(1, 300, 20))
    (_, (_, detail)) = story.told("1", 1)
    assert detail == "MoE binding 0; pages: 5 on 0; an instance holds it"
    story = Story(num_instances=2, max_model_len=1024)
    story.plan(0, Arrival(1, 600, 20))
    (_, (_, detail)) = story.told("1", 1)
    assert detail.endswith("; split because an instance has 8 frames, and it needs 10")
    story.plan(2, Arrival(2, 600, 20))
    ((title, detail),) = story.told("2", 3)
    assert title == "arrived" and "; kept in the queue by frames: " in detail


def test_a_timeline_says_how_much_of_a_prompt_was_there():
    hashes = page_hashes([7] * 300)
    for asked, told in (
        (300, "43 tokens from the prefill behind 256 that were"),
        (280, "23 tokens"),
    ):
        story = Story(num_instances=1, num_frames=30)
        (transfer,) = story.plan(0, Arrival(1, 300, 20, page_hashes=hashes)).transfers
        story.plan(1, TransferDone(transfer.ticket, 0))
        (_, title_and_detail) = story.told("1", 2)[1:3]
        assert title_and_detail == ("KV is there", "299 tokens from the prefill; its row can start")
        again = page_hashes([7] * asked)
        (transfer,) = story.plan(3, Arrival(2, asked, 20, page_hashes=again)).transfers
        story.plan(4, TransferDone(transfer.ticket, 0))
        detail = story.told("2", 5)[2][1]
        assert detail.startswith(told)


def test_refusals_are_not_among_those_that_ended_last():
    """An overload has hundreds a second."""
    story = Story()
    story.scheduler = Scheduler(story.cluster, SchedulerConfig(max_queued_requests=1))
    story.plan(0, *(Arrival(number, 300, 200) for number in (1, 2, 3)))
    assert [len(story.timelines.find(str(number), 1)) for number in (1, 2, 3)] == [1, 1, 1]
    refused = [n for n in (1, 2, 3) if story.find(str(n), 1).part is None]
    assert refused and not list(story.timelines.latest_ended())


def test_a_name_that_is_used_again_finds_both():
    story = Story()
    story.plan(0, Arrival(1, 10, 10, client_id="cmpl-a"), Arrival(2, 10, 10, client_id="cmpl-a"))
    for name in ("a", "cmpl-a"):
        found = story.timelines.find(name, 0)
        assert [one.timeline.arrival.request_id for one in found] == [1, 2]
    assert story.timelines.find("mpl-a", 0) == story.timelines.find("", 0) == []


def test_what_is_forgotten_is_not_found():
    timelines = Timelines(64, most=3)
    scheduler = Scheduler(ClusterConfig(num_instances=1), SchedulerConfig())
    for number in range(1, 9):
        events = [Arrival(number, 10, 10, client_id=f"client {number % 4}")]
        timelines.planned(number, events, scheduler.plan_window(events, number))
    known = [number for number in range(1, 9) if timelines.find(str(number), 99)]
    assert known == [6, 7, 8]
    assert [len(timelines.find(f"client {number}", 99)) for number in range(4)] == [1, 0, 1, 1]
    assert sum(timelines._num_in.values()) == 3


def test_what_is_kept_of_ended_requests_is_bounded_and_no_prompt():
    """Ids and page hashes of 4,096 long prompts would be hundreds of megabytes."""

    def kept(num_requests, prompt_len):
        story = Story(num_frames=2_000, max_model_len=100_000)
        story.timelines = Timelines(2_000, most=50)
        for number in range(1, num_requests + 1):
            hashes = tuple(bytes([page % 256]) * 16 for page in range((prompt_len - 1) // 64))
            arrival = Arrival(number, prompt_len, 5, b"x" * 4 * prompt_len, page_hashes=hashes)
            now_us = 10_000 * number
            (transfer,) = story.plan(now_us, arrival).transfers or (None,)
            if transfer is not None:
                story.plan(now_us + 1, TransferDone(transfer.ticket, 0))
            story.plan(now_us + 2, AbortRequested(number))
        return len(pickle.dumps(story.timelines))

    short = kept(50, 200)
    assert kept(50, 60_000) < 1.2 * short, "a prompt of any length takes as much"
    assert kept(250, 200) < 1.2 * short, "the oldest are forgotten"
    assert short / 50 < 2_000


def test_the_parts_are_the_whole_time_whatever_happens(monkeypatch):
    """Preemptions, page moves, aborts and parking: each request's parts end where it ends."""
    calls, plan_window = [], Scheduler.plan_window

    def recorded(scheduler, events, now_us):
        calls.append((now_us, tuple(events), plan_window(scheduler, events, now_us)))
        return calls[-1][-1]

    monkeypatch.setattr(Scheduler, "plan_window", recorded)
    num_preempted = 0
    crowds = [(hash_seeds.play_crowd, seed) for seed in (4, 8, 12, 15)]
    for play, seed in [*crowds, *((hash_seeds.play, seed) for seed in range(8))]:
        calls.clear()
        play(seed)
        timelines, arrived, ended = Timelines(64), {}, {}
        for now_us, events, plan in calls:
            timelines.planned(now_us, events, plan)
            for event in events:
                if isinstance(event, Arrival):
                    arrived.setdefault(event.request_id, now_us)
                for finished in getattr(event, "finished", ()):
                    ended.setdefault(finished.request_id, now_us)
            for one in plan.ended:
                ended.setdefault(one.request_id, now_us)
        assert ended.keys() == arrived.keys()
        for request_id, ended_us in ended.items():
            (found,) = timelines.find(str(request_id), 1 << 60)
            assert found.part is None
            assert sum(found.account.parts_us.values()) == ended_us - arrived[request_id]
            assert min(found.account.parts_us.values()) >= 0
            num_preempted += found.account.num_preemptions
        assert not any(timelines._num_in.values())
    assert num_preempted > 5
