"""GPUs, NVSHMEM and DeepEP of nodes that have none: instances are processes, whose calls go by TCP.

`python -m harness.gpu_stand_ins.far_nodes` is nanocp, whose `serve` starts such instances. A file
in a node's home says what is wrong there: `deep_ep`, its version; `no_driver`; `hidden`.
"""

import ctypes
import pickle
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace

NAME = "harness.gpu_stand_ins.far_nodes"
_HELD = ExitStack()
"""For the life of the process."""
_POLL_S = 0.0005
"""How long a wait that polls leaves the processor to others."""


class Peers:
    """The way to the other instances: calls of one of them are made in its order."""

    def __init__(self, host, rank):
        self._listener, self.rank = Listener((host, 0)), rank
        self.address, self.others = list(self._listener.address), {}
        self.calls = {}
        """Name -> what happens here when another instance calls it."""
        threading.Thread(target=self._accept, daemon=True).start()

    def meet(self, addresses):
        """Connect to all others, by what each has as its address."""
        self.others = {
            rank: Client(tuple(address))
            for rank, address in enumerate(addresses)
            if rank != self.rank
        }

    def call(self, rank, name, *arguments):
        """Let it happen there, after all that was called before."""
        self.others[rank].send_bytes(pickle.dumps((name, arguments)))

    def _accept(self):
        while True:
            connection = self._listener.accept()
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection):
        with suppress(EOFError, OSError):
            while True:
                name, arguments = pickle.loads(connection.recv_bytes())
                self.calls[name](*arguments)


class FarGroup:
    """A fake_nvshmem.Group of which one PE is here, and a network as weak_memory.network takes."""

    def __init__(self, peers, num_pes):
        self._peers, self._own, self.memory, self.barrier = peers, peers.rank, {}, self
        self.far = {frozenset((self._own, pe)) for pe in range(num_pes)} - {frozenset((self._own,))}
        self._arrived, self._number, self._changed = Counter(), 0, threading.Condition()
        peers.calls |= {"arrive": self._arrive, "put": self._put}

    def wait(self, limit_s):
        """Wait until every PE has called it as often."""
        self._number += 1
        for pe in self._peers.others:
            self._peers.call(pe, "arrive", self._own)
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(self._arrived[pe] >= self._number for pe in self._peers.others), limit_s
            ), "a PE does not come"

    def _arrive(self, pe):
        with self._changed:
            self._arrived[pe] += 1
            self._changed.notify_all()

    def call(self, symbol, arguments):
        """Put, as an interpreted kernel asks."""
        assert symbol == "nvshmemx_putmem_signal_block", symbol
        to, source, num_bytes, signal, value, operation, pe = (
            int(handle.data.reshape(-1)[0]) for handle in arguments
        )
        assert operation == 9, "it sets the signal"
        rows = ctypes.string_at(source, num_bytes)
        self._peers.call(pe, "put", *self._place(to), rows, self._place(signal)[1], value)

    def _place(self, address):
        for lane, memory in enumerate(self.memory[self._own]):
            if 0 <= (offset := address - memory.data_ptr()) < memory.nbytes:
                return lane, offset
        raise AssertionError(f"{address:#x} is not symmetric")

    def _put(self, lane, begin, rows, signal, value):
        address = self.memory[self._own][lane].data_ptr()
        ctypes.memmove(address + begin, rows, len(rows))
        ctypes.c_int64.from_address(address + signal).value = value

    def read(self):
        """Memory may be read at any time."""

    def deliver(self):
        """Somebody polls."""
        time.sleep(_POLL_S)


class FarWords:
    """A field of a buffer of another rank: what is set in it is set there."""

    def __init__(self, *where):
        self._peers, self._rank, *self._field = where

    def __setitem__(self, key, value):
        self._peers.call(self._rank, "set", *self._field, key, value)


def far_buffer(peers):
    """The class of Buffer of an instance whose peers are other processes."""
    from harness.gpu_stand_ins import deep_ep_stand_in

    class FarBuffer(deep_ep_stand_in.Buffer):
        """A Buffer whose ranks find each other by addresses."""

        def find_peers(self, comm):
            """Every rank: this one, and those that take what is set in them."""

            def put(number, field, key, value):
                getattr(self._buffers[number], field)[key] = value

            peers.calls["set"] = put
            peers.meet(comm.allgather(peers.address))
            fields = ("rows", "counts", "flags")
            found = {self.rank: self}
            for rank in peers.others:
                buffers = [
                    SimpleNamespace(**{f: FarWords(peers, rank, n, f) for f in fields})
                    for n in range(2)
                ]
                found[rank] = SimpleNamespace(_buffers=buffers)
            return found

    return FarBuffer


def build_instance(config, instance, segments, checkpoint, progress):
    """Build the instance that serves, on stand-ins."""
    from harness.gpu_stand_ins.interpreter import interpret

    interpret()
    from pytest import MonkeyPatch

    from data_plane.startup import gpu
    from data_plane.startup.experimental import deep_ep, nvshmem
    from data_plane.startup.instance import build_instance
    from harness.gpu_stand_ins.fake_nvshmem import FakeLibrary
    from harness.gpu_stand_ins.weak_memory import network
    from harness.gpu_stand_ins.whole_instances import stand_in_for_a_gpu, stand_in_for_deep_ep

    patch, home = MonkeyPatch(), Path.home()
    peers = Peers(segments.address.rpartition(":")[0], instance)
    group = FarGroup(peers, config.cluster.num_instances)
    library = FakeLibrary(group, limit_s=60)
    if not (home / "no_driver").exists():
        stand_in_for_a_gpu(patch, tempfile.mkdtemp(dir=home))
    if (home / "hidden").exists():
        segments._server.close()
    stand_in_for_deep_ep(patch, {instance: library})
    buffer, version = far_buffer(peers), home / "deep_ep"
    package = SimpleNamespace(
        Buffer=buffer, __version__=version.read_text() if version.exists() else "2.1.0"
    )
    patch.setattr(deep_ep, "import_module", lambda name: package)
    patch.setattr(nvshmem, "load_nvshmem", lambda address: nvshmem.Nvshmem(library))
    patch.setattr(nvshmem, "forwarding_module", lambda exchange: 5)
    exchange = gpu.EXCHANGES["nvshmem"]._replace(obstacle=lambda **site: "")
    patch.setitem(gpu.EXCHANGES, "nvshmem", exchange)
    _HELD.enter_context(network(group))
    return build_instance(config, instance, segments, checkpoint, progress)


def main():
    """Run the command line."""
    from nanocp.cli.main import app
    from nanocp.serve import service

    opened = service.open_checkpoint

    def open_checkpoint(config, checkpoint):
        return replace(opened(config, checkpoint), instance_factory=f"{NAME}:build_instance")

    service.open_checkpoint = open_checkpoint
    app()


if __name__ == "__main__":
    main()
