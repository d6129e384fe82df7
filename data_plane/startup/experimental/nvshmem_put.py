"""The put between nodes: one call of NVSHMEM for each target, from the device, in a captured step.

A target's packed rows are one run, and its flag, the epoch, is the same put's signal: NVSHMEM
orders nothing else (docs/decisions/0064). Linking takes 20 s and more, so one kernel serves all
channels.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import FAR

SET = tl.constexpr(9)
"""NVSHMEM_SIGNAL_SET. Every other number adds, also torch's documented 0."""
_FAR = tl.constexpr(FAR)
_LIBRARY = "libnvshmem_device.bc"


if find_spec("triton_dist") is None:

    @core.extern
    def _put_signal_block(to, source, num_bytes, signal, value, operation, pe, _semantic=None):
        whole, number = core.dtype("int64"), core.dtype("int32")
        kinds = whole, whole, whole, whole, whole, number, number
        return core.extern_elementwise(
            "",
            "",
            [to, source, num_bytes, signal, value, operation, pe],
            {kinds: ("nvshmemx_putmem_signal_block", number)},
            is_pure=False,
            _semantic=_semantic,
        )

    @triton.jit
    def put_signal(to, source, num_bytes, signal, value, pe):
        """Put bytes, then set the signal at their receiver; all threads of a program call it.

        Addresses are of this instance's symmetric memory, in int64. The source is free on return.
        """
        _put_signal_block(to, source, num_bytes, signal, value, SET, pe)

else:  # Triton-distributed is a Triton of its own, which links NVSHMEM and initialises modules.
    from triton_dist.language.extra import libshmem_device

    @triton.jit
    def put_signal(to, source, num_bytes, signal, value, pe):
        """Put bytes, then set the signal at their receiver, as with NVIDIA's library."""
        libshmem_device.putmem_signal_block(
            to.to(tl.pointer_type(tl.uint8)),
            source.to(tl.pointer_type(tl.uint8)),
            num_bytes,
            signal.to(tl.pointer_type(tl.uint64)),
            value,
            SET,
            pe,
        )


@triton.jit(
    do_not_specialize=[
        "peer_ptr",
        "epoch_ptr",
        "error_ptr",
        "count_ptr",
        "place_ptr",
        "instance",
        "ahead",
    ]
)
def forward_kernel(peer_ptr, epoch_ptr, error_ptr, count_ptr, place_ptr, instance, ahead):
    """Program t: put the packed rows for target t, if it is far, and set its flag to the epoch.

    place_ptr: [6] int64: offsets of flags, regions and staged rows; bytes of a region, of a row,
    and of the header before the first row (0: not counted). A target without a row gets nothing,
    unless counted.
    """
    target, num_instances = tl.program_id(0), tl.num_programs(0)
    count = tl.load(count_ptr + target).to(tl.int64)
    is_far = tl.load(peer_ptr + target) == _FAR
    header = tl.load(place_ptr + 5)
    row_bytes = tl.load(place_ptr + 4)
    num_bytes = count * row_bytes + header
    # After an error the rows of this instance are worthless, and peers must not merge them.
    if is_far & (num_bytes > 0) & (tl.load(error_ptr) == 0):
        epoch = tl.load(epoch_ptr) + ahead
        region = (epoch & 1) * num_instances + instance
        own = tl.load(peer_ptr + instance)
        region_bytes = tl.load(place_ptr + 3)
        # The header is the end of the slot before the first row's.
        begin = row_bytes - header
        put_signal(
            own + tl.load(place_ptr + 1) + region * region_bytes + begin,
            own + tl.load(place_ptr + 2) + target * region_bytes + begin,
            num_bytes,
            own + tl.load(place_ptr) + region * 8,
            epoch,
            target,
        )


def device_library() -> Path | None:
    """Return the path of NVSHMEM's device library in its wheel; None if it is absent."""
    package = find_spec("nvidia.nvshmem") if find_spec("nvidia") else None
    folders = package.submodule_search_locations if package else None
    paths = [Path(folder) / "lib" / _LIBRARY for folder in folders or ()]
    return next((path for path in paths if path.exists()), None)


def put_far(num_instances: int, *arguments: Any) -> None:
    """Launch forward_kernel; arguments: of GpuExchange.forwarding."""
    forward_kernel[(num_instances,)](*arguments, **link_options())


def forwarding_module(exchange: GpuExchange) -> int:
    """Load the kernel of puts to far peers, and return its CUDA module."""
    arguments = exchange.forwarding(Channel.Q, exchange.done(Channel.Q))
    kernel = forward_kernel.warmup(*arguments, grid=(1,), **link_options())
    _ = kernel.run  # loads it
    module: int = kernel.module
    return module


@cache
def link_options() -> dict[str, Any]:
    """Return the options of a launch of `forward_kernel`: the library to link."""
    library = device_library()
    has_fork = find_spec("triton_dist") is not None
    return {} if has_fork or library is None else {"extern_libs": {_LIBRARY[:-3]: str(library)}}
