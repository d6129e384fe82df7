"""Stands for libcudart on a CPU: memory is in files of a folder, which other processes map too.

Its functions have the prototypes of the CUDA runtime's header, and are called as C functions are.
They refuse what the runtime leaves undefined: memory that is freed while another process has it
mapped, a handle that its own process opens, a mapping that is closed twice.
"""

import ctypes
import mmap
import os
from itertools import count
from pathlib import Path

INVALID, UNMAPPABLE, NOT_ALLOWED = 1, 205, 800
NAMES = {INVALID: b"invalid argument", UNMAPPABLE: b"mapping failed", NOT_ALLOWED: b"not permitted"}

_NUMBERS = count()
"""One for each allocation, so that libraries of one process name no file alike."""


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


VOID, PLACE = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
HEADER = {
    "cudaSetDevice": (ctypes.c_int,),
    "cudaDeviceSynchronize": (),
    "cudaDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cudaMalloc": (PLACE, ctypes.c_size_t),
    "cudaMemset": (VOID, ctypes.c_int, ctypes.c_size_t),
    "cudaFree": (VOID,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(Handle), VOID),
    "cudaIpcOpenMemHandle": (PLACE, Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (VOID,),
    "cudaHostRegister": (VOID, ctypes.c_size_t, ctypes.c_uint),
    "cudaHostUnregister": (VOID,),
    "cudaGetLastError": (),
}


class FakeCudart:
    """A library, as ctypes gives one. `process` names another process, if a test plays several."""

    def __init__(self, folder, process=None):
        self.folder, self.process = Path(folder), process or os.getpid()
        self.calls = []
        """(name, first argument that is a number, or None) of every call."""
        self.failing = {}
        """Name of a function -> the code that it returns."""
        self.pinned = {}
        """Address -> bytes of pinned memory of the host."""
        self.last_error = 0
        self._files, self._opened, self._mapped = {}, {}, []
        for name, arguments in HEADER.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._called(name)))
        self._texts = {code: ctypes.create_string_buffer(text) for code, text in NAMES.items()}
        other = ctypes.create_string_buffer(b"some error")
        self.cudaGetErrorString = ctypes.CFUNCTYPE(VOID, ctypes.c_int)(
            lambda code: ctypes.addressof(self._texts.get(code, other))
        )

    def names(self):
        """The names of all calls but those that choose a GPU."""
        return [name for name, _ in self.calls if name != "cudaSetDevice"]

    def die(self):
        """Lose all memory and mappings, as those of a process that ends."""
        for path in (*self._files.values(), *self._opened.values()):
            path.unlink()

    def _called(self, name):
        run = getattr(self, f"_{name}")

        def function(*arguments):
            numbers = [each for each in arguments if isinstance(each, int)]
            self.calls.append((name, numbers[0] if numbers else None))
            try:
                code = self.failing.get(name, 0) or run(*arguments) or 0
            except Exception:
                code = INVALID
            if name != "cudaGetLastError":
                self.last_error = code or self.last_error
            return code

        return function

    def _cudaGetLastError(self):
        code, self.last_error = self.last_error, 0
        return code

    def _cudaSetDevice(self, device):
        return INVALID if device < 0 else 0

    def _cudaDeviceSynchronize(self):
        pass

    def _cudaDeviceGetAttribute(self, found, attribute, device):
        assert attribute == 118, "the order of a network card's writes"
        found[0] = 100

    def _cudaMalloc(self, place, num_bytes):
        path = self.folder / f"{self.process}-{next(_NUMBERS)}.memory"
        path.write_bytes(b"\xcd" * num_bytes)
        place[0] = address = self._map(path)
        self._files[address] = path

    def _cudaMemset(self, address, value, num_bytes):
        ctypes.memset(address, value, num_bytes)

    def _cudaFree(self, address):
        path = self._files[address]
        if any(_is_alive(each) for each in self.folder.glob(f"{path.name}.mapped-*")):
            return NOT_ALLOWED
        ctypes.memset(address, 0xCD, path.stat().st_size)
        path.unlink()
        del self._files[address]

    def _cudaHostRegister(self, address, num_bytes, flags):
        if flags or address in self.pinned:
            return INVALID
        self.pinned[address] = num_bytes

    def _cudaHostUnregister(self, address):
        del self.pinned[address]

    def _cudaIpcGetMemHandle(self, handle, address):
        handle[0].reserved = self._files[address].name.encode()

    def _cudaIpcOpenMemHandle(self, place, handle, flags):
        name = handle.reserved.decode()
        if flags != 1 or name.startswith(f"{self.process}-"):
            return INVALID
        path = self.folder / name
        if not path.exists():
            return UNMAPPABLE
        place[0] = address = self._map(path)
        self._opened[address] = marker = self.folder / f"{name}.mapped-{self.process}"
        marker.touch()

    def _cudaIpcCloseMemHandle(self, address):
        self._opened.pop(address).unlink()

    def _map(self, path):
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        self._mapped.append(mapped)  # instances in threads map at the same time
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _is_alive(marker):
    """Whether the process that made the marker is there; one that a test plays always is."""
    process = marker.name.rpartition("-")[2]
    return not process.isdigit() or Path(f"/proc/{process}").exists()
