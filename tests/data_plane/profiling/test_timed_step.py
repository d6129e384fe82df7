"""What `nanocp profile` measures: batches that load instances as they say, and steps with a clock
in them."""

import os
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.profiling.batch import (
    BatchRequest,
    alone,
    linked_batches,
    local_batches,
    num_frames,
)
from data_plane.profiling.cluster import measuring
from nanocp.config import BoundsConfig, ClusterConfig, Config
from nanocp.plan import PAGE_SIZE
from nanocp.profile.fit import loads_of

CONFIG = Config(cluster=ClusterConfig(num_instances=2, num_frames=128))


@given(st.integers(1, 5000), st.permutations(range(6)), st.integers(1, 6))
def test_a_request_lies_on_its_kv_binding_once_and_evenly(length, instances, degree):
    request = BatchRequest(length, tuple(instances[:degree]))
    pages = [list(request.pages_of(instance)) for instance in range(6)]
    num_pages = -(-length // PAGE_SIZE)
    assert sorted(page for held in pages for page in held) == list(range(num_pages))
    assert num_pages - 1 in pages[request.moe_binding]
    counts = [len(pages[instance]) for instance in request.kv_binding]
    assert max(counts) - min(counts) <= 1
    assert sum(request.tokens_of(instance) for instance in range(6)) == length


@given(
    st.integers(2, 5),
    st.integers(512, 8192),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 48),
)
def test_batches_load_all_instances_alike_and_keep_the_bounds(
    num_instances, max_tokens, rows, links, partials
):
    bounds = BoundsConfig(
        max_rows=rows, max_links=links, max_attention_rows=rows + links, max_partials=partials
    )
    local = list(local_batches(num_instances, bounds.max_rows, max_tokens))
    linked = list(linked_batches(num_instances, bounds, max_tokens))
    assert local
    for batch in [*local, *linked]:
        loads = loads_of(batch, num_instances)
        for of_instance in (loads.kv_tokens, loads.rows, loads.attention_rows, loads.links):
            assert len(set(of_instance)) == 1
        assert loads.kv_tokens[0] <= max_tokens
        assert loads.rows[0] <= bounds.max_rows
        assert loads.attention_rows[0] <= bounds.max_attention_rows
        assert loads.links[0] <= bounds.max_partials
        assert max(num_frames(batch, instance) for instance in range(num_instances)) <= -(
            -max_tokens // PAGE_SIZE
        )
    assert not any(loads_of(batch, num_instances).links[0] for batch in local)
    assert all(loads_of(batch, num_instances).links[0] > 0 for batch in linked)


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
    assert min(linked.other_us, linked.dispatch_combine_us, linked.step_us, ingest_gb_per_s) > 0
    assert not [name for name in os.listdir("/dev/shm") if cluster_id in name]


def test_an_instance_that_cannot_start_says_why(tiny_checkpoint):
    config = replace(CONFIG, cluster=replace(CONFIG.cluster, num_frames=10**9))
    with (
        pytest.raises(RuntimeError, match=r"instance \d: num_frames is 1000000000"),
        measuring(config, tiny_checkpoint, {}),
    ):
        pass
