"""Calls of NVIDIA's CUDA runtime by which processes of a node map each other's GPU memory.

torch's symmetric memory belongs to a process group with fixed members (docs/decisions/0048).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

HANDLE_BYTES = 64
GRANULE = 2 << 20
"""Unit of allocation: of less, the driver would share its neighbours too."""
_ENABLE_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess."""
_WRITES_ORDERING, _ORDERED_FOR_OWNER = 118, 100
"""cudaDevAttrGPUDirectRDMAWritesOrdering, and its value for the GPU that has the memory."""
_TOKEN = uuid4().hex


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_ADDRESS = ctypes.POINTER(ctypes.c_void_p)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cudaSetDevice": (ctypes.c_int,),
    "cudaDeviceSynchronize": (),
    "cudaDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cudaMalloc": (_ADDRESS, ctypes.c_size_t),
    "cudaMemset": (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t),
    "cudaFree": (ctypes.c_void_p,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(IpcHandle), ctypes.c_void_p),
    "cudaIpcOpenMemHandle": (_ADDRESS, IpcHandle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (ctypes.c_void_p,),
    "cudaHostRegister": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cudaHostUnregister": (ctypes.c_void_p,),
    "cudaGetLastError": (),
}


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class CudaRuntime:
    """The CUDA runtime, with one GPU. Every call raises CudaError if it fails."""

    def __init__(self, library: Any, device: int) -> None:
        """library: a ctypes library. device: torch's number of the GPU."""
        self._library, self._device = library, device
        self.process = f"{os.getpid()} {_TOKEN}"
        """Unique: containers may give two processes one number."""
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory of at least this size, all zero; returns its address."""
        address = ctypes.c_void_p()
        rounded = -(-num_bytes // GRANULE) * GRANULE
        self._on_device("cudaMalloc", ctypes.byref(address), rounded)
        self._call("cudaMemset", address, 0, rounded)
        self.synchronize()
        return _value(address)

    def synchronize(self) -> None:
        """Wait until the GPU has done all work of this process."""
        self._on_device("cudaDeviceSynchronize")

    @property
    def orders_writes(self) -> bool:
        """True if this GPU sees writes of a network card in order, without a flush."""
        found = ctypes.c_int()
        attribute = _WRITES_ORDERING
        self._call("cudaDeviceGetAttribute", ctypes.byref(found), attribute, self._device)
        return found.value >= _ORDERED_FOR_OWNER

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned. No other process may have it mapped."""
        self._on_device("cudaFree", address)

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin memory of the host, so that copies to and from it need no processor."""
        self._on_device("cudaHostRegister", address, num_bytes, 0)

    def unpin(self, address: int) -> None:
        """Undo `pin`. No copy may be under way."""
        self._on_device("cudaHostUnregister", address)

    def export(self, address: int) -> bytes:
        """Return the handle by which other processes map memory of `allocate`."""
        handle = IpcHandle()
        self._on_device("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map memory of another process, perhaps on another GPU; returns its address here."""
        address = ctypes.c_void_p()
        self._on_device(
            "cudaIpcOpenMemHandle",
            ctypes.byref(address),
            IpcHandle.from_buffer_copy(handle),
            _ENABLE_PEER_ACCESS,
        )
        return _value(address)

    def close(self, address: int) -> None:
        """Unmap memory of `open`. No kernel of this process may use it."""
        self._on_device("cudaIpcCloseMemHandle", address)

    def _on_device(self, name: str, *arguments: Any) -> None:
        self._call("cudaSetDevice", self._device)
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            # The runtime keeps an error for whoever looks next, which would be a launch of torch.
            self._library.cudaGetLastError()
            why = self._library.cudaGetErrorString(code).decode()
            raise CudaError(f"{name} failed on GPU {self._device}: {why} (error {code})")


def loaded_cudart() -> str:
    """Return the path of the CUDA runtime that torch has loaded; empty if there is none."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (line[line.index("/") :] for line in lines if "/libcudart" in line)
    return next(paths, "")


def load_runtime(device: int) -> CudaRuntime:
    """Take the CUDA runtime that torch uses, for this GPU."""
    return CudaRuntime(ctypes.CDLL(loaded_cudart()), device)


def _value(address: ctypes.c_void_p) -> int:
    assert address.value, "the CUDA runtime returned the address 0"
    return address.value
