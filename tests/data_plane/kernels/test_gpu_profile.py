"""`nanocp profile` on GPUs: real instances on a CPU that they take for a GPU, interpreted."""

import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from data_plane.graph.cuda_graphs import CudaGraphs
from data_plane.profiling import cluster
from data_plane.profiling.batch import alone
from data_plane.profiling.cluster import MeasuringCluster, _Instance
from data_plane.startup import gpu as gpu_startup
from data_plane.transport.shared_memory import unlink_cluster
from harness.gpu_stand_ins.cuda_stand_in import Cuda
from harness.gpu_stand_ins.interpreter import shared_by_threads
from harness.gpu_stand_ins.whole_instances import HostEvent, stand_in_for_a_gpu
from nanocp.cli.checkpoint import profile
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.file import load_config
from nanocp.config.whole import Config
from nanocp.serve.served import open_checkpoint, policy_in_words

BOUNDS = BoundsConfig(max_rows=2, max_links=2, max_attention_rows=4, max_partials=2)
CONFIG = Config(
    cluster=ClusterConfig(
        num_instances=2, instances_per_node=2, num_frames=16, max_model_len=512, bounds=BOUNDS
    ),
    data_plane=DataPlaneConfig(device="cuda", eager=True, row_buckets=(2,)),
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    stand_in_for_a_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    monkeypatch.setattr(cluster, "_NUM_WARM_STEPS", 0)
    monkeypatch.setattr(profile, "_NUM_STEPS", 1)


class InThreads(MeasuringCluster):
    """Instances in threads of this process."""

    def __init__(self, config, checkpoint):
        self._pool = ThreadPoolExecutor(config.cluster.num_instances)
        self._cluster_id = secrets.token_hex(4)
        self._instances = self._each(
            lambda instance: _Instance(config, instance, self._cluster_id, checkpoint),
            range(config.cluster.num_instances),
        )

    def _each(self, call, of):
        return [each.result() for each in [self._pool.submit(call, one) for one in of]]

    def _ask(self, method, *arguments):
        return self._each(lambda each: getattr(each, method)(*arguments), self._instances)

    def close(self):
        self._pool.shutdown()
        for each in self._instances:
            each._built.close()
        unlink_cluster(self._cluster_id)


def test_a_profile_of_gpus_is_served_from(mini, gpu, monkeypatch, tmp_path):
    path, _ = mini
    monkeypatch.setattr(
        cluster, "measuring", lambda config, at, _: contextlib.closing(InThreads(config, at))
    )
    measurement = profile.Measurement(out=tmp_path / "out", quick=True, max_len=512)
    with shared_by_threads():
        profile.run(CONFIG, path, measurement, Console(quiet=True))
    text = (tmp_path / "out/profile.yaml").read_text()
    assert "2 instances on a stand-in, torch" in text and "device: cuda" in text
    assert "The instances share GPUs: a step that loads only some" in text, "here is less than one"
    config = load_config(tmp_path / "out/serve.yaml", {}, {})
    assert config.data_plane.device == "cuda"
    assert config.scheduler.costs not in (CostConfig(), Config().scheduler.costs)
    assert config.scheduler.cp_degree_max in (1, 2)
    assert policy_in_words(config) == "cost_aware"
    assert open_checkpoint(config, path).num_experts


@pytest.mark.parametrize("is_eager", [True, False])
def test_phases_of_a_step_are_timed_by_events(mini, gpu, monkeypatch, is_eager):
    """A captured step's events stay: each replay records them anew."""
    path, _ = mini
    cuda = Cuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(CudaGraphs, "warm", lambda self, step: step())
    config = replace(
        CONFIG,
        cluster=replace(CONFIG.cluster, num_instances=1),
        data_plane=replace(CONFIG.data_plane, eager=is_eager),
    )
    instance = _Instance(config, 0, "alone", path)
    times = instance.measure(alone(130, 1), 2)
    assert len(cuda.graphs) == (not is_eager)
    assert min(times.attention_us, times.expert_us, times.other_us) > 0
    assert times.exchange_us == 0, "nothing is linked"
    marks = [phase for phase, _ in instance._clock._marks]
    num_layers = instance._model.num_layers
    assert marks.count("attention") == num_layers and marks.count("step") == 1
    instance._built.close()


def test_a_step_awaits_a_peer_as_long_as_it_may_compile(mini, gpu, monkeypatch):
    """A service compiles alone; here a first step's kernels are compiled while peers wait."""
    path, _ = mini
    given = []
    monkeypatch.setattr(
        gpu_startup, "build_gpu_instance", lambda config, *site, **_: given.append(config)
    )
    with pytest.raises(AttributeError):
        _Instance(CONFIG, 0, "alone", path)
    limits = given[0].limits
    assert limits.exchange_timeout_ms == limits.start_timeout_ms > CONFIG.limits.exchange_timeout_ms
