"""What a spare has loaded before it knows its seat, and what it adds then."""

import uuid
from dataclasses import replace

import pytest
import torch

from data_plane.startup.instance import build_instance, prepare_instance
from data_plane.transport.segments import Segments
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.whole import Config

CONFIG = Config(cluster=ClusterConfig(num_instances=3, num_frames=8, max_model_len=256))


@pytest.fixture
def built(tiny_checkpoint):
    """Instance 1 of 3 as a new process makes it, and as a spare does."""
    made = []

    def make(build, *more):
        instance = build(CONFIG, 1, Segments(f"test-{uuid.uuid4().hex}"), tiny_checkpoint, *more)
        made.append(instance)
        return instance

    yield make(build_instance), make(prepare_instance(CONFIG, tiny_checkpoint), print)
    for instance in made:
        instance.close()


def test_a_spare_with_a_seat_has_the_weights_of_a_new_process(built):
    fresh, spare = (each.startup.lanes[0].step._weights for each in built)
    assert torch.equal(fresh.embedding, spare.embedding)
    torch.manual_seed(0)
    x_BX = torch.randn(3, fresh.embedding.shape[1])
    mixtures = [
        (one.moe, other.moe)
        for one, other in zip(fresh.layers, spare.layers, strict=True)
        if one.moe
    ]
    for one, other in mixtures:
        assert one.held == other.held and one.held
        assert torch.equal(one.gate, other.gate)
        for mine, theirs in zip(one.mlps, other.mlps, strict=True):
            assert torch.equal(mine.gate_up(x_BX), theirs.gate_up(x_BX))
    assert mixtures
    assert (built[0].grammar_masks is None) == (built[1].grammar_masks is None)


def test_a_service_that_cannot_use_spares_refuses_them():
    cluster = replace(CONFIG.cluster, spares=2)
    with pytest.raises(ValueError, match=r"spares is 2, and members that are lost are not"):
        Config(cluster=cluster, limits=LimitsConfig(recovery_timeout_ms=0))
    assert Config(cluster=cluster).cluster.spares == 2
