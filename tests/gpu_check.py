"""Every kernel against its reference on a GPU, and installed packages against the signatures that we pinned.

    PYTHONPATH=. python3 tests/gpu_check.py [--json PATH]

Needs torch and Triton, no pytest, no network, no Ray. Prints a line a check; exit status 1 if one fails.
"""

import inspect
import json
import sys
import tempfile
import time
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import published_packages
import torch
from exchange_cases import ExchangeCase, run_process
from kernel_cases import LENGTHS, AttentionCase, ExpertCase, make_partials, poisoned

from data_plane.merge import reference_lse_merge
from data_plane.transport.exchange import Channel, ExchangeTimeout

TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}


def attention_checks(device, widths, heads, num_parts=None):
    """(name, check) of every layout, dtype and KV format."""
    from data_plane.attention.triton_mla import TritonMla

    for name, lengths in LENGTHS.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for is_fp8 in (False, True) if dtype == torch.bfloat16 else (False,):
                tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]

                def check(lengths=lengths, dtype=dtype, is_fp8=is_fp8, tolerance=tolerance):
                    case = AttentionCase(lengths, heads, *widths, dtype, device, is_fp8, scale=0.1)
                    case.check(*case.run(TritonMla(*widths, heads, num_parts)), tolerance, tolerance)

                yield f"attention, {name}, {dtype}, {'fp8' if is_fp8 else 'plain'} KV", check


def merge_and_expert_checks(device):
    """(name, check)."""
    from data_plane.moe.grouped import GroupedMm
    from data_plane.moe.triton_gemm import TritonGemm
    from data_plane.triton_merge import merge_partials

    def merge():
        partial, lse = make_partials(5, 4, 3, 128, seed=1, empty=(0, 3))
        with poisoned():
            merged, merged_lse = merge_partials(partial.to(device), lse.to(device))
        for got, expected in zip((merged, merged_lse), reference_lse_merge(partial, lse), strict=True):
            torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)

    def experts(gemm, dtype, tolerance):
        case = ExpertCase(dtype, num_rows=40, hidden=128, size=64, device=device)
        case.check(case.run(gemm), tolerance)

    yield "merge", merge
    yield "grouped GEMM, fp32", lambda: experts(TritonGemm(), torch.float32, 1e-4)
    yield "grouped GEMM, bf16", lambda: experts(TritonGemm(), torch.bfloat16, 4e-2)
    yield "grouped_mm, bf16", lambda: experts(GroupedMm(), torch.bfloat16, 4e-2)


