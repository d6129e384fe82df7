"""Compiles for sm_90, without a GPU, every kernel that steps launch, as a launch specialises it.

Triton makes an argument that is 1 a constant; the interpreter does not.

`python tests/harness/gpu/launch_compilation.py CHECKPOINT` prints one JSON object. Tensors are meta
tensors and nothing runs: steps of several instances in every bucket of gpu_check, the exchange of
one instance and more, and all of gpu_step at full width, with four layers.
"""

import json
import sys
from collections import namedtuple
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu import gpu_shapes, gpu_step
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from harness.gpu import gpu_cluster
from harness.gpu.gpu_token_checks import BOUNDS
from harness.transports import exchange_cases
from nanocp.config.data_plane import DataPlaneConfig

META = torch.device("meta")
CEILINGS = {"copy_gb_per_s": 1.0, "matmul_tflop_per_s": 1.0}
_launch = JITFunction.run


class StandInDriver:
    """Stands for the driver of an H200, as far as compiling asks."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def stand_in_for_a_card():
    """Let this process take what asks for a GPU to an H200 that is not there."""
    driver.set_active(StandInDriver())
    properties = namedtuple("Properties", "multi_processor_count")(132)
    torch.cuda.get_device_properties = lambda *_: properties


class Launches:
    """Records what was compiled, and what could not be."""

    def __init__(self):
        self.shared_bytes, self.refused = {}, []

    def compile(self, kernel, *args, grid, warmup, **keys):
        try:
            compiled = _launch(kernel, *args, grid=grid, warmup=True, **keys)
        except Exception as error:
            self.refused.append(f"{kernel.__name__}: {str(error).strip()[-300:]}")
        else:
            self.shared_bytes[compiled.hash] = compiled.metadata.shared


@triton.jit
def control_kernel(out_ptr, count):
    """Compile for a count of 1 only."""
    tl.store(out_ptr + tl.arange(0, count), 0)


def steps(checkpoint, num_instances, **keys):
    """Launch gpu_check's steps, in every bucket."""
    data_plane = DataPlaneConfig(device="cuda", **keys)
    cluster = gpu_cluster.GpuCluster(
        checkpoint, num_instances, META, data_plane, BOUNDS, num_frames=32, max_len=1024
    )
    for bucket in cluster.buckets.all():
        gpu_cluster.run_in_turn([(i, i.pool.context(bucket)) for i in cluster.instances.values()])


def exchange(num_instances, num_slots):
    """Launch a layer of the exchange."""
    exchange_cases.ExchangeCase(num_instances, num_slots, device=META, has_experts=True).run_layer()


def benchmarks():
    """Launch all that gpu_step measures, once."""

    def once(*calls):
        for call in calls:
            call()
        return 1.0

    card = gpu_step.Card(replace(gpu_step.FULL, model=gpu_shapes.deepseek_v3(num_layers=4)))
    card.device, card.num_parts, card.us = META, None, once
    card.host_us = lambda call: (once(call), 1.0)
    card.graphs = lambda parts: (
        lambda context: once(lambda: parts.step.run(context)) and (lambda: None)
    )
    for _, measure in gpu_step.measures(card, CEILINGS):
        list(measure())


def main(checkpoint):
    launches = Launches()
    stand_in_for_a_card()
    JITFunction.run = lambda *args, **keys: launches.compile(*args, **keys)
    # There are no numbers to check.
    GpuExchange.check = exchange_cases.ExchangeCase.check = lambda self: None
    for count in (1, 2):
        control_kernel[(1,)](torch.empty(2, dtype=torch.int32, device=META), count)
    controls, launches.refused = launches.refused, []
    for sizes in ((1, 1), (2, 1), (3, 4)):
        exchange(*sizes)
    for keys in ({}, {"dtype": "bfloat16", "kv_dtype": "fp8"}, {"dispatch_backend": "fused"}):
        steps(checkpoint, 2, **keys)
    benchmarks()
    sizes = launches.shared_bytes.values()
    found = {
        "variants": len(sizes),
        "shared_bytes": max(sizes),
        "refused": launches.refused,
        "controls": controls,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
