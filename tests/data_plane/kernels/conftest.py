"""Kernels in this folder run under Triton's interpreter; compiling them needs a process of its own.

What the compiler makes of them is test_kernel_compilation.py.
"""

import pytest

from harness.gpu_stand_ins.interpreter import interpret, shared_by_threads
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config

interpret()


@pytest.fixture(scope="session")
def mini(models):
    """A mini checkpoint: (its folder, the oracle on it)."""
    model = models("tiny, mini")
    return model.path, model.oracle


@pytest.fixture
def two_instances(mini, monkeypatch, tmp_path):
    """(configuration of two instances in threads of this process, their fake CUDA runtime)."""
    from harness.gpu_stand_ins.whole_instances import stand_in_for_a_gpu

    library = stand_in_for_a_gpu(monkeypatch, tmp_path)
    bounds = BoundsConfig(max_rows=2, max_links=2, max_attention_rows=2, max_partials=2)
    config = Config(
        cluster=ClusterConfig(
            num_instances=2, instances_per_node=2, num_frames=4, max_model_len=256, bounds=bounds,
            redundant_experts=4,
        ),
        scheduler=SchedulerConfig(steps_per_window=2),
        data_plane=DataPlaneConfig(
            device="cuda", eager=True, row_buckets=(2,), dispatch_backend="exchange"
        ),
    )  # fmt: skip
    with shared_by_threads():
        yield config, library
