"""Memory that processes map of each other: the calls of the CUDA runtime, and who meets whom."""

import ctypes
import os
import threading
import uuid
from types import SimpleNamespace

import pytest

from data_plane.transport.exchange import ExchangeTimeout, PeerLost, Term, TermOver
from data_plane.transport.gpu.cuda_runtime import GRANULE, CudaError, CudaRuntime
from data_plane.transport.gpu.ipc_memory import IpcMemory
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import segment_name
from harness.gpu_stand_ins.fake_cudart import FakeCudart
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

LIMITS = LimitsConfig(start_timeout_ms=10_000)
IMPATIENT = LimitsConfig(start_timeout_ms=50)
PLACES = SimpleNamespace(num_instances=3, num_bytes=1000)


def read(address):
    return ctypes.c_ubyte.from_address(address).value


def write(address, value):
    ctypes.c_ubyte.from_address(address).value = value


def test_one_runtime_maps_what_another_exports(tmp_path):
    """The fake's functions have the prototypes of the header, so ctypes refuses other arguments."""
    libraries = [FakeCudart(tmp_path, process) for process in ("a", "b")]
    a, b = CudaRuntime(libraries[0], 3), CudaRuntime(libraries[1], 5)
    own = a.allocate(GRANULE + 1)
    assert ctypes.string_at(own, 2 * GRANULE) == bytes(2 * GRANULE), "zero, in whole granules"
    handle = a.export(own)
    assert len(handle) == 64
    mapped = b.open(handle)
    write(mapped + GRANULE, 7)
    assert read(own + GRANULE) == 7
    b.close(mapped)
    a.free(own)
    assert libraries[0].names() == [
        "cudaMalloc", "cudaMemset", "cudaDeviceSynchronize", "cudaIpcGetMemHandle", "cudaFree",
    ]  # fmt: skip
    assert libraries[1].names() == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]
    for library, device in zip(libraries, (3, 5), strict=True):
        assert {number for name, number in library.calls if name == "cudaSetDevice"} == {device}


def test_an_error_has_a_sentence_and_is_not_left_for_a_launch(tmp_path):
    library = FakeCudart(tmp_path)
    runtime = CudaRuntime(library, 0)
    with pytest.raises(CudaError, match=r"cudaIpcOpenMemHandle failed on GPU 0: mapping failed \("):
        runtime.open(b"of nobody".ljust(64, b"\0"))
    assert library.last_error == 0
    own = runtime.allocate(1)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle failed on GPU 0: invalid argument"):
        runtime.open(runtime.export(own))
    library.failing["cudaMalloc"] = 2
    with pytest.raises(CudaError, match=r"cudaMalloc failed on GPU 0: some error \(error 2\)"):
        runtime.allocate(1)


class Member:
    """One instance, as if in a process of its own."""

    def __init__(self, cluster_id, folder, name, instance, term=1, limits=LIMITS, places=PLACES):
        self.library, self.instance = FakeCudart(folder, name), instance
        runtime = CudaRuntime(self.library, 0)
        runtime.process = name
        self.segments = Segments(cluster_id, term=Term(term))
        self.memory = IpcMemory(runtime, self.segments, 0, instance, places, limits)

    def begin_term(self, number, seats):
        self.segments.term.number = number
        self.mapped = self.memory.begin_term(seats)

    def die(self):
        """Lose what the process had; its segment stays, and belongs to nobody."""
        self.library.die()
        self.memory._segment.disown()

    @property
    def num_held(self):
        names = self.library.names()
        return names.count("cudaMalloc") - names.count("cudaFree")


@pytest.fixture
def member(tmp_path):
    made, cluster_id = [], uuid.uuid4().hex[:8]

    def make(*arguments, **keys):
        made.append(Member(cluster_id, tmp_path, *arguments, **keys))
        return made[-1]

    yield make
    for each in made:
        each.segments.close()


