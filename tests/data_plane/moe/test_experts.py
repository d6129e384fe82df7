"""The experts of one instance: fast equals slow, and the instances' sums add up to the whole."""

import math
from itertools import product
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.model.linear import Linear
from data_plane.model.weights import MlpWeights, MoeWeights
from data_plane.moe.experts import experts_forward
from data_plane.moe.mixture import SlotNames
from data_plane.moe.rows import name_slots
from harness.kernels.slow_references import reference_experts_forward
from harness.transports.random_tables import named_slots, numbers_of, random_table
from nanocp.values.experts import MAX_REPLICAS, ExpertTable

NUM_EXPERTS, HIDDEN, SIZE, PER_TOKEN = 8, 32, 48, 3


def make_moe(experts=range(NUM_EXPERTS), dtype=torch.float32, limit=math.inf):
    mlps = []
    for expert in experts:
        generator = torch.Generator().manual_seed(expert)
        gate_up = torch.randn(2 * SIZE, HIDDEN, generator=generator) / HIDDEN**0.5
        down = torch.randn(HIDDEN, SIZE, generator=generator) / SIZE**0.5
        mlps.append(MlpWeights(Linear(gate_up.to(dtype)), Linear(down.to(dtype))))
    return MoeWeights(torch.zeros(0), torch.zeros(0), list(experts), mlps, None, limit=limit)


def make_rows(num_rows, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x_TX = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    slot_TK = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :PER_TOKEN]
    return x_TX, slot_TK, torch.rand(num_rows, PER_TOKEN, generator=generator)


@settings(max_examples=40)
@given(
    st.integers(0, 40),
    st.integers(0, 1000),
    st.permutations(range(NUM_EXPERTS)),
    st.integers(0, NUM_EXPERTS),
    st.sampled_from((math.inf, 4.0, 0.25)),
)
def test_fast_and_slow_agree(num_rows, seed, order, num_here, limit):
    """Any experts in any slots, none too, with a limit and without; others' slots on both sides."""
    moe = make_moe(order[:num_here], limit=limit)
    x_TX, slot_TK, weight_TK = make_rows(num_rows, seed)
    rows = x_TX, slot_TK - seed % 3, weight_TK
    y_TX = experts_forward(*rows, moe)
    assert y_TX.shape == rows[0].shape
    torch.testing.assert_close(y_TX, reference_experts_forward(*rows, moe), atol=1e-5, rtol=1e-5)


def test_bf16_is_within_its_eight_bits_of_the_slow_reference():
    rows = make_rows(30, seed=1, dtype=torch.bfloat16)
    moe = make_moe(dtype=torch.bfloat16)
    assert experts_forward(*rows, moe).dtype == torch.bfloat16
    torch.testing.assert_close(
        experts_forward(*rows, moe), reference_experts_forward(*rows, moe), atol=3e-2, rtol=3e-2
    )


def test_a_replica_counts_once_because_rows_name_slots():
    """Receivers that looked experts up would run each replica (protocol.md, named slots)."""
    table = random_table(NUM_EXPERTS, 2, seed=3, num_slots=7, num_layers=2)
    (x_TX, expert_TK, weight_TK), live_T = make_rows(20, seed=2), torch.arange(20) % 5 != 1
    names = SlotNames(table, [SimpleNamespace(moe=1)] * 2, NUM_EXPERTS)
    for layer, seat in product((0, 1), (0, 1)):
        number_TK, name = (
            name_slots(expert_TK, live_T, names.of(layer), seat), named_slots(table, layer)
        )  # fmt: skip
        for row, experts in enumerate(expert_TK.tolist()):
            expected = [name(e, row + seat) if live_T[row] else -1 for e in experts]
            assert number_TK[row].tolist() == expected
    number_TK = name_slots(expert_TK, live_T, names.of(0), 1)
    by_name, looked_up = [], []
    for seat in (0, 1):
        held = table.at(seat)
        moe, slot_of = (
            make_moe([held.get(slot, 0) for slot in range(7)]),
            {held[s]: s for s in held},
        )
        slots = [[slot_of.get(e, -1) for e in experts] for experts in expert_TK.tolist()]
        slot_TK = number_TK - 7 * seat
        by_name.append(experts_forward(x_TX, slot_TK.masked_fill(slot_TK > 6, -1), weight_TK, moe))
        looked_up.append(experts_forward(x_TX, torch.tensor(slots), weight_TK, moe))
    whole = experts_forward(x_TX, expert_TK, weight_TK, make_moe()) * live_T[:, None]
    torch.testing.assert_close(sum(by_name), whole, atol=1e-5, rtol=1e-5)
    assert (sum(looked_up) * live_T[:, None] - whole).abs().max() > 0.1
    number_ER = numbers_of(ExpertTable.of(70, [0] * 69 + [1]), 2)
    assert number_ER[:, 0].tolist() == [MAX_REPLICAS, 1], "of too many replicas the first count"
    assert number_ER[0, 1:].tolist() == list(range(63)) and number_ER[1, 1] == 69


def test_the_rows_given_are_left_alone():
    rows = x_TX, *_ = make_rows(10, seed=4)
    kept = x_TX.clone()
    experts_forward(*rows, make_moe())
    assert torch.equal(x_TX, kept)
