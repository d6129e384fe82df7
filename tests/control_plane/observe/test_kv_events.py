"""Events of cached pages: a router that follows them knows what the scheduler can share."""

import contextlib
import socket
import sys
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from control_plane.coordinator.coordinator import Coordinator
from control_plane.observe.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventPublisher,
    PageEvents,
)
from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from harness.hash_clusters.hash_offload import play_offloading
from harness.hash_clusters.kinds.hash_seeds import play_crowd, play_sharing
from harness.hash_clusters.losses.hash_recovery_seeds import play, play_failovers
from harness.hash_clusters.pipeline import hash_pipeline, hash_pipeline_losses
from harness.services.hash_service import CONFIG as SERVICE
from harness.services.hash_service import generate, hash_service, prompt
from nanocp.config.cluster import ClusterConfig
from nanocp.config.service import ServiceConfig
from nanocp.values.offload import next_page_hash, page_hashes, salt_of
from nanocp.values.plan import Arrival, Ended, FinishReason


class Batch(msgspec.Struct, array_like=True):
    """A batch as vLLM 0.32 defines it."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def short(page_hash):
    return int.from_bytes(page_hash[-8:], "big")


class Router:
    """Follows events, and computes each page's hash of its tokens again."""

    def __init__(self, salts=()):
        self.pages = {}
        """Short hash -> the whole one."""
        self.known = {None: b""}
        """Hashes of all pages ever stored: a page outlives the one before it."""
        self.salts = {salt.hex(): salt for salt in salts}
        self.num_events = 0

    def take(self, events):
        for event in events:
            self.num_events += 1
            match event:
                case AllBlocksCleared():
                    self.pages.clear()
                case BlockRemoved():
                    assert event.block_hashes and event.medium == "GPU"
                    for key in event.block_hashes:
                        del self.pages[key]
                case BlockStored():
                    self._store(event)

    def _store(self, event):
        ids, size = event.token_ids, event.block_size
        assert size == 64 and len(ids) == size * len(event.block_hashes)
        page_hash = self.known[event.parent_block_hash]
        if event.extra_keys:
            ((salt,), *others) = event.extra_keys
            assert event.parent_block_hash is None and others == [None] * (len(others))
            page_hash = self.salts[salt]
        for index, key in enumerate(event.block_hashes):
            page_hash = next_page_hash(page_hash, ids[index * size : (index + 1) * size])
            assert key == short(page_hash) and key not in self.pages
            self.pages[key] = self.known[key] = page_hash


def shareable(scheduler):
    ledgers = scheduler.requests.decided[0].frames
    return {page_hash for each in ledgers for _, page_hash, *_ in each.cached_pages()}


class Watch:
    """Gives every coordinator a router, and compares after each call of the scheduler."""

    def __init__(self, monkeypatch, has_output=False):
        self.routers = []
        self.num_shared = self.num_removed = 0
        make, carry_out = Coordinator.__init__, Coordinator.carry_out

        def made(coordinator, *arguments):
            make(coordinator, *arguments)
            router = Router()
            self.routers.append(router)
            coordinator.page_events = PageEvents(router.take)
            coordinator.router = router

        def carried_out(coordinator, plan, now_us):
            before = {*coordinator.router.pages}
            carry_out(coordinator, plan, now_us)
            now, wanted = coordinator.router.pages, shareable(coordinator.scheduler)
            found = {*now.values()}
            assert found <= wanted if has_output else found == wanted
            self.num_shared += len(now)
            self.num_removed += len(before - {*now})

        monkeypatch.setattr(Coordinator, "__init__", made)
        monkeypatch.setattr(Coordinator, "carry_out", carried_out)


@pytest.mark.parametrize(
    ("play_seed", "seeds"),
    [
        (play_sharing, (3, 13, 14)),
        (play_crowd, (1, 24)),
        (play, (1, 17)),
        (play_failovers, (17, 20)),
        (hash_pipeline.play, (1, 7)),
        (hash_pipeline_losses.play, (0, 8)),
    ],
    ids=("sharing", "crowd", "losses", "failovers", "pipeline", "pipeline-losses"),
)
def test_a_router_knows_exactly_the_pages_that_can_be_shared(monkeypatch, play_seed, seeds):
    watch = Watch(monkeypatch)
    for seed in seeds:
        play_seed(seed)
    assert watch.num_shared > 500 and watch.num_removed > 5


def test_of_kv_offload_it_knows_no_page_that_is_not_in_a_frame(monkeypatch):
    watch = Watch(monkeypatch, has_output=True)
    for seed in (4, 9):
        play_offloading(seed)
    assert watch.num_shared > 500 and watch.num_removed > 5


