"""The cluster page's data is bounded and made only on request; timelines are in order."""

import asyncio
import json
import time
import urllib.error
import urllib.request

import pytest

from control_plane.observe import cluster_view, timelines
from control_plane.observe.cluster_view import ClusterView
from control_plane.scheduler.scheduler import Scheduler
from harness.exact.settings import configured
from harness.services.drained_seat import BEFORE, drained_scheduler
from harness.services.hash_service import CONFIG, hash_service, prompt
from nanocp.client import Client
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    Finished,
    FinishReason,
    Plan,
    TransferDone,
    WindowDone,
)

TWO = Config(
    cluster=ClusterConfig(num_instances=2, num_frames=8, max_model_len=1000),
    scheduler=SchedulerConfig(
        policy="dual_balanced", cp_degree_buckets=((128, 1),), cp_degree_max=2
    ),
)


class Story:
    """A scheduler and its view, without a cluster."""

    def __init__(self, config=TWO):
        self.scheduler = Scheduler(config.cluster, config.scheduler)
        self.view = ClusterView(config.cluster, config.scheduler.policy, lambda: (0, 0.0))

    def plan(self, *events):
        now_us = time.monotonic_ns() // 1000
        plan = self.scheduler.plan_window(events, now_us)
        self.view.planned(now_us, events, plan)
        return plan

    def arrived(self, transfer):
        self.plan(*(TransferDone(transfer.ticket, each) for each in transfer.receivers))

    def look(self):
        """A new snapshot, with the publisher at work as the controller's thread is."""
        self.view._published = None

        async def look():
            publisher = asyncio.create_task(self.view.publish_for_ever(self.scheduler))
            try:
                return json.loads(await asyncio.to_thread(self.view.snapshot_json))
            finally:
                publisher.cancel()

        return asyncio.run(look())


def words(request):
    return [word for _, word, _ in request["timeline"]]


def test_a_timeline_is_in_order():
    story = Story()
    plan = story.plan(Arrival(1, 200, 30))
    (transfer,) = plan.transfers
    story.arrived(transfer)
    assert story.plan().window == 1
    shown = story.look()
    (request,) = shown["requests"]
    assert request["state"] == "running" and dict(request["pages_on"]) == {0: 2, 1: 2}
    assert words(request) == ["arrived", "placed", "KV is there", "row starts"]
    times_s = [at_s for at_s, _, _ in request["timeline"]]
    assert times_s == sorted(times_s)
    assert (
        request["timeline"][1][2]
        == f"MoE binding {request['moe_binding']}; pages: 2 on 0, 2 on 1; "
        "the policy chose to split it"
    )
    assert [instance["other_pages"] for instance in shown["instances"]] == [0, 0]
    assert sum(instance["rows"] for instance in shown["instances"]) == shown["num_running"] == 1
    done = (Finished(1, 5, FinishReason.STOP),)
    story.plan(
        WindowDone(request["moe_binding"], 0, done), WindowDone(1 - request["moe_binding"], 0)
    )
    shown = story.look()
    assert shown["requests"] == [] and words(shown["ended"][0])[-1] == "ended: stop"
    ended = shown["ended"][0]
    assert ended["num_generated"] == 5
    assert sum(ended["parts_s"].values()) == pytest.approx(ended["timeline"][-1][0], abs=0.002)
    assert shown["instances"][0]["frames_quarantined"] == 2, "window 1 is in flight"


def test_promised_pages_are_told_from_written_ones():
    story = Story()
    plan = story.plan(Arrival(1, 130, 300))  # 429 tokens of KV: 7 pages
    (request,) = story.look()["requests"]
    assert sum(dict(request["pages_on"]).values()) == 7
    assert request["promised_on"] == sorted(request["pages_on"]), "none has arrived"
    (transfer,) = plan.transfers
    story.arrived(transfer)
    (request,) = story.look()["requests"]
    assert sum(dict(request["promised_on"]).values()) == 4, "130 tokens need 3 pages"
    last = max(transfer.targets).instance
    assert last in dict(request["promised_on"]), "the last pages are for coming tokens"


def test_who_waits_is_shown_and_who_is_aborted_ends_once():
    story = Story()
    story.plan(Arrival(1, 700, 200), Arrival(2, 600, 10), Arrival(3, 500, 10))
    shown = story.look()
    assert [request["id"] for request in shown["waiting"]] == [2, 3] and shown["num_queued"] == 2
    assert words(shown["waiting"][0]) == ["arrived"]
    story.plan(AbortRequested(2), AbortRequested(2))
    (ended,) = story.look()["ended"]
    assert (ended["id"], words(ended)) == (2, ["arrived", "ended: aborted"])


