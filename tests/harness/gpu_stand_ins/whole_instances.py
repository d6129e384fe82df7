"""What a whole instance needs to take this machine's CPU for a GPU, with DeepEP beside it.

Kernels must be interpreted: interpreter.interpret comes before any import of this.
"""

import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch

from data_plane.attention.triton_mla import TritonMla
from data_plane.moe.gpu.gemm import TritonGemm
from data_plane.startup import gpu, shared_parts
from data_plane.startup.experimental import deep_ep
from data_plane.transport.gpu.cuda_runtime import CudaRuntime
from harness.gpu_stand_ins import deep_ep_stand_in
from harness.gpu_stand_ins.fake_cudart import FakeCudart


class Hopper:
    """What torch says of a GPU."""

    major, minor, shared_memory_per_block_optin = 9, 0, 232_448


def stand_in_for_a_gpu(monkeypatch, folder):
    """Let an instance take this machine's CPU for a GPU, and run its kernels interpreted."""
    library = FakeCudart(folder)
    monkeypatch.setattr(gpu, "load_runtime", lambda device: CudaRuntime(library, device))
    monkeypatch.setattr(gpu, "cuda_ipc_obstacle", lambda device: "")
    monkeypatch.setattr(gpu, "device_of", lambda cluster, instance: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(
        gpu,
        "attention_backend",
        lambda name, site: (
            TritonMla(site.kind.kv_lora_rank, site.kind.rope_dim, site.kind.num_heads, 2),
            "triton",
        ),
    )
    monkeypatch.setattr(shared_parts, "expert_backend", lambda *site: (TritonGemm(), "triton"))
    return library


def stand_in_for_deep_ep(monkeypatch, libraries):
    """Let instances of this process take a stand-in for DeepEP, with rows in fp32."""
    by_stand_in = gpu.DISPATCHES["deep_ep"]._replace(obstacle=lambda *site: "")
    monkeypatch.setitem(gpu.DISPATCHES, "deep_ep", by_stand_in)
    monkeypatch.setattr(deep_ep, "import_module", lambda name: deep_ep_stand_in.deep_ep)
    monkeypatch.setattr(deep_ep_stand_in.Buffer, "dtype", torch.float32)
    monkeypatch.setattr(deep_ep_stand_in.Buffer, "nvshmem", libraries)
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", "")


def launched(cuda, run):
    """A method of a step that launches what `run` runs."""
    return lambda step, *context: cuda.launch(partial(run, step, *context))


class HostEvent:
    """An event of the host's clock, in place of torch.cuda's."""

    def __init__(self, enable_timing, external):
        assert enable_timing and external, "else a replay does not record it anew"
        self.at_s = None

    def record(self):
        self.at_s = time.perf_counter()

    def synchronize(self):
        """It has happened."""

    def elapsed_time(self, later):
        """Milliseconds until the later one."""
        return (later.at_s - self.at_s) * 1e3
