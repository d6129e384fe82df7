"""NVSHMEM's host calls: the library's own that need no GPU, and a stand-in for the rest."""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType

import pytest
import torch

from data_plane.startup.experimental import nvshmem, nvshmem_put
from data_plane.startup.experimental.nvshmem import (
    Nvshmem,
    NvshmemError,
    NvshmemMemory,
    load_nvshmem,
    nvshmem_choice,
    nvshmem_obstacle,
)
from data_plane.transport.exchange import ExchangeTimeout, Term, TermOver
from data_plane.transport.gpu.peer_memory import FAR, RegionPlaces
from data_plane.transport.regions import mixture_layout
from data_plane.transport.segments import Segments
from data_plane.transport.tcp.receiver import receive_in_python
from harness.gpu_stand_ins.fake_nvshmem import FakeLibrary, Group
from harness.transports.tcp_nodes import tcp_nodes
from nanocp.config.limits import LimitsConfig

CPU = torch.device("cpu")


def places(num_instances):
    return RegionPlaces(mixture_layout(2, 2, 8, "float32"), num_instances, is_packed=True)


def memory(library, segments, instance, num_instances=2, timeout_ms=20_000, lane_places=None):
    limits = LimitsConfig(start_timeout_ms=timeout_ms)
    lane_places = lane_places or places(num_instances)
    return NvshmemMemory(library, segments, instance, lane_places, limits, CPU)


two_nodes = partial(tcp_nodes, receive=receive_in_python)


def test_nvidias_library_takes_our_structures():
    """It loads without a GPU; it makes ids, and writes into the attributes where we read them."""
    environment = {}
    library = load_nvshmem("127.0.0.1:5000", environment)
    assert environment == {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "=lo"}
    assert library.version.startswith("3.") and not library.is_running
    unique_id = library.unique_id()
    assert len(unique_id) == 128 and int.from_bytes(unique_id[:4], "little") == (1 << 16) + 128
    kept, attributes = ctypes.create_string_buffer(unique_id, 128), nvshmem._Attributes()
    library._call("nvshmemx_set_attr_uniqueid_args", 1, 3, kept, ctypes.byref(attributes))
    found = attributes.arguments.unique_id
    assert (found.rank, found.num_ranks, found.id) == (1, 3, ctypes.addressof(kept))


def test_instances_meet_and_find_each_others_memory(cluster_id):
    """Instances 0 and 1 are on one node, 2 on another; each of two lanes has its own memory."""
    group = Group(3, far=[(0, 2), (1, 2)])

    def meet(instance):
        library = Nvshmem(FakeLibrary(group))
        segments = Segments(cluster_id)
        made = [memory(library, segments, instance, 3).begin_term(range(3)) for _ in range(2)]
        segments.close()
        return [each.addresses for each in made]

    with ThreadPoolExecutor(3) as pool:
        addresses = list(pool.map(meet, range(3)))
    for lane in range(2):
        own = [group.memory[pe][lane].data_ptr() for pe in range(3)]
        assert addresses[0][lane] == addresses[1][lane] == [own[0], own[1], FAR]
        assert addresses[2][lane] == [FAR, FAR, own[2]]


def test_the_id_of_a_group_reaches_another_node(cluster_id):
    """The description of a segment has it, which comes over TCP."""
    group = Group(2, far=[(0, 1)])
    with two_nodes(cluster_id) as (owner, other), ThreadPoolExecutor(2) as pool:
        first = pool.submit(memory(Nvshmem(FakeLibrary(group)), owner, 0).begin_term, [0, 1])
        memory(Nvshmem(FakeLibrary(group)), other, 1).begin_term([0, 1])
        assert first.result().addresses[1] == FAR


def test_a_group_that_deep_ep_has_started_is_joined(cluster_id):
    """By its instances as PEs; nobody makes another group, which would wait for ever."""
    group = Group(2)
    libraries = [FakeLibrary(group), FakeLibrary(group)]
    for library in libraries:
        library.nvshmemx_get_uniqueid.run = None
    with two_nodes(cluster_id) as nodes, ThreadPoolExecutor(2) as pool:
        list(pool.map(FakeLibrary.join, libraries, range(2)))
        joining = [
            pool.submit(memory(Nvshmem(library), segments, instance).begin_term, [0, 1])
            for instance, (library, segments) in enumerate(zip(libraries, nodes, strict=True))
        ]
        for seat, each in enumerate(joining):
            assert each.result().addresses[seat] == group.memory[seat][0].data_ptr()
    assert [library.num_users for library in libraries] == [2, 2]


def test_another_version_of_the_library_is_refused_before_it_starts(cluster_id):
    group = Group(2)
    libraries = [FakeLibrary(group), FakeLibrary(group)]
    libraries[1].version = (3, 3, 9)
    with two_nodes(cluster_id) as nodes, ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(memory(Nvshmem(library), segments, instance).agree)
            for instance, (library, segments) in enumerate(zip(libraries, nodes, strict=True))
        ]
        with pytest.raises(ValueError, match=r"instance 1 has NVSHMEM 3.3.9, and instance 0 NVSH"):
            starting[0].result()
        with pytest.raises(ValueError, match=r"instance 0 has NVSHMEM 3.4.5, and instance 1 NVSH"):
            starting[1].result()
    assert [library.num_users for library in libraries] == [0, 0]


def test_an_instance_alone_meets_nobody_and_there_is_one_term(cluster_id):
    library, segments = Nvshmem(FakeLibrary(Group(1))), Segments(cluster_id)
    alone = memory(library, segments, 0)
    made = alone.begin_term([0])
    assert made.addresses == [alone._alone.data_ptr(), 0] and not alone._alone.any()
    assert not library.is_started
    with pytest.raises(ValueError, match=r"fixed at the start: the service must be started again"):
        memory(library, segments, 0, 3).begin_term([0, 2])
    of_two = memory(library, segments, 0, 2)
    of_two._has_begun = True
    with pytest.raises(ValueError, match=r"fixed at the start"):
        of_two.begin_term([0, 1])


