"""A fused mixture, interpreted: any order of tasks gives the same rows, and every wait ends."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton

from data_plane.moe.fused import kernel as fused_kernel
from data_plane.moe.fused.mixture import fused_obstacle
from data_plane.moe.fused.state import ROUTE
from data_plane.moe.gpu.rows import route_rows
from data_plane.moe.rows import name_slots
from data_plane.transport.exchange import Channel, EpochError, ExchangeTimeout, TermOver
from data_plane.transport.gpu.peer_memory import PeerMemory
from harness.gpu_stand_ins.interpreter import products_in_order
from harness.kernels.fused_cases import FusedCase, FusedSizes, run_turns
from harness.kernels.fused_roles import run_gate, run_queues, run_roles
from harness.kernels.fused_schedules import explore, weave

FOUR = FusedSizes(num_instances=4, num_experts=8, per_row=3, max_rows=2)
SHAPES = {
    "any rows": (FusedSizes(), {}),
    "every slot, two column tiles": (FusedSizes(width=32), {"num_rows": (4, 4)}),
    "no row": (FusedSizes(), {"num_rows": (0, 0)}),
    "an instance without rows": (FusedSizes(), {"num_rows": (0, 4)}),
    "none live": (FusedSizes(), {"is_live": False}),
    "one expert for all": (FusedSizes(per_row=1, max_rows=6), {"visited": [3]}),
    "all experts of one instance": (FusedSizes(), {"visited": [0, 1]}),
    "experts that do not divide": (FusedSizes(num_experts=5, per_row=3), {}),
    "replicas": (FusedSizes(num_experts=5, per_row=3, redundant=2), {}),
    "FP8 weights": (FusedSizes(hidden=32, width=32, fp8_block=(16, 16)), {}),
    "one instance, no shared expert": (FusedSizes(num_instances=1, num_shared=0), {}),
    "two shared experts, two row blocks": (FusedSizes(max_rows=6, num_shared=2),
                                           {"num_rows": (6, 1)}),
}  # fmt: skip


def drawn(sizes, num_epochs, seed=0, **rows):
    case = FusedCase(sizes, seed)
    for _ in range(num_epochs):
        case.draw(**rows)
    return case


@pytest.mark.parametrize("name", SHAPES)
def test_any_order_of_tasks_gives_the_sums(name):
    sizes, rows = SHAPES[name]
    case = drawn(sizes, 1, **rows)
    explore(case, seed=1)
    case.check()


def in_system(*values):
    """Mark values that only `make test-system` tries."""
    return [pytest.param(*value, marks=pytest.mark.system) for value in values]


@pytest.mark.parametrize(
    "seed, held_back",
    [(0, 1), *in_system(*((seed, late) for seed in range(5) for late in (None, 0)))],
)
def test_epochs_overlap_and_an_instance_may_be_late(seed, held_back):
    case = drawn(FusedSizes(width=32 if seed else 16), 3, seed, num_rows=(2, 2))
    explore(case, seed, held_back=held_back)
    case.check()


def flags(case, channel, target):
    """Flags of the regions at an instance: [parity, source] int64, two instances."""
    offset = case.exchanges[target].places.channels[channel].flag_offset
    return case.exchanges[target].memory.memory[offset:][:32].view(torch.int64).view(2, 2)


def send_rows(case, instance):
    """Let an instance run its first tasks, up to the last of its dispatches in epoch 1."""
    for _ in range(40):
        if all(flags(case, Channel.DISPATCH, target)[:, instance].any() for target in (0, 1)):
            return
        case.launch(instance, max_tasks=1, max_idle=1, is_last=False)
    raise AssertionError("its rows are not announced")


def test_a_peer_may_be_an_epoch_ahead():
    """Instance 0 has no rows, so only dispatches bound it; regions are two deep for that."""
    case = drawn(FusedSizes(), 2, num_rows=(0, 2))
    send_rows(case, 1)
    case.launch(0, max_idle=1, is_last=False)
    assert case.epoch(0) == 1 and case.epoch(1) == 0
    case.launch(0, max_idle=1, is_last=False)
    explore(case, seed=0)
    case.check()


@pytest.mark.parametrize("seed", [0, *in_system(*((seed,) for seed in range(1, 5)))])
def test_four_instances(seed):
    case = drawn(FOUR, 1 if seed == 0 else 3, seed)
    explore(case, seed)
    case.check()
    assert all(int(fused.statistic[1]) <= 3 * 4 for fused in case.fused), "more waves than sources"


GATES = {
    "sigmoid": {},
    "sigmoid, groups": {"num_groups": 3, "groups_per_row": 2},
    "softmax": {"softmax_gate": True, "weights_normalised": False},
    "softmax, groups": {"softmax_gate": True, "num_groups": 4, "groups_per_row": 2},
}


@pytest.mark.parametrize("name", GATES)
def test_the_gate_chooses_as_the_plain_one_and_routes_likewise(name):
    """Neither experts nor the hidden width fill their tiles, and rows have two blocks."""
    sizes = FusedSizes(num_experts=12, per_row=3, max_rows=6, hidden=40, num_shared=0)
    case = drawn(replace(sizes, **GATES[name]), 1, num_rows=(6, 6))
    run_gate(case, 0)
    run_queues(case, 0, ROUTE)
    layer, state = case.layers[0][0], case.fused[0].state()
    named = name_slots(layer.expert, layer.live, case.number, 0)
    assert state.chosen.equal(named)
    torch.testing.assert_close(state.weight, layer.weight)
    expected = route_rows(named, case.num_here, 2, sizes.max_rows)
    assert state.count.equal(expected[0]) and state.slot.equal(expected[2])
    for target, count in enumerate(state.count.tolist()):
        assert state.row[target, :count].equal(expected[1][target, :count])


def test_of_equal_scores_the_first_wins_and_nan_chooses_experts_too():
    case = drawn(FusedSizes(num_experts=12, per_row=3, num_shared=0), 1, num_rows=(2, 0))
    layer = case.layers[0][0]
    case.gate[:], layer.bias[:] = case.gate[7], torch.tensor([0.0] * 5 + [1.0] * 7)
    layer.x[1] = float("nan")
    layer.live[:] = True
    run_gate(case, 0)
    chosen = case.fused[0].state().chosen
    assert chosen[0].tolist() == [5, 6, 7]
    assert len(set(chosen[1].tolist())) == 3 and 0 <= chosen[1].min() <= chosen[1].max() < 12


def sums_in_order(case, instance):
    """Compute an instance's results in fp32 as docs/develop/mixture.md orders them: [B, X]."""
    (layer,), sizes = case.layers[instance], case.sizes
    state = case.fused[instance].state()
    total = np.zeros(layer.x.shape, np.float32)

    def product(weight, x):
        acc = np.zeros(len(weight), np.float32)
        for depth in range(len(x)):
            acc += x[depth] * weight[:, depth]
        return acc

    def run(expert, x):
        gate, up = np.split(product(case.gate_up[expert].numpy(), x), 2)
        inner = gate / (np.float32(1) + np.exp(-gate)) * up
        return product(case.down[expert].numpy(), inner)

    for row, x in enumerate(layer.x.numpy()):
        for holder in range(sizes.num_instances) if layer.live[row] else ():
            part = np.zeros(sizes.hidden, np.float32)
            for k, number in enumerate(state.chosen[row].tolist()):
                seat, slot = divmod(number, case.num_here)
                if seat == holder:
                    part += state.weight[row, k].numpy() * run(case.held[seat][slot], x)
            total[row] += part
        shared = np.zeros(sizes.hidden, np.float32)
        for expert in range(sizes.num_experts, len(case.gate_up)):
            shared += run(expert, x)
        total[row] = layer.residual[row].numpy() + (shared + total[row])
    return torch.from_numpy(total)


