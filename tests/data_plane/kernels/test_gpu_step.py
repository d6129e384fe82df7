"""The GPU's step, interpreted: several instances in turn give the reference model's tokens."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_plane.graph.buckets import Bucket
from data_plane.graph.pool_cpu import LocalPages
from data_plane.graph.pool_gpu import GpuPages, GpuPool
from data_plane.kv.frame_pool import LocalStep
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.presets import PRESETS
from data_plane.moe.fused.mixture import FusedMixtures
from data_plane.moe.gpu.rows import route_rows
from data_plane.reference.oracle import Oracle
from data_plane.step.triton_returned import merge_returned
from data_plane.transport.gpu.cuda_ipc import Region
from harness.exact.fp8_twin import make_twin
from harness.gpu.gpu_cluster import GpuCluster
from harness.kernels.kernel_cases import make_partials, poisoned
from harness.kernels.slow_references import reference_lse_merge
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.values.table_changes import PageRun

CPU = torch.device("cpu")


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 320, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("dispatch", ["exchange", "fused"])
def test_tokens_are_the_reference_models_wherever_pages_and_rows_are(mini, dispatch):
    """Unwritten memory holds NaN; a request crosses a page's edge, rows change their binding."""
    path, oracle = mini
    data_plane = DataPlaneConfig(device="cuda", dispatch_backend=dispatch)
    cluster = GpuCluster(path, num_parts=2, data_plane=data_plane)
    for ids, degree in zip(prompts(1, 130, 63), (1, 2, 2), strict=True):
        cluster.add(ids, degree)
    with poisoned():
        for _ in range(3):
            cluster.step()
    for request in cluster.requests:
        assert len(request.output) == 3
        assert oracle.judge(request.ids[: request.num_prompt], request.output).exact
    assert cluster.num_moved >= 1
    assert max(len({holder for holder, _ in request.pages}) for request in cluster.requests) == 2
    is_fused = isinstance(cluster.instances[0].step.mixture, FusedMixtures)
    assert is_fused == (dispatch == "fused")


def test_behind_a_wait_that_failed_every_row_appends_to_the_scratch_frame(mini):
    """A wait fails in the second step: what was received says where the first step appended."""
    cluster = GpuCluster(mini[0], num_parts=2)
    cluster.add(*prompts(70), degree=2)
    (request,) = cluster.requests
    holder, _ = request.pages[-1]
    frames = cluster.instances[holder].frames
    assert holder != request.moe_binding
    for has_failed in (False, True):
        cluster._stage(0)
        for instance in cluster.instances.values():
            instance.step._exchange.error[0] = int(has_failed)
        frames.layers.fill_(7.0)
        cluster._run()
        *frames_changed, scratch_changed = (frames.layers != 7.0).any(dim=(0, 2, 3)).tolist()
        assert any(frames_changed) != has_failed
        assert scratch_changed or not has_failed
        request.ids.append(5)


def test_two_lanes_over_the_same_frames_give_the_tokens_of_one(mini):
    """Each lane has tables, regions and epochs of its own; their steps take turns."""
    path, oracle = mini
    cluster = GpuCluster(path, num_parts=2, num_lanes=2)
    for ids, degree in zip(prompts(1, 70, 63), (1, 2, 2), strict=True):
        cluster.add(ids, degree)
    with poisoned():
        for _ in range(2):
            cluster.step()
    for request in cluster.requests:
        assert oracle.judge(request.ids[: request.num_prompt], request.output).exact
    first, second = (lane[0] for lane in cluster.lanes)
    assert first.frames is second.frames and first.pool is not second.pool


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A function: a preset's name -> a small checkpoint of it and its oracle."""
    return cache(lambda preset: small_checkpoint(preset, tmp_path_factory.mktemp(preset)))


def small_checkpoint(preset, path):
    shape = {
        "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64,
        "moe_intermediate_size": 32, "num_local_experts": 8, "vocab_size": 320,
    }  # fmt: skip
    fields = {name: value for name, value in shape.items() if name in PRESETS[preset]}
    make_checkpoint(path, preset, overrides=fields)
    return path, Oracle(path)


