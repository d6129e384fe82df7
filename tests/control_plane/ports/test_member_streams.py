"""Streams of members that end in unusual ways."""

import asyncio
import logging
from types import SimpleNamespace

import grpc

from control_plane.ports.member_streams import MemberServicer
from nanocp.values.members import Loading, Member
from nanocp.wire.members import FROM_INSTANCE


def test_a_connection_that_is_cut_in_the_middle_of_a_message_is_no_fault_of_ours(caplog):
    """A process that is killed while it loads: the others of a start that has failed."""
    loaded = []
    listener = SimpleNamespace(loading=lambda *values: loaded.append(values))

    async def requests():
        yield FROM_INSTANCE.encode(Loading(5))
        raise grpc.aio.InternalError('Failed "execute_batch"')

    async def attach():
        servicer = MemberServicer(listener, None, None, 1.0)
        context = SimpleNamespace(invocation_metadata=lambda: (("nanocp-member", "instance 1"),))
        return [each async for each in servicer._attach_instance(requests(), context)]

    with caplog.at_level(logging.INFO):
        assert asyncio.run(attach()) == []
    assert (loaded, caplog.records) == ([(Member("instance", 1), 5)], [])