@pytest.mark.parametrize("seed", [0, *in_system(*((seed,) for seed in range(1, 6)))])
def test_sums_are_equal_bit_by_bit_in_every_schedule_and_role_by_role(seed):
    """Pairs are summed by ascending k and instances ascending, whatever arrived first."""
    sizes = FusedSizes(num_experts=6, per_row=6, redundant=1)
    with products_in_order():
        roles = drawn(sizes, 1)
        run_roles(roles)
        roles.check()
        for instance, (layer,) in enumerate(roles.layers):
            assert layer.rows.out.equal(sums_in_order(roles, instance))
        case = drawn(sizes, 1)
        explore(case, seed)
        assert case.outputs().equal(roles.outputs())


# Seed 1 sees a flag that goes before its rows (tests/mutants/of_fused.py); 0 and 2 to 14 do not.
@pytest.mark.parametrize("seed", [1, *in_system((0,), *((seed,) for seed in range(2, 6)))])
def test_woven_instances_never_see_half_a_packet(seed):
    case = drawn(FusedSizes(), 2, seed, num_rows=(2, 2))
    assert weave(case, seed) > 20
    case.check()


@pytest.mark.system
@pytest.mark.parametrize("seed", range(3))
def test_four_woven_instances_never_see_half_a_packet(seed):
    case = drawn(FOUR, 2, seed)
    assert weave(case, seed) > 40
    case.check()


# Seed 4 sees a task that two programs draw (tests/mutants/of_fused.py).
@pytest.mark.parametrize("seed", [4, *in_system(*((seed,) for seed in (0, 1, 2, 3, 5, 6, 7)))])
def test_woven_programs_share_an_instances_tasks(seed):
    case = drawn(FusedSizes(width=32), 1, seed, num_rows=(4, 2))
    assert weave(case, seed, num_programs=2, chance=0.3) > 20
    case.check()


@pytest.mark.parametrize("num_epochs", [2, *in_system((5,))])
def test_turns_end_in_three_launches_and_are_replayed(num_epochs):
    case = drawn(FusedSizes(), num_epochs)
    for _ in range(num_epochs):
        assert run_turns(case) <= 3
    case.check()
    for fused in case.fused:
        sweeps, waves, polls = (count / num_epochs for count in fused.statistic[:3].tolist())
        assert waves <= 2 and polls <= 3 and sweeps <= 8, fused.statistic


