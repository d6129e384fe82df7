"""Late puts: whole, in order, not before the link would have carried them."""

import time

import pytest

from data_plane.native.build import NativeUnavailable, puts_library
from data_plane.profiling.late_puts import LateExchange
from data_plane.transport.exchange import Awaited, Channel
from data_plane.transport.regions import mixture_layout
from harness.kernels.mixture_cases import exchanges

LATE_S = 0.05
ROWS, WIDTH = 512, 2048
"""Rows of 4 MiB together: more than a socket's buffers hold."""
LAYOUT = mixture_layout(ROWS, 2, WIDTH, "float32")


@pytest.fixture(params=["shm", "tcp"])
def ends(request):
    try:
        puts_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    both = exchanges(request.param, 2, LAYOUT, cls=LateExchange)
    yield both
    for end in both:
        end.close()


def fill(end, channel, epoch, value):
    end.outgoing(channel, 1 - end.instance, epoch)["hidden"][:] = value


def test_puts_arrive_whole_and_in_order_after_the_latency(ends):
    sender, receiver = ends
    sender.late_s = LATE_S
    for epoch in range(2):
        fill(sender, Channel.DISPATCH, epoch, epoch + 1)
        fill(sender, Channel.COMBINE, epoch, epoch + 3)
    began = time.monotonic()
    for epoch in range(2):
        sender.put(Channel.DISPATCH, 1, epoch)
        sender.put(Channel.COMBINE, 1, epoch, ROWS // 2)
    assert not receiver.arrived(Channel.DISPATCH, 0, 0) or time.monotonic() - began > LATE_S
    assert (receiver.wait(Channel.COMBINE, 0, 1)["hidden"][: ROWS // 2] == 4).all()
    assert time.monotonic() - began >= LATE_S
    for epoch in range(2):
        assert receiver.arrived(*Awaited(Channel.DISPATCH, 0, epoch))
        assert (receiver.wait(Channel.DISPATCH, 0, epoch)["hidden"] == epoch + 1).all()


def test_a_slow_link_carries_one_put_after_the_other(ends):
    sender, receiver = ends
    sender.ns_per_byte = 1e9 * LATE_S / (ROWS * WIDTH * 4)
    began = time.monotonic()
    for channel in (Channel.DISPATCH, Channel.COMBINE):
        sender.put(channel, 1, 0)
    receiver.wait(Channel.COMBINE, 0, 0)
    assert time.monotonic() - began >= 2 * LATE_S


def test_what_is_on_its_way_is_dropped_by_close(ends):
    sender, receiver = ends
    sender.late_s = LATE_S
    sender.put(Channel.DISPATCH, 1, 0)
    sender.close()
    time.sleep(2 * LATE_S)
    assert not receiver.arrived(Channel.DISPATCH, 0, 0)
