"""Stands for NVSHMEM's host library: PEs are threads of this process, their memory is the CPU's."""

import ctypes
import threading

import torch

from data_plane.startup.experimental.nvshmem import _Attributes
from data_plane.transport.gpu.peer_memory import PeerMemory


class Function:
    """A function of a ctypes library, which takes the types that a caller sets."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *arguments):
        return self.run(*arguments)


class Group:
    """PEs that start together, and what they have allocated. far: pairs that no store connects."""

    def __init__(self, num_pes, far=()):
        self.barrier = threading.Barrier(num_pes)
        self.far = {frozenset(pair) for pair in far}
        self.memory = {}
        """[pe] -> tensors, in the order in which all allocate."""

    def items(self):
        """Give the first memory of each PE, as weak_memory.WeakMemory takes memories."""
        return [(pe, PeerMemory(pe, [], made[0])) for pe, made in self.memory.items()]

    def __getitem__(self, pe):
        return PeerMemory(pe, [], self.memory[pe][0])


class FakeLibrary:
    """libnvshmem_host in one PE of a group."""

    def __init__(self, group, limit_s=20):
        self._group, self._limit_s, self.pe, self.modules = group, limit_s, None, []
        self.num_users, self.version = 0, (3, 4, 5)
        for name in (
            "nvshmemx_init_status",
            "nvshmemx_vendor_get_version_info",
            "nvshmemx_get_uniqueid",
            "nvshmemx_set_attr_uniqueid_args",
            "nvshmemx_hostlib_init_attr",
            "nvshmemx_cumodule_init",
            "nvshmem_calloc",
            "nvshmem_ptr",
        ):
            setattr(self, name, Function(getattr(self, name.partition("_")[2])))

    def init_status(self):
        """NOT_INITIALIZED or IS_INITIALIZED."""
        return 0 if self.pe is None else 2

    def vendor_get_version_info(self, *parts):
        """Write major, minor and patch."""
        for part, number in zip(parts, self.version, strict=True):
            part._obj.value = number

    def get_uniqueid(self, made):
        """Write an id of 128 bytes, after its version."""
        made[4:10] = b"meet\0!"
        return 0

    def set_attr_uniqueid_args(self, pe, num_pes, unique_id, attributes):
        """Write the arguments into the attributes, as the library does."""
        assert unique_id.raw[4:10] == b"meet\0!"
        arguments = ctypes.cast(attributes, ctypes.POINTER(_Attributes)).contents.arguments
        arguments.unique_id.rank, arguments.unique_id.num_ranks = pe, num_pes
        return 0

    def hostlib_init_attr(self, flags, attributes):
        """Wait for all PEs; in a process that has, count one more user, whatever the id."""
        found = ctypes.cast(attributes, ctypes.POINTER(_Attributes)).contents
        if self.pe is not None:
            self.num_users += 1
            return 0
        assert flags == 8 and found.version == (1 << 16) + 144
        assert found.arguments.version == (1 << 16) + 128
        self.join(found.arguments.unique_id.rank)
        return 0

    def join(self, pe):
        """Become a PE, as also another package of this process may have this one."""
        self.pe, self.num_users = pe, self.num_users + 1
        self._group.barrier.wait(self._limit_s)

    def calloc(self, num_bytes, size):
        """Allocate on all PEs at once."""
        made = torch.zeros(num_bytes * size, dtype=torch.uint8)
        self._group.memory.setdefault(self.pe, []).append(made)
        self._group.barrier.wait(self._limit_s)
        return made.data_ptr()

    def ptr(self, address, pe):
        """The PE's memory that was allocated together with this one's."""
        own = [each.data_ptr() for each in self._group.memory[self.pe]]
        if frozenset((self.pe, pe)) in self._group.far:
            return None
        return self._group.memory[pe][own.index(address)].data_ptr()

    def cumodule_init(self, module):
        """Note the module."""
        self.modules.append(module)
        return 0