def captured_lengths_change():
    """A captured plan and run is right for lengths that came after the capture."""
    from data_plane.attention.triton_mla import TritonMla

    backend, case = TritonMla(512, 64, 128), AttentionCase([900, 1, 64, 300], 128, 512, 64, torch.bfloat16, "cuda")
    frame_AP, length_A = case.frame_AP.clone(), case.length_A.clone()
    backend.run(case.q, case.pool, backend.plan(frame_AP, length_A), 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.run(case.q, case.pool, backend.plan(frame_AP, length_A), 0.1)
    for lengths in ([900, 1, 64, 300], [0, 1, 0, 299], [0, 0, 0, 0], [640, 0, 64, 1]):
        length_A.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        eager = backend.run(case.q, case.pool, backend.plan(frame_AP, length_A), 0.1)
        for replayed, expected in zip(captured, eager, strict=True):
            torch.testing.assert_close(replayed, expected, atol=0, rtol=0)


def exchange_checks(device, num_instances, num_slots, widths):
    """(name, check) of what needs no streams."""

    def in_turn():
        case = ExchangeCase(num_instances, num_slots, widths, device, timeout_ms=1000)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            case.fill(case.random_requests(2 * num_slots, generator), generator)
            case.run_layer()
            case.check()

    def nothing_comes():
        case = ExchangeCase(2, 2, widths, device, timeout_ms=0.01)
        case.fill([(0, 0, (0, 1))], torch.Generator().manual_seed(1))
        case.members[1].wait(Channel.Q, case.num_received[1])
        try:
            case.members[1].check()
        except ExchangeTimeout:
            return
        raise AssertionError("a wait for what was never put had no error")

    yield "routed exchange, instances in turn", in_turn
    yield "routed exchange, a flag that does not come", nothing_comes


def captured_exchange():
    """Each instance's layer is a graph on a stream of its own; they wait for each other, with ever new tables."""
    case = ExchangeCase(4, 16, (1536, 576, 128, 128), "cuda", timeout_ms=1000, max_rows=32)
    generator = torch.Generator().manual_seed(2)
    case.fill(case.random_requests(60, generator), generator)
    # A kernel that is loaded while another one spins may wait for it: all are loaded before.
    case.run_layer()
    case.check()
    graphs = []
    for instance in case.members:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for phase in case.phases():
                phase(instance)
        graphs.append((graph, stream))
    for num_layers in (1, 2, 1, 61):
        case.fill(case.random_requests(60, generator), generator)
        torch.cuda.synchronize()
        for _ in range(num_layers):
            for graph, stream in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        case.check()


def exchange_between_processes():
    """Two processes on this GPU, through torch's symmetric memory."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run_process, (2, f"{directory}/store", "cuda:0", 5), nprocs=2)


def flashmla():
    """FlashMLA and ours give the same on the same frames."""
    from data_plane.attention.flashmla import FlashMla

    for lengths in LENGTHS.values():
        case = AttentionCase(lengths, 128, 512, 64, torch.bfloat16, "cuda", scale=0.1)
        case.check(*case.run(FlashMla(512)), 3e-2, 3e-2)


def same_signature(package, name):
    """The installed package's function has the parameters that tests/published_packages.py pinned."""
    module, _, attribute = name.rpartition(".")
    installed = getattr(import_module(module), attribute)
    pinned = getattr(published_packages, attribute)
    for function in (
        [attribute]
        if inspect.isfunction(pinned)
        else [n for n in vars(pinned) if "low_latency" in n or n == "__init__"]
    ):
        theirs = getattr(installed, function) if inspect.isclass(pinned) else installed
        ours = getattr(pinned, function) if inspect.isclass(pinned) else pinned
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters), function


def package_checks():
    """(name, check) for what is installed. DeepGEMM's functions are C++ and have no signature to read."""
    pinned = {
        "flash_mla": ["flash_mla.flash_mla_with_kvcache", "flash_mla.get_mla_metadata"],
        "deep_ep": ["deep_ep.Buffer"],
    }
    for package, names in pinned.items():
        if find_spec(package):
            for name in names:
                yield f"signature of {name}", lambda package=package, name=name: same_signature(package, name)
    if find_spec("flash_mla"):
        yield "FlashMLA against the reference", flashmla


def run(checks):
    """[{"check", "seconds", "error"}], a line printed for each."""
    results = []
    for name, check in checks:
        begin, error = time.monotonic(), ""
        try:
            check()
        except Exception:
            error = traceback.format_exc(limit=-2)
        results.append({"check": name, "seconds": round(time.monotonic() - begin, 2), "error": error})
        print(f"{'FAILED' if error else 'ok'}  {name}  {results[-1]['seconds']} s", error, flush=True)
    return results


def main(arguments):
    if not torch.cuda.is_available():
        sys.exit("gpu_check: no NVIDIA GPU is here (torch sees none); run it on a machine that has one")
    torch.backends.cuda.matmul.allow_tf32 = False
    checks = [*attention_checks("cuda", (512, 64), 128), *merge_and_expert_checks("cuda")]
    checks += exchange_checks("cuda", 4, 8, (1536, 576, 128, 128))
    checks += [("routed exchange, captured, a stream each", captured_exchange)]
    checks += [("routed exchange between two processes", exchange_between_processes)]
    checks += [("a captured step with new lengths", captured_lengths_change), *package_checks()]
    results = run(checks)
    if arguments[:1] == ["--json"]:
        Path(arguments[1]).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(result["error"] for result in results))


if __name__ == "__main__":
    main(sys.argv[1:])
