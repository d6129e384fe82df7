"""What `nanocp profile` measures: steps of real instances, phase by phase."""

import os
import uuid
from dataclasses import replace

import pytest

from data_plane.profiling.batch import alone
from data_plane.profiling.cluster import measuring
from nanocp.config.cluster import ClusterConfig
from nanocp.config.whole import Config

CONFIG = Config(cluster=ClusterConfig(num_instances=2, num_frames=128))


def test_phases_are_where_the_load_is(tiny_checkpoint, monkeypatch):
    cluster_id = f"test-{uuid.uuid4().hex}"
    monkeypatch.setattr(
        "data_plane.profiling.cluster.secrets.token_hex", lambda num_bytes: cluster_id
    )
    with measuring(CONFIG, tiny_checkpoint, {"OMP_NUM_THREADS": "1"}) as cluster:
        short, idle = cluster.measure(alone(512, 1), 5)
        long, _ = cluster.measure(alone(8192, 1), 5)
        linked, holder = cluster.measure(alone(512, 2), 5)
        ingest_gb_per_s = cluster.ingest_gb_per_s()
    assert long.attention_us > 2 * short.attention_us > 0
    assert min(linked.exchange_us, holder.exchange_us) > 5 * max(
        short.exchange_us, long.exchange_us
    )
    # An instance without rows still takes part in the all-to-all.
    assert idle.dispatch_combine_us > idle.attention_us
    # One row's experts may all be on one instance.
    assert linked.expert_us + holder.expert_us > 0
    # The instance that has more to do before a mixture finds its peer's rows there.
    assert linked.dispatch_combine_us + holder.dispatch_combine_us > 0
    assert min(linked.other_us, linked.step_us, ingest_gb_per_s) > 0
    assert not [name for name in os.listdir("/dev/shm") if cluster_id in name]


def test_an_instance_that_cannot_start_says_why(tiny_checkpoint):
    cluster = replace(CONFIG.cluster, num_instances=1, num_frames=10**9)
    config = replace(CONFIG, cluster=cluster)
    with (
        pytest.raises(RuntimeError, match=r"instance \d: each of 1 .*num_frames is 1000000000"),
        measuring(config, tiny_checkpoint, {}),
    ):
        pass
