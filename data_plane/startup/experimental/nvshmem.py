"""NVSHMEM's host calls: memory that GPUs of every node write, for the one term of its instances.

NVSHMEM's members are fixed, and it ends the process when one is lost (docs/decisions/0064). A
process has one NVSHMEM, also beside DeepEP (docs/decisions/0070).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from data_plane.startup.experimental.gathering import Communicator, bounded
from data_plane.startup.experimental.nvshmem_put import device_library, forwarding_module, put_far
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import FAR, PeerMemory, RegionPlaces
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig

_HOST_NAME = "libnvshmem_host.so"
_HOST_LIBRARY = f"{_HOST_NAME}.3"
_WITH_UNIQUE_ID = 1 << 3
_ID_BYTES = 128
_KIND, _VERSIONS = "nvshmem", "nvshmem-version"
_IS_INITIALIZED = 2
"""At least what nvshmemx_init_status says then."""
_INTERFACE = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
_DEVICES = Path("/sys/class/infiniband")
_MAPS = Path("/proc/self/maps")
_VERBS_TRANSPORTS = ("ibrc", "ibgda", "ibdevx")
_TRANSPORTS = (*_VERBS_TRANSPORTS, "ucx", "libfabric", "none")


class _UniqueIdArguments(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("num_ranks", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("unique_id", _UniqueIdArguments),
        ("content", ctypes.c_char * 96),
    )


class _Attributes(ctypes.Structure):
    """nvshmemx_init_attr_t of NVSHMEM 3."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("mpi_comm", ctypes.c_void_p),
        ("arguments", _Arguments),
    )


def _version(kind: type[ctypes.Structure] | int) -> int:
    return (1 << 16) + (kind if isinstance(kind, int) else ctypes.sizeof(kind))


class NvshmemError(RuntimeError):
    """A call of NVSHMEM failed."""


class Nvshmem:
    """NVSHMEM in this process: one PE of a group. Memory and modules need `start` first."""

    def __init__(self, library: Any) -> None:
        """library: a ctypes library, libnvshmem_host."""
        self._library = library
        self.is_started = False
        for name in ("nvshmem_calloc", "nvshmem_ptr"):
            getattr(library, name).restype = ctypes.c_void_p
        library.nvshmem_calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        library.nvshmem_ptr.argtypes = (ctypes.c_void_p, ctypes.c_int)
        library.nvshmemx_cumodule_init.argtypes = (ctypes.c_void_p,)

    @property
    def version(self) -> str:
        """The library's version."""
        parts = [ctypes.c_int() for _ in range(3)]
        self._library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, parts))
        return ".".join(str(part.value) for part in parts)

    @property
    def is_running(self) -> bool:
        """True if this process is in a group."""
        return int(self._library.nvshmemx_init_status()) >= _IS_INITIALIZED

    def unique_id(self) -> bytes:
        """Make the id of a group, for all its PEs; it has the address of their meeting."""
        made = ctypes.create_string_buffer(_ID_BYTES)
        ctypes.c_int.from_buffer(made).value = _version(_ID_BYTES)
        self._call("nvshmemx_get_uniqueid", made)
        return made.raw

    def start(self, unique_id: bytes, pe: int, num_pes: int) -> None:
        """Join the group on the present GPU. Waits for all PEs without a limit."""
        kept = ctypes.create_string_buffer(unique_id, _ID_BYTES)
        attributes = _Attributes(version=_version(_Attributes))
        attributes.arguments.version = _version(_Arguments)
        attributes.arguments.unique_id.version = _version(_UniqueIdArguments)
        self._call("nvshmemx_set_attr_uniqueid_args", pe, num_pes, kept, ctypes.byref(attributes))
        self._call("nvshmemx_hostlib_init_attr", _WITH_UNIQUE_ID, ctypes.byref(attributes))
        self.is_started = True

    def join(self) -> None:
        """Use the group that another library of this process has started."""
        attributes = _Attributes(version=_version(_Attributes))
        self._call("nvshmemx_hostlib_init_attr", 0, ctypes.byref(attributes))
        self.is_started = True

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory, all zero, and return its address; all PEs do so in the same order."""
        address: int | None = self._library.nvshmem_calloc(num_bytes, 1)
        if not address:
            raise NvshmemError(
                f"NVSHMEM has no room for {num_bytes} bytes: raise NVSHMEM_SYMMETRIC_SIZE"
            )
        return address

    def address_at(self, address: int, pe: int) -> int:
        """Return the address of a PE's memory for stores of this GPU; 0 if they do not reach it."""
        return self._library.nvshmem_ptr(address, pe) or 0

    def initialise(self, module: int) -> None:
        """Let kernels of a loaded CUDA module put. module: a CUmodule."""
        self._call("nvshmemx_cumodule_init", module)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise NvshmemError(f"{name} failed: error {code} (NVSHMEM_DEBUG=INFO says more)")


