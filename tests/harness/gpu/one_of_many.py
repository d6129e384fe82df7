"""An instance of a GpuCluster whose peers run in other processes of this node."""

import pickle
from pathlib import Path

import torch
import torch.distributed as dist

from data_plane.transport.exchange import Term
from data_plane.transport.gpu.cuda_runtime import load_runtime
from data_plane.transport.gpu.ipc_memory import IpcMemory
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig


class OneOfMany:
    """An instance whose peers are other processes of this node: how they meet, in a folder."""

    def __init__(self, instance, folder, term=1, runtime=None, device="cuda:0"):
        """runtime: what maps memory; by default CUDA's."""
        self.instance, self.segments = instance, Segments(Path(folder).name, term=Term(term))
        self._store, self._num_gathered = dist.FileStore(f"{folder}/store", -1), 0
        self._runtime = runtime or load_runtime(torch.device(device).index or 0)
        self._memories = {}

    def begin_term(self, lane, seats, places):
        """Map the memory of these instances, who do the same, for a lane."""
        if lane not in self._memories:
            limits = LimitsConfig(start_timeout_ms=120_000)
            self._memories[lane] = IpcMemory(
                self._runtime, self.segments, lane, self.instance, places, limits
            )
        self._num_gathered = 0
        return self._memories[lane].begin_term(seats)

    def leave(self):
        """Unmap what is mapped."""
        for memory in self._memories.values():
            memory.leave()

    def gather(self, value, seats):
        """Wait for the values of these instances, who all call this; returns them in this order."""
        self._num_gathered += 1
        prefix = f"{self.segments.term.number}/{self._num_gathered}"
        self._store.set(f"{prefix}/{self.instance}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"{prefix}/{seat}")) for seat in seats]