def lonely(has_sent):
    """Let instance 1 send its rows, or nothing, and instance 0 then wait for it."""
    case = drawn(FusedSizes(), 1, num_rows=(4, 4), visited=[2, 3])
    if has_sent:
        send_rows(case, 1)
    return case


@pytest.mark.parametrize(
    "has_sent, channel, word",
    [(False, Channel.DISPATCH, [3, 1, 1, 0]), (True, Channel.COMBINE, [4, 1, 1, 0])],
)
def test_a_peer_that_does_not_come_is_the_error(has_sent, channel, word):
    case = lonely(has_sent)
    case.launch(0, max_idle=10)
    assert case.exchanges[0].error.tolist() == word and case.epoch(0) == 0
    assert int(case.fused[0].statistic[2]) <= 12
    with pytest.raises(ExchangeTimeout, match=f"awaits {channel.name} of instance 1, epoch 1"):
        case.exchanges[0].check()


@pytest.mark.parametrize("has_sent, code", [(False, 16 + 3), (True, 16 + 4)])
@pytest.mark.parametrize("how", ["late", "looks"])
def test_a_wait_ends_with_its_term(has_sent, code, how, monkeypatch):
    """A program looks now and then whether its term is over, and at last when it gives up."""
    case = lonely(has_sent)
    case.exchanges[0].ended[0] = 1
    if how == "looks":
        monkeypatch.setattr(fused_kernel, "_POLLS_A_LOOK", triton.language.constexpr(4))
    case.launch(0, max_idle=10 if how == "late" else 400)
    assert case.exchanges[0].error.tolist() == [code, 1, 1, 0] and case.epoch(0) == 0
    assert int(case.fused[0].statistic[2]) <= 12
    with pytest.raises(TermOver, match="term 1 is over: instance 0 awaits"):
        case.exchanges[0].check()


def test_an_epoch_that_was_abandoned_is_forgotten_and_the_lost_instance_is_left_out():
    """The second of three instances is lost; rows of the others visit experts of the others."""
    sizes = FusedSizes(num_instances=3, num_experts=6)
    case = drawn(sizes, 1, num_rows=(2, 2, 2))
    case.launch(0, max_idle=1, is_last=False)
    case.layers = [[], [], []]
    for weights in case.weights:
        weights.load.zero_()  # rows that were taken in count
    memories = PeerMemory.create_all(case.exchanges[0].places, torch.device("cpu"), [0, 2])
    for memory in memories:
        case.exchanges[memory.instance].attach(memory, term=2)
        case.fused[memory.instance].begin_term()
    for run in (run_turns, partial(explore, seed=1)):
        case.draw(num_rows=(3, 0, 4), visited=[0, 1, 4, 5])
        case.layers[1].clear()
        run(case)
        case.check()


def test_after_an_error_nothing_is_put_and_the_first_error_stays():
    case = lonely(has_sent=False)
    case.launch(0, max_tasks=1, max_idle=1, is_last=False)
    case.exchanges[0].error[0] = 1
    before = case.exchanges[1].memory.memory.clone(), case.exchanges[0].error.tolist()
    case.launch(0, max_idle=10)
    assert case.exchanges[1].memory.memory.equal(before[0])
    assert case.exchanges[0].error.tolist() == before[1]


@pytest.mark.parametrize("channel", [Channel.DISPATCH, Channel.COMBINE])
def test_a_flag_that_is_ahead_is_an_error(channel):
    case = lonely(has_sent=True)
    flags(case, channel, 0)[1, 1] = 3
    case.launch(0, max_idle=10)
    with pytest.raises(
        EpochError, match=f"{channel.name} of instance 1, epoch 1, but finds epoch 3"
    ):
        case.exchanges[0].check()


def test_a_count_that_no_region_holds_is_an_error():
    case = lonely(has_sent=True)
    place = case.exchanges[0].places.channels[Channel.DISPATCH]
    counts = case.exchanges[0].memory.memory[place.cell_offset :][:16].view(torch.int32)
    counts.view(2, 2)[1, 1] = 5
    case.launch(0, max_idle=10)
    with pytest.raises(EpochError, match="epoch 1, but finds a count of 5 rows"):
        case.exchanges[0].check()


class Gpu:
    """What torch says of a GPU."""

    major, minor, shared_memory_per_block_optin = 9, 0, 232_448


def test_what_cannot_run_is_named():
    assert fused_obstacle(Gpu, torch.bfloat16, "auto", 1) == ""
    for arguments, words in (
        ((Gpu, torch.bfloat16, "auto", 2), "GPUs of one node, and the cluster has 2"),
        ((Gpu, torch.bfloat16, "deep_gemm", 1), "expert_backend is deep_gemm"),
    ):
        assert words in fused_obstacle(*arguments)
    old = type("Old", (Gpu,), {"major": 7, "minor": 5})
    assert "this GPU has 7.5" in fused_obstacle(old, torch.float32, "triton", 1)
    small = type("Small", (Gpu,), {"shared_memory_per_block_optin": 65_536})
    assert "gives it 65536" in fused_obstacle(small, torch.bfloat16, "auto", 1)
