"""The routed exchange through GPU memory that peers map (CUDA IPC), for captured steps.

Epochs are on the device (triton_exchange.py); `check` reads errors after the step. One table on the
device holds all of a term, so captured steps outlive it. (The paper's section 5.3; the slow
reference is exchange.py.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_plane.transport.exchange import Channel, EpochError, ExchangeTimeout, TermOver
from data_plane.transport.gpu.peer_memory import (
    CHANNELS,
    MAX_FIELDS,
    PeerMemory,
    RegionPlace,
    RegionPlaces,
)

_MAX_PROGRAMS = 16
_MAX_BLOCK = 1024
_POLLS_PER_MS = 1_000
"""An estimate, not measured yet (docs/use/gpu.md)."""

_FOLLOWS = {
    Channel.Q: (Channel.RES, 1),
    Channel.RES: (Channel.Q, 0),
    Channel.DISPATCH: (Channel.COMBINE, 1),
    Channel.COMBINE: (Channel.DISPATCH, 0),
}
"""By channel of a put: the channel whose last wait it follows, and its lead in epochs."""
_TERM_OVER = 16
"""Added to the error word's first number: the term was over."""
_WRONG_STATE = 32
"""The error word's first number: a recurrent state was of another position."""


class _WaitError(NamedTuple):
    code: int
    """The channel's number + 1, plus _TERM_OVER if the term was over; 0: no error."""
    source: int
    awaited_epoch: int
    found_epoch: int
    """Negative: minus a count of rows above a region's."""


class Region(NamedTuple):
    """A field of a channel in this instance's memory, [parity, source, slot, width].

    Kernels may read it from the wait until their answer is launched.
    """

    table: Tensor
    epoch: Tensor
    """[1] int64 or more: the epoch of the channel's last wait; its last bit is the parity."""
    offset: int
    instance: int
    num_slots: int
    """From one source to the next."""
    stride: int
    """Bytes."""

    def stride_in(self, like: Tensor) -> int:
        return self.stride // like.element_size()


