"""The GPU's step, interpreted: several instances in turn give the reference model's tokens."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_plane.graph.buckets import Bucket
from data_plane.graph.pool_cpu import LocalPages
from data_plane.graph.pool_gpu import GpuPages, GpuPool
from data_plane.kv.frame_pool import LocalStep
from data_plane.moe.fused.mixture import FusedMixtures
from data_plane.moe.gate import gate
from data_plane.moe.gpu.rows import route_rows
from data_plane.moe.rows import name_slots
from data_plane.step.triton_returned import merge_returned
from data_plane.transport.gpu.cuda_ipc import Region
from harness.gpu.gpu_cluster import GpuCluster
from harness.kernels.kernel_cases import make_partials, poisoned
from harness.kernels.slow_references import reference_lse_merge
from harness.transports.random_tables import table_of
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.overlap.policies.registry import lane_policy
from nanocp.values.table_changes import PageRun

CPU = torch.device("cpu")


def count_named(cluster):
    """Count from now on, by plain functions, the slots that live rows name: [lane, layer, N, S]."""
    names = cluster.instances[0].step.mixture._names
    layers, num_instances = list(names._of_layer), len(cluster.instances)
    shape = len(cluster.lanes), len(layers), num_instances, names.num_slots
    count_LLNS = torch.zeros(shape, dtype=torch.int64)

    def watch(mixture, seat, count_LNS):
        phases = mixture.phases

        def counted(x_BX, normed_BX, live_B, layer, *more):
            expert_BK, _ = gate(normed_BX, mixture._layers[layer].moe, cluster.model)
            number_BK = name_slots(expert_BK, live_B, mixture._names.of(layer), seat)
            counts = torch.bincount(number_BK[live_B].flatten(), minlength=count_LNS[0].numel())
            count_LNS[layers.index(layer)] += counts.view_as(count_LNS[0])
            return phases(x_BX, normed_BX, live_B, layer, *more)

        mixture.phases = counted

    for lane, count_LNS in zip(cluster.lanes, count_LLNS, strict=True):
        for seat, instance in lane.items():
            watch(instance.step.mixture, seat, count_LNS)
    return count_LLNS


@pytest.mark.parametrize(("name", "how", "lengths"), [
    ("tiny, mini", {"dispatch_backend": "exchange", "num_redundant": 2}, (1, 130, 63)),
    ("tiny, mini", {"dispatch_backend": "fused", "num_redundant": 2}, (1, 130, 63)),
    ("tiny, mini", {"num_lanes": 2, "policy": "behind_first"}, (1, 70, 63)),
    ("tiny-kimi-linear, mini", {"num_lanes": 2, "policy": "dual_batch_overlap"}, (1, 70, 63)),
    ("tiny-qwen3-moe, mini", {"dispatch_backend": "exchange"}, (1, 130, 63)),
    ("tiny-qwen3-moe, mini", {"dispatch_backend": "fused"}, (1, 130, 63)),
    ("tiny-llama, mini", {"dispatch_backend": "fused"}, (1, 130, 63)),
    ("tiny-qwen3-next, mini", {}, (1, 70, 63)),
    ("tiny-kimi-linear, mini", {}, (1, 70, 63)),
    ("tiny, mini, in FP8", {"dispatch_backend": "exchange"}, (5, 70)),
    ("tiny, mini, in FP8", {"dispatch_backend": "fused"}, (5, 70)),
], ids=str)  # fmt: skip
def test_tokens_are_the_reference_models_wherever_pages_and_rows_are(models, name, how, lengths):
    """Unwritten memory holds NaN; a request crosses a page's edge, rows change their binding.

    Each lane has tables, regions and epochs of its own. A state goes with its row, and a prompt of
    a token has none yet. Tokens over FP8 are exact, because e4m3 times its scales is, in fp32. With
    redundant slots experts move anywhere, in each layer elsewhere, and some have replicas.
    """
    model, num_lanes = models(name), how.get("num_lanes", 1)
    backend = {each: how[each] for each in how if each == "dispatch_backend"}
    keys = {each: how[each] for each in how if each not in backend}
    if "policy" in keys:
        keys["policy"] = lane_policy(keys["policy"])
    data_plane = DataPlaneConfig(device="cuda", **backend)
    cluster = GpuCluster(model.path, num_parts=2, data_plane=data_plane, **keys)
    cluster.add_drawn(lengths, (1, 2, 2)[: len(lengths)])
    num_steps = 2 if num_lanes == 2 or "FP8" in name else 3
    named_LLNS = None if "llama" in name else count_named(cluster)
    with poisoned():
        for number in range(num_steps):
            if number and "num_redundant" in how:
                cluster.table = table_of(cluster.model, cluster.cluster, seed=number)
                for lane, seat in product(cluster.lanes, cluster.seats):
                    cluster._place_experts(seat, lane[seat])
            cluster.step()
    cluster.assert_exact(model.oracle)
    assert all(len(request.output) == num_steps for request in cluster.requests)
    assert cluster.num_moved >= num_steps - 2
    assert max(len({holder for holder, _ in request.pages}) for request in cluster.requests) == 2
    mixture = cluster.instances[0].step.mixture
    assert (mixture is None) == ("llama" in name), "without experts nothing is dispatched"
    if mixture is not None:
        for lane, named_LNS in zip(cluster.lanes, named_LLNS, strict=True):
            for seat, instance in lane.items():
                assert instance.step.loads().equal(named_LNS[:, seat])
                assert not instance.step.loads().any(), "they were read already"
    if mixture is not None and "dispatch_backend" in how:
        assert isinstance(mixture, FusedMixtures) == (how["dispatch_backend"] == "fused")
    if "FP8" in name:
        experts = mixture._experts[1]
        assert experts.gate_up.values.dtype == experts.down.values.dtype == torch.float8_e4m3fn
    if num_lanes == 2:
        first, second = (lane[0] for lane in cluster.lanes)
        assert first.frames is second.frames and first.pool is not second.pool


def test_behind_a_wait_that_failed_every_row_appends_to_the_scratch_frame(mini):
    """A wait fails in the second step: what was received says where the first step appended."""
    cluster = GpuCluster(mini[0], num_parts=2)
    cluster.add_drawn((70,), (2,))
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
    """Two instances have three slots each; a row that is not live goes nowhere."""
    generator = torch.Generator().manual_seed(3)
    number_BK = torch.rand(6, 6, generator=generator).argsort(dim=1)[:, :2].contiguous()
    number_BK[2] = -1
    with poisoned():
        count_N, row_NL, slot_NB = route_rows(number_BK, 3, num_instances=2, num_slots=8)
    for instance in range(2):
        is_there = number_BK.div(3, rounding_mode="floor") == instance
        visits = is_there.any(dim=1).nonzero().flatten()
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