def test_a_wait_for_all_instances_is_bounded_and_ends_with_the_term(cluster_id):
    library = Nvshmem(FakeLibrary(group := Group(3), limit_s=2))
    segments = Segments(cluster_id, term=(term := Term()))
    with pytest.raises(ExchangeTimeout, match="nvshmem0-1 did not appear in 200 ms"):
        memory(library, segments, 0, timeout_ms=200).begin_term([0, 1])
    both = [Nvshmem(FakeLibrary(group, limit_s=2)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(memory(each, Segments(cluster_id), seat, 2, 1000).begin_term, [0, 1])
            for seat, each in enumerate(both)
        ]
        for each in starting:
            with pytest.raises(ExchangeTimeout, match="NVSHMEM did not start on all instances in"):
                each.result()
    term.end(1)
    with pytest.raises(TermOver):
        memory(library, segments, 0).begin_term([0, 1])


def test_a_call_that_fails_is_named(cluster_id):
    group = Group(1)
    library, full = Nvshmem(fake := FakeLibrary(group)), Nvshmem(crowded := FakeLibrary(group))
    fake.nvshmemx_get_uniqueid.run = lambda made: 7
    with pytest.raises(NvshmemError, match="nvshmemx_get_uniqueid failed: error 7"):
        library.unique_id()
    crowded.nvshmem_calloc.run = lambda num_bytes, size: None
    with pytest.raises(NvshmemError, match="no room for 64 bytes: raise NVSHMEM_SYMMETRIC_SIZE"):
        full.allocate(64)
    library.initialise(5)
    assert fake.modules == [5]


@pytest.mark.parametrize(("has_far_peers", "environment", "words"), [
    (False, {}, ""),
    (True, {}, "NVSHMEM would go by ibrc, and this machine has no InfiniBand"),
    (True, {"NVSHMEM_IB_ENABLE_IBGDA": "1"}, "NVSHMEM would go by ibgda"),
    (True, {"NVSHMEM_REMOTE_TRANSPORT": "none"}, "NVSHMEM_REMOTE_TRANSPORT is none"),
    (True, {"NVSHMEM_REMOTE_TRANSPORT": "ibdevx"}, "NVSHMEM would go by ibdevx"),
    (True, {"NVSHMEM_REMOTE_TRANSPORT": "efa"}, "is 'efa'; NVSHMEM has ibrc, ibgda"),
    (True, {"NVSHMEM_REMOTE_TRANSPORT": "libfabric"}, ""),
    (False, {"NVSHMEM_REMOTE_TRANSPORT": "none"}, ""),
])  # fmt: skip
def test_what_would_end_the_process_is_refused(tmp_path, has_far_peers, environment, words):
    (tmp_path / "efa_0" / "device").mkdir(parents=True)
    (tmp_path / "efa_0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    obstacle = nvshmem_obstacle(has_far_peers, True, False, environment, devices=tmp_path)
    assert words in obstacle and bool(words) == bool(obstacle)


def test_gpus_that_cannot_take_part_are_refused(tmp_path):
    far = {"NVSHMEM_REMOTE_TRANSPORT": "libfabric"}
    assert "needs a Hopper GPU or later" in nvshmem_obstacle(True, False, False, far, tmp_path)
    assert nvshmem_obstacle(False, False, False, far, tmp_path) == ""
    assert "a GPU of its own" in nvshmem_obstacle(False, True, True, far, tmp_path)


def test_a_device_that_is_there_is_taken(tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    assert nvshmem_obstacle(True, True, False, {}, tmp_path) == ""
    sentence = nvshmem_choice(True, {"NVSHMEM_IB_ENABLE_IBGDA": "true"})
    assert sentence.endswith("for one term: peers of other nodes by ibgda")
    assert nvshmem_choice(False, {}).endswith("one node")


def test_without_its_library_nvshmem_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(nvshmem, "device_library", lambda: None)
    assert "NVSHMEM is not installed (pip install '.[nvshmem]')" in nvshmem_obstacle(
        False, True, False, {}
    )


def test_triton_distributed_brings_its_own_put(monkeypatch):
    """A stand-in with its signature: what our shim calls there, and with what."""
    calls, fork = [], ModuleType("triton_dist.language.extra")

    def putmem_signal_block(dest, source, nbytes, sig_addr, signal, sig_op, pe):
        calls.append((dest, source, nbytes, sig_addr, signal, int(sig_op.value), pe))

    fork.libshmem_device = ModuleType("libshmem_device")
    fork.libshmem_device.putmem_signal_block = putmem_signal_block
    for name in ("triton_dist", "triton_dist.language"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__spec__ = nvshmem_put.__spec__
    monkeypatch.setitem(sys.modules, fork.__name__, fork)
    source = nvshmem_put.__spec__.loader.get_source(nvshmem_put.__name__)
    module = ModuleType("shim")
    module.__file__ = nvshmem_put.__file__
    exec(compile(source, nvshmem_put.__file__, "exec"), module.__dict__)

    class Address(int):
        def to(self, kind):
            return int(self), str(kind)

    module.put_signal.fn(Address(1), Address(2), 3, Address(4), 5, 6)
    assert calls == [
        ((1, "pointer<uint8>"), (2, "pointer<uint8>"), 3, (4, "pointer<uint64>"), 5, 9, 6)
    ]
    assert module.link_options() == {}
