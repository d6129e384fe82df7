"""Mixtures in one native call: bit-equal to their parts, on any processors, in any order."""

import os
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.model.config import ModelConfig
from data_plane.moe.experts import visit_experts
from data_plane.moe.mixture import MoeSchedule
from data_plane.native.kernels import NativeKernels
from data_plane.step.cpu_kernels import cpu_kernels
from data_plane.transport.exchange import (
    Channel,
    EpochError,
    ExchangeError,
    ExchangeTimeout,
    Flags,
    PeerLost,
)
from data_plane.transport.regions import TensorExchange
from harness.kernels.mixture_cases import (
    MAX_ROWS,
    PATIENT,
    MixtureCase,
    exchanges,
    moe_layout,
    result_of,
)
from harness.kernels.native_cases import FORMS, available_forms, native
from harness.transports.random_tables import random_table

FASTEST = (torch.float32, "")
SHAPES = [
    {},
    {"hidden_size": 40, "expert_size": 24},
    {"hidden_size": 200, "expert_size": 256, "num_shared_experts": 0},
]
"""Widths of the preset; those that are no whole blocks; those that are cut, no shared expert."""


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return ModelConfig.from_folder(tiny_checkpoint)


def assert_equal(outs, expected):
    for instance, (ours, theirs) in enumerate(zip(outs, expected, strict=True)):
        for epoch, (value, wanted) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(value, wanted), f"instance {instance}, epoch {epoch}"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_instances", [1, 2, 4])
def test_bit_equal_to_the_parts_on_any_processors(config, form, num_instances):
    native(form)
    for seed, shape in enumerate(SHAPES):
        table = seed and random_table(config.num_experts, num_instances, seed, num_layers=2)
        case = MixtureCase(config, form, num_instances, seed, table=table, **shape)
        expected = case.run(case.in_parts)
        for num_processors in (1, 2, 3):
            for schedule in MoeSchedule:
                outs = case.run(case.in_one_call(num_processors, schedule), "shm")
                assert_equal(outs, expected)


@settings(max_examples=12)
@given(
    st.sampled_from(available_forms()),
    st.sampled_from(["local", "shm", "tcp"]),
    st.integers(0, 1000),
)
def test_bit_equal_whatever_arrives_first(config, form, kind, seed):
    """Instances are late at random, so that rows are taken in waves of any sources."""
    table = random_table(config.num_experts, 4, seed, num_layers=2)
    case = MixtureCase(config, form, 4, seed, num_epochs=4, table=table)
    late = random.Random(seed)
    delays = {(i, epoch): late.choice((0, 0, 0.002)) for i in range(4) for epoch in range(4)}
    expected = case.run(case.in_parts)
    outs = case.run(case.in_one_call(2, MoeSchedule.ARRIVAL), kind, lambda *where: delays[where])
    assert_equal(outs, expected)


@pytest.mark.parametrize("how", ["torch", "native", "one call"])
def test_loads_are_of_the_slots_that_live_rows_name(config, how):
    """Own rows, and those that arrive late, visit replicas; loads are read after each layer."""
    table = random_table(config.num_experts, 3, seed=5, num_layers=2)
    case = MixtureCase(config, FASTEST, 3, seed=5, num_epochs=6, table=table)
    if how == "torch":
        case.packing.visit_experts = visit_experts
    make = case.in_one_call(2, MoeSchedule.ARRIVAL) if how == "one call" else case.in_parts
    case.run(make, "shm", lambda instance, epoch: 0.002 * instance)
    assert_equal(case.loads, case.expected_loads())


def test_experts_that_begin_while_rows_are_awaited(config):
    """An instance is 3 ms late in every layer, so the other one expects to wait."""
    case = MixtureCase(config, FASTEST, 2, seed=4, num_epochs=8)
    expected = case.run(case.in_parts)
    make = case.in_one_call(1, MoeSchedule.ARRIVAL)
    assert_equal(case.run(make, "shm", lambda instance, epoch: 0.003 * instance), expected)


@pytest.mark.parametrize("schedule", MoeSchedule)
def test_all_rows_visit_one_expert_and_none_is_live(config, schedule):
    case = MixtureCase(config, FASTEST, 2, seed=3, num_epochs=3)
    for moe in case.layers:
        moe.gate_bias[:] = -1e4
        moe.gate_bias[:4] = 1e4
    for of_instance in case.rows:
        of_instance[1][2][:] = False
    expected = case.run(case.in_parts)
    assert_equal(case.run(case.in_one_call(2, schedule), "shm"), expected)


class Two:
    """Two instances of which only instance 0 runs its mixture in one call."""

    def __init__(self, config, kind, schedule=MoeSchedule.BARRIER, limits=PATIENT, processors=2):
        self.case = MixtureCase(config, FASTEST, 2, seed=1)
        layout = moe_layout(self.case.model, self.case.dtype)
        self.ends = [TensorExchange(end, layout) for end in exchanges(kind, 2, layout, limits)]
        self.mixtures = self.case.in_one_call(processors, schedule)(self.ends[0], 0)

    def run(self):
        hidden = self.case.model.hidden_size
        rows = torch.ones(3, hidden), torch.randn(3, hidden), torch.ones(3, dtype=torch.bool)
        return result_of(self.mixtures.phases(*rows, 0))

    def close(self):
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("kind", ["local", "shm"])
@pytest.mark.parametrize("schedule", MoeSchedule)
def test_a_peer_that_sends_nothing_ends_the_wait_within_its_limit(config, kind, schedule):
    two = Two(config, kind, schedule, replace(PATIENT, exchange_timeout_ms=300))
    began = time.monotonic()
    with pytest.raises(ExchangeTimeout, match="DISPATCH of epoch 1"):
        two.run()
    assert time.monotonic() - began < 10
    two.close()


