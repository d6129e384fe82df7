"""KV of layers on its way between stages on two nodes, whose connection ends."""

import time

import pytest

from data_plane.transport.exchange import PeerLost
from harness.hash_clusters.hash_model import HashModel
from harness.hash_clusters.pipeline.hash_stage import hash_stage
from harness.transports.local_stage_links import LocalStageLinks
from harness.transports.peer_rings_by_tcp import WAIT_S, cut, peer_rings_by_tcp
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import LayerMove, LayerMoves, LayersMoved
from nanocp.values.plan import PAGE_SIZE

PIPELINE = PipelineConfig(num_stages=2, num_layers=4)
THREE_FRAMES = LayerMoves(1, None, (LayerMove(1, 0, 1, 2, ((0, 3),)),))
"""Layer 1 goes ahead from stage 0 to place 2 of stage 1; rings have two places."""


@pytest.fixture
def stages():
    """Two stages with full frames, whose KV goes by TCP."""
    with peer_rings_by_tcp(PAGE_SIZE * 8) as movers:
        links, model = LocalStageLinks.create_all(2), HashModel(4)
        stages = [hash_stage(i, PIPELINE, 8, model, links[i], movers[i]) for i in range(2)]
        for stage in stages:
            stage.layers.filled[:] = PAGE_SIZE
            assert not list(stage.run(THREE_FRAMES))
        yield stages


def test_a_connection_that_is_cut_in_the_middle_of_a_copy_is_a_lost_peer(stages):
    """Else the change would never end, nor any after it: nothing else waits for KV sent ahead."""
    source, target = stages
    assert len(source.layers.to_send) == 1, "the ring is full"
    cut(source._mover, target._mover)
    with pytest.raises(PeerLost, match=r"stage 1 waits for KV of layer 1: .* stage 0") as lost:
        target.progress()
    assert lost.value.peer == 0
    assert target.layers.filled[2, 2] == 0 and target.layers.is_moving


def test_a_connection_that_ends_after_a_copy_costs_nothing(stages):
    source, target = stages
    deadline = time.monotonic() + WAIT_S
    while not (events := target.poll().events):
        assert time.monotonic() < deadline
        for stage in stages:
            stage.progress()
        time.sleep(0.001)
    assert events == (LayersMoved(1, 1),)
    cut(source._mover, target._mover)
    target.progress()
    assert (target.layers.filled[2, :3] == PAGE_SIZE).all()