class Frames:
    """Two instances' frames and page index, by hand; and a router."""

    def __init__(self):
        self.state = ClusterState(ClusterConfig(num_instances=2, num_frames=8))
        self.prefix_sharing = PrefixSharing(self.state, True)
        self.requests = SimpleNamespace(decided=(self.state, ()))
        self.batches = []
        self.events = PageEvents(self.batches.append)
        self.router = Router([SALT])

    def submit(self, request_id, token_ids, salt=b""):
        arrival = Arrival(request_id, len(token_ids), 1, page_hashes=page_hashes(token_ids, salt))
        self.events.submitted(arrival, token_ids, salt)
        return arrival.page_hashes

    def write(self, request_id, page_hash, instance=0):
        """The next free frame of an instance gets the page."""
        (run,) = self.state.frames[instance].take(1)
        assert self.state.frames[instance].cache(run.frame, page_hash)
        if self.prefix_sharing.stored is not None:
            self.prefix_sharing.stored.append((request_id, page_hash))
        return instance, run

    def drop(self, place):
        instance, run = place
        ledger = self.state.frames[instance]
        ledger.quarantine([run])
        ledger.free([run])
        runs = ledger.take(ledger.num_free)
        ledger.quarantine(runs)
        ledger.free(runs)

    def plan(self, *ended):
        """What a call of the scheduler publishes."""
        self.batches.clear()
        self.events.planned(self, [Ended(each, FinishReason.LENGTH) for each in ended])
        for batch in self.batches:
            self.router.take(batch)
        return [event for batch in self.batches for event in batch]


SALT = salt_of(None, "s")
PROMPT = [*range(200)]


def test_a_page_with_two_copies_is_removed_with_the_last_one():
    frames = Frames()
    hashes = frames.submit(1, PROMPT)
    assert frames.plan() == []
    places = [frames.write(1, hashes[0], instance) for instance in (0, 1)]
    (stored,) = frames.plan()
    assert (stored.block_hashes, stored.token_ids) == ([short(hashes[0])], PROMPT[:64])
    frames.drop(places[0])
    assert frames.plan() == []
    frames.drop(places[1])
    assert frames.plan() == [BlockRemoved([short(hashes[0])], "GPU")]


def test_pages_of_one_prompt_are_one_event_with_the_page_before_them():
    frames = Frames()
    hashes = frames.submit(1, PROMPT)
    assert len(hashes) == 3
    frames.write(1, hashes[0])
    (first,) = frames.plan()
    for page_hash in hashes[1:]:
        frames.write(1, page_hash)
    (rest,) = frames.plan()
    assert first.parent_block_hash is None and rest.parent_block_hash == short(hashes[0])
    assert rest.block_hashes == [*map(short, hashes[1:])] and rest.token_ids == PROMPT[64:192]


def test_a_page_that_is_lost_and_written_again_is_stored_again():
    frames = Frames()
    (page_hash,) = frames.submit(1, PROMPT[:65])
    place = frames.write(1, page_hash)
    assert len(frames.plan()) == 1
    frames.drop(place)
    frames.write(1, page_hash, instance=1)
    assert frames.plan() == [], "as nothing has changed for a router"
    frames.state.frames[1].quarantine([FrameRun(0, 1)])
    frames.state.lose(1)
    assert frames.plan() == [BlockRemoved([short(page_hash)], "GPU")]
    frames.write(1, page_hash, instance=1)
    assert [type(event) for event in frames.plan(1)] == [BlockStored]
    assert not frames.events._prompts


def test_a_salt_is_said_at_the_first_page():
    frames = Frames()
    for page_hash in frames.submit(1, PROMPT, SALT):
        frames.write(1, page_hash)
    (stored,) = frames.plan()
    assert stored.extra_keys == [(SALT.hex(),), None, None]


def test_a_page_of_output_is_published_with_the_next_prompt_that_has_it():
    frames = Frames()
    first, second, _ = page_hashes(PROMPT)
    frames.submit(1, PROMPT[:100])
    frames.plan()
    for page_hash in (first, second):
        frames.write(1, page_hash)
    (stored,) = frames.plan(1)
    assert stored.block_hashes == [short(first)]
    third = frames.submit(2, PROMPT)[2]
    frames.write(2, third)
    (stored,) = frames.plan()
    assert stored.block_hashes == [short(second), short(third)]


# --- the publisher


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def publisher(endpoint):
    publisher = KvEventPublisher(endpoint, "kv@pod@model")
    yield publisher
    publisher.close()


@contextlib.contextmanager
def subscribed(endpoint, topic="", most=1000):
    """most: batches that it keeps unread."""
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, most)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        socket.connect(endpoint)
        yield socket