@pytest.mark.parametrize("kind", ["local", "shm"])
@pytest.mark.parametrize("schedule", MoeSchedule)
def test_a_peer_that_is_gone_is_lost(config, kind, schedule):
    two = Two(config, kind, schedule)
    timer = threading.Timer(0.1, two.ends[1].close)
    timer.start()
    with pytest.raises(PeerLost):
        two.run()
    timer.join()
    two.close()


@pytest.mark.parametrize("kind", ["local", "shm"])
@pytest.mark.parametrize("schedule", MoeSchedule)
def test_rows_of_a_later_epoch_are_an_error(config, kind, schedule):
    """The region of epoch 1 was put again for epoch 3 before it was read."""
    two = Two(config, kind, schedule, replace(PATIENT, exchange_timeout_ms=2000))
    two.ends[1].outgoing(Channel.DISPATCH, 0, 3)["count"][0] = 0
    two.ends[1].put(Channel.DISPATCH, 0, 3, 0)
    with pytest.raises(EpochError, match="epoch 3"):
        two.run()
    two.close()


def test_a_count_above_the_bound_is_an_error_and_the_mixture_works_after_it(config):
    two = Two(config, "shm")
    for epoch, count in ((1, MAX_ROWS + 1), (2, 0)):
        two.ends[1].outgoing(Channel.DISPATCH, 0, epoch)["count"][0] = count
        two.ends[1].put(Channel.DISPATCH, 0, epoch, 0)
    with pytest.raises(ExchangeError, match=f"finds {MAX_ROWS + 1} rows"):
        two.run()
    two.ends[1].put(Channel.COMBINE, 0, 2, MAX_ROWS)
    assert two.run().shape[0] == 3
    two.close()


@pytest.mark.parametrize("what", ["experts", "shared"])
@pytest.mark.parametrize("schedule", MoeSchedule)
def test_what_a_peer_waits_for_runs_first(config, schedule, what, monkeypatch):
    """When the peer's sums leave, weights that only own rows read become NaN: they are read later.

    With a barrier they have been read by then (decision 0044).
    """
    two = Two(config, "shm", schedule, processors=1)
    moe, own, end, peer = two.case.layers[0], [0, 1, 4, 5], *two.ends
    moe.gate_bias[:] = -1e4
    moe.gate_bias[own] = 1e4
    spoilt = [moe.shared] if what == "shared" else [moe.mlps[expert] for expert in own]
    flags, put = end.exchange.flags, end.put
    monkeypatch.setattr(
        end.exchange, "flags", lambda *where: Flags(None, flags(*where).incoming)
    )  # so that sums leave by `put`

    def put_and_spoil(channel, *where):
        if channel is Channel.COMBINE:
            for mlp in spoilt:
                mlp.down.packed.view(torch.float32).fill_(torch.nan)
        put(channel, *where)

    monkeypatch.setattr(end, "put", put_and_spoil)
    rows = peer.outgoing(Channel.DISPATCH, 0, 1)
    rows["count"][0] = 2
    rows["number"][:2] = torch.tensor([2, 3, 6, 7])
    rows["weight"][:2] = 0.25
    rows["hidden"][:2] = 1.0
    peer.put(Channel.DISPATCH, 0, 1, 2)
    out = two.run()
    sums = peer.wait(Channel.COMBINE, 0, 1)["hidden"][:2]
    assert sums.isfinite().all() and sums.abs().sum() > 0
    assert out.isnan().all() == (schedule is not MoeSchedule.BARRIER)
    two.close()


def test_more_processors_than_cores_are_refused():
    native((torch.float32, ""))
    cores = len(os.sched_getaffinity(0))
    for name in ("auto", "native"):
        with pytest.raises(
            ValueError, match=f"threads_per_instance is {cores + 1}, but .* {cores}"
        ):
            cpu_kernels(name, torch.float32, cores + 1)
    kernels, _ = cpu_kernels("auto", torch.float32, cores)
    assert isinstance(kernels, NativeKernels) and kernels.processors.count == cores


def test_a_put_that_fails_leaves_no_task_behind(config, monkeypatch):
    """Rows cannot be put, while processors run the shared expert: all has ended with the error."""
    two = Two(config, "local")
    ran = []
    finish = two.mixtures._finish
    monkeypatch.setattr(two.mixtures, "_finish", lambda mixture: ran.append(finish(mixture)))
    put = two.ends[0].put

    def lost(*where):
        raise PeerLost("it is gone")

    monkeypatch.setattr(two.ends[0], "put", lost)
    with pytest.raises(PeerLost):
        two.run()
    assert ran == [None]
    monkeypatch.setattr(two.ends[0], "put", put)
    for channel in (Channel.DISPATCH, Channel.COMBINE):
        two.ends[1].outgoing(channel, 0, 2)
        two.ends[1].put(channel, 0, 2, 0)
    assert two.run().shape[0] == 3
    two.close()
