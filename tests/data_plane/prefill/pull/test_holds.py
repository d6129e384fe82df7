"""Blocks in use: one notice for each set after its last user, heartbeats, deadlines, bounds."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.prefill.pull import holds as module
from data_plane.prefill.pull.holds import EngineAddress, Holds
from nanocp.values.remote_blocks import RemoteBlocks

NEVER = float("inf")


def blocks(name, engine="engine", port=5600):
    return RemoteBlocks(engine, name, (1, 2), "127.0.0.1", port, 1, 100)


ADDRESS = EngineAddress.of(blocks("a"))
REQUESTS, SETS = st.integers(0, 5), st.sampled_from("abcd")
ACTS = st.one_of(
    st.tuples(st.just("hold"), REQUESTS, SETS),
    st.tuples(st.just("release"), REQUESTS),
    st.tuples(st.just("refuse"), SETS),
    st.tuples(st.just("begin"), REQUESTS),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("orphan")),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


class Play:
    """The holds, beside a slow model of who uses what."""

    def __init__(self):
        self.holds, self.now = Holds(30), 0.0
        self.held, self.reads, self.notified = {}, {}, Counter()
        self.orphans, self.orphans_end = set(), NEVER
        self.seen = set()

    def act(self, kind, *args):
        getattr(self, kind)(*args)
        for freed in self.holds.notices.values():
            for each in freed:
                name = each.request_id
                self.notified[name] += 1
                assert self.notified[name] == 1, "told twice"
                assert name not in self.reads.values() and name not in self.held.values(), (
                    "still used"
                )
        self.holds.notices.clear()
        for request_id, name in self.held.items():
            held = self.holds.of(request_id)
            assert held.blocks.request_id == name
            assert (held.deadline == -NEVER) == (self.notified[name] > 0)
        used = {*self.held.values(), *self.reads.values()}
        assert {name for name in self.seen if self.notified[name]} >= self.seen - used

    def hold(self, request_id, name):
        self.holds.hold(request_id, blocks(name), self.now)
        self.held.setdefault(request_id, name)
        self.orphans.discard(request_id)
        self.seen.add(self.held[request_id])

    def release(self, request_id):
        self.holds.release(request_id)
        self.held.pop(request_id, None)

    def refuse(self, name):
        self.holds.refuse(blocks(name))
        self.seen.add(name)

    def begin(self, request_id):
        if request_id in self.held:
            read = object()
            self.reads[read] = self.held[request_id]
            self.holds.hold(read, blocks(self.reads[read]), self.now)

    def end(self, index):
        if self.reads:
            read = [*self.reads][index % len(self.reads)]
            del self.reads[read]
            self.holds.release(read)

    def orphan(self):
        self.holds.orphan(self.now)
        self.orphans, self.orphans_end = set(self.held), self.now + 30

    def wait(self, seconds):
        self.now += seconds
        self.holds.expire(self.now)
        if self.now >= self.orphans_end:
            for request_id in self.orphans:
                self.held.pop(request_id, None)
            self.orphans, self.orphans_end = set(), NEVER
        for sets in self.holds.beats_due(self.now).values():
            self.holds.renewed(sets, self.now)


@settings(max_examples=300)
@given(st.lists(ACTS, max_size=60))
def test_whatever_the_order_each_set_is_freed_once_and_nothing_stays(acts):
    play = Play()
    for kind, *args in acts:
        play.act(kind, *args)
    while play.reads:
        play.act("end", 0)
    for request_id in list(play.held):
        play.act("release", request_id)
    assert play.notified == Counter(play.seen)
    play.act("wait", 40)
    assert not play.holds.addresses() and play.holds.next_change() == NEVER


@pytest.mark.parametrize(
    ("lease_s", "first_s", "renewed_s"), [(30, 25, 15), (60, 55, 35), (12, 7, 4), (6, 3, 2)]
)
def test_a_deadline_comes_before_the_leases_end_and_heartbeats_put_it_off(
    lease_s, first_s, renewed_s
):
    holds = Holds(lease_s)
    holds.hold(1, blocks("a"), 100.0)
    held = holds.of(1)
    assert held.deadline == 100 + first_s and holds.next_change() <= 100
    assert holds.beats_due(100.0) == {ADDRESS: [held]} and holds.beats_due(100.0) == {}
    assert holds.next_change() == 100 + lease_s / 6
    holds.renewed([held], 100.0)
    assert held.deadline == 100 + first_s, "the first lease ends later than the renewed one"
    last = held.deadline - 0.5
    holds.renewed([held], last)
    assert held.deadline == last + renewed_s


def test_what_has_expired_is_not_renewed():
    holds = Holds(30)
    holds.hold(1, blocks("a"), 0.0)
    holds.hold(2, blocks("b"), 10.0)
    assert holds.beats_due(24.9) == {ADDRESS: [holds.of(1), holds.of(2)]}
    assert holds.beats_due(30.0) == {ADDRESS: [holds.of(2)]}


def test_engines_at_other_addresses_have_heartbeats_of_their_own():
    holds, other = Holds(30), blocks("c", port=5601)
    holds.hold(1, blocks("a"), 0.0)
    holds.hold(2, other, 3.0)
    sets = {ADDRESS: [holds.of(1)], EngineAddress.of(other): [holds.of(2)]}
    assert holds.beats_due(3.0) == sets and holds.addresses() == sets.keys()


def test_remembered_sets_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MAX_RELEASED", 2)
    holds = Holds(30)
    for name in "bcdbd":
        holds.refuse(blocks(name))
    assert [each.request_id for each in holds.notices[ADDRESS]] == ["b", "c", "d", "b"]