def meet(number, seats, *members):
    """Begin a term with all of these at once."""
    threads = [threading.Thread(target=each.begin_term, args=(number, seats)) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in members:
        for target in members:
            write(writer.mapped.addresses[target.instance] + writer.instance, 1 + writer.instance)
    for target in members:
        own = target.mapped.addresses[target.instance]
        assert [read(own + seat) for seat in seats] == [1 + seat for seat in seats]


def test_a_survivor_and_a_process_that_has_come_meet_in_the_second_term(member):
    a, b = member("a", 0), member("b", 2)
    meet(1, [0, 2], a, b)
    assert a.mapped.addresses[1] == 0 and a.mapped.memory is None
    b.die()
    a.memory.leave()
    new = member("new", 2, term=2)
    meet(2, [0, 2], a, new)
    assert a.num_held == 1, "the memory of the term before is free"
    names = a.library.names()
    first = names[: names.index("cudaFree")]
    assert first.index("cudaIpcGetMemHandle") < first.index("cudaIpcOpenMemHandle")
    assert first[-2:] == ["cudaDeviceSynchronize", "cudaIpcCloseMemHandle"], (
        "nothing is unmapped under a step, and all of it before memory is free"
    )


def test_a_process_that_ends_within_a_term_leaves_no_name_behind(member):
    a, b = member("a", 0), member("b", 1)
    meet(1, [0, 1], a, b)
    names = [segment_name(a.segments.cluster_id, 1, "gpu_memory0", seat) for seat in (0, 1)]
    assert all(os.path.exists(f"/dev/shm/{name}") for name in names)
    a.segments.close()
    assert [os.path.exists(f"/dev/shm/{name}") for name in names] == [False, True]


def test_memory_is_kept_as_long_as_a_peer_that_hangs_may_write_it(member):
    a, b = member("a", 0), member("b", 1)
    meet(1, [0, 1], a, b)
    old = a.mapped.addresses[0]
    a.begin_term(2, [0])
    assert a.num_held == 2
    write(b.mapped.addresses[0], 9)
    assert read(old) == 9 and read(a.mapped.addresses[0]) == 0
    b.die()
    a.begin_term(3, [0])
    assert a.num_held == 1
    a.memory.leave()
    a.memory.leave()
    assert a.num_held == 0


def test_nobody_frees_before_its_peer_has_closed(member):
    a, b = member("a", 0), member("b", 1)
    meet(1, [0, 1], a, b)
    a.memory.leave()
    assert a.num_held == 1, "b has it mapped"
    b.memory.leave()
    assert b.num_held == 0
    meet(2, [0, 1], a, b)
    assert (a.num_held, b.num_held) == (1, 1)


def test_in_one_process_an_address_is_used_as_it_is(member):
    a, b = member("a", 0), member("a", 1)
    meet(1, [0, 1], a, b)
    assert a.mapped.addresses == b.mapped.addresses
    assert "cudaIpcOpenMemHandle" not in a.library.names()


def test_a_peer_that_does_not_come_is_named(member):
    with pytest.raises(ExchangeTimeout) as late:
        member("a", 0, limits=IMPATIENT).begin_term(1, [0, 1])
    assert late.value.peer == 1


def test_a_wait_for_a_peer_ends_with_the_term_and_its_memory_is_given_up(member):
    a = member("a", 0)
    threading.Timer(0.1, a.segments.term.end, [1]).start()
    with pytest.raises(TermOver):
        a.begin_term(1, [0, 1])
    a.memory.leave()
    assert a.num_held == 0


def test_a_handle_that_a_process_took_with_it_names_the_peer_that_is_gone(member, monkeypatch):
    a, b = member("a", 0), member("b", 1, limits=IMPATIENT)
    with pytest.raises(ExchangeTimeout):
        b.begin_term(1, [0, 1])
    b.library.die()
    opens = a.memory._runtime.open

    def opens_before_the_segment_goes(handle):
        threading.Timer(0.1, b.memory._segment.disown).start()
        return opens(handle)

    monkeypatch.setattr(a.memory._runtime, "open", opens_before_the_segment_goes)
    with pytest.raises(PeerLost, match="instance 1 is gone: cudaIpcOpenMemHandle failed") as lost:
        a.begin_term(1, [0, 1])
    assert lost.value.peer == 1


def test_a_handle_that_cannot_be_opened_is_an_error_if_its_process_lives(member, monkeypatch):
    monkeypatch.setattr("data_plane.transport.gpu.ipc_memory._DEATH_S", 0.05)
    a, b = member("a", 0), member("b", 1, limits=IMPATIENT)
    with pytest.raises(ExchangeTimeout):
        b.begin_term(1, [0, 1])
    a.library.failing["cudaIpcOpenMemHandle"] = 217
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle failed"):
        a.begin_term(1, [0, 1])


def test_other_bounds_and_another_node_are_refused(member):
    a = member("a", 0)
    b = member("b", 1, limits=IMPATIENT, places=SimpleNamespace(num_instances=3, num_bytes=999))
    with pytest.raises(ExchangeTimeout):
        b.begin_term(1, [0, 1])
    with pytest.raises(ValueError, match="has '3 instances, 999 bytes'"):
        a.begin_term(1, [0, 1])
    a.segments.meet([Peer(a.segments.node, ""), Peer("elsewhere", "")])
    with pytest.raises(ValueError, match="GPUs of one node; instance 1 is on another one"):
        a.begin_term(2, [0, 1])
