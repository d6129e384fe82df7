"""The launches of a captured layer against torch: interpreted in small, on a GPU at full width."""

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from data_plane.attention.fp8_latent import quantise
from data_plane.kernels.norm import add_norm, embed_norm, gated
from data_plane.kv.triton_latent import (
    LatentFrames,
    absorbed_queries,
    append_rows,
    heads_values,
    start_rows,
)
from data_plane.model.attention_kinds.mla import LATENT_NORM_EPS
from data_plane.model.fp8_weight import Fp8Weight
from data_plane.model.norm import rms_norm
from data_plane.model.rope import RopeTable
from data_plane.model.rope_config import RopeConfig
from data_plane.moe.gate import gate as plain_gate
from data_plane.moe.gpu.deep_gemm import DeepGemm
from data_plane.moe.gpu.gate import gate, gate_scores
from data_plane.moe.gpu.gemm import TritonGemm
from data_plane.moe.gpu.grouped import GroupedExperts
from data_plane.moe.gpu.pairs import find_pairs
from data_plane.moe.gpu.sums import sum_pairs
from harness.kernels.kernel_cases import poisoned
from harness.transports.random_tables import numbers_of
from nanocp.values.experts import home_table


class Layer:
    """Draws rows and weights of a layer on a device. Widths: DeepSeek-V3's, or small ones."""

    def __init__(self, device, is_small=False):
        self.device, self.rows = torch.device(device), 10 if is_small else 64
        self.hidden, self.q_latent, self.rank, self.rope_dim = (
            (256, 24, 32, 16) if is_small else (7168, 1536, 512, 64)
        )
        self.heads, self.nope, self.size = (3, 16, 128) if is_small else (128, 128, 2048)
        self.experts = 8

    def normal(self, *shape, scale=1.0, dtype=torch.bfloat16):
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def positions(self, most):
        """Positions of the rows, and a table that reaches them."""
        table = RopeTable(RopeConfig(10_000.0, True, None), self.rope_dim)
        table.place(self.device, most)
        return torch.randint(0, most, (self.rows,), device=self.device), table


