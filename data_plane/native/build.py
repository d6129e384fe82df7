"""The compiled CPU kernels: built once for each machine by its C++ compiler, cached, loaded.

Enters: the sources in this folder, the CPU's flags, a compiler. Leaves: the library, or the reason
why there is none. Does not know: what the kernels compute.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = (
    "vector.h",
    "linear.h",
    "norm.h",
    "heads.h",
    "attention.h",
    "rows.h",
    "kernels.cpp",
)
_FP32_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
_BF16_FLAGS = ("avx512_bf16", "amx_tile", "amx_bf16")
_COMPILE = (
    *("-O3", "-std=c++17", "-shared", "-fPIC"),
    *(
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mfma",
        "-mavx512bf16",
        "-mamx-tile",
        "-mamx-bf16",
    ),
)
_COMPILE_LIMIT_S = 120


class NativeUnavailable(Exception):
    """This machine has no compiled kernels; the message says why, as a clause."""


def native_library(is_bf16: bool) -> ctypes.CDLL:
    """The loaded kernels, built if this is their first use here. Raises NativeUnavailable."""
    missing = [
        flag
        for flag in (*_FP32_FLAGS, *(_BF16_FLAGS if is_bf16 else ()))
        if flag not in _cpu_flags()
    ]
    if missing:
        raise NativeUnavailable(f"the CPU has no {missing[0]}")
    library = _load()
    if is_bf16 and not library.nanocp_allow_amx():
        raise NativeUnavailable("Linux does not let this process use AMX")
    return library


@functools.cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@functools.cache
def _load() -> ctypes.CDLL:
    digest = blake2b(" ".join(_COMPILE).encode(), digest_size=8)
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanocp"
    path = cache / f"kernels-{digest.hexdigest()}.so"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the instances of a node start together
            if not path.exists():
                _build(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"they cannot be kept in {cache}: {error}") from error


def _build(path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (c++, or what CXX names)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *_COMPILE, str(_HERE / "kernels.cpp"), "-o", str(built)]
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
