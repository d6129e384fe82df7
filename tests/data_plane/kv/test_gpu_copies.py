"""Pages of a GPU go to slots and come back as on a CPU, though all it is asked for comes late."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_plane.kv.frame_pool import FramePool
from data_plane.kv.gpu_copies import GpuCopies
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.slots import Slots
from data_plane.transport.gpu.cuda_runtime import CudaRuntime
from harness.gpu_stand_ins.fake_cudart import FakeCudart
from nanocp.values.offload import Fetch, StoredPage, Stow
from nanocp.values.plan import TransferDone

CPU = torch.device("cpu")
NUM_LAYERS, LAYER_BYTES = 3, 64 * 5 * 2


class LateStream:
    """A stream that does nothing before somebody waits for it."""

    def __init__(self, device=CPU):
        self.launched, self.num_done = [], 0

    def wait_stream(self, other):
        until = len(other.launched)
        self.launched.append(lambda: other.run(until))

    def run(self, until):
        while self.num_done < until:
            self.num_done += 1
            self.launched[self.num_done - 1]()

    def synchronize(self):
        self.run(len(self.launched))


class LateGpu(TorchDispatchMode):
    """Stands for torch.cuda with tensors of the CPU: copies are launched on the current stream."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.caller = self.now = LateStream()
        self.sizes = []
        """(stream, bytes, whether both ends are contiguous) of each copy."""
        self._is_running = False
        monkeypatch.setattr(torch.cuda, "Stream", LateStream)
        monkeypatch.setattr(torch.cuda, "stream", self._inside)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)

    @contextmanager
    def _inside(self, stream):
        self.now, before = stream, self.now
        yield
        self.now = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or self._is_running:
            return func(*args, **(kwargs or {}))
        to, source = args[:2]
        self.sizes.append((self.now, to.nbytes, to.is_contiguous() and source.is_contiguous()))
        self.now.launched.append(lambda: self._run(to, source))
        return to

    def _run(self, to, source):
        self._is_running = True
        to.copy_(source)
        self._is_running = False


def frames():
    pool = FramePool(NUM_LAYERS, 8, 5, torch.bfloat16)
    drawn = torch.randn(pool.layers.shape, generator=torch.Generator().manual_seed(1))
    pool.layers.copy_(drawn)
    return pool


def answers(pool, copier):
    """Play a story: pages go to memory and to the file, and come back to other frames."""
    pool.layers[:, 2, 63] = torch.ones(NUM_LAYERS, 5, dtype=torch.bfloat16)  # the last step's
    copier.stow(Stow(1, 3, ((2, 0), (5, 1))))
    copier.stow(Stow(2, 3, ((0, 2),), is_demotion=True))
    copier.stow(Stow(3, 3, ((7, 0),)))
    copier.fetch(Fetch(4, 3, (StoredPage(0, 2, 3), StoredPage(1, 1, 3))), {0: 4, 1: 6})
    copier.fetch(Fetch(5, 3, (StoredPage(0, 0, 3),)), {0: 3})
    copier.cancel(5)
    while copier.run_one():
        pass
    return copier.take()


@pytest.fixture
def library(tmp_path):
    return FakeCudart(tmp_path)


def pinned(library, memory):
    return GpuCopies(CudaRuntime(library, 0), CPU, memory)


def test_a_page_is_in_its_slot_or_frame_when_its_ticket_is_answered(monkeypatch, tmp_path, library):
    """A row's last step is late too; no ticket over means that a frame was not written."""
    expected, pool = frames(), frames()
    tiers = [Slots(2, 1, pool.page_bytes, str(tmp_path)) for _ in range(2)]
    on_cpu = PageCopier(3, tiers[0], expected.page_view, expected.write_payload)

    def write(*page):
        pool.write_payload(*page)
        torch.cuda.current_stream(CPU).synchronize()  # as frames of a GPU do themselves

    found = answers(expected, on_cpu)
    with LateGpu(monkeypatch) as gpu:
        copier = PageCopier(3, tiers[1], pool.page_view, write, pinned(library, tiers[1].memory))
        assert answers(pool, copier) == found
    assert found == ([TransferDone(1, 3), TransferDone(2, 3), TransferDone(3, 3)], [(4, 0), (4, 1)])
    assert torch.equal(pool.layers, expected.layers)
    np.testing.assert_array_equal(tiers[1].memory, tiers[0].memory)
    (steps, *_), *others = gpu.sizes
    assert steps is gpu.caller and {each[0] for each in others}.isdisjoint({steps}), "none of ours"
    page_bytes = NUM_LAYERS * LAYER_BYTES
    layers_out = [(LAYER_BYTES, True)] * NUM_LAYERS
    back = [(page_bytes, True), (page_bytes, False)]
    assert [each[1:] for each in others] == [*layers_out * 3, *back * 2], "nothing of the fenced"
    on_cpu.close()
    copier.close()


def test_memory_is_pinned_as_it_is_and_released(monkeypatch, tmp_path, library):
    LateGpu(monkeypatch)
    slots = Slots(3, 1, 100, str(tmp_path))
    copier = PageCopier(3, slots, lambda frame: None, print, pinned(library, slots.memory))
    assert library.pinned == {slots.memory.ctypes.data: 300}
    copier.close()
    copier.close()
    assert not library.pinned


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch, library):
    LateGpu(monkeypatch)
    library.failing["cudaHostRegister"] = 2
    with pytest.raises(ValueError, match=r"300 bytes of memory cannot be pinned .*rror 2"):
        pinned(library, Slots(3, 0, 100, "").memory)