def error(found, expected):
    """The norm of the difference over the norm of what is expected."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def assert_near(found, expected, most):
    assert error(found, expected) <= most, error(found, expected)


def norms(layer):
    x, first, second = (layer.normal(layer.rows, layer.hidden) for _ in range(3))
    weight, token = (
        layer.normal(layer.hidden),
        torch.randint(0, layer.rows, (5,), device=layer.device),
    )
    with poisoned():
        out, normed = add_norm(x, weight, 1e-6, first, second)
        rows, of_rows = embed_norm(x, token, weight, 1e-6)
    expected = (x.float() + (first.float() + second.float())).bfloat16()
    assert out.equal(expected) and rows.equal(x[token])
    assert_near(normed, rms_norm(expected, weight, 1e-6), 2e-3)
    assert_near(of_rows, rms_norm(rows, weight, 1e-6), 2e-3)
    gate_up = layer.normal(layer.rows, 2 * layer.size)
    gate_BI, up_BI = gate_up.float().chunk(2, dim=1)
    assert_near(gated(gate_up), F.silu(gate_BI) * up_BI, 5e-3)


def latent_rows(layer, is_fp8):
    rank, latent, rope_dim = layer.rank, layer.q_latent, layer.rope_dim
    position, rope = layer.positions(9000)
    down = layer.normal(layer.rows, latent + rank + rope_dim)
    q_norm, kv_norm = layer.normal(latent), layer.normal(rank)
    slot = torch.randperm(640, device=layer.device)[: layer.rows]
    width, dtype = (rank + 16 + 2 * rope_dim, torch.uint8) if is_fp8 else (rank + rope_dim, None)
    slots, again = (
        torch.zeros(640, width, dtype=dtype or down.dtype, device=layer.device) for _ in range(2)
    )
    with poisoned():
        frames = LatentFrames(slots, rank, rope_dim)
        q, kv = start_rows(
            down, q_norm, kv_norm, rope, position, slot, frames, LATENT_NORM_EPS, keeps_kv=True
        )
        append_rows(kv, slot, LatentFrames(again, rank, rope_dim))
    key = rope.rotate(down[:, latent + rank :], position)
    c_kv = rms_norm(down[:, latent:][:, :rank], kv_norm, LATENT_NORM_EPS)
    assert_near(kv, torch.cat((c_kv, key), dim=1), 4e-3)
    assert_near(q, rms_norm(down[:, :latent], q_norm, LATENT_NORM_EPS), 4e-3)
    assert again.equal(slots)
    if not is_fp8:
        assert slots[slot].equal(kv)
        return
    # On a GPU torch divides by a product with the reciprocal, which may round otherwise.
    kept = quantise(kv.cpu(), rank)
    assert float((slots[slot].cpu() != kept).float().mean()) < 1e-3


def queries(layer):
    position, rope = layer.positions(9000)
    heads, nope, rank = layer.heads, layer.nope, layer.rank
    q = layer.normal(layer.rows, heads * (nope + layer.rope_dim))
    k_up, v_up = (
        layer.normal(heads, nope, rank, scale=0.1),
        layer.normal(heads, rank, nope, scale=0.05),
    )
    with poisoned():
        found = absorbed_queries(q, position, rope, k_up, layer.rope_dim)
        values = heads_values(found[..., :rank], v_up)
    each = q.view(layer.rows, heads, -1)
    absorbed = torch.einsum("bhn,hnr->bhr", each[..., :nope].float(), k_up.float())
    rotated = rope.rotate(each[..., nope:], position).float()
    assert_near(found, torch.cat((absorbed, rotated), dim=2), 4e-3)
    assert_near(values, torch.einsum("bhr,hrv->bhv", found[..., :rank].float(), v_up.float()), 4e-3)
    assert values.is_contiguous()


def gates(layer):
    config = SimpleNamespace(
        softmax_gate=False, num_groups=8, num_groups_per_token=4, num_experts=256,
        num_experts_per_token=8, weights_normalised=True, routed_scale=2.5,
    )  # fmt: skip
    weight = layer.normal(256, layer.hidden, scale=0.02, dtype=torch.float32)
    bias = layer.normal(256, scale=0.1, dtype=torch.float32)
    moe, x = SimpleNamespace(gate=weight, gate_bias=bias), layer.normal(layer.rows, layer.hidden)
    live = torch.ones(len(x), dtype=torch.bool, device=x.device)
    with poisoned():
        scores = gate_scores(x, weight).sum(dim=0).double()
        expert, found = gate(x, moe, config, live, numbers_of(home_table(256, 1), 256, x.device), 0)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert ((scores - exact).abs() <= (layer.hidden + 3) * 2**-23 * sizes).all()
    expected, expected_weight = plain_gate(x, moe, config)
    order, expected_order = expert.argsort(dim=1), expected.argsort(dim=1)
    assert expert.gather(1, order).equal(expected.gather(1, expected_order))
    assert_near(found.gather(1, order), expected_weight.gather(1, expected_order), 1e-5)


def experts(layer, form, rows=None):
    """Pairs to normed rows, of eight experts and a shared one, against products in fp32."""
    rows, hidden, size, num = rows or layer.rows, layer.hidden, layer.size, layer.experts
    weights = [
        layer.normal(num + 1, 2 * size, hidden, scale=hidden**-0.5),
        layer.normal(num + 1, hidden, size, scale=size**-0.5),
    ]
    gemm = TritonGemm()
    held = weights
    if form != "bf16":
        rounding = DeepGemm(rows, SimpleNamespace())
        held = [Fp8Weight(*rounding.prepare(weight), (128, 128)) for weight in weights]
        weights = [weight.dequantised() for weight in held]
        gemm = DeepGemm(rows) if form == "deep_gemm" else gemm
    group = GroupedExperts(gemm, *held, 1)
    expert = torch.rand(rows, num, device=layer.device).argsort(dim=1)[:, :6].contiguous()
    weight = torch.rand(rows, 6, device=layer.device)
    x, norm = layer.normal(rows, hidden), layer.normal(hidden)
    live = torch.rand(rows, device=layer.device) > 0.1
    number = expert.masked_fill(~live[:, None], -1)
    load = torch.zeros(num, dtype=torch.int64, device=layer.device)
    with poisoned():
        pairs = find_pairs(x, number, load, 1)
        zeros = torch.zeros_like(x)
        out, _ = sum_pairs(zeros, group.run_pairs(pairs), pairs, weight, None, norm, 1e-6)
    expected = torch.zeros(rows, hidden, device=layer.device)
    for number, (gate_up, down) in enumerate(zip(*weights, strict=True)):
        gate_BI, up_BI = (x.float() @ gate_up.float().T).chunk(2, dim=1)
        share = torch.ones(rows, device=layer.device)
        if number < num:
            share = (weight * (expert == number)).sum(dim=1)
        expected += ((F.silu(gate_BI) * up_BI) @ down.float().T) * (share * live)[:, None]
    assert_near(out, expected, 6e-2 if form == "deep_gemm" else 1e-2)


def layer_checks(device, is_small=False):
    """Yield (name, check) of every launch between a layer's dense products."""
    layer = Layer(device, is_small)
    many = 130 if is_small else 160
    yield "layer: sums and norms", partial(norms, layer)
    yield "layer: latent rows", partial(latent_rows, layer, False)
    yield "layer: latent rows, FP8", partial(latent_rows, layer, True)
    yield "layer: absorbed queries", partial(queries, layer)
    yield "layer: gate", partial(gates, layer)
    yield "layer: experts, bf16", partial(experts, layer, "bf16")
    yield "layer: experts, bf16, many rows", partial(experts, layer, "bf16", many)
    yield "layer: experts, FP8", partial(experts, layer, "fp8")
    if find_spec("deep_gemm") is not None:
        yield "layer: experts by DeepGEMM", partial(experts, layer, "deep_gemm")
