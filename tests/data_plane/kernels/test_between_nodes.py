"""Puts between nodes, interpreted over a network that delivers as late as NVSHMEM allows."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from data_plane.startup.experimental import nvshmem_put
from data_plane.transport.exchange import Channel, EpochError, ExchangeError
from data_plane.transport.gpu.peer_memory import FAR, RegionPlaces
from harness.gpu.gpu_cluster import GpuCluster
from harness.gpu_stand_ins.weak_memory import MODELS, WeakMemory, apart, calls, network, run_layers
from harness.kernels.kernel_cases import poisoned
from harness.transports.exchange_cases import (
    NARROW,
    NUM_EXPERTS,
    ExchangeCase,
    expert_layout,
    layout,
)
from nanocp.config.data_plane import DataPlaneConfig

put = calls("nvshmemx_putmem_block", "qqqi")
put_signal = calls("nvshmemx_putmem_signal_block", "qqqqqii")
put_signal_later = calls("nvshmemx_putmem_signal_nbi_block", "qqqqqii")
signal_op = calls("nvshmemx_signal_op", "qqii")
fence = calls("nvshmemx_fence", "")
SET, ADD = tl.constexpr(9), tl.constexpr(10)
LINE = tl.constexpr(128)


@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_rows_arrive_whatever_is_late(seed):
    """One seed for each model of memory; thousands ran (docs/log.md)."""
    run_layers(seed)


@triton.jit
def two_puts_and_a_fence(to, source, num_bytes, signal, value, pe):
    """Right, and slower: fence is needed where a signal is no put's own."""
    put(to, source, LINE, pe)
    if num_bytes > LINE:
        put(to + LINE, source + LINE, num_bytes - LINE, pe)
    fence()
    signal_op(signal, value, SET, pe)


@triton.jit
def two_puts_without_a_fence(to, source, num_bytes, signal, value, pe):
    put(to, source, LINE, pe)
    if num_bytes > LINE:
        put(to + LINE, source + LINE, num_bytes - LINE, pe)
    signal_op(signal, value, SET, pe)


@triton.jit
def the_signal_of_the_first_put(to, source, num_bytes, signal, value, pe):
    put_signal(to, source, LINE, signal, value, SET, pe)
    if num_bytes > LINE:
        put(to + LINE, source + LINE, num_bytes - LINE, pe)


@triton.jit
def the_signal_of_the_last_put(to, source, num_bytes, signal, value, pe):
    if num_bytes > LINE:
        put(to + LINE, source + LINE, num_bytes - LINE, pe)
    put_signal(to, source, LINE, signal, value, SET, pe)


@triton.jit
def a_signal_that_every_thread_adds(to, source, num_bytes, signal, value, pe):
    put(to, source, num_bytes, pe)
    fence()
    signal_op(signal, value, ADD, pe)


@triton.jit
def an_operation_that_adds(to, source, num_bytes, signal, value, pe):
    put_signal(to, source, num_bytes, signal, value, ADD, pe)


@triton.jit
def a_source_that_is_read_later(to, source, num_bytes, signal, value, pe):
    put_signal_later(to, source, num_bytes, signal, value, SET, pe)


def is_right(protocol, seed, monkeypatch):
    monkeypatch.setattr(nvshmem_put, "put_signal", protocol)
    try:
        run_layers(seed)
    except (AssertionError, ExchangeError):
        return False
    return True


FAULTS = [
    (two_puts_without_a_fence, 0),
    (the_signal_of_the_first_put, 1),
    (the_signal_of_the_last_put, 4),
    (a_signal_that_every_thread_adds, 0),
    (an_operation_that_adds, 0),
]


