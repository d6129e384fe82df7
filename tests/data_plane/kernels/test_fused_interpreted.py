"""A fused mixture, interpreted: any order of tasks gives the same sums, and every wait ends."""

import numpy as np
import pytest
import torch

from data_plane.moe.fused import fused_obstacle
from data_plane.transport.exchange import Channel, EpochError, ExchangeTimeout
from harness.fused_cases import SMALL_TILES, FusedCase, FusedSizes
from harness.fused_roles import run_roles
from harness.fused_schedules import explore, weave
from harness.interpreter import products_in_order

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
    "FP8 weights": (FusedSizes(hidden=32, width=32, fp8_block=(16, 16)), {}),
    "one instance": (FusedSizes(num_instances=1), {}),
}


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


def test_a_peer_may_be_an_epoch_ahead():
    """Instance 0 has no rows, so only dispatches bound it; regions are two deep for that."""
    case = drawn(FusedSizes(), 2, num_rows=(0, 2))
    num_dispatches = 2 * SMALL_TILES.parts
    case.launch(1, max_tasks=num_dispatches, max_idle=1, is_last=False)
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


def sums_in_order(case, layer):
    """Compute a layer's sums in fp32 as docs/mixture.md orders them: [B, X]."""
    sizes, total = case.sizes, np.zeros(layer.x.shape, np.float32)
    seats = case.fused[0]._seat_E.tolist()

    def product(weight, x):
        acc = np.zeros(len(weight), np.float32)
        for depth in range(len(x)):
            acc += x[depth] * weight[:, depth]
        return acc

    gate_up, down = case.gate_up.numpy(), case.down.numpy()
    for row in layer.live.nonzero().flatten().tolist():
        x = layer.x[row].numpy()
        for instance in range(sizes.num_instances):
            part = np.zeros(sizes.hidden, np.float32)
            for k, expert in enumerate(layer.expert[row].tolist()):
                if seats[expert] == instance:
                    gate, up = np.split(product(gate_up[expert], x), 2)
                    inner = gate / (np.float32(1) + np.exp(-gate)) * up
                    part += layer.weight[row, k].numpy() * product(down[expert], inner)
            total[row] += part
    return torch.from_numpy(total)


@pytest.mark.parametrize("seed", [0, *in_system(*((seed,) for seed in range(1, 6)))])
def test_sums_are_equal_bit_by_bit_in_every_schedule_and_role_by_role(seed):
    """Pairs are summed by ascending k and instances ascending, whatever arrived first."""
    sizes = FusedSizes(num_experts=6, per_row=4)
    with products_in_order():
        roles = drawn(sizes, 1)
        run_roles(roles)
        roles.check()
        for layers in roles.layers:
            for layer in layers:
                assert layer.rows.out.equal(sums_in_order(roles, layer))
        case = drawn(sizes, 1)
        explore(case, seed)
        assert case.outputs().equal(roles.outputs())


# Seed 3 sees a flag that goes before its rows (tests/mutants/of_fused.py); 0 to 2 do not.
@pytest.mark.parametrize("seed", [3, *in_system(*((seed,) for seed in (0, 1, 2, 4, 5)))])
def test_woven_instances_never_see_half_a_packet(seed):
    case = drawn(FusedSizes(), 2, seed, num_rows=(2, 2))
    assert weave(case, seed) > 20
    case.check()


@pytest.mark.parametrize("seed", [2, *in_system((0,), (1,), *((seed,) for seed in range(3, 8)))])
def test_woven_programs_share_an_instances_tasks(seed):
    case = drawn(FusedSizes(width=32), 1, seed, num_rows=(4, 2))
    assert weave(case, seed, num_programs=2, chance=0.3) > 20
    case.check()


def test_turns_end_in_three_launches_and_are_replayed():
    case = drawn(FusedSizes(), 2)
    for _ in range(2):
        turns = [fused.turns(case.rows(i), case.experts[i]) for i, fused in enumerate(case.fused)]
        num_rounds = 0
        while turns:
            turns = [turn for turn in turns if next(turn, StopIteration) is not StopIteration]
            num_rounds += 1
        assert num_rounds <= 3
    case.check()
    for fused in case.fused:
        sweeps, waves, polls = fused.statistic[:3].tolist()
        assert waves <= 4 and polls <= 6 and sweeps <= 16, fused.statistic


def lonely(num_tasks):
    """Let instance 1 run some tasks, and instance 0 then wait for it."""
    case = drawn(FusedSizes(), 1, num_rows=(4, 4), visited=[2, 3])
    if num_tasks:
        case.launch(1, max_tasks=num_tasks, max_idle=1, is_last=False)
    return case


@pytest.mark.parametrize(
    "num_tasks, channel, word",
    [(0, Channel.DISPATCH, [3, 1, 1, 0]), (4, Channel.COMBINE, [4, 1, 1, 0])],
)
def test_a_peer_that_does_not_come_is_the_error(num_tasks, channel, word):
    case = lonely(num_tasks)
    case.launch(0, max_idle=10)
    assert case.exchanges[0].error.tolist() == word and case.epoch(0) == 0
    assert int(case.fused[0].statistic[2]) <= 12
    with pytest.raises(ExchangeTimeout, match=f"awaits {channel.name} of instance 1, epoch 1"):
        case.exchanges[0].check()


def test_after_an_error_nothing_is_put_and_the_first_error_stays():
    case = lonely(0)
    case.launch(0, max_tasks=1, max_idle=1, is_last=False)
    case.exchanges[0].error[0] = 1
    before = case.exchanges[1].memory.memory.clone(), case.exchanges[0].error.tolist()
    case.launch(0, max_idle=10)
    assert case.exchanges[1].memory.memory.equal(before[0])
    assert case.exchanges[0].error.tolist() == before[1]


def region_word(case, channel, is_flag, value):
    """Set the flag (int64) or the count (int32) of instance 1's first region at instance 0."""
    place = case.exchanges[0].places.channels[channel]
    memory, odd = case.exchanges[0].memory.memory, 2 + 1  # parity 1, source 1
    if is_flag:
        memory[place.flag_offset :][:32].view(torch.int64)[odd] = value
    else:
        memory[place.cell_offset :][:16].view(torch.int32)[odd] = value


@pytest.mark.parametrize("channel", [Channel.DISPATCH, Channel.COMBINE])
def test_a_flag_that_is_ahead_is_an_error(channel):
    case = lonely(4)
    region_word(case, channel, True, 3)
    case.launch(0, max_idle=10)
    with pytest.raises(
        EpochError, match=f"{channel.name} of instance 1, epoch 1, but finds epoch 3"
    ):
        case.exchanges[0].check()


def test_a_count_that_no_region_holds_is_an_error():
    case = lonely(4)
    region_word(case, Channel.DISPATCH, False, 5)
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
