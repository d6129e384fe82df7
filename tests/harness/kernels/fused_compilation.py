"""Compiles the fused mixture and its roles for sm_90 without a GPU, at DeepSeek-V3's widths.

`python tests/harness/kernels/fused_compilation.py [NAME...]` prints one JSON object: kernel ->
resources. It is a process of its own, as kernel_compilation.py is. Eight instances, 128 rows, 256
experts.
"""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import torch

from data_plane.moe.fused.kernel import fused_kernel
from data_plane.moe.fused.mixture import FusedMoe, tiles_for
from data_plane.moe.fused.state import (
    CHOOSE,
    GATE,
    INNER,
    OUTPUT,
    RETURN,
    ROUTE,
    FusedRows,
    FusedWeights,
)
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import RegionPlaces
from data_plane.transport.regions import mixture_layout
from harness.kernels import fused_roles as roles
from harness.kernels.compiled_kernel import compile_kernel

META = torch.device("meta")
ROWS, PER_ROW, HIDDEN, WIDTH, EXPERTS, INSTANCES = 128, 8, 7168, 2048, 256, 8
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shape(dtype, fp8_block=None, tiles=None, instances=INSTANCES, experts=EXPERTS):
    """The constant of a launch; the gate of few experts has no groups."""
    value = "uint16" if dtype == "bf16" else "float32"
    layout = mixture_layout(ROWS, PER_ROW, HIDDEN, value)
    exchange = GpuExchange(RegionPlaces(layout, instances), META, timeout_ms=1000)
    model = SimpleNamespace(
        num_experts=experts, num_experts_per_token=PER_ROW, hidden_size=HIDDEN, expert_size=WIDTH,
        num_shared_experts=1, softmax_gate=False, num_groups=8 if experts >= 64 else 1,
        num_groups_per_token=4 if experts >= 64 else 1, weights_normalised=True, routed_scale=2.5,
        fp8_block=fp8_block,
    )  # fmt: skip
    return FusedMoe(
        exchange, model, num_instances=instances, num_here=experts // instances, max_rows=ROWS,
        dtype=DTYPES[dtype], device=META, is_fp8=fp8_block is not None, tiles=tiles,
        num_programs=130,
    ).shape  # fmt: skip


def types(dtype, weight):
    """The types of a launch's tuples."""
    rows = dict.fromkeys(("x", "residual", "out"), f"*{dtype}") | {"live": "*u8"}
    scales = dict.fromkeys(("gate_up_scale", "down_scale"), "*fp32")
    gate = dict.fromkeys(("gate", "gate_bias"), "*fp32")
    experts = dict.fromkeys(("gate_up", "down"), f"*{weight}")
    return {
        "state": roles.state_types(dtype),
        "rows": FusedRows(**rows),
        "weights": FusedWeights(number="*i32", load="*i64", **gate, **experts, **scales),
    }


def compiled(kernel, dtype="bf16", is_fp8=False, tiles=None, sizes=None, **constants):
    """Compile a kernel of a fused mixture. sizes: other instances and experts than above."""
    tiles = tiles or tiles_for(DTYPES[dtype], is_fp8)
    kinds = types(dtype, "fp8e4nv" if is_fp8 else dtype)
    arguments = {
        name: kinds.get(name, "i64" if name == "max_idle" else "i32")
        for name in kernel.arg_names
        if name not in ("S", *constants)
    }
    constants["S"] = shape(dtype, (128, 128) if is_fp8 else None, tiles, **(sizes or {}))
    return compile_kernel(kernel, arguments, constants, tiles.num_warps, tiles.num_stages)


def kernels():
    """List the kernels: name -> what compiles it."""

    def queue(number, **how):
        return lambda: compiled(roles.queue_role, QUEUE=number.value, **how)

    return {
        "dispatch": lambda: compiled(roles.dispatch_role),
        "return": queue(RETURN),
        "gate": queue(GATE),
        "choose": queue(CHOOSE),
        "route": queue(ROUTE),
        "sweep": lambda: compiled(roles.sweep_role),
        "inner": queue(INNER),
        "output": queue(OUTPUT),
        "combine": lambda: compiled(roles.combine_role),
        "fused bf16": lambda: compiled(fused_kernel),
        "fused fp8": lambda: compiled(fused_kernel, is_fp8=True),
        "fused bf16, one instance": lambda: compiled(
            fused_kernel, sizes={"instances": 1, "experts": 8}
        ),
        "fused fp32": lambda: compiled(fused_kernel, "fp32"),
    }


if __name__ == "__main__":
    known = kernels()
    print(json.dumps({name: asdict(known[name]()) for name in sys.argv[1:] or known}))