class NvshmemMemory:
    """An instance's memory for one lane's (micro-batch's) exchange, in the only term."""

    def __init__(
        self,
        nvshmem: Nvshmem,
        segments: Segments,
        instance: int,
        places: RegionPlaces,
        limits: LimitsConfig,
        device: torch.device,
    ) -> None:
        self._nvshmem, self._segments, self._instance = nvshmem, segments, instance
        self._places, self._limits, self._device = places, limits, device
        self._alone: torch.Tensor | None = None
        self._has_begun = False

    def begin_term(self, seats: Sequence[int]) -> PeerMemory:
        """Make this instance's memory and find its peers'.

        seats: all, or this one alone, which may put nothing. Raises ExchangeTimeout, TermOver or
        NvshmemError; ValueError in a second term, or for only some of the instances.
        """
        num_instances = self._places.num_instances
        addresses = [0] * num_instances
        if list(seats) == [self._instance]:
            self._alone = torch.zeros(
                self._places.num_bytes, dtype=torch.uint8, device=self._device
            )
            addresses[self._instance] = self._alone.data_ptr()
            return PeerMemory(self._instance, addresses, put_far=put_far)
        if self._has_begun or len(seats) != num_instances:
            raise ValueError(
                "exchange_backend is nvshmem, whose instances are fixed at the start: the service "
                "must be started again"
            )
        self._has_begun = True
        # NVSHMEM allocates as much, and not of what torch keeps.
        self._alone = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._nvshmem.is_started:
            self._start()
        address = self._bounded(lambda: self._nvshmem.allocate(self._places.num_bytes))
        for seat in seats:
            addresses[seat] = self._nvshmem.address_at(address, seat) or FAR
        return PeerMemory(self._instance, addresses, put_far=put_far)

    def leave(self) -> None:
        """Do nothing: memory goes with the process, since freeing it takes all instances."""

    def agree(self) -> None:
        """Raise ValueError, naming an instance, unless all have one version of NVSHMEM."""
        num_pes = self._places.num_instances
        meeting = Communicator(self._segments, _VERSIONS, self._instance, num_pes, self._limits)
        try:
            meeting.require_same(f"NVSHMEM {self._nvshmem.version}")
        finally:
            meeting.leave()

    def _start(self) -> None:
        if self._nvshmem.is_running:
            # Whoever started it had all instances meet.
            self._nvshmem.join()
            return
        num_pes = self._places.num_instances
        meeting = Communicator(self._segments, _KIND, self._instance, num_pes, self._limits)
        try:
            own = bytearray(self._nvshmem.unique_id()) if self._instance == 0 else None
            unique_id = bytes(meeting.allgather(own)[0])
            self._bounded(lambda: self._nvshmem.start(unique_id, self._instance, num_pes))
        finally:
            meeting.leave()

    def _bounded(self, call: Callable[[], Any]) -> Any:
        return bounded(call, "NVSHMEM", self._device, self._segments.term, self._limits)