def received(socket):
    topic, number, batch = socket.recv_multipart()
    return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(batch, type=Batch)


GONE = BlockRemoved([1], "GPU")


def join(publisher, socket):
    """Publish until the subscriber gets batches; return the number of the latest."""
    while not socket.poll(20):
        publisher.publish([GONE])
    while socket.poll(0):
        _, number, _ = received(socket)
    return number


def test_batches_are_those_of_vllm_and_the_first_one_clears(publisher):
    stored = BlockStored([2**64 - 1], None, [5] * 64, 64, None, "GPU", None)
    sent = []
    publisher._socket.close()
    publisher._socket = SimpleNamespace(send_multipart=sent.append, close=lambda linger: None)
    began = time.time()
    for _ in range(2):
        publisher.publish([stored, GONE])
    assert [frames[:2] for frames in sent] == [
        (b"kv@pod@model", number.to_bytes(8, "big")) for number in (0, 1)
    ]
    first, second = (msgspec.msgpack.decode(frames[2]) for frames in sent)
    assert began <= first[0] <= second[0] <= time.time() and first[2] == second[2] == 0
    assert first[1] == [{"type": "AllBlocksCleared"}, *second[1]]
    page = {"block_hashes": [2**64 - 1], "parent_block_hash": None, "token_ids": [5] * 64}
    names = {"block_size": 64, "lora_id": None, "medium": "GPU", "lora_name": None}
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    assert second[1] == [{"type": "BlockStored", **page, **names}, removed]


def test_a_subscriber_gets_them_in_order_by_topic(publisher, endpoint):
    with subscribed(endpoint, "kv@") as ours, subscribed(endpoint, "other") as other:
        number = join(publisher, ours)
        for _ in range(3):
            publisher.publish([GONE])
        for expected in range(number + 1, number + 4):
            assert ours.poll(30_000)
            assert received(ours)[:2] == (b"kv@pod@model", expected)
        assert not other.poll(0)


def test_a_subscriber_that_does_not_read_holds_nobody_up_and_sees_the_gap(publisher, endpoint):
    batch = [BlockStored([*range(1000)], None, [0] * 64_000, 64, None, "GPU", None)]
    with subscribed(endpoint, most=1) as slow:
        last = join(publisher, slow)
        for _ in range(3000):
            publisher.publish(batch)
        numbers = []
        while slow.poll(2000):
            numbers.append(received(slow)[1])
        assert numbers == sorted(numbers) and 1 < len(numbers) < 2000
        assert numbers[0] == last + 1
        publisher.publish([GONE])
        assert slow.poll(30_000) and received(slow)[1] == last + 3001 > numbers[-1] + 1


def test_an_endpoint_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"kv_events is tcp://127.0.0.1:{port}, .*in use"):
            KvEventPublisher(f"tcp://127.0.0.1:{port}", "")


def test_without_pyzmq_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ValueError, match=r"pyzmq is not installed; pip install '\.\[kv_events\]'"):
        KvEventPublisher("tcp://127.0.0.1:1", "")


@pytest.mark.parametrize("value", ["5557", "tcp://*", "tcp://*:0", "tcp:// :1", "inproc://x", "*"])
def test_another_endpoint_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"kv_events is .*; it must be a ZMQ endpoint such as tcp"):
        ServiceConfig(kv_events=value)


@pytest.mark.parametrize("value", ["", "tcp://*:5557", "tcp://10.0.0.1:1", "ipc:///run/events"])
def test_endpoints(value):
    assert ServiceConfig(kv_events=value).kv_events == value


def test_a_service_that_shares_no_page_has_no_events():
    scheduler = replace(SERVICE.scheduler, prefix_sharing=False)
    with pytest.raises(ValueError, match=r"kv_events is set, and .*: no page is shared"):
        replace(SERVICE, scheduler=scheduler, service=ServiceConfig(kv_events="tcp://*:1"))


@pytest.mark.parametrize("num_front_ends", [1, 2])
def test_a_service_publishes_the_pages_of_its_prompts(endpoint, num_front_ends):
    ports = replace(SERVICE.service, kv_events=endpoint, front_ends=num_front_ends)
    config = replace(SERVICE, service=ports)
    router, shared = Router(), prompt(200, 1)
    with hash_service(config) as service, subscribed(endpoint, "kv-events") as socket:
        # The first ones may come before the subscription does.
        for number in count(2):
            generate(service.address, prompt(70, number), 2)
            if socket.poll(20):
                break
        generate(service.address, shared, 2)
        wanted = {short(page_hash) for page_hash in page_hashes(shared)}
        while not wanted <= router.pages.keys():
            assert socket.poll(30_000)
            router.take(received(socket)[2].events)
