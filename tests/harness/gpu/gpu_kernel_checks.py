"""Checks of a GPU's kernels against their references, and of installed packages.

Each function that yields yields (name, check).
"""

import inspect
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch

from data_plane.attention.torch_paged import KvHeads
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.gpu_copies import GpuCopies
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.slots import Slots
from data_plane.transport.exchange import ExchangeTimeout
from data_plane.transport.gpu.cuda_runtime import load_runtime
from harness.gpu_stand_ins import deep_ep_stand_in, published_packages
from harness.kernels.kernel_cases import (
    LENGTHS,
    AttentionCase,
    ExpertCase,
    dense_in_fp8,
    make_partials,
    poisoned,
)
from harness.kernels.slow_references import reference_lse_merge
from nanocp.values.offload import Fetch, StoredPage, Stow
from nanocp.values.plan import TransferDone

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def attention_checks(device, widths, heads, num_parts=None):
    """Attention for each layout of lengths, dtype and KV format."""
    from data_plane.attention.triton_gqa import TritonHeads
    from data_plane.attention.triton_mla import TritonMla

    def check(lengths, dtype, is_fp8):
        case = AttentionCase(lengths, heads, *widths, dtype, device, is_fp8, scale=0.1)
        result = case.run(TritonMla(*widths, heads, num_parts))
        case.check(*result, TOLERANCE[dtype], TOLERANCE[dtype])

    def check_heads(lengths, dtype):
        layout = KvHeads(4, 128)
        case = AttentionCase(lengths, 64, 0, 0, dtype, device, scale=0.1, layout=layout)
        case.check(*case.run(TritonHeads(4, 128, 64, num_parts)), *[TOLERANCE[dtype]] * 2)

    for name, lengths in LENGTHS.items():
        for dtype in TOLERANCE:
            yield (
                f"attention over K/V heads, {name}, {dtype}",
                lambda case=(lengths, dtype): check_heads(*case),
            )
        for dtype in TOLERANCE:
            for is_fp8 in (False, True) if dtype == torch.bfloat16 else (False,):
                yield (
                    f"attention, {name}, {dtype}, {'fp8' if is_fp8 else 'plain'} KV",
                    lambda case=(lengths, dtype, is_fp8): check(*case),
                )


def merge_and_expert_checks(device):
    """The LSE merge, the grouped GEMMs of experts, and rows that are rounded to FP8."""
    from data_plane.attention.triton_merge import merge_partials
    from data_plane.kernels.fp8 import quantised_rows
    from data_plane.moe.gpu.deep_gemm import _quantise
    from data_plane.moe.gpu.gemm import TritonGemm
    from data_plane.moe.gpu.grouped import GroupedMm

    def merge():
        partial, lse = make_partials(5, 4, 3, 128, seed=1, empty=(0, 3))
        with poisoned():
            merged, merged_lse = merge_partials(partial.to(device), lse.to(device))
        for got, expected in zip(
            (merged, merged_lse), reference_lse_merge(partial, lse), strict=True
        ):
            torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)

    def experts(gemm, dtype, tolerance, fp8_block=None):
        case = ExpertCase(
            dtype, num_rows=40, hidden=256, size=128, device=device, fp8_block=fp8_block
        )
        case.check(case.run(gemm), tolerance)

    def rounded():
        x = torch.randn(9, 1152, generator=torch.Generator().manual_seed(1)).bfloat16()
        with poisoned():
            values, scale = (part.cpu() for part in quantised_rows(x.to(device)))
        # On the CPU: torch's quotients on a GPU are not rounded to the nearest.
        expected, expected_scale = _quantise(x.float().view(9, 9, 128), (2,))
        assert values.view(torch.uint8).equal(expected.view(9, 1152).view(torch.uint8))
        assert scale.equal(expected_scale[..., 0])

    yield "merge", merge
    yield "grouped GEMM, fp32", lambda: experts(TritonGemm(), torch.float32, 1e-4)
    yield "grouped GEMM, bf16", lambda: experts(TritonGemm(), torch.bfloat16, 4e-2)
    yield (
        "grouped GEMM, bf16, FP8 weights",
        lambda: experts(TritonGemm(), torch.bfloat16, 4e-2, (128, 128)),
    )
    yield "grouped_mm, bf16", lambda: experts(GroupedMm(), torch.bfloat16, 4e-2)
    yield "rows to FP8", rounded


def fused_checks(device, max_rows=80, num_epochs=3, tiles=None, limit_ms=20):
    """The fused mixture of several instances on this device, which take turns."""
    from harness.kernels.fused_cases import FusedCase, FusedSizes, run_turns

    sizes = FusedSizes(
        num_experts=32, per_row=4, max_rows=max_rows, hidden=256, width=128, num_groups=4,
        groups_per_row=2,
    )  # fmt: skip

    def made(timeout_ms=2000, **how):
        case = FusedCase(replace(sizes, **how), tiles=tiles, timeout_ms=timeout_ms, device=device)
        for fused in case.fused:
            fused.num_programs = min(fused.num_programs, 16)
        return case

    def right(**how):
        case = made(**how)
        for _ in range(num_epochs):
            case.draw()
        for _ in range(num_epochs):
            run_turns(case)
        case.check()

    def alone():
        case = made(timeout_ms=limit_ms)
        case.draw(num_rows=(sizes.max_rows, 0), visited=list(range(16, 32)))
        case.launch(0)
        try:
            case.exchanges[0].check()
        except ExchangeTimeout as error:
            assert "awaits DISPATCH of instance 1" in str(error)
        else:
            raise AssertionError("a peer that did not come was no error")

    yield "fused mixture", right
    yield "fused mixture, a softmax gate", lambda: right(softmax_gate=True, num_shared=0)
    yield "fused mixture, four instances", lambda: right(num_instances=4)
    yield "fused mixture, FP8 weights", lambda: right(fp8_block=(128, 128))
    yield "fused mixture, a peer stays away", alone