class GpuExchange:
    """One instance's end of the exchange; an instance that is alone calls nothing of it.

    An attention layer puts, awaits and takes Q, then puts and awaits RES; a step without links
    calls `skip_attention`. A MoE layer puts and awaits DISPATCH; a kernel returns the sums
    (moe/gpu/sums.py).
    """

    def __init__(self, places: RegionPlaces, device: torch.device, timeout_ms: float) -> None:
        """Prepare an end, which can put and wait after `attach`.

        timeout_ms: of each wait, counted in polls.
        """
        self.places = places
        self._timeout_ms = timeout_ms
        self.max_polls = max(1, round(timeout_ms * _POLLS_PER_MS))
        self.timeout_ns = round(timeout_ms * 1e6)
        """By the GPU's clock."""
        self.table = torch.zeros(places.num_instances + 2, dtype=torch.int64, device=device)
        """[N + 2] int64, what captured steps know of a term: each instance's address (0: not in the
        term, FAR: only NVSHMEM reaches it), that of two words of the host, and the term's
        number.
        """
        self._words = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.ended: np.ndarray = self._words[:1].numpy()
        """[1] int64 in the host's memory: the last term that is over, which waits poll
        (Term.mirror).
        """
        self._term = 0
        self.epoch_C = torch.zeros(len(CHANNELS), dtype=torch.int64, device=device)
        """[channel] int64: epoch of the last wait. Epochs begin at 1."""
        self.error = torch.zeros(4, dtype=torch.int64, device=device)
        """The first error of a wait or of a fused MoE layer, or zeros."""
        self._done_CN = torch.zeros(
            len(CHANNELS), places.num_instances, dtype=torch.int32, device=device
        )
        self._packed = {
            channel: torch.tensor(place.packed, dtype=torch.int64, device=device)
            for channel, place in places.channels.items()
        }

    def attach(self, memory: PeerMemory, term: int = 1) -> None:
        """Begin a term at epoch 1 in its memory, which is zero. No step may run."""
        assert self.places.is_packed or not memory.put_far, "one put carries packed rows only"
        self.memory, self._term = memory, term
        words = [*memory.addresses, self._words.data_ptr(), term]
        self.table.copy_(torch.tensor(words, dtype=torch.int64))
        for state in (self.epoch_C, self.error, self._done_CN):
            state.zero_()

    @property
    def awaited(self) -> int | None:
        """The instance that a wait polls for now, for any thread; not of a fused MoE layer."""
        number = int(self._words[1])
        return number - 1 if number else None

    def put(
        self,
        channel: Channel,
        fields: Mapping[str, Tensor],
        count_N: Tensor,
        row_NL: Tensor | None = None,
    ) -> None:
        """Put rows of the fields into the slots at each peer, then the peer's flag.

        A peer without a row gets nothing; a counted channel's flag goes to every instance of the
        term. fields: [rows, ...], contiguous. count_N [N] int32: slots at each peer. row_NL [N,
        slots] int32: the row of each slot; None: rows are dense, by ascending peer.
        """
        from data_plane.transport.gpu.triton_exchange import put_kernel

        place = self.places.channels[channel]
        follows, ahead = _FOLLOWS[channel]
        tensors, offsets, widths = self._fields(place, fields)
        put_kernel[self._grid(place)](
            self.table,
            self.epoch_C[follows:],
            self.error,
            count_N,
            count_N if row_NL is None else row_NL,
            self._done_CN[channel],
            *tensors,
            place.flag_offset,
            place.cell_offset,
            *offsets,
            self.memory.instance,
            place.num_slots,
            1 if row_NL is None else row_NL.shape[1],
            place.cell_stride,
            place.stage_offset - place.offset,
            AHEAD=ahead,
            HAS_ROWS=row_NL is not None,
            COUNTED=place.is_counted,
            BLOCK_N=_power_of_two(self.places.num_instances),
            **widths,
        )
        self.forward(channel, count_N)

    def forward(self, channel: Channel, count_N: Tensor) -> None:
        """Put the rows for far peers, if any, that a kernel has left in this instance's own memory.

        count_N: [N] int32, rows for each peer.
        """
        if self.memory.put_far is not None:
            self.memory.put_far(self.places.num_instances, *self.forwarding(channel, count_N))

    def forwarding(self, channel: Channel, count_N: Tensor) -> tuple[Any, ...]:
        """Return the arguments of a put to far peers, as `forward` takes them."""
        follows, ahead = _FOLLOWS[channel]
        epoch, places = self.epoch_C[follows:], self._packed[channel]
        return self.table, epoch, self.error, count_N, places, self.memory.instance, ahead

    def wait(self, channel: Channel, count_N: Tensor) -> None:
        """Wait on the device, a bounded time, until the rows of every peer with a count are here.

        count_N: [N] int32; a counted channel awaits every peer of the term and writes it. `check`
        reports a failed wait.
        """
        from data_plane.transport.gpu.triton_exchange import wait_kernel

        place, num_instances = self.places.channels[channel], self.places.num_instances
        wait_kernel[(1,)](
            self.table,
            self.epoch_C[channel:],
            self.error,
            count_N,
            place.flag_offset,
            place.cell_offset,
            self.memory.instance,
            num_instances,
            int(channel),
            self.max_polls,
            place.cell_stride,
            COUNTED=place.is_counted,
            BLOCK_N=_power_of_two(num_instances),
            num_warps=1,
        )

    def take(self, channel: Channel, count_N: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Copy the rows that have come to the first rows of the fields, by ascending peer."""
        from data_plane.transport.gpu.triton_exchange import take_kernel

        place = self.places.channels[channel]
        tensors, offsets, widths = self._fields(place, fields)
        take_kernel[self._grid(place)](
            self.table,
            self.epoch_C[channel:],
            count_N,
            *tensors,
            *offsets,
            self.memory.instance,
            place.num_slots,
            BLOCK_N=_power_of_two(self.places.num_instances),
            **widths,
        )

    def region(self, channel: Channel, name: str) -> Region:
        """Return the place of a field's rows after a wait, for kernels that read them there."""
        place = self.places.channels[channel]
        field = next(field for field in place.fields if field.name == name)
        epoch, instance = self.epoch_C[channel:], self.memory.instance
        return Region(self.table, epoch, field.offset, instance, place.num_slots, field.stride)

    def done(self, channel: Channel) -> Tensor:
        """Return [N] int32: ended programs of puts to each instance, modulo their number."""
        return self._done_CN[channel]

    def skip_attention(self, num_layers: int) -> None:
        """Count the epochs of a step's layers without links, equally on all instances."""
        self.epoch_C[Channel.Q : Channel.RES + 1].add_(num_layers)

    def check(self) -> None:
        """Wait for the device, and raise TermOver, ExchangeTimeout or EpochError if a wait failed.

        Raises RuntimeError if a recurrent state was not of its row's position.
        """
        error = _WaitError._make(self.error.tolist())
        if error.code == 0:
            return
        if error.code == _WRONG_STATE:
            raise RuntimeError(
                f"row {error.source} of instance {self.memory.instance} is at position "
                f"{error.awaited_epoch}, and its state has {error.found_epoch} tokens"
            )
        channel = Channel((error.code - 1) % _TERM_OVER)
        what = (
            f"instance {self.memory.instance} awaits {channel.name} of "
            f"instance {error.source}, epoch {error.awaited_epoch}"
        )
        if error.code > _TERM_OVER:
            raise TermOver(f"term {self._term} is over: {what}")
        if error.found_epoch < 0:
            raise EpochError(
                f"{what}, but finds a count of {-error.found_epoch} rows in its region"
            )
        if error.found_epoch > error.awaited_epoch:
            raise EpochError(
                f"{what}, but finds epoch {error.found_epoch}: the region was overwritten before "
                "it was read"
            )
        raise ExchangeTimeout(
            f"{what}: it did not come within {self._timeout_ms:g} ms "
            f"(the last epoch here is {error.found_epoch})",
            error.source,
        )

    def _grid(self, place: RegionPlace) -> tuple[int, int]:
        return self.places.num_instances, min(_MAX_PROGRAMS, _power_of_two(place.num_slots))

    def _fields(
        self, place: RegionPlace, fields: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[int], dict[str, int]]:
        tensors, widths = [], dict.fromkeys("ABCD", 0)
        for letter, field in zip(widths, place.fields, strict=False):
            tensor = fields[field.name]
            assert tensor.is_contiguous(), field.name
            # Rows are copied as bytes: 4 at a time if a row has a multiple of 4.
            flat = tensor.view(len(tensor), math.prod(tensor.shape[1:]))
            tensors.append(flat.view(torch.int32 if field.row_bytes % 4 == 0 else torch.uint8))
            widths[letter] = tensors[-1].shape[1]
            assert tensors[-1].nbytes == len(tensor) * field.row_bytes, field.name
        widths["BLOCK"] = min(_MAX_BLOCK, _power_of_two(max(widths.values())))
        widths["ROW_BYTES"] = place.row_bytes
        missing = MAX_FIELDS - len(tensors)
        offsets = [field.offset for field in place.fields]
        return tensors + tensors[:1] * missing, offsets + [0] * missing, widths


def _power_of_two(high: int) -> int:
    return 1 << (high - 1).bit_length()
