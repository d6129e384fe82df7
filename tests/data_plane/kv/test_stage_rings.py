"""Messages between stages in different processes: in shared memory, and by TCP."""

import os
from contextlib import ExitStack

import pytest
import torch

from data_plane.kv.stage_rings import RingStageLinks
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import PeerLost
from data_plane.transport.segments import Segments
from data_plane.transport.stage_links import HiddenRows, PassTokens
from data_plane.transport.tcp.messages import shut
from data_plane.transport.tcp.server import TcpSegmentServer
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

WIDTH, MAX_TOKENS = 24, 10


@pytest.fixture(params=["shared memory", "TCP"])
def stages(request):
    """The connected ends of three stages."""
    cluster_id, held = f"stages{os.getpid()}", ExitStack()
    segments = []
    for _ in range(3):
        server = TcpSegmentServer("127.0.0.1", receive_puts) if request.param == "TCP" else None
        own = Segments(cluster_id, server, is_always_tcp=server is not None)
        held.callback(own.close)
        segments.append(own)
    links = [
        RingStageLinks(own, stage, 3, MAX_TOKENS, torch.zeros(WIDTH), LimitsConfig())
        for stage, own in enumerate(segments)
    ]
    for own in segments:
        own.meet([Peer(each.node, each.address) for each in segments])
    for link in links:
        held.callback(link.close)
        link.connect()
    with held:
        yield links


def received(stage, take):
    """What `take` returns once it is here."""
    for _ in range(1000):
        message = take()
        if message is not None:
            return message
        stage.wait(20)
    raise AssertionError("nothing came")


def test_hidden_rows_of_any_number_arrive_in_order(stages):
    """So many passes are in flight as there are stages, and one that waits."""
    sent = []
    for number, count in enumerate((MAX_TOKENS, 1, 3, 7)):
        rows = torch.randn(count, WIDTH)
        stages[0].send_hidden(HiddenRows(number, 2**20, 5, rows))
        sent.append(rows)
    for number, rows in enumerate(sent):
        came = received(stages[1], stages[1].receive_hidden)
        assert came[:3] == (number, 2**20, 5)
        assert torch.equal(came.rows, rows)
    assert stages[1].receive_hidden() is None and stages[2].receive_hidden() is None


def test_what_was_received_stays_when_its_place_is_written_again(stages):
    first = torch.ones(4, WIDTH)
    stages[1].send_hidden(HiddenRows(0, 0, 1, first))
    came = received(stages[2], stages[2].receive_hidden)
    for number in range(1, 9):
        stages[1].send_hidden(HiddenRows(number, 0, 1, torch.zeros(4, WIDTH)))
        received(stages[2], stages[2].receive_hidden)
    assert torch.equal(came.rows, first)


@pytest.mark.parametrize("stages", ["TCP"], indirect=True)
def test_a_connection_that_ends_is_a_lost_stage_once_its_messages_are_taken(stages):
    stages[2].send_tokens(PassTokens(0, ((1, 7),)))
    shut(stages[2]._writer._segment._connection)
    assert received(stages[0], stages[0].receive_tokens) == PassTokens(0, ((1, 7),))
    with pytest.raises(PeerLost, match="stage 0 waits for stage 2") as lost:
        received(stages[0], stages[0].receive_tokens)
    assert lost.value.peer == 2
    assert stages[1].receive_hidden() is None, "stage 0 is still there"


def test_tokens_go_from_the_last_stage_to_the_first(stages):
    for tokens in (PassTokens(0, ()), PassTokens(1, ((2**40, 7), (3, 128_000)))):
        stages[2].send_tokens(tokens)
        assert received(stages[0], stages[0].receive_tokens) == tokens
    assert stages[0].receive_tokens() is None


def test_more_rows_than_a_pass_may_have_are_refused(stages):
    with pytest.raises(ValueError, match="the payload"):
        stages[0].send_hidden(HiddenRows(0, 0, 1, torch.zeros(MAX_TOKENS + 1, WIDTH)))


def test_one_stage_hands_tokens_to_itself():
    links = RingStageLinks(Segments("one"), 0, 1, MAX_TOKENS, torch.zeros(4), LimitsConfig())
    links.connect()
    links.send_tokens(PassTokens(0, ((1, 2),)))
    assert links.receive_tokens() == PassTokens(0, ((1, 2),))
    assert links.receive_tokens() is None
    links.wait(1)
    links.close()
