"""The graph engine: buckets hold every shape, staging has two copies, contexts share one pool."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.graph.buckets import Bucket, BucketTable, powers_of_two
from data_plane.graph.engine import GraphEngine, PairedEngine
from data_plane.graph.pool_cpu import ContextPool
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.values.table_changes import PageRun

CLUSTER = ClusterConfig(
    num_instances=3,
    num_frames=32,
    max_model_len=1024,
    bounds=BoundsConfig(max_rows=6, max_attention_rows=10),
)


@given(max_rows=st.integers(1, 300), data=st.data())
def test_lookup_finds_the_smallest_bucket_that_holds_the_shape(max_rows, data):
    max_received = data.draw(st.integers(1, 300))
    table = BucketTable(max_rows, max_received)
    rows, received = data.draw(st.integers(0, max_rows)), data.draw(st.integers(0, max_received))
    fitting = [
        bucket
        for bucket in table.all()
        if bucket.num_rows >= rows and bucket.num_received >= received
    ]
    assert table.lookup(rows, received) == min(fitting)


def test_powers_of_two_end_at_the_bound():
    assert powers_of_two(1) == (1,)
    assert powers_of_two(8) == (1, 2, 4, 8)
    assert powers_of_two(6) == (1, 2, 4, 6)


def test_row_buckets_must_end_at_the_bound():
    with pytest.raises(ValueError, match="it must end at max_rows"):
        BucketTable(8, 8, row_buckets=(1, 4))


@pytest.mark.parametrize("row_buckets", [(), (2, 8)])
def test_instance_without_rows_computes_no_padding(row_buckets):
    assert BucketTable(8, 8, row_buckets).lookup(0, 3) == Bucket(0, 4)


def make_engine():
    pool, seen = ContextPool(CLUSTER), []
    buckets = BucketTable(CLUSTER.bounds.max_rows, CLUSTER.bounds.max_attention_rows)
    captured = []

    def capture(context):
        captured.append(context.bucket)
        return lambda: seen.append(
            (context.bucket, int(context.tables.num_rows[0]), context.tables.send_row[0].copy())
        )

    engine = GraphEngine(pool, buckets, capture)
    assert engine.prepare() == len(buckets.all())
    assert captured == sorted(captured, reverse=True), "largest first"
    return engine, pool, seen


def test_staged_tables_reach_the_step_at_the_first_replay_and_stay():
    engine, _, seen = make_engine()
    tables = engine.stage(0)
    tables.num_rows[0], tables.num_received[:] = 3, (0, 2, 3)
    tables.send_row[0, 0] = 2
    engine.replay()
    # The next window is staged while this one still has a step to run, which must read the tables
    # of this one.
    following = engine.stage(1)
    following.num_rows[0] = 6
    assert following is not tables
    assert seen[0][:2] == (Bucket(4, 8), 3) and seen[0][2][0] == 2
    engine.replay()
    assert seen[1][:2] == (Bucket(6, 0), 6)


def test_both_lanes_replay_the_smallest_step_that_holds_either():
    """One lane has more rows, the other more links; the next window has one lane."""
    lanes = [make_engine() for _ in range(2)]
    engines, seen = [engine for engine, _, _ in lanes], []
    buckets = BucketTable(CLUSTER.bounds.max_rows, CLUSTER.bounds.max_attention_rows)

    def capture(bucket, order):
        return lambda: seen.append(
            (bucket, order, *(int(pool.tables.num_rows[0]) for _, pool, _ in lanes))
        )

    both = PairedEngine(engines, buckets, 2, capture)
    assert both.prepare() == 2 * len(buckets.all())
    for engine, num_rows, num_received in zip(engines, (3, 1), (1, 4), strict=True):
        tables = engine.stage(0)
        tables.num_rows[0], tables.num_received[1] = num_rows, num_received
        engine.staged()
    both.replay(1)
    both.replay(0)
    assert seen == [(Bucket(4, 4), order, 3, 1) for order in (1, 0)]
    assert [engine.bucket for engine in engines] == [Bucket(4, 4)] * 2, "what a report adds up"
    engines[0].stage(1).num_rows[0] = 2
    engines[0].replay()
    assert lanes[0][2][-1][:2] == (Bucket(2, 0), 2) and len(seen) == 2


def test_contexts_are_prefixes_of_one_pool():
    pool = ContextPool(CLUSTER)
    small, large = pool.context(Bucket(2, 4)), pool.context(Bucket(6, 10))
    large.rows.token[1] = 7
    large.tables.own.fill(1, [PageRun(7, 2, 1, 4), PageRun(7, 5, 1, 9)])
    assert small.rows.token[1] == 7 and len(small.rows.token) == 2
    assert small.tables.own.page[1, :2].tolist() == [2, 5]
    assert small.tables.own.frame[1, :2].tolist() == [4, 9]


def test_copy_clears_what_a_shorter_table_leaves_behind():
    engine, pool, _ = make_engine()
    tables = engine.stage(0)
    tables.num_rows[0] = 4
    for row in range(4):
        tables.own.fill(row, [PageRun(7, row, 1, row)])
    engine.replay()
    tables = engine.stage(1)
    tables.num_rows[0], tables.own.num_pages[:] = 1, 0
    tables.own.fill(0, [PageRun(7, 0, 1, 5)])
    engine.replay()
    assert pool.tables.own.num_pages.tolist() == [1, 0, 0, 0, 0, 0]
    assert np.array_equal(pool.tables.own.frame[0, :1], [5])
