"""The compiled kernels against the torch functions, which are their slow references."""

import itertools
import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.attention.torch_paged import LatentKv
from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights
from data_plane.native import build, experts
from data_plane.native.attention import NativeAttention
from data_plane.native.build import NativeUnavailable
from data_plane.native.kernels import NativeKernels
from data_plane.step.cpu_kernels import TorchKernels, cpu_kernels
from harness.exact.split_decoder import page_table
from harness.kernels.kernel_cases import LENGTHS, AttentionCase
from harness.kernels.native_cases import FORMS, assert_agree, available_forms, native
from harness.kernels.slow_references import reference_attention, reference_experts_forward
from harness.transports.random_tables import named_slots, numbers_of, random_table

EXPERTS = range(4, 12)
PAGE = 64


@pytest.fixture(scope="module", params=FORMS, ids=str)
def both(request, tiny_checkpoint):
    """(dtype, config, native kernels, weights for them, torch kernels, weights for those)."""
    kernels, config = native(request.param), ModelConfig.from_folder(tiny_checkpoint)
    dtype = request.param[0]
    ours = load_weights(tiny_checkpoint, config, dtype, EXPERTS, packing=kernels)
    theirs = load_weights(tiny_checkpoint, config, dtype, EXPERTS)
    for weights in (ours, theirs):
        weights.rope.reach(6000)
    return dtype, config, kernels, ours, TorchKernels(), theirs


def rows(dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(512, 256), (96, 33), (1, 7), (65, 64), (119, 31)])
def test_linear(form, shape):
    dtype = form[0]
    weight = rows(dtype, *shape)
    layer = native(form).linear(weight)
    assert layer.shape == shape
    for num_rows in (0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 32, 33, 64, 70):
        x = rows(dtype, num_rows, shape[1])
        expected = F.linear(x.double(), weight.double()).to(dtype)
        assert_agree(layer(x), expected, dtype)
        assert_agree(layer(torch.cat((x, x), dim=1)[:, : shape[1]]), expected, dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 33])
def test_a_layer(both, num_rows):
    dtype, config, ours, our_weights, theirs, their_weights = both
    our_layer, their_layer = our_weights.layers[1], their_weights.layers[1]
    x_BX, position_B = rows(dtype, num_rows, config.hidden_size), torch.arange(num_rows) * 179
    kind = config.attention
    our_side, their_side = (
        (our_layer, our_weights.rope, config),
        (their_layer, their_weights.rope, config),
    )
    expected = theirs.attention_rows(x_BX, position_B, *their_side)
    for value, wanted in zip(
        ours.attention_rows(x_BX, position_B, *our_side), expected, strict=True
    ):
        assert_agree(value, wanted, dtype)
    latent_BC, kv_BD, q_BHD = expected
    assert_agree(ours.attention_queries(latent_BC, position_B, *our_side), q_BHD, dtype)
    o_BHV = rows(dtype, num_rows, kind.num_heads, kind.value_dim)
    expected = theirs.after_attention(x_BX, o_BHV, *their_side)
    for value, wanted in zip(ours.after_attention(x_BX, o_BHV, *our_side), expected, strict=True):
        assert_agree(value, wanted, dtype)
    slots_SD, slot_B = (
        rows(dtype, 128, kind.kv_width),
        rows(torch.float32, 128).argsort()[:num_rows],
    )
    expected_SD = slots_SD.clone()
    theirs.append(expected_SD, slot_B, kv_BD)
    ours.append(slots_SD, slot_B, kv_BD)
    assert torch.equal(slots_SD, expected_SD)
    partial_BHR = rows(dtype, num_rows, kind.num_heads, kind.kv_lora_rank)
    # fp32 partials come out of a merge.
    for partial in (partial_BHR, partial_BHR.float()):
        assert_agree(
            ours.finish_attention(partial, our_layer, config),
            theirs.finish_attention(partial, their_layer, config),
            dtype,
        )
    for limit in (math.inf, 0.125):
        our_mlp, their_mlp = (
            replace(each.moe.shared, limit=limit) for each in (our_layer, their_layer)
        )
        assert_agree(ours.gated_mlp(x_BX, our_mlp), theirs.gated_mlp(x_BX, their_mlp), dtype)
    assert_agree(
        ours.logits(x_BX, our_weights, config), theirs.logits(x_BX, their_weights, config), dtype
    )