@pytest.mark.parametrize(
    "preset, dispatch",
    [("tiny-qwen3-moe", "exchange"), ("tiny-llama", "fused"), ("tiny-qwen3-moe", "fused")],
)
def test_tokens_over_kv_heads_are_the_reference_models(preset, dispatch, small):
    """With experts, and without any: then nothing is dispatched."""
    path, oracle = small(preset)
    data_plane = DataPlaneConfig(device="cuda", dispatch_backend=dispatch)
    cluster = GpuCluster(path, num_parts=2, data_plane=data_plane)
    for ids, degree in zip(prompts(1, 130, 63), (1, 2, 2), strict=True):
        cluster.add(ids, degree)
    with poisoned():
        for _ in range(3):
            cluster.step()
    for request in cluster.requests:
        assert oracle.judge(request.ids[: request.num_prompt], request.output).exact
    assert (cluster.instances[0].step.mixture is None) == (preset == "tiny-llama")


LINEAR = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_local_experts": 8, "num_experts": 8,
    "vocab_size": 320, "head_dim": 16, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
    "linear_head_dim": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("preset", ["tiny-qwen3-next", "tiny-kimi-linear"])
def test_states_of_linear_attention_layers_go_with_their_rows(preset, tmp_path):
    """One prompt of a token has no state yet; rows change their binding, and take theirs along."""
    shape = {name: value for name, value in LINEAR.items() if name in PRESETS[preset]}
    layers = ["linear_attention", "full_attention", "linear_attention"]
    make_checkpoint(
        tmp_path, preset, overrides=shape | {"num_hidden_layers": 3, "layer_types": layers}
    )
    oracle, cluster = Oracle(tmp_path), GpuCluster(tmp_path, num_parts=2)
    for ids, degree in zip(prompts(1, 70, 63), (1, 2, 2), strict=True):
        cluster.add(ids, degree)
    with poisoned():
        for _ in range(3):
            cluster.step()
    assert cluster.num_moved >= 1
    for request in cluster.requests:
        assert oracle.judge(request.ids[: request.num_prompt], request.output).exact


@pytest.fixture(scope="module")
def mini_fp8(mini_shape, tmp_path_factory):
    """A mini checkpoint in FP8, and the oracle of its de-quantised twin."""
    path = tmp_path_factory.mktemp("fp8") / "fp8"
    shape = mini_shape | {
        "n_routed_experts": 4,
        "moe_intermediate_size": 128,
        "n_group": 2,
        "topk_group": 1,
    }
    make_checkpoint(
        path, "tiny", dtype=torch.float8_e4m3fn, overrides=shape | {"num_experts_per_tok": 2}
    )
    return path, Oracle(make_twin(path, path.parent / "twin"))


@pytest.mark.parametrize("dispatch", ["exchange", "fused"])
def test_experts_stay_in_fp8_and_tokens_are_those_of_the_dequantised_model(mini_fp8, dispatch):
    """The tokens are exact, because e4m3 times its scales is exact in fp32."""
    path, oracle = mini_fp8
    data_plane = DataPlaneConfig(device="cuda", dispatch_backend=dispatch)
    cluster = GpuCluster(path, num_parts=2, data_plane=data_plane)
    for ids, degree in zip(prompts(5, 70), (1, 2), strict=True):
        cluster.add(ids, degree)
    for _ in range(2):
        cluster.step()
    experts = cluster.instances[0].step.mixture._experts[1]
    assert experts.gate_up.values.dtype == experts.down.values.dtype == torch.float8_e4m3fn
    for request in cluster.requests:
        assert oracle.judge(request.ids[: request.num_prompt], request.output).exact


CLUSTER = ClusterConfig(
    num_instances=3,
    instances_per_node=3,
    num_frames=64,
    max_model_len=40 * 64,
    bounds=BoundsConfig(max_rows=5, max_attention_rows=7, max_links=3),
)


