"""A ring and its writer, and a port that no process listens on, for the tests of a member."""

import socket

import pytest

from data_plane.kv.page_ring import PageRing, PageRingWriter
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from harness.members.member_fakes import CLUSTER_ID, LIMITS, Link
from harness.members.pulled_engines import Engine, rings


@pytest.fixture
def ring():
    ring = PageRing.create(Segments(CLUSTER_ID), 0, 2, 64)
    yield ring
    ring.close()
    unlink_cluster(CLUSTER_ID)


@pytest.fixture
def writer(ring):
    writer = PageRingWriter(Segments(CLUSTER_ID), 0, LIMITS)
    yield writer
    writer.close()


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def both():
    """A puller's rings at two instances in term 1."""
    both = rings()
    yield both
    for ring in both:
        ring.close()
    unlink_cluster(CLUSTER_ID)


@pytest.fixture
def free_port():
    """A port without a listener, which only a gRPC server of this test can take."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
