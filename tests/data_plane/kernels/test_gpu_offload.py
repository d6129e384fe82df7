"""Instances with a GPU's step whose pages and states go to pinned memory and come back."""

import pytest
import torch

from data_plane.graph.cuda_graphs import CudaGraphs
from data_plane.step.gpu import GpuStep
from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.exact.exact_runs import assert_exact
from harness.exact.settings import configured
from harness.gpu.launch_counts import Launches
from harness.gpu_stand_ins.cuda_stand_in import Cuda
from harness.gpu_stand_ins.whole_instances import launched, stand_in_for_a_gpu
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.kv_offload import KvOffloadConfig
from nanocp.config.whole import Config
from nanocp.values.sampling import SamplingParams

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)
ONE = Config(
    cluster=ClusterConfig(
        num_instances=1, max_model_len=256, num_frames=4, bounds=BoundsConfig(max_rows=2)
    ),
    data_plane=DataPlaneConfig(device="cuda", row_buckets=(2,), dispatch_backend="exchange"),
)


class Counted:
    """An instance's CPU that stands for a GPU; notes what each of its steps launches."""

    def __init__(self, monkeypatch, folder):
        self.library, self.cuda = stand_in_for_a_gpu(monkeypatch, folder), Cuda()
        self.steps, run = [], GpuStep.run
        self.cuda.install(monkeypatch)
        monkeypatch.setattr(CudaGraphs, "warm", lambda graphs, step: None)

        def counted(step, context):
            with Launches() as found:
                run(step, context)
            self.steps.append(found.names)

        monkeypatch.setattr(GpuStep, "run", launched(self.cuda, counted))


@pytest.fixture
def linear(models):
    """A mini checkpoint with linear attention layers, made before anything stands for a GPU."""
    return models("tiny-kimi-linear, mini")


@pytest.fixture
def counted(monkeypatch, tmp_path):
    return Counted(monkeypatch, tmp_path)


def prompt(length, num_tokens):
    """A greedy request; a length stands for one prompt."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    return Prompt([2 + (length + 7 * place) % 318 for place in range(length)], params)


def conversation(path, **settings):
    """Two rounds, and another prompt between them, which takes every frame."""
    with DecodeCluster(configured(ONE, **settings), path) as cluster:
        first, other = prompt(140, 3), prompt(220, 3)
        again = Prompt([*first.ids, 7, 8, 9], first.params)
        prompts = [cluster.run([each])[0] for each in (first, other, again)]
    return prompts, cluster.scheduler.offload


@without_gpu
def test_a_conversation_finds_its_history_in_memory_and_in_the_file(mini, counted, tmp_path):
    path, oracle = mini
    plain, _ = conversation(path)
    without = [*counted.steps]
    counted.steps.clear()
    file = KvOffloadConfig(1.0, 1.0, str(tmp_path))
    prompts, offload = conversation(
        path, kv_offload=file, offload_host_pages=3, offload_file_pages=20
    )
    assert sum(offload.num_fetched) >= 2 and offload.num_stowed[1] and offload.num_fetched[1]
    assert [each.output for each in prompts] == [each.output for each in plain]
    assert_exact(oracle, prompts)
    assert counted.steps == without and min(map(len, without)) > 9, "no step launches more"
    assert not counted.library.pinned, "it is released at the end"
    assert len([each for each in counted.cuda.log if each[1:] == ("ends",)]) >= 2


@without_gpu
def test_a_preempted_row_comes_back_with_its_state(linear, counted):
    config = configured(ONE, num_frames=2, growth_promise="tokens:0", offload_host_pages=100)
    with DecodeCluster(config, linear.path) as cluster:
        prompts = cluster.run([prompt(61, 6), prompt(62, 6)])
    assert sum(each.num_preemptions for each in prompts) and cluster.num_whole_tickets
    assert_exact(linear.oracle, prompts)
    assert not counted.library.pinned