def test_a_window_is_adopted_once_and_slots_and_lengths_are_the_cpus():
    """The second window has fewer rows and pages; rows are before, on and after their tail page."""
    random = np.random.default_rng(0)
    pool = GpuPool(CLUSTER, CPU, scratch_slot=64 * 64)
    context = pool.context(Bucket(5, 7))
    for window, num_rows in ((0, 5), (1, 2)):
        tables = pool.staging[window]
        tables.num_rows[0] = num_rows
        tables.num_sent[:] = (0, 2, 1)
        tables.send_row[1, :2], tables.send_row[2, 0] = (1, 0), 1
        pages = [
            sorted(random.choice(40, size, replace=False)) for size in (1, 7, 0, 40, 3)[:num_rows]
        ]
        for row, own in enumerate(pages):
            tables.own.fill(
                row, [PageRun(0, int(page), 1, int(random.integers(64))) for page in own]
            )
        state = pool.rows
        state.position[:] = [0, 64 * 17 + 5, 9, 64 * 39 + 63, 64 * 20]
        state.live[:] = [True, True, False, True, False]
        pool.upload(window)
        pool.adopt(window)
        pool.start()
        pool.run_adopt()
        expected = LocalStep(
            LocalPages(
                *(array[:5] for array in (tables.own.num_pages, tables.own.page, tables.own.frame))
            ),
            state.position,
            state.live,
            64 * 64,
        )
        no_error = torch.zeros(4, dtype=torch.int64)
        slots, lengths = pool.run_locate(context.own, context.position, context.live, no_error)
        assert (
            slots.tolist() == expected.slots.tolist()
            and lengths.tolist() == expected.lengths.tolist()
        )
        assert pool.run_route(context).tolist() == [
            [-1] * 5,
            [1, 0, -1, -1, -1],
            [-1, 0, -1, -1, -1],
        ]
    live = [tensor.clone() for tensor in vars_of(context.own)]
    pool.staging[0].own.page[:] = 99
    pool.upload(0)
    pool.start()
    pool.run_adopt()
    assert all(now.equal(then) for now, then in zip(vars_of(context.own), live, strict=True)), (
        "nothing was to be adopted"
    )


def vars_of(pages: GpuPages):
    return pages.num_pages, pages.page, pages.frame


def test_rows_go_to_the_instances_of_their_experts():
    """Two instances have three experts each, of any table; a row that is not live goes nowhere."""
    generator = torch.Generator().manual_seed(3)
    expert_BK = torch.rand(6, 6, generator=generator).argsort(dim=1)[:, :2].contiguous()
    live_B = torch.tensor([True, True, False, True, True, True])
    seat_E = torch.tensor([0, 1, 1, 0, 0, 1])
    with poisoned():
        count_N, row_NL, slot_NB = route_rows(
            expert_BK, live_B, seat_E, num_instances=2, num_slots=8
        )
    for instance in range(2):
        visits = ((seat_E[expert_BK] == instance).any(dim=1) & live_B).nonzero().flatten()
        assert row_NL[instance, : count_N[instance]].tolist() == visits.tolist()
        slots = torch.full((6,), -1)
        slots[visits] = torch.arange(len(visits))
        assert slot_NB[instance].tolist() == slots.tolist()


@pytest.mark.parametrize("parity", [0, 1])
def test_returned_partials_are_merged_into_their_rows(parity):
    """Row 0 went to both others, row 1 to one, row 2 nowhere, row 3 has nothing of its own."""
    partial, lse = make_partials(8, 1, 3, 20, seed=4, empty=(3, 5))
    own, own_lse, came, came_lse = partial[:4, 0], lse[:4, 0], partial[4:, 0], lse[4:, 0]
    slot_NB = torch.tensor([[-1] * 4, [1, -1, -1, 0], [0, 1, -1, -1]], dtype=torch.int32)
    # [parity, source, slot, ...], as the exchange lays fields out; what is not there is NaN.
    places = torch.full((2, 3, 2, 3, 20), float("nan")), torch.full((2, 3, 2, 3), float("nan"))
    for field, values in zip(places, (came, came_lse), strict=True):
        field[parity, 1:] = values.view(2, 2, *values.shape[1:])
    base = places[0].data_ptr()
    table, epoch = torch.tensor([0, base, 0]), torch.tensor([6 + parity])
    offsets = {"partial": 0, "lse": places[1].data_ptr() - base}
    strides = {"partial": 3 * 20 * 4, "lse": 3 * 4}
    exchange = SimpleNamespace(
        region=lambda channel, name: Region(
            table, epoch, offsets[name], 1, num_slots=2, stride=strides[name]
        )
    )
    out, out_lse = own.clone(), own_lse.clone()
    merge_returned(out, out_lse, exchange, slot_NB)
    for row, indices in enumerate([(1, 2), (3,), (), (0,)]):
        parts = torch.stack([own[row], *(came[i] for i in indices)])[:, None]
        lses = torch.stack([own_lse[row], *(came_lse[i] for i in indices)])[:, None]
        expected, expected_lse = reference_lse_merge(parts, lses)
        torch.testing.assert_close(out[row], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out_lse[row], expected_lse[0], atol=1e-5, rtol=1e-5)