class NvshmemEnd:
    """NVSHMEM's part in the only term, and the memory of an instance's lanes."""

    def __init__(
        self, segments: Segments, instance: int, lanes: Sequence[GpuExchange], limits: LimitsConfig
    ) -> None:
        self._nvshmem, self._exchange = load_nvshmem(segments.address), lanes[0]
        self.memories = [
            NvshmemMemory(self._nvshmem, segments, instance, lane.places, limits, lane.table.device)
            for lane in lanes
        ]

    def agree(self) -> None:
        """Compare versions, before anything starts or is captured; see NvshmemMemory.agree."""
        self.memories[0].agree()

    def begin_term(self, _seats: Sequence[int]) -> None:
        """Initialise its kernels: captures loaded them before NVSHMEM started."""
        # A lone instance does not start it.
        if self._nvshmem.is_started:
            self._nvshmem.initialise(forwarding_module(self._exchange))

    def leave(self) -> None:
        """Do nothing."""


def load_nvshmem(address: str, environment: MutableMapping[str, str] = os.environ) -> Nvshmem:
    """Load NVSHMEM's host library, which will meet its peers over this member's network."""
    host = address.rpartition(":")[0].strip("[]")
    names = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == host for each in addresses)
    )
    if name := next(names, ""):
        # A bare name would also be the begin of others.
        environment.setdefault(_INTERFACE, f"={name}")
    library = device_library()
    assert library is not None, "nvshmem_obstacle was asked first"
    # Global, because its transports and bootstraps are plug-ins that need its symbols.
    return Nvshmem(ctypes.CDLL(str(library.with_name(_HOST_LIBRARY)), mode=ctypes.RTLD_GLOBAL))


def require_one_library(maps: Path = _MAPS) -> None:
    """Raise ValueError if this process has two NVSHMEM libraries."""
    lines = (line.split() for line in maps.read_text().splitlines())
    found = sorted({line[-1] for line in lines if Path(line[-1]).name.startswith(_HOST_NAME)})
    if len(found) > 1:
        raise ValueError(
            f"this process has two NVSHMEM libraries, {' and '.join(found)}: build deep_ep with "
            "NVSHMEM_DIR naming the folder of the extra nvshmem"
        )


def nvshmem_obstacle(
    has_far_peers: bool,
    orders_writes: bool,
    shares_gpu: bool,
    environment: Mapping[str, str] = os.environ,
    devices: Path = _DEVICES,
) -> str:
    """Return why NVSHMEM cannot serve here; empty if it may. It would end the process."""
    if device_library() is None:
        return "NVSHMEM is not installed (pip install '.[nvshmem]')"
    if shares_gpu:
        return "each instance needs a GPU of its own: NVSHMEM makes no teams on one that is shared"
    if not has_far_peers:
        return ""
    transport = _transport(environment)
    if transport not in _TRANSPORTS:
        known = ", ".join(_TRANSPORTS)
        return f"NVSHMEM_REMOTE_TRANSPORT is {transport!r}; NVSHMEM has {known}"
    if transport == "none":
        return "NVSHMEM_REMOTE_TRANSPORT is none, and instances are on several nodes"
    if not orders_writes:
        return (
            "this GPU does not see a network card's writes in order, so a flag may come before its "
            "rows: it needs a Hopper GPU or later"
        )
    if transport in _VERBS_TRANSPORTS and not any(map(_has_verbs, _listed(devices))):
        return (
            f"NVSHMEM would go by {transport}, and this machine has no InfiniBand or RoCE device: "
            "NVSHMEM_REMOTE_TRANSPORT=libfabric is for other networks"
        )
    return ""


def nvshmem_choice(has_far_peers: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Describe for an operator the transport to peers that the environment asks for."""
    way = f"peers of other nodes by {_transport(environment)}" if has_far_peers else "one node"
    return f"exchange: nvshmem, experimental and for one term: {way}"


def _transport(environment: Mapping[str, str]) -> str:
    if environment.get("NVSHMEM_IB_ENABLE_IBGDA", "").lower() in ("1", "true", "yes", "on"):
        return "ibgda"
    return environment.get("NVSHMEM_REMOTE_TRANSPORT", "ibrc").lower()


def _has_verbs(device: Path) -> bool:
    """True for InfiniBand or RoCE; EFA's devices have no verbs."""
    return (device / "device" / "driver").resolve().name != "efa"


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
