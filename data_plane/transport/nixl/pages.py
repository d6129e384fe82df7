"""Pages by NIXL: one-sided writes between memory of CPUs or GPUs, on any node.

A connection as over TCP (tcp/segment.py) carries the words and the memory's grant. An agent makes
progress only when called: the receiver's thread calls it from the announcement of a write until the
word behind it.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from data_plane.transport.exchange import ExchangeTimeout, PeerLost, Term
from data_plane.transport.futex import Word
from data_plane.transport.tcp.segment import TcpSegment
from nanocp.config.limits import LimitsConfig

_PACKAGES = ("nixl_cu13", "nixl_cu12")
_PLACE = struct.Struct("<QQQQ")  # address, bytes, device, whether it is a GPU's
_POLL_S = 20e-6
_LEAVE_A_WAY = (
    "UCX_TLS and UCX_NET_DEVICES must leave both ends a transport in common; tcp over a bridge "
    "needs UCX_TCP_BRIDGE_ENABLE=y"
)


def nixl_package() -> str | None:
    """Return the name of NIXL's installed module, or None."""
    return next((name for name in _PACKAGES if find_spec(name)), None)


class Place(NamedTuple):
    """Memory registered with an agent."""

    address: int
    num_bytes: int
    device: int
    """The GPU's index; 0 for the CPU."""
    is_gpu: bool

    @property
    def kind(self) -> str:
        return "VRAM" if self.is_gpu else "DRAM"

    def part(self, begin: int, num_bytes: int) -> Place:
        return self._replace(address=self.address + begin, num_bytes=num_bytes)