@pytest.mark.parametrize(("protocol", "seed"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_protocol_that_the_network_does_not_promise_is_seen(protocol, seed, monkeypatch):
    assert not is_right(protocol, seed, monkeypatch)


@pytest.mark.parametrize("protocol", [nvshmem_put.put_signal, a_source_that_is_read_later])
def test_a_put_has_read_its_rows_when_it_returns(protocol, monkeypatch):
    """Instance 0 learns nothing of the arrival of a dispatch of no rows, and packs the next one."""
    monkeypatch.setattr(nvshmem_put, "put_signal", protocol)
    case = ExchangeCase(2, 2, own_memory=apart, is_packed=True, has_experts=True, max_rows=4)
    case.fill([], torch.Generator().manual_seed(0))
    case.live[:], case.expert[:] = False, torch.tensor([NUM_EXPERTS, NUM_EXPERTS + 1])
    *_, dispatch, run_experts, combine = case.phases()
    with network(WeakMemory({i: m.memory for i, m in case.members.items()}, 0)) as weak:
        weak.held = {0}
        for phase in (lambda i: dispatch(1), dispatch, run_experts, combine):
            phase(0)
        case.live[0] = True
        dispatch(0)
        weak.held = set()
        run_experts(1)
    came = case.all_to_all[1]._arrived_N.tolist()
    assert came == [4 if protocol is a_source_that_is_read_later else 0, 0]


def test_every_thread_makes_a_call_with_scalars_alone():
    case = ExchangeCase(2, 2, own_memory=apart, is_packed=True)
    memories = {i: member.memory for i, member in case.members.items()}
    weak, flag = WeakMemory(memories, 0), memories[0].memory.data_ptr()
    one = [TensorHandle(np.array([value]), tl.int64) for value in (flag, 1, ADD.value, 1)]
    weak.call("nvshmemx_signal_op", one)
    weak.deliver(1000)
    assert memories[1].memory[:8].view(torch.int64).item() == 128


def test_the_slower_protocol_that_is_promised_is_right(monkeypatch):
    assert is_right(two_puts_and_a_fence, 1, monkeypatch)


def test_a_wait_refuses_a_flag_that_is_newer_also_from_another_node():
    case = ExchangeCase(2, 2, own_memory=apart, is_packed=True)
    case.fill([(0, 0, (0, 1))], torch.Generator().manual_seed(0))
    place = case.places.channels[Channel.Q]
    receiver = case.members[1]
    receiver.memory.memory[place.flag_offset :][:32].view(torch.int64)[2] = 3
    receiver.wait(Channel.Q, case.num_received[1])
    with pytest.raises(EpochError, match="finds epoch 3: the region was overwritten"):
        receiver.check()


def test_after_an_error_nothing_is_forwarded():
    case = ExchangeCase(2, 2, own_memory=apart, is_packed=True)
    case.fill([(0, 0, (0, 1))], torch.Generator().manual_seed(0))
    case.members[0].error[0] = 1
    weak = WeakMemory({i: member.memory for i, member in case.members.items()}, 0)
    with network(weak):
        case.members[0].forward(Channel.Q, case.num_sent[0])
    assert not weak.pending


def test_packed_rows_lie_behind_their_count_and_do_not_overlap():
    places = RegionPlaces(layout(3, NARROW) | expert_layout(4), 3, is_packed=True)
    for channel, place in places.channels.items():
        begins = sorted((field.offset, field.row_bytes) for field in place.fields)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(begins))
        first, (last, last_bytes) = begins[0][0], begins[-1]
        assert first == place.offset + place.row_bytes == place.cell_offset + 128
        assert last + last_bytes <= first + place.row_bytes
        assert all(field.offset % 16 == 0 for field in place.fields)
        assert place.row_bytes % 128 == 0, channel
        assert place.cell_stride == place.num_slots * place.row_bytes
        assert place.stage_offset == place.offset + 2 * 3 * place.cell_stride


def test_instances_of_two_nodes_give_the_reference_models_tokens(mini):
    """A whole step: rows are packed, put, and read where they came."""
    path, oracle = mini
    data_plane = DataPlaneConfig(device="cuda", exchange_backend="nvshmem")
    cluster = GpuCluster(path, num_parts=2, data_plane=data_plane, timeout_ms=1000.0)
    assert cluster.instances[0].exchange.memory.addresses[1] == FAR
    cluster.add_drawn((1, 130, 63), (1, 2, 2))
    memories = {i: each.exchange.memory for i, each in cluster.instances.items()}
    with poisoned(), network(WeakMemory(memories, seed=1, order="oldest")):
        for _ in range(2):
            cluster.step()
    cluster.assert_exact(oracle)


def test_the_put_links_nvidias_library(tmp_path):
    """Compiled for sm_90 with the device library of NVSHMEM's wheel."""
    pytest.importorskip("nvidia.nvshmem")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parents[2] / "harness/gpu_stand_ins/nvshmem_linking.py"
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stderr
    linked = json.loads(result.stdout)
    assert linked["unresolved"] == [] and linked["stack_bytes"] == 0
    assert linked["registers"] <= 64 and linked["cubin_bytes"] < 200_000
    # The library puts by all threads, and its state must be initialised before the first put.
    assert linked["barriers"] > 0 and linked["has_device_state"]
