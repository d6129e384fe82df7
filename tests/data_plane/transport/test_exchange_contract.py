"""What every backend of the exchange must do; a new backend is one line in BACKENDS."""

import ctypes
import itertools
import threading
import time
import uuid
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import (
    Awaited,
    Channel,
    EpochError,
    ExchangeTimeout,
    Field,
    PeerLost,
    row_bytes,
)
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.receiver import receive_in_python
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.local_exchange import LocalExchange
from harness.waits import until
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

LAYOUT = {
    Channel.Q: (Field("position", "int64", (3,)),
                Field("live", "bool", (3,)),
                Field("q", "float32", (3, 5)),
                Field("kv", "uint16", (3, 7))),
    Channel.RES: (Field("partial", "float32", (3, 2, 5)), Field("lse", "float32", (3, 2))),
    Channel.DISPATCH: (Field("hidden", "float32", (8, 6)), Field("count", "int32", ())),
    Channel.MAILBOX: (Field("payload", "uint8", (33,)),),
}  # fmt: skip
PATIENT = LimitsConfig(tick_ms=20, exchange_timeout_ms=30_000, plan_timeout_ms=200, retry_ms=100)
IMPATIENT = replace(PATIENT, exchange_timeout_ms=300)
START_MS = 30_000
PAIRS = list(itertools.permutations(range(3), 2))


def make_shm(layout, num_instances, limits=PATIENT):
    cluster_id = f"test-{uuid.uuid4().hex}"
    members = [
        ShmExchange.create(Segments(cluster_id), instance, num_instances, layout, limits)
        for instance in range(num_instances)
    ]
    for member in members:
        member.connect(START_MS)
    return members


def make_local(layout, num_instances, limits=PATIENT):
    return LocalExchange.create_all(num_instances, layout, limits)


class NodeMember(ShmExchange):
    """A member that closes its segments with itself, as a process would."""

    def close(self):
        super().close()
        self._segments.close()


def make_on_nodes(nodes, receiver=None):
    def make(layout, num_instances, limits=PATIENT):
        cluster_id = f"test-{uuid.uuid4().hex}"
        servers = [TcpSegmentServer("127.0.0.1", receiver or receive_puts) for _ in nodes]
        segments = [
            Segments(cluster_id, server, node=node)
            for number, (server, node) in enumerate(zip(servers, nodes, strict=True))
        ]
        members = [
            NodeMember.create(segments[i], i, num_instances, layout, limits)
            for i in range(num_instances)
        ]
        for own, member in zip(segments, members, strict=True):
            own.meet([Peer(other.node, other.address) for other in segments])
            member.connect(START_MS)
        return members

    return make


BACKENDS = {
    "shm": make_shm,
    "local": make_local,
    "tcp": make_on_nodes("abc"),
    "tcp in Python": make_on_nodes("abc", receive_in_python),
    "shm and tcp": make_on_nodes("aab"),
}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def members(request):
    """Three instances of a backend, in this process."""
    members = request.param(LAYOUT, 3)
    yield members
    for member in members:
        member.close()


def fill(member, channel, target, epoch, value):
    for view in member.outgoing(channel, target, epoch).values():
        view[...] = value


def assert_filled(views, channel, value):
    assert list(views) == [field.name for field in LAYOUT[channel]]
    for field in LAYOUT[channel]:
        view = views[field.name]
        assert (view.dtype, view.shape) == (np.dtype(field.dtype), field.shape)
        np.testing.assert_array_equal(view, np.full(field.shape, value).astype(field.dtype))


def until_here(member, channel, source, epoch):
    """A put is visible before its flag is, but it may take its time."""
    until(lambda: member.arrived(channel, source, epoch))


def test_a_flag_may_be_raised_and_read_by_its_address(members):
    """Compiled code does so, where a backend gives addresses."""
    sender, receiver = members[:2]
    fill(sender, Channel.Q, 1, 1, 1)
    assert_filled(receiver.incoming(Channel.Q, 0, 1), Channel.Q, 0 if is_remote(sender) else 1)
    ours, theirs = sender.flags(Channel.Q, 1, 1), receiver.flags(Channel.Q, 0, 1)
    if ours.outgoing is None:
        sender.put(Channel.Q, 1, 1)
    else:
        assert not receiver.arrived(Channel.Q, 0, 1)
        ctypes.c_uint64.from_address(ours.outgoing).value = 2
    until_here(receiver, Channel.Q, 0, 1)
    assert_filled(receiver.incoming(Channel.Q, 0, 1), Channel.Q, 1)
    if theirs.incoming is not None:
        assert ctypes.c_uint64.from_address(theirs.incoming).value == 2