class NixlAgent:
    """This process's end of every write: its registered memory and its known peers."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        """Start an agent. Raises ValueError if NIXL is not installed, or UCX does not start.

        name: unique in the cluster. device: of memory of `allocate`.
        """
        package = nixl_package()
        if package is None:
            raise ValueError("a backend is nixl: NIXL is not installed (pip install '.[nixl]')")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api: Any = import_module(f"{package}._api")
        # NIXL's own progress thread would spin: a core for every idle instance.
        config = api.nixl_agent_config(
            enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._bindings: Any = import_module(f"{package}._bindings")
        try:
            self._agent = api.nixl_agent(name, config)
        except self._bindings.nixlBackendError as error:
            raise ValueError(f"NIXL does not start ({error}): {_LEAVE_A_WAY}") from error
        self._device = device
        self._registered: dict[int, Any] = {}
        """(NIXL's registration, memory, which must outlast it) by address."""

    def allocate(self, num_bytes: int) -> tuple[Any, Place]:
        """Make registered memory, all zero, and return it with its place.

        It is uint8 [num_bytes], an array or, on a GPU, a tensor.
        """
        if self._device == "cpu":
            memory: Any = np.zeros(num_bytes, np.uint8)
            place = Place(memory.ctypes.data, num_bytes, device=0, is_gpu=False)
        else:
            import torch

            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            place = Place(memory.data_ptr(), num_bytes, device=memory.device.index, is_gpu=True)
        registered = self._agent.register_memory(
            [(place.address, num_bytes, place.device, "")], place.kind
        )
        self._registered[place.address] = registered, memory
        return memory, place

    def release(self, place: Place) -> None:
        """Deregister memory of `allocate`. Idempotent."""
        if held := self._registered.pop(place.address, None):
            self._agent.deregister_memory(held[0])

    def grant(self, place: Place) -> bytes:
        """Return the bytes that let a writer write to the place."""
        return _PLACE.pack(*place) + bytes(self._agent.get_agent_metadata())

    def meet(self, grant: bytes) -> tuple[str, Place]:
        """Read a peer's grant: the peer's name and the place open to writes.

        Raises ValueError if UCX has no way to the peer.
        """
        place = Place._make(_PLACE.unpack_from(grant))
        return self.add_peer(grant[_PLACE.size :]), place._replace(is_gpu=bool(place.is_gpu))

    def add_peer(self, metadata: bytes) -> str:
        """Load the metadata of any agent, and return its name.

        Raises ValueError if UCX has no way to it.
        """
        known = self._bindings
        refused = known.nixlNotFoundError, known.nixlBackendError, known.nixlMismatchError
        try:
            return str(self._agent.add_remote_agent(metadata).decode())
        except (*refused, known.nixlInvalidParamError) as error:
            raise ValueError(
                f"NIXL finds no way to the memory of another process ({error}): {_LEAVE_A_WAY}"
            ) from error

    def remove_peer(self, peer: str) -> None:
        """Disconnect from a peer, which may be gone."""
        with suppress(PeerLost):
            self._call(self._agent.remove_remote_agent, f"the end of {peer}", -1, peer)

    def notify(self, peer: str, text: str) -> None:
        """Send a notification to a peer, which acknowledges none. Raises PeerLost."""
        self._call(self._agent.send_notif, f"a notification to {peer}", -1, peer, text.encode())
        self.progress()

    def progress(self) -> None:
        """Serve the peers' writes; takes a microsecond if there are none."""
        self._agent.get_new_notifs()

    def prepare(self, local: Place, peer: str, remote: Place, what: str, instance: int) -> Any:
        """Prepare a write of all of `local` to `remote`, of equal size, of the agent `peer`.

        It may be posted repeatedly. Raises PeerLost; arguments as of `post`.
        """
        ends = [
            self._agent.get_xfer_descs([(place.address, place.num_bytes, place.device)], place.kind)
            for place in (local, remote)
        ]
        return self._call(self._agent.initialize_xfer, what, instance, "WRITE", *ends, peer)

    def blocks(self, runs: Sequence[Sequence[int]], kind: str, peer: str = "") -> Any:
        """Prepare memory for `prepare_read`: runs of blocks, which are numbered through all runs.

        runs: of each the address, the bytes of a block, the device, the bytes from one block to the
        next, the number of blocks. kind: DRAM or VRAM. peer: the memory's agent; empty: this one.
        Raises PeerLost.
        """
        what = f"the memory of {peer or 'this process'}"
        return self._call(
            self._agent.prep_xfer_dlist, what, -1, peer, np.array(runs, np.uint64), kind
        )

    def prepare_read(self, local: Any, into: np.ndarray, remote: Any, blocks: np.ndarray) -> Any:
        """Prepare a read of remote blocks into local ones, both by number [n] int32.

        local, remote: of `blocks`. It is posted as a write. Raises PeerLost.
        """
        return self._call(
            self._agent.make_prepped_xfer, "a read", -1, "READ", local, into, remote, blocks
        )

    def post(self, write: Any, what: str, instance: int) -> None:
        """Begin a prepared write without waiting for its end.

        what: its short description. instance: the owner of the target. Raises PeerLost.
        """
        self._step(self._agent.transfer, write, what, instance)

    def is_done(self, write: Any, what: str, instance: int) -> bool:
        """Return True once a posted write is over. Raises PeerLost; arguments as of `post`."""
        return self._step(self._agent.check_xfer_state, write, what, instance)

    def finish(
        self,
        write: Any,
        what: str,
        instance: int,
        is_alive: Callable[[], bool],
        limit_s: float,
    ) -> None:
        """Wait until a posted write is done; arguments as of `post`.

        Raises PeerLost if its target dies meanwhile, ExchangeTimeout after limit_s.
        """
        deadline = time.monotonic() + limit_s
        while not self.is_done(write, what, instance):
            if not is_alive():
                raise PeerLost(f"{what}: the process is gone", instance)
            if time.monotonic() > deadline:
                raise ExchangeTimeout(
                    f"{what}: the process is alive but took more than {limit_s:.1f} s", instance
                )
            time.sleep(_POLL_S)

    def discard(self, write: Any) -> None:
        """Give up a prepared write that is not under way."""
        self._agent.release_xfer_handle(write)

    def _step(self, call: Callable[[Any], str], write: Any, what: str, instance: int) -> bool:
        state = self._call(call, what, instance, write)
        if state == "ERR":
            raise PeerLost(f"{what}: it ended as {state}", instance)
        return bool(state == "DONE")

    def _call(self, call: Callable[..., Any], what: str, instance: int, *arguments: Any) -> Any:
        known = self._bindings
        # NIXL forgets a peer whose connection broke.
        lost = known.nixlRemoteDisconnectError, known.nixlBackendError, known.nixlNotFoundError
        try:
            return call(*arguments)
        except lost as error:
            raise PeerLost(f"{what}: {error}", instance) from error


class NixlSegment(TcpSegment):
    """A peer's segment whose pages go by NIXL, from `bulk`, and whose words go by TCP."""

    def __init__(
        self,
        name: str,
        instance: int,
        address: str,
        writer: str,
        limits: LimitsConfig,
        timeout_ms: float,
        term: Term,
        agent: NixlAgent,
    ) -> None:
        super().__init__(name, instance, address, writer, limits, timeout_ms, term)
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
        """Write the pages and the chunks, then set the word.

        Raises PeerLost or ExchangeTimeout while the pages are under way.
        """
        if bulk is not None and self.owner_is_alive():
            self.announce()
            self._write(*bulk)
        super().publish(word, value, chunks)

    def _write(self, begin: int, num_bytes: int) -> None:
        if self._local.is_gpu:
            import torch

            # The bytes to write may still be on their way to `bulk`.
            torch.cuda.current_stream(self._local.device).synchronize()
        what = f"{num_bytes} bytes for {self._peer} by NIXL"
        limit_s = self._limits.exchange_timeout_ms / 1000
        local, remote = (place.part(begin, num_bytes) for place in (self._local, self._remote))
        write = self._agent.prepare(local, self._peer, remote, what, self._instance)
        self._agent.post(write, what, self._instance)
        self._agent.finish(write, what, self._instance, self.owner_is_alive, limit_s)
        self._agent.discard(write)

    def close(self) -> None:
        super().close()
        if self.bulk is not None:
            self.bulk = None
            self._agent.release(self._local)
