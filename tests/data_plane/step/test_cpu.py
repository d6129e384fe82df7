"""What all layers of a step on the CPU have alike."""

from types import SimpleNamespace

import numpy as np

from data_plane.graph.buckets import Bucket
from data_plane.graph.pool_cpu import ContextPool
from data_plane.step.cpu import _Step
from nanocp.config.cluster import BoundsConfig, ClusterConfig


def test_rows_that_are_not_live_have_the_scratch_frame():
    """Rows that stopped and padding must not change a state (protocol.md, late fold)."""
    bounds = BoundsConfig(max_rows=4, max_attention_rows=4)
    pool = ContextPool(ClusterConfig(num_instances=1, num_frames=8, bounds=bounds))
    pool.tables.carry_frame[:] = 2, 0, 1, 0
    pool.rows.live[:] = True, False, True, False
    step = _Step(pool.context(Bucket(4, 0)), 0, 0, SimpleNamespace(scratch=9))
    frame_B, position_B, live_B = step.carried
    assert frame_B.tolist() == [2, 9, 1, 9] and live_B.tolist() == [True, False, True, False]
    assert np.shares_memory(position_B.numpy(), pool.rows.position)