def is_remote(sender):
    return isinstance(sender, ShmExchange) and sender.flags(Channel.Q, 1, 1).outgoing is None


def naming(channel, source, epoch):
    """A pattern: the message names all three."""
    return rf"(?s)(?=.*\b{channel.name}\b)(?=.*instance {source}\b)(?=.*epoch {epoch}\b)"


def test_members_know_who_they_are(members):
    assert [(member.instance, member.num_instances) for member in members] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


def test_every_pair_and_channel_has_regions_of_its_own(members):
    contents = {}
    for epoch in range(4):
        for number, (channel, (source, target)) in enumerate(itertools.product(LAYOUT, PAIRS)):
            contents[channel, source, target, epoch] = (number + 50 * epoch) % 250
            fill(members[source], channel, target, epoch, contents[channel, source, target, epoch])
            members[source].put(channel, target, epoch)
        if epoch % 2:
            for (channel, source, target, of_epoch), value in contents.items():
                assert_filled(members[target].wait(channel, source, of_epoch), channel, value)
            contents.clear()


def test_nothing_has_arrived_before_its_put(members):
    for epoch in (0, 1, 2):
        assert not members[1].arrived(Channel.Q, 0, epoch)
    fill(members[0], Channel.Q, 1, 0, 1)
    assert not members[1].arrived(Channel.Q, 0, 0)
    members[0].put(Channel.Q, 1, 0)
    until_here(members[1], Channel.Q, 0, 0)
    assert not members[2].arrived(Channel.Q, 0, 0)
    assert not members[1].arrived(Channel.RES, 0, 0)
    assert not members[1].arrived(Channel.Q, 0, 1)
    assert not members[1].arrived(Channel.Q, 0, 2), (
        "an older epoch in the same region is not the awaited one"
    )


def test_what_arrived_stays_while_the_next_epoch_is_written(members):
    fill(members[0], Channel.RES, 2, 6, 1)
    members[0].put(Channel.RES, 2, 6)
    views = members[2].wait(Channel.RES, 0, 6)
    fill(members[0], Channel.RES, 2, 7, 2)
    members[0].put(Channel.RES, 2, 7)
    assert_filled(views, Channel.RES, 1)
    assert_filled(members[2].wait(Channel.RES, 0, 7), Channel.RES, 2)


def test_epochs_may_skip(members):
    for epoch in (0, 5, 12):
        fill(members[1], Channel.MAILBOX, 0, epoch, epoch)
        members[1].put(Channel.MAILBOX, 0, epoch)
        assert_filled(members[0].wait(Channel.MAILBOX, 1, epoch), Channel.MAILBOX, epoch)


def test_a_put_may_be_of_the_first_rows_only(members):
    for epoch, num_rows in enumerate((2, 0)):
        fill(members[0], Channel.Q, 1, epoch, 1)
        fill(members[0], Channel.DISPATCH, 1, epoch, 1)
        members[0].put(Channel.Q, 1, epoch, num_rows)
        members[0].put(Channel.DISPATCH, 1, epoch, num_rows)
        for view in members[1].wait(Channel.Q, 0, epoch).values():
            assert (view[:num_rows] == 1).all()
        views = members[1].wait(Channel.DISPATCH, 0, epoch)
        assert views["count"] == 1, "a field of one row always arrives"
        assert (views["hidden"][:num_rows] == 1).all()


def test_arrived_views_cannot_be_written(members):
    members[0].put(Channel.Q, 1, 0)
    for view in members[1].wait(Channel.Q, 0, 0).values():
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0


def test_a_later_epoch_in_the_region_is_an_error_for_both_ways_to_look(members):
    members[0].put(Channel.DISPATCH, 1, 4)
    members[0].put(Channel.DISPATCH, 1, 6)
    until_here(members[1], Channel.DISPATCH, 0, 6)
    with pytest.raises(EpochError, match=naming(Channel.DISPATCH, 0, 4)):
        members[1].arrived(Channel.DISPATCH, 0, 4)
    with pytest.raises(EpochError, match=naming(Channel.DISPATCH, 0, 4)):
        members[1].wait(Channel.DISPATCH, 0, 4)
    members[1].wait(Channel.DISPATCH, 0, 6)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
