"""The launches of a captured layer, interpreted, against the slow references."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from data_plane.attention.fp8_latent import quantise
from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.kernels.norm import add_norm, embed_norm, gated
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.triton_latent import (
    LatentFrames,
    absorbed_queries,
    append_rows,
    heads_values,
    start_rows,
)
from data_plane.model.attention_kinds.mla import LATENT_NORM_EPS, MlaConfig, MlaWeights
from data_plane.model.linear import PlainLinear
from data_plane.model.norm import rms_norm
from data_plane.model.rope import RopeTable
from data_plane.model.rope_config import RopeConfig
from data_plane.model.weights import MlpWeights, MoeWeights
from data_plane.moe.gate import gate as plain_gate
from data_plane.moe.gpu import gemm as gemm_kernels
from data_plane.moe.gpu.deep_gemm import DeepGemm, _quantise
from data_plane.moe.gpu.gate import gate, gate_scores
from data_plane.moe.gpu.gemm import TritonGemm
from data_plane.moe.gpu.gpu_weights import _can_join
from data_plane.moe.gpu.grouped import GroupedExperts
from data_plane.moe.gpu.pairs import find_pairs, lay_out
from data_plane.moe.gpu.sums import sum_pairs
from data_plane.moe.rows import name_slots
from data_plane.step.gpu_rows import LatentRows, PlainRows
from harness.gpu.gpu_cluster import GpuCluster
from harness.kernels.kernel_cases import poisoned, visited
from harness.kernels.slow_references import ReferenceGemm, group_rows, slots_of
from harness.transports.random_tables import numbers_of, random_table
from nanocp.config.data_plane import DataPlaneConfig


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found, expected, dtype):
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_norms(dtype):
    x, first, second, weight = (normal(3, 500, seed=s, dtype=dtype) for s in range(4))
    for addends in ((), (first,), (first, second)):
        with poisoned():
            out, normed = add_norm(x, weight[0], 1e-6, *addends)
        expected = (x.float() + sum((a.float() for a in addends), torch.zeros(1))).to(dtype)
        assert out.equal(expected)
        expected = rms_norm(expected, weight[0], 1e-6)
        close(normed, expected, dtype)
        if dtype == torch.bfloat16:  # a last bit of the scale moves few of them
            assert float((normed == expected).float().mean()) > 0.98
    token = torch.tensor([2, 0, 2, 1])
    out, normed = embed_norm(x, token, weight[0], 1e-6)
    assert out.equal(x[token])
    close(normed, rms_norm(x[token], weight[0], 1e-6), dtype)
    gate_up = normal(3, 40, dtype=dtype)
    close(gated(gate_up), F.silu(gate_up[:, :20]) * gate_up[:, 20:], dtype)


def test_a_norm_in_fp32_meets_rows_before_they_are_rounded():
    """Norms that a checkpoint has as 1 + w stay in fp32, as norm.rms_norm knows."""
    x, weight = normal(3, 500, dtype=torch.bfloat16), 1 + 0.1 * normal(500, seed=1)
    _, normed = add_norm(x, weight, 1e-6)
    assert float((normed == rms_norm(x, weight, 1e-6)).float().mean()) > 0.98


@pytest.mark.parametrize("has_q", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_latent_rows(has_q, interleaved, is_fp8):
    latent, rank, rope_dim, num_rows, eps = 24 * has_q, 32, 16, 3, LATENT_NORM_EPS
    rope = RopeTable(RopeConfig(10_000.0, interleaved, None), rope_dim)
    rope.reach(99)
    down, position = normal(num_rows, latent + rank + rope_dim), torch.tensor([7, 0, 99])
    q_norm = normal(latent, seed=1) if has_q else None
    kv_norm, slot = normal(rank, seed=2), torch.tensor([5, 1, 6])
    expected_kv = torch.cat(
        (
            rms_norm(down[:, latent:][:, :rank], kv_norm, eps),
            rope.rotate(down[:, latent + rank :], position),
        ),
        dim=1,
    )
    kept = quantise(expected_kv, rank) if is_fp8 else expected_kv
    slots = torch.zeros(8, kept.shape[1], dtype=kept.dtype)
    frames = LatentFrames(slots, rank, rope_dim)
    with poisoned():
        q, kv = start_rows(down, q_norm, kv_norm, rope, position, slot, frames, eps, keeps_kv=True)
    close(kv, expected_kv, torch.float32)
    if has_q:
        close(q, rms_norm(down[:, :latent], q_norm, eps), torch.float32)
    again = torch.zeros_like(slots)
    append_rows(kv, slot, LatentFrames(again, rank, rope_dim))
    kept = quantise(kv, rank) if is_fp8 else kv
    for held in (slots, again):
        assert held[slot].equal(kept)
        assert not held[[0, 2, 3, 4, 7]].any()


def test_fused_rows_are_as_plain_ones():
    """Both ways of a step's rows, for rows so small that epsilon counts."""
    kind = MlaConfig(64, 2, 24, 32, nope_dim=16, rope_dim=16, value_dim=16)
    rope = RopeTable(RopeConfig(10_000.0, True, None), 16)
    weights = MlaWeights(
        PlainLinear(normal(24 + 48, 64, seed=1)), normal(24, seed=2), normal(32, seed=3),
        PlainLinear(normal(64, 24, seed=4)), normal(2, 16, 32, seed=5), normal(2, 32, 16, seed=6),
    )  # fmt: skip
    layer, model = SimpleNamespace(attention=weights), SimpleNamespace(attention=kind)
    x, position, slot = 1e-4 * normal(3, 64), torch.tensor([7, 0, 99]), torch.tensor([5, 1, 6])
    rope.reach(99)
    found, kept = [], []
    for rows in (LatentRows, PlainRows):
        frames = FramePool(1, 1, kind.kv_width, torch.float32)
        first = kind if rows is LatentRows else model
        started = rows(first, rope, frames).start(0, layer, x, position, slot, keeps_kv=True)
        found.append(started)
        kept.append(frames.slots[0][slot])
    for one, other in zip((*found[0], kept[0]), (*found[1], kept[1]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_absorbed_queries_and_values(interleaved):
    heads, nope, rope_dim, rank, value, num_rows = 3, 16, 16, 32, 8, 5
    rope = RopeTable(RopeConfig(10_000.0, interleaved, None), rope_dim)
    rope.reach(99)
    q, position = normal(num_rows, heads * (nope + rope_dim)), torch.tensor([7, 0, 99, 3, 4])
    k_up, v_up = normal(heads, nope, rank, seed=1), normal(heads, rank, value, seed=2)
    with poisoned():
        found = absorbed_queries(q, position, rope, k_up, rope_dim)
        values = heads_values(found[..., :rank], v_up)
    each = q.view(num_rows, heads, -1)
    expected = torch.cat(
        (
            torch.einsum("bhn,hnr->bhr", each[..., :nope], k_up),
            rope.rotate(each[..., nope:], position),
        ),
        dim=2,
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        values, torch.einsum("bhr,hrv->bhv", expected[..., :rank], v_up), atol=1e-3, rtol=1e-4
    )
    assert values.is_contiguous()


def gate_of(config, num_experts, hidden, seed=0):
    weight = normal(num_experts, hidden, seed=seed)
    return SimpleNamespace(gate=weight, gate_bias=normal(num_experts, seed=seed + 1) * 0.1)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(
    "groups, groups_a_row, size", [(1, 1, 4), (4, 2, 4), (3, 2, 4), (2, 1, 12), (3, 2, 5)]
)
def test_the_gate_chooses_what_the_plain_one_does(softmax, groups, groups_a_row, size):
    config = SimpleNamespace(
        softmax_gate=softmax, num_groups=groups, num_groups_per_token=groups_a_row,
        num_experts=groups * size, num_experts_per_token=3, weights_normalised=True,
        routed_scale=2.5,
    )  # fmt: skip
    moe = gate_of(config, config.num_experts, 200)
    x, live = normal(7, 200, seed=5), torch.arange(7) != 3
    table = numbers_of(random_table(config.num_experts, 3, seed=size), config.num_experts)
    with poisoned():
        number, weight = gate(x, moe, config, live, table, 2)
    expert, expected_weight = plain_gate(x, moe, config)
    expected = name_slots(expert, live, table, 2)
    order, expected_order = number.argsort(dim=1), expected.argsort(dim=1)
    assert number.gather(1, order).equal(expected.gather(1, expected_order))
    found, expected = weight.gather(1, order), expected_weight.gather(1, expected_order)
    torch.testing.assert_close(found[live], expected[live], atol=1e-5, rtol=1e-5)


def test_scores_of_bf16_rows_have_the_precision_of_fp32():
    x, weight = normal(5, 1000, dtype=torch.bfloat16), normal(20, 1000, seed=1)
    found = gate_scores(x, weight).sum(dim=0)
    exact = x.double() @ weight.double().T
    bound = (1000 + 3) * 2**-23 * (x.double().abs() @ weight.double().abs().T)
    assert ((found.double() - exact).abs() <= bound).all()
    halved = x.double() @ weight.bfloat16().double().T
    assert not ((halved - exact).abs() <= bound).all()
    # A row that picks one weight gets all 24 bits of it.
    weight = normal(20, 16, seed=1)
    found = gate_scores(torch.eye(16, dtype=torch.bfloat16), weight).sum(dim=0)
    assert found.equal(weight.T)


@pytest.mark.parametrize("num_shared", [0, 1])
def test_pairs_are_those_of_the_live_rows(num_shared):
    num_rows, experts, width, inner = 9, 6, 24, 16
    held = [4, 0, 3]
    expert = torch.rand(num_rows, experts, generator=torch.Generator().manual_seed(1)).argsort(
        dim=1
    )[:, :2]
    live = torch.arange(num_rows) != 4
    # A slot beyond those here is another instance's.
    slot = slots_of(held, experts)[expert]
    slot[live] = torch.where(slot[live] < 0, 7, slot[live])
    slot[~live] = -1
    x, weight = normal(num_rows, width), normal(num_rows, 2, seed=1).abs()
    gate_up = normal(len(held) + num_shared, 2 * inner, width, seed=2)
    down = normal(len(held) + num_shared, width, inner, seed=3)
    grouped = GroupedExperts(TritonGemm(), gate_up, down, num_shared)
    slowly = GroupedExperts(ReferenceGemm(), gate_up, down, num_shared)
    norm, load = normal(width, seed=4), torch.arange(len(held))
    with poisoned():
        pairs = find_pairs(x, slot, load, num_shared)
        found = sum_pairs(x, grouped.run_pairs(pairs), pairs, weight, None, norm, 1e-6)
        other = sum_pairs(x, slowly.run_pairs(pairs), pairs, weight, None, norm, 1e-6)
    assert load.tolist() == [place + int((slot == place).sum()) for place in range(len(held))]
    rows = GroupedExperts(ReferenceGemm(), gate_up[:3], down[:3])
    y = torch.zeros_like(x)
    y[live] = visited(rows, x[live], slot[live], weight[live])
    if num_shared:
        gate, up = (x @ gate_up[3].T).chunk(2, dim=1)
        y += ((F.silu(gate) * up) @ down[3].T) * live[:, None]
    expected = x + y
    for out, normed in (found, other):
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(normed, rms_norm(expected, norm, 1e-6), atol=1e-4, rtol=1e-4)


class MaskedGemm:
    """Stands for DeepGEMM: scales lie slot by slot, and no row after a count is read."""

    @staticmethod
    def m_grouped_fp8_gemm_nt_masked(x, weight, out, count_E, expected):
        values, scale = x
        assert scale.stride(1) == 1 and scale.stride(2) % 4 == 0
        wide = values.float() * scale.repeat_interleave(128, 2)
        w = weight[0].float() * weight[1].repeat_interleave(128, 1).repeat_interleave(128, 2)
        for expert, count in enumerate(count_E.tolist()):
            out[expert, :count] = (wide[expert, :count] @ w[expert].T).to(out.dtype)


def test_deep_gemm_gets_only_the_rows_that_are_there():
    num_rows, width, inner = 5, 256, 128
    gemm = DeepGemm(4, MaskedGemm)
    slot = torch.tensor([[0, 1], [1, 0], [-1, -1], [1, 0], [0, 1]])
    live = torch.tensor([True, True, False, True, True])
    x = normal(num_rows, width, dtype=torch.bfloat16)
    gate_up = normal(2, 2 * inner, width, seed=2) * width**-0.5
    down = normal(2, width, inner, seed=3) * inner**-0.5
    experts = GroupedExperts(gemm, gate_up, down)
    with poisoned():
        pairs = find_pairs(x, slot, torch.zeros(2, dtype=torch.int64))
        values, scale = lay_out(x, pairs.count_E, num_rows, pairs, is_fp8=True)
        y = experts.run_pairs(pairs).view(2, num_rows, width)
    rows, counts, _ = group_rows(x[live], slot[live], 2, 4)
    expected, expected_scale = _quantise(rows.float().view(2, 4, 2, 128), (3,))
    assert pairs.count_E.tolist() == counts.tolist() == [4, 4]
    assert values[:, :4].float().equal(expected.float().view(2, 4, width))
    assert scale[:, :4].equal(expected_scale[..., 0])
    slowly = GroupedExperts(ReferenceGemm(), gate_up, down).run_grouped(rows.float(), counts)
    error = (y[:, :4].float() - slowly).norm() / slowly.norm()
    assert error < 0.09, error


def test_one_instance_alone_gives_the_reference_models_tokens(mini):
    path, oracle = mini
    cluster = GpuCluster(
        path, num_instances=1, num_parts=2, data_plane=DataPlaneConfig(device="cuda")
    )
    cluster.add_drawn((1, 130, 63), (1, 1, 1))
    experts = cluster.instances[0].step.mixture._experts[1]
    assert experts.num_shared == 1
    with poisoned():
        for _ in range(3):
            cluster.step()
    cluster.assert_exact(oracle)


def test_shared_experts_do_not_join_where_that_would_round_them():
    """DeepGEMM rounds plain experts to FP8; a plain shared expert stays plain beside them."""
    mlp = MlpWeights(PlainLinear(normal(256, 128)), PlainLinear(normal(128, 128)))
    moe = MoeWeights(normal(2, 128), None, [0, 1], [mlp, mlp], mlp)
    assert _can_join(moe, TritonGemm()) and not _can_join(moe, DeepGemm(4, MaskedGemm))
    assert not _can_join(replace(moe, shared_gate=normal(1, 128)), TritonGemm())


def test_tiles_follow_the_rows_that_an_expert_gets(monkeypatch):
    """On 8 instances of DeepSeek-V3 a quarter of what an instance has, on 32 as many."""
    pairs = SimpleNamespace(row_ES=torch.zeros(1, 8), x=normal(128, 8), count_E=None)
    seen = []
    monkeypatch.setattr(gemm_kernels, "_product", lambda *given: seen.append(given[4]))
    for rows_a_row in (0.25, 1.0):
        TritonGemm(rows_a_row).run_pairs(pairs, None, None)
    assert seen == [32, 32, 128, 128]
    assert gemm_kernels._tiles(torch.bfloat16, True, False, 32) == gemm_kernels.GATED
    assert gemm_kernels._tiles(torch.bfloat16, True, False, 128) == gemm_kernels.GATED_MANY


def test_buckets_without_links():
    table = BucketTable(4, 2, num_instances=2)
    assert len(table.all()) == len(BucketTable(4, 2).all()) + 3
    assert table.lookup(3, 0, has_links=False) == Bucket(4, 0, has_links=False)
    assert table.lookup(3, 0) == Bucket(4, 0) and table.lookup(0, 1) == Bucket(0, 1)
    assert table.lookup(0, 0, has_links=False) == Bucket(0, 0, has_links=False)
    shapes = ((3, 0, 1, False), (0, 0, 1, False), (1, 2, 1, True), (0, 1, 1, True))
    assert {table.lookup(*each) for each in shapes} <= set(table.all())
    assert all(not bucket.has_links for bucket in BucketTable(4, 2, num_instances=1).all())


class Still:
    """A random source with which nothing moves; bindings are drawn in turn."""

    def random(self):
        return 1.0

    def sample(self, seats, degree):
        return list(seats)[:degree]


@pytest.mark.parametrize("counts", [True, False])
def test_instances_without_links_stay_at_equal_epochs(mini, monkeypatch, counts):
    """Two of three have a link, then the third has one with one of them; and none has any.

    counts: False plants the fault that a step without links does not count its layers.
    """
    from data_plane.transport.gpu.cuda_ipc import GpuExchange

    path, oracle = mini
    skipped, skip = [], GpuExchange.skip_attention

    def noted(exchange, num_layers):
        skipped.append(exchange.memory.instance)
        if counts:
            skip(exchange, num_layers)

    monkeypatch.setattr(GpuExchange, "skip_attention", noted)
    cluster = GpuCluster(
        path, num_instances=3, num_parts=2, data_plane=DataPlaneConfig(device="cuda")
    )
    cluster.random = Still()
    generator = torch.Generator().manual_seed(1)
    for length, seat in ((5, 0), (70, 1), (66, 2)):
        cluster.seats = [seat]
        cluster.add(torch.randint(2, 320, (length,), generator=generator).tolist(), 1)
    cluster.seats = [0, 1, 2]
    first, second, third = cluster.requests
    failed = False
    for bindings in ((0, 1, 2), (1, 1, 2), (0, 1, 2), (0, 1, 1), (0, 2, 2)):
        for request, moe_binding in zip((first, second, third), bindings, strict=True):
            request.moe_binding = moe_binding
        try:
            cluster.step()
        except Exception:
            failed = True
            break
    assert {0, 1, 2} <= set(skipped)
    exact = not failed and all(
        oracle.judge(request.ids[: request.num_prompt], request.output).exact
        for request in cluster.requests
    )
    assert exact == counts
