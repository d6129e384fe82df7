"""Pages by NIXL: one-sided writes from a writer's memory into a receiver's, of the CPU or a GPU, of
any node.

Enters: at both ends memory for pages, at the writer what is to be written. Leaves: the same bytes
at the receiver. Does not know: what a page is, tickets, who may write.

A writer dials the receiver as over TCP (tcp.py); that connection carries the words, tells
whether the other end lives, and brings what NIXL needs to know of the receiver's memory. Only the
pages go by NIXL. Nothing polls while nothing is under way: an agent makes progress in calls only,
so the thread of the writer's connection calls the receiver's agent from the message that announces
a write to the word that follows it.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from data_plane.transport.exchange import ExchangeTimeout, PeerLost
from data_plane.transport.futex import Word
from data_plane.transport.tcp import TcpSegment
from nanocp.config import LimitsConfig

_PACKAGES = ("nixl_cu13", "nixl_cu12")
_PLACE = struct.Struct("<QQQQ")  # address, bytes, device, whether it is a GPU's
_POLL_S = 20e-6


def nixl_package() -> str | None:
    """The module of NIXL that is installed; None if there is none."""
    return next((name for name in _PACKAGES if find_spec(name)), None)


class Place(NamedTuple):
    """Memory that an agent has registered."""

    address: int
    num_bytes: int
    device: int
    is_gpu: bool

    @property
    def kind(self) -> str:
        """As NIXL calls it."""
        return "VRAM" if self.is_gpu else "DRAM"


class NixlAgent:
    """This process's end of every write: what it has registered, and whom it has met."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        """name: unique in the cluster. device: of the memory that `allocate` makes.

        Raises ValueError if NIXL is not installed.
        """
        package = nixl_package()
        if package is None:
            raise ValueError(
                "page_backend is nixl: NIXL is not installed (pip install 'nanocp[nixl]')"
            )
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api: Any = import_module(f"{package}._api")
        # Its own progress thread spins, a core for every idle instance.
        config = api.nixl_agent_config(
            enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._agent = api.nixl_agent(name, config)
        self._bindings: Any = import_module(f"{package}._bindings")
        self._device = device
        self._registered: dict[int, Any] = {}
        """By address: what NIXL made of it, and the memory, which must not go before that does."""

    def allocate(self, num_bytes: int) -> tuple[Any, Place]:
        """Registered memory, zero at first: uint8 [num_bytes], an array or, on a GPU, a tensor; and
        where it is."""
        if self._device == "cpu":
            memory: Any = np.zeros(num_bytes, np.uint8)
            place = Place(memory.ctypes.data, num_bytes, 0, False)
        else:
            import torch

            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            place = Place(memory.data_ptr(), num_bytes, memory.device.index, True)
        registered = self._agent.register_memory(
            [(place.address, num_bytes, place.device, "")], place.kind
        )
        self._registered[place.address] = registered, memory
        return memory, place

    def release(self, place: Place) -> None:
        """Take back what `allocate` registered. Idempotent."""
        if held := self._registered.pop(place.address, None):
            self._agent.deregister_memory(held[0])

    def grant(self, place: Place) -> bytes:
        """What a writer needs in order to write there."""
        return _PLACE.pack(*place) + bytes(self._agent.get_agent_metadata())

    def meet(self, grant: bytes) -> tuple[str, Place]:
        """The peer's name, and where one may write there."""
        address, num_bytes, device, is_gpu = _PLACE.unpack_from(grant)
        return self._agent.add_remote_agent(grant[_PLACE.size :]).decode(), Place(
            address, num_bytes, device, bool(is_gpu)
        )

    def progress(self) -> None:
        """Do what peers wait for. A microsecond when that is nothing."""
        self._agent.get_new_notifs()

    def write(
        self,
        local: Place,
        peer: str,
        remote: Place,
        begin: int,
        num_bytes: int,
        is_alive: Callable[[], bool],
        limit_s: float,
    ) -> None:
        """Write bytes of `local` to the same place in `remote`, and wait until they are there.

        Raises PeerLost if the peer dies meanwhile, ExchangeTimeout after limit_s.
        """
        if local.is_gpu:
            import torch

            torch.cuda.current_stream(
                local.device
            ).synchronize()  # what is to be written may still be on its way here
        what = f"{num_bytes} bytes for {peer} by NIXL"
        deadline = time.monotonic() + limit_s
        ends = [
            self._agent.get_xfer_descs(
                [(place.address + begin, num_bytes, place.device)], place.kind
            )
            for place in (local, remote)
        ]
        try:
            handle = self._agent.initialize_xfer("WRITE", *ends, peer)
            state = self._agent.transfer(handle)
            while state == "PROC":
                if not is_alive():
                    raise PeerLost(f"{what}: the process is gone")
                if time.monotonic() > deadline:
                    raise ExchangeTimeout(
                        f"{what}: the process is alive but took {limit_s:.1f} s and more"
                    )
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except (self._bindings.nixlRemoteDisconnectError, self._bindings.nixlBackendError) as error:
            raise PeerLost(f"{what}: {error}") from error
        if state != "DONE":
            raise PeerLost(f"{what}: it ended as {state}")
        self._agent.release_xfer_handle(handle)


class NixlSegment(TcpSegment):
    """A segments.Segment whose pages are written by NIXL from `bulk`, and whose words go over TCP.

    Raises what TcpSegment does, and ValueError if the owner takes no pages by NIXL.
    """

    def __init__(
        self,
        name: str,
        address: str,
        writer: str,
        limits: LimitsConfig,
        timeout_ms: float,
        agent: NixlAgent,
    ) -> None:
        super().__init__(name, address, writer, limits, timeout_ms)
        if not self.grant:
            self.close()
            raise ValueError(
                f"{name} takes no pages by NIXL: page_backend must be the same everywhere"
            )
        self._agent = agent
        self._peer, self._remote = agent.meet(self.grant)
        self.bulk, self._local = agent.allocate(self._remote.num_bytes)

    def publish(
        self,
        word: Word,
        value: int,
        chunks: Sequence[tuple[int, int]] = (),
        bulk: tuple[int, int] | None = None,
    ) -> None:
        """See segments.Segment. Raises PeerLost and ExchangeTimeout while the pages are under way."""
        if bulk is not None and self.owner_is_alive():
            self.announce()
            limit_s = self._limits.exchange_timeout_ms / 1000
            self._agent.write(
                self._local, self._peer, self._remote, *bulk, self.owner_is_alive, limit_s
            )
        super().publish(word, value, chunks)

    def close(self) -> None:
        """See segments.Segment."""
        super().close()
        if self.bulk is not None:
            self.bulk = None
            self._agent.release(self._local)