def test_a_silent_peer_times_out_by_name(make):
    with ExitStack() as stack:
        members = [stack.enter_context(closing(member)) for member in make(LAYOUT, 3, IMPATIENT)]
        waited_before_ns, begin_ns = members[0].waited_ns, time.monotonic_ns()
        with pytest.raises(ExchangeTimeout, match=naming(Channel.RES, 1, 4)):
            members[0].wait(Channel.RES, 1, 4)
        elapsed_ns = time.monotonic_ns() - begin_ns
        assert 3e8 <= elapsed_ns < 1e10
        assert 2.9e8 <= members[0].waited_ns - waited_before_ns <= elapsed_ns


def test_a_put_of_another_thread_ends_a_wait(members):
    fill(members[1], Channel.RES, 0, 0, 9)
    timer = threading.Timer(0.05, members[1].put, [Channel.RES, 0, 0])
    timer.start()
    assert_filled(members[0].wait(Channel.RES, 1, 0), Channel.RES, 9)
    timer.join()


def test_a_later_epoch_that_comes_during_the_wait_is_an_error(members):
    timer = threading.Timer(0.05, members[1].put, [Channel.RES, 0, 2])
    timer.start()
    with pytest.raises(EpochError, match=naming(Channel.RES, 1, 0)):
        members[0].wait(Channel.RES, 1, 0)
    timer.join()


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
def test_a_peer_that_left_is_lost_but_its_last_put_arrives(make):
    with ExitStack() as stack:
        members = [stack.enter_context(closing(member)) for member in make(LAYOUT, 3)]
        fill(members[1], Channel.Q, 0, 0, 1)
        members[1].put(Channel.Q, 0, 0)
        members[1].close()
        assert_filled(members[0].wait(Channel.Q, 1, 0), Channel.Q, 1)
        begin = time.monotonic()
        with pytest.raises(PeerLost, match=naming(Channel.Q, 1, 1)):
            members[0].wait(Channel.Q, 1, 1)
        assert time.monotonic() - begin < PATIENT.exchange_timeout_ms / 3000, (
            "found by a tick, not by the timeout"
        )


def test_an_epoch_can_be_put_once(members):
    members[0].put(Channel.Q, 1, 2)
    with pytest.raises(AssertionError, match="put before"):
        members[0].put(Channel.Q, 1, 2)


def test_close_is_idempotent(members):
    for member in [*members, *members]:
        member.close()


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
@settings(max_examples=30)
@given(puts=st.lists(
    st.tuples(st.sampled_from(sorted(LAYOUT)),
              st.sampled_from(PAIRS),
              st.integers(1, 3),
              st.integers(0, 255)),
    max_size=40,
))  # fmt: skip
def test_a_region_holds_the_last_epoch_of_its_parity(make, puts):
    with ExitStack() as stack:
        members = [stack.enter_context(closing(member)) for member in make(LAYOUT, 3)]
        last_epoch, contents = {}, {}
        for channel, (source, target), stride, value in puts:
            epoch = last_epoch.get((channel, source, target), -1) + stride
            last_epoch[channel, source, target] = epoch
            contents[channel, source, target, epoch & 1] = (epoch, value)
            fill(members[source], channel, target, epoch, value)
            members[source].put(channel, target, epoch)
        for (channel, source, target, _), (epoch, value) in contents.items():
            until_here(members[target], channel, source, epoch)
            assert_filled(members[target].wait(channel, source, epoch), channel, value)
            assert not members[target].arrived(channel, source, epoch + 2)
            if epoch >= 2:
                with pytest.raises(EpochError):
                    members[target].wait(channel, source, epoch - 2)


def test_bytes_of_a_row_leave_the_count_out():
    # DeepSeek-V3's widths in bf16, latent form: what a link costs a layer, there and back.
    layout = {
        Channel.Q: (Field("q", "uint16", (16, 1536)),),
        Channel.RES: (
            Field("partial", "uint16", (16, 128, 128)),
            Field("lse", "float32", (16, 128)),
        ),
        Channel.DISPATCH: (Field("count", "int32", (1,)), Field("hidden", "uint16", (64, 7168))),
    }
    found = row_bytes(layout)
    assert found[Channel.Q] + found[Channel.RES] == 36_352 and found[Channel.DISPATCH] == 2 * 7168


def test_a_wait_for_any_ends_with_the_first_put_that_arrives(members):
    awaited = [Awaited(Channel.Q, 1, 0), Awaited(Channel.RES, 2, 0)]
    late = threading.Timer(0.05, lambda: members[2].put(Channel.RES, 0, 0))
    late.start()
    members[0].wait_any(awaited)
    assert members[0].arrived(*awaited[1]) and not members[0].arrived(*awaited[0])
    late.join()