def captured_lengths_change():
    """A captured plan and run are right for lengths that are written after the capture."""
    from data_plane.attention.triton_mla import TritonMla

    backend = TritonMla(512, 64, 128)
    case = AttentionCase([900, 1, 64, 300], 128, 512, 64, torch.bfloat16, "cuda")
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


def pages_in_pinned_memory(device="cuda", runtime=None):
    """Pages go to pinned memory behind a write that is under way, and come back elsewhere."""
    pool = FramePool(8, 16, 576, torch.bfloat16, device)
    slots = Slots(8, 0, pool.page_bytes, "")
    gpu = GpuCopies(runtime or load_runtime(0), pool.layers.device, slots.memory)
    copier = PageCopier(0, slots, pool.page_view, pool.write_payload, gpu)
    if pool.layers.is_cuda:
        torch.cuda._sleep(200_000_000)
    pool.layers[:, :8].normal_()
    copier.stow(Stow(1, 0, tuple((frame, frame) for frame in range(8))))
    pages = tuple(StoredPage(frame, frame, 0) for frame in range(8))
    copier.fetch(Fetch(2, 0, pages), {frame: frame + 8 for frame in range(8)})
    while copier.run_one():
        pass
    assert copier.take() == ([TransferDone(1, 0)], [(2, frame) for frame in range(8)])
    assert pool.layers[:, 8:16].equal(pool.layers[:, :8]) and pool.layers[:, 15].any()
    copier.close()


def package_checks():
    """The packages that are installed, against the signatures in published_packages.py."""
    pinned = {
        "flash_mla": ["flash_mla.flash_mla_with_kvcache", "flash_mla.get_mla_metadata"],
        "flash_attn_interface": ["flash_attn_interface.flash_attn_with_kvcache"],
        "deep_ep": ["deep_ep.Buffer"],
    }
    for package, names in pinned.items():
        if find_spec(package):
            for name in names:
                yield f"signature of {name}", lambda name=name: _same_signature(name)
    if find_spec("flash_mla"):
        yield "FlashMLA against the reference", _flashmla
    if find_spec("flash_attn_interface"):
        yield "FlashAttention against the reference", _flash_attention
    if find_spec("deep_gemm"):
        yield "DeepGEMM's dense layer against the reference", _dense_layer


def _flashmla():
    """FlashMLA computes what the reference computes, on the same frames."""
    from data_plane.attention.flashmla import FlashMla

    for lengths in LENGTHS.values():
        case = AttentionCase(lengths, 128, 512, 64, torch.bfloat16, "cuda", scale=0.1)
        case.check(*case.run(FlashMla(512)), 3e-2, 3e-2)


def _flash_attention():
    """FlashAttention computes what the reference computes, on the same frames."""
    from data_plane.attention.flash_attention import FlashAttentionHeads

    for lengths in LENGTHS.values():
        for width in (64, 128):
            case = AttentionCase(
                lengths, 32, 0, 0, torch.bfloat16, "cuda", scale=0.1, layout=KvHeads(4, width)
            )
            case.check(*case.run(FlashAttentionHeads(4, width)), 3e-2, 3e-2)


def _dense_layer():
    """A dense layer in FP8, with a last block that is not whole, is within the error of FP8."""
    from data_plane.moe.gpu.deep_gemm import DeepGemm

    for shape in ((2112, 7168), (7168, 2048)):
        layer = DeepGemm(8).dense(dense_in_fp8(shape, device="cuda"))
        for num_rows in (1, 63, 128):
            x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
            expected = x.float() @ layer.weight.dequantised().T
            error = (layer(x).float() - expected).norm() / expected.norm()
            assert 0.001 < error < 0.09, (shape, num_rows, error)


def _same_signature(name):
    """The installed function, or each method that is used, has the pinned parameters."""
    module, _, attribute = name.rpartition(".")
    installed = getattr(import_module(module), attribute)
    pinned = getattr(deep_ep_stand_in if module == "deep_ep" else published_packages, attribute)
    if "use_legacy" in inspect.signature(installed).parameters:
        pinned = published_packages.sgl_flash_mla_with_kvcache
    if inspect.isfunction(pinned):
        pairs = {attribute: (installed, pinned)}
    else:
        used = [n for n in vars(pinned) if "low_latency" in n or n == "__init__"]
        pairs = {method: (getattr(installed, method), getattr(pinned, method)) for method in used}
    for function, signatures in pairs.items():
        found, expected = (list(inspect.signature(each).parameters) for each in signatures)
        assert found == expected, function
