"""Start-up on a GPU, on a machine without one: what is refused, and with which sentence."""

from socket import gethostname

import pytest
import torch

from data_plane.startup.instance import build_instance
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.whole import Config
from nanocp.serve.service import member_environment

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
@pytest.mark.parametrize(("keys", "words"), [
    ({}, f"device is cuda: it needs an NVIDIA GPU, and torch sees none here, on {gethostname()}: "),
    ({"exchange_backend": "nvshmem"}, "device is cuda: it needs an NVIDIA GPU"),
])  # fmt: skip
def test_what_this_machine_cannot_do_is_refused_before_anything_is_loaded(tmp_path, keys, words):
    config = Config(data_plane=DataPlaneConfig(device="cuda", **keys))
    with pytest.raises(ValueError, match=words):
        build_instance(config, 0, "refused", tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"device": "gpu"}, "device is 'gpu'; it must be cpu or cuda"),
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'; it must be auto or fp8"),
        ({"kv_dtype": "fp8"}, "kv_dtype is fp8, which needs a GPU: device must be cuda"),
        (
            {"exchange_backend": "cuda_ipc"},
            "exchange_backend is cuda_ipc and device cpu; shm and tcp are for cpu",
        ),
        ({"exchange_backend": "shm", "device": "cuda"}, "exchange_backend is shm and device cuda"),
        (
            {"exchange_backend": "nvshmem", "device": "cuda", "dispatch_backend": "fused"},
            "exchange_backend is nvshmem and dispatch_backend fused",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        DataPlaneConfig(**keys)


@pytest.mark.parametrize(
    ("dispatch", "goes_on"),
    [("exchange", True), ("fused", True), ("nixl_ep", True), ("auto", False), ("deep_ep", False)],
)  # fmt: skip
def test_a_service_on_gpus_goes_on_after_a_loss_with_a_dispatch_that_can_regroup(dispatch, goes_on):
    data_plane = DataPlaneConfig(device="cuda", dispatch_backend=dispatch)
    config = Config(data_plane=data_plane)
    assert config.recovers == goes_on
    waits_ms = config.limits.exchange_timeout_ms if dispatch == "nixl_ep" else 0
    assert config.leave_timeout_ms == config.limits.plan_timeout_ms + waits_ms
    with pytest.raises(ValueError, match=r"spares is 1, and .* is cuda: it must be cpu"):
        Config(data_plane=data_plane, cluster=ClusterConfig(spares=1))


@without_gpu
@pytest.mark.parametrize(("cuda", "advice"), [
    ("13.0", "nvidia-smi must list one"),
    (None, "is for CPUs; `make setup` with a driver has CUDA's"),
])  # fmt: skip
def test_a_node_without_the_driver_says_what_it_lacks(monkeypatch, tmp_path, cuda, advice):
    """Whichever torch is there, and before the checkpoint is looked for."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = Config(data_plane=DataPlaneConfig(device="cuda"))
    with pytest.raises(ValueError, match=advice):
        build_instance(config, 0, "refused", tmp_path)


def test_members_on_gpus_see_all_of_them():
    name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert name not in member_environment(Config())
    on_gpus = Config(data_plane=DataPlaneConfig(device="cuda"))
    assert member_environment(on_gpus)[name] == "1"


@pytest.mark.parametrize(
    ("num_gpus", "own", "queues"), [(1, {}, "32"), (2, {}, None), (1, {"": "16"}, "16")]
)
def test_streams_of_instances_that_share_a_gpu_have_a_queue_each(
    monkeypatch, num_gpus, own, queues
):
    """Unless the operator has set another number."""
    gpu = pytest.importorskip("data_plane.startup.gpu")
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    environment = {name + key: value for key, value in own.items()}
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: num_gpus)
    gpu._set_queues(ClusterConfig(num_instances=2, instances_per_node=4), environment)
    assert environment.get(name) == queues
