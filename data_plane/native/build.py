"""The compiled libraries: built once for each machine by its C++ compiler, cached, loaded."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = (
    "bf16.h",
    "avx2.h",
    "avx512.h",
    "vector.h",
    "linear.h",
    "norm.h",
    "heads.h",
    "attention.h",
    "amx.h",
    "rows.h",
    "experts.h",
    "processors.h",
    "flag.h",
    "peers.h",
    "arrivals.h",
    "forecast.h",
    "mixture.h",
    "shared_out.h",
    "delta.h",
    "kernels.cpp",
)
_PUTS = ("flag.h", "late.h", "puts.cpp")
_RECEIVER = ("flag.h", "receive.cpp")
_COMPILE = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
_COMPILE_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class _InstructionSet:
    fp32: tuple[str, ...] | None
    """CPU flags of the fp32 kernels; None if another set is as good."""
    bf16: tuple[str, ...]
    compiler: tuple[str, ...]


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
_COMPILE_AVX512 = (*(f"-m{flag}" for flag in _AVX512), "-mavx512bf16")
_AVX2 = ("avx2", "fma")
_SETS = {
    "amx": _InstructionSet(
        None,
        (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
        (*_COMPILE_AVX512, "-mamx-tile", "-mamx-bf16"),
    ),
    "avx512": _InstructionSet(_AVX512, (*_AVX512, "avx512_bf16"), _COMPILE_AVX512),
    "avx2": _InstructionSet(_AVX2, _AVX2, ("-mavx2", "-mfma")),
}
"""Fastest first."""


class NativeUnavailable(Exception):
    """This machine has no compiled kernels; the message says why, as a clause."""


def native_library(is_bf16: bool, wanted: str = "") -> tuple[ctypes.CDLL, str]:
    """Return the loaded kernels, built at first use, and their instruction set.

    wanted: amx, avx512 or avx2; if empty, the fastest of the CPU. Raises NativeUnavailable.
    """
    obstacles = []
    for name in [wanted] if wanted else _SETS:
        needed = _SETS[name].bf16 if is_bf16 else _SETS[name].fp32
        if needed is None:
            continue
        missing = [flag for flag in needed if flag not in _cpu_flags()]
        if missing:
            obstacles.append(f"for {name} the CPU has no {missing[0]}")
            continue
        library = _load(_SOURCES, _SETS[name].compiler)
        if name != "amx" or library.nanocp_allow_amx():
            return library, name
        obstacles.append("Linux does not let this process use AMX")
    raise NativeUnavailable("; ".join(obstacles) or f"{wanted} has no kernels of fp32")


def puts_library() -> ctypes.CDLL:
    """Return the library of puts through the exchange. Raises NativeUnavailable."""
    return _load(_PUTS, ())


def receiver_library() -> ctypes.CDLL:
    """Return the library that receives puts by TCP. Raises NativeUnavailable."""
    return _load(_RECEIVER, ())


@functools.cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@functools.cache
def _load(sources: tuple[str, ...], instructions: tuple[str, ...]) -> ctypes.CDLL:
    flags = (*_COMPILE, *instructions)
    digest = blake2b(" ".join(flags).encode(), digest_size=8)
    for name in sources:
        digest.update((_HERE / name).read_bytes())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanocp"
    except RuntimeError as error:  # a user without a home
        raise NativeUnavailable(f"there is no folder to keep them in: {error}") from error
    path = cache / f"{Path(sources[-1]).stem}-{digest.hexdigest()}.so"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the instances of a node start together
            if not path.exists():
                _build(path, sources[-1], flags)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"they cannot be kept in {cache}: {error}") from error


def _build(path: Path, source: str, flags: tuple[str, ...]) -> None:
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (c++, or what CXX names)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *flags, str(_HERE / source), "-o", str(built)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{compiler} took more than {_COMPILE_LIMIT_S} s") from None
        if result.returncode:
            printed = result.stderr.strip().splitlines()
            reason = printed[0] if printed else "it printed no reason"
            raise NativeUnavailable(f"{compiler} failed: {reason}")
        built.replace(path)