@pytest.mark.parametrize(
    "rules",
    [{},
     {"num_groups": 1, "num_groups_per_token": 1},
     {"softmax_gate": True, "weights_normalised": False},
     {"num_experts_per_token": 1, "routed_scale": 1.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("has_bias", [True, False])
def test_gate(both, rules, has_bias):
    dtype, config, ours, our_weights, theirs, their_weights = both
    config = replace(config, **rules)
    x_BX = rows(dtype, 40, config.hidden_size)
    our_moe, their_moe = our_weights.layers[1].moe, their_weights.layers[1].moe
    bias = rows(torch.float32, config.num_experts) if has_bias else None
    expert_BK, weight_BK = theirs.gate(x_BX, replace(their_moe, gate_bias=bias), config)
    our_expert_BK, our_weight_BK = ours.gate(x_BX, replace(our_moe, gate_bias=bias), config)
    assert torch.equal(our_expert_BK, expert_BK)
    torch.testing.assert_close(our_weight_BK, weight_BK, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("num_rows", "limit"), [(1, math.inf), (5, 0.125), (40, math.inf)])
def test_experts(both, num_rows, limit):
    """Own rows, and rows from one of two others; some rows have no expert here."""
    dtype, config, ours, our_weights, theirs, their_weights = both
    x_TX, generator = (
        rows(dtype, num_rows, config.hidden_size),
        torch.Generator().manual_seed(num_rows),
    )
    expert_TK = (
        torch.rand(num_rows, config.num_experts, generator=generator)
        .argsort(dim=1)[:, :3]
        .contiguous()
    )
    weight_TK = torch.rand(num_rows, 3, generator=generator)
    if num_rows > 1:
        expert_TK[1] = torch.tensor([0, 3, 12])
    # In bf16 this reference rounds after every expert and the kernel once, hence the tolerance
    # below.
    moe = replace(their_weights.layers[1].moe, limit=limit)
    first = moe.held[0]
    expected = reference_experts_forward(x_TX, expert_TK - first, weight_TK, moe)
    own = torch.arange(num_rows)[::2]
    sent = torch.arange(num_rows)[1::2]
    for kernels, weights in ((ours, our_weights), (theirs, their_weights)):
        arrived, answers = (
            [region(dtype, num_rows, 3, config.hidden_size) for _ in range(2)] for _ in range(2)
        )
        fields = {"hidden": x_TX, "number": expert_TK, "weight": weight_TK}
        for name, tensor in fields.items():
            arrived[1][name][: len(sent)] = tensor[sent]
        arrived[0]["count"][0], arrived[1]["count"][0] = 0, len(sent)
        own_sum, counts = kernels.visit_experts(
            *(x_TX, expert_TK, weight_TK, own, [*zip(arrived, answers, strict=True)]),
            *(replace(weights.layers[1].moe, limit=limit), first),
        )
        assert counts == [0, len(sent)] and answers[0]["hidden"].isnan().all()
        assert answers[1]["hidden"][len(sent) :].isnan().all()
        value = torch.empty_like(expected)
        value[own], value[sent] = own_sum, answers[1]["hidden"][: len(sent)]
        torch.testing.assert_close(
            value, expected, atol=2e-6 if dtype == torch.float32 else 3e-2, rtol=1e-5
        )
        assert num_rows == 1 or (value[1] == 0).all()


def test_an_expert_may_come_while_addresses_are_looked_up(both, monkeypatch):
    _, _, kernels, weights, _, _ = both
    moe = weights.layers[1].moe
    moe = replace(moe, mlps=[*moe.mlps])
    number, look_up = len(moe.mlps), experts.packed_address

    def slow(weight):
        moe.mlps[number:] = [moe.mlps[0]]
        return look_up(weight)

    monkeypatch.setattr(experts, "packed_address", slow)
    found = kernels.addresses_of_experts(moe)
    assert len(found.gate_up) == len(found.down) == number


def region(dtype, max_rows, per_token, hidden):
    """A region full of values that must not be read."""
    return {
        "count": torch.full((1,), -1, dtype=torch.int32),
        "number": torch.full((max_rows, per_token), -1),
        "weight": torch.full((max_rows, per_token), float("nan")),
        "hidden": torch.full((max_rows, hidden), float("nan"), dtype=dtype),
    }


@settings(max_examples=40)
@given(
    st.sampled_from(available_forms()),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_rows_on_their_way_to_experts_and_back(form, num_rows, num_instances, per_token, seed):
    """Every region gets the same bytes from the kernels as from the torch functions.

    Experts are in any slots, some rows are dead, and some instances get no row.
    """
    hidden, num_experts, generator = 21, 4 * num_instances, torch.Generator().manual_seed(seed)
    table = random_table(num_experts, num_instances, seed)
    number_ER, num_slots = numbers_of(table, num_experts), table.num_slots
    dtype, ours, theirs = form[0], native(form), TorchKernels()
    x_BX = torch.randn(num_rows, hidden, generator=generator).to(dtype)
    expert_BK = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)
    expert_BK = expert_BK[:, :per_token]
    weight_BK = torch.rand(num_rows, per_token, generator=generator)
    live_B = torch.rand(num_rows, generator=generator) < 0.8
    instance = seed % num_instances
    shared_BX = torch.randn(num_rows, hidden, generator=generator).to(dtype) if seed % 3 else None
    sides = []
    for moves in (ours, theirs):
        regions = [region(dtype, num_rows, per_token, hidden) for _ in range(num_instances)]
        regions[instance] = None
        number_BK = moves.name_slots(expert_BK.clone(), live_B, number_ER, instance)
        rows_NB, counts = moves.pack_rows(x_BX, number_BK, weight_BK, num_slots, regions)
        packed = [rows_NB[number, :count] for number, count in enumerate(counts)]
        # As if every expert returned its input: what was sent comes back.
        sums = [each if count else None for each, count in zip(regions, counts, strict=True)]
        y_BX = moves.combine_sums(x_BX, shared_BX, x_BX[packed[instance]], rows_NB, counts, sums)
        sides.append((packed, counts, regions[:instance] + regions[instance + 1 :], y_BX))
    torch.testing.assert_close(sides[0][:-1], sides[1][:-1], atol=0, rtol=0, equal_nan=True)
    # Every row comes back once from each of its owners.
    name = named_slots(table, 0)
    rows_of = enumerate(expert_BK.tolist(), instance)
    owners = [{name(expert, row) // num_slots for expert in experts} for row, experts in rows_of]
    visits_B = live_B * torch.tensor([*map(len, owners)])
    expected_BX = x_BX.double() * (1 + visits_B[:, None]) + (
        0 if shared_BX is None else shared_BX.double()
    )
    for *_, y_BX in sides:
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y_BX.double(), expected_BX, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=20)
@given(st.data(), st.integers(1, 19), st.sampled_from([(64, 32), (96, 64), (160, 160)]))
def test_attention(form, data, num_heads, widths):
    """Any lengths, frames in any order, an empty row, any number of heads."""
    kernels, dtype, (width, rank) = native(form), form[0], widths
    lengths = data.draw(st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    frames = [
        torch.randperm(12, generator=generator)[: -(-length // PAGE)].tolist() for length in lengths
    ]
    pool = torch.randn(12, PAGE, width, generator=generator).to(dtype)
    q = torch.randn(len(lengths), num_heads, width, generator=generator).to(dtype)
    attention = NativeAttention(kernels.attention_call, rank)
    plan = attention.plan(page_table(frames), torch.tensor(lengths, dtype=torch.int32))
    out, lse = attention.run(q, pool, plan, 0.2)
    expected, expected_lse = reference_attention(q, pool, frames, lengths, 0.2, LatentKv(rank))
    assert out.dtype == dtype
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    tolerance = 5e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_attention_through_the_interface(name, form):
    dtype = form[0]
    case = AttentionCase(LENGTHS[name], heads=8, rank=64, rope=32, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    case.check(*case.run(NativeAttention(native(form).attention_call, 64)), tolerance, tolerance)


def test_scores_far_apart_do_not_overflow():
    for dtype, instructions in available_forms():
        kernels = NativeKernels(dtype, instructions)
        attention = NativeAttention(kernels.attention_call, 32)
        pool = torch.full((2, PAGE, 64), 30.0).to(dtype)
        pool[0] = -30.0
        q = torch.full((1, 2, 64), 30.0).to(dtype)
        plan = attention.plan(page_table([[0, 1]]), torch.tensor([2 * PAGE], dtype=torch.int32))
        out, lse = attention.run(q, pool, plan, 1.0)
        assert (out == 30).all() and torch.isfinite(lse).all()


def test_the_choice_says_why(monkeypatch, tmp_path):
    assert cpu_kernels("torch", torch.float32, 1)[1] == "torch, as configured"
    monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset({"avx512f"}))
    with pytest.raises(
        ValueError, match="cpu_kernels is native, but native kernels are unavailable"
    ):
        cpu_kernels("native", torch.float32, 1)
    neither = "for avx512 the CPU has no avx512bw; for avx2 the CPU has no avx2"
    assert neither in cpu_kernels("auto", torch.float32, 1)[1]
    with pytest.raises(ValueError, match=r"cpu_kernels is avx2, .* for avx2 the CPU has no avx2"):
        cpu_kernels("avx2", torch.float32, 1)


def test_a_cpu_without_avx512_gets_avx2(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        native((dtype, "avx2"))
        assert cpu_kernels("avx2", dtype, 1)[1] == "native (avx2), as configured"
        with monkeypatch.context() as patched:
            patched.setattr(build, "_cpu_flags", lambda: frozenset({"avx2", "fma"}))
            kernels, why = cpu_kernels("auto", dtype, 1)
            assert why == "native (avx2), which this CPU can run"
            assert kernels.instructions == "avx2"


@pytest.mark.parametrize("is_bf16", [False, True])
def test_whoever_asks_for_it_gets_avx2_of_a_cpu_that_has_more(monkeypatch, is_bf16):
    sets = build._SETS.values()
    flags = [each.bf16 or () for each in sets] + [each.fp32 or () for each in sets]
    monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset(itertools.chain(*flags)))
    monkeypatch.setattr(build, "_load", lambda sources, compiler: compiler)
    assert build.native_library(is_bf16, "avx2") == (build._SETS["avx2"].compiler, "avx2")


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    native((torch.float32, ""))
    build._load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "nanocp"
    build._load.cache_clear()


def test_they_are_built_once_and_kept(empty_cache, monkeypatch, tmp_path):
    quick = tmp_path / "c++"
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick))
    NativeKernels(torch.float32)
    (built,) = empty_cache.glob("kernels-*.so")
    build._load.cache_clear()
    monkeypatch.setenv("CXX", "/bin/false")
    NativeKernels(torch.float32)
    assert (
        sorted(path.suffix for path in empty_cache.iterdir()) == [".lock", ".so"] and built.exists()
    )


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/bin/false", "/bin/false failed: it printed no reason"), ("no-such", "no C\\+\\+ compiler")],
)
def test_without_a_compiler_there_is_torch(empty_cache, monkeypatch, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NativeUnavailable, match=reason):
        NativeKernels(torch.float32)
    assert isinstance(cpu_kernels("auto", torch.float32, 1)[0], TorchKernels)
    assert not list(empty_cache.glob("*.so"))


def test_a_cache_that_cannot_be_written_is_a_reason(empty_cache, monkeypatch):
    empty_cache.write_text("not a folder")
    with pytest.raises(
        NativeUnavailable, match=f"cannot be kept in {os.path.realpath(empty_cache)}"
    ):
        NativeKernels(torch.float32)