def test_a_seat_that_serves_nothing_shows_no_steps_and_no_free_frames():
    story = Story()
    story.view.planned(0, BEFORE, Plan(None))
    assert [one["step_ms"] for one in story.look()["instances"]] == [0, 0]
    story.scheduler = drained_scheduler()
    serves, drained = story.look()["instances"]
    assert (serves["step_ms"], serves["frames_committed"]) == (0, 8)
    assert (drained["step_ms"], drained["exchange_ms"], drained["frames_free"]) == (None, None, 0)


def test_a_snapshot_is_bounded(monkeypatch):
    monkeypatch.setattr(cluster_view, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(cluster_view, "_MAX_WAITING", 2)
    story = Story(configured(TWO, num_frames=2))
    monkeypatch.setattr(story.view, "_timelines", timelines.Timelines(64, most=5))
    story.plan(
        *(Arrival(number, 40, 20) for number in range(1, 4)),
        Arrival(4, 1, 10),
        *(Arrival(n, 90, 9) for n in (5, 6, 7)),
    )
    shown = story.look()
    assert len(shown["requests"]) == 3
    assert shown["num_running"] + shown["num_prefilling"] == 4
    assert sum(instance["other_pages"] for instance in shown["instances"]) == 1
    assert [request["id"] for request in shown["waiting"]] == [5, 6] and shown["num_queued"] == 3
    forgotten = [request for request in shown["requests"] if request["id"] <= 2]
    assert forgotten and all(
        request["timeline"] == [] and request["prompt_len"] is None for request in forgotten
    )


def test_a_long_timeline_forgets_its_middle(monkeypatch):
    monkeypatch.setattr(timelines, "_MAX_MOMENTS", 4)
    story = Story()
    plan = story.plan(Arrival(1, 1, 10))
    for _ in range(9):
        story.view.planned(time.monotonic_ns() // 1000, (), plan)
    story.plan(AbortRequested(1))
    (ended,) = story.look()["ended"]
    assert (
        len(ended["timeline"]) == 4
        and words(ended)[0] == "arrived"
        and words(ended)[-1] == "ended: aborted"
    )


def test_without_a_request_no_snapshot_is_made():
    story, made = Story(), []
    story.view._snapshot = made.append

    async def wait():
        publisher = asyncio.create_task(story.view.publish_for_ever(story.scheduler))
        async with asyncio.timeout(60):
            while len(story.view._curves) < 2:
                await asyncio.sleep(cluster_view._PERIOD_S / 5)
        publisher.cancel()

    asyncio.run(wait())
    assert made == []
    with pytest.raises(TimeoutError, match="published nothing in 2 s"):
        story.view.snapshot_json()


def fetch(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        return answer.read()


def test_a_service_shows_its_cluster():
    with hash_service(CONFIG, "harness.services.hash_members:build_slow") as service:
        client = Client(service.address)
        chunks = client.generate(prompt(300, 1), max_tokens=1500, timeout_s=60)
        next(chunks)
        shown = json.loads(fetch(service.metrics_address, "/cluster/snapshot.json"))
        (request,) = shown["requests"]
        assert len(request["pages_on"]) == 4 and request["num_tokens"] > 300
        assert [instance["instance"] for instance in shown["instances"]] == [0, 1, 2, 3]
        page = fetch(service.metrics_address, "/cluster").decode()
        assert page.startswith("<!doctype html>") and "snapshot.json" in page
        client.close()
        while json.loads(fetch(service.metrics_address, "/cluster/snapshot.json"))["num_running"]:
            time.sleep(0.1)
        shown = json.loads(fetch(service.metrics_address, "/cluster/snapshot.json"))
        assert words(shown["ended"][0])[-1].startswith("ended")
        assert (
            any(ms is not None and ms > 0 for ms in shown["tpot_ms"])
            and max(shown["tokens_per_s"]) > 0
        )
        # The HTTP API shows the same.
        assert fetch(service.http_address, "/cluster").decode() == page
        over_http = json.loads(fetch(service.http_address, "/cluster/snapshot.json"))
        assert over_http["ended"][0]["timeline"] == shown["ended"][0]["timeline"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(service.metrics_address, "/elsewhere")
