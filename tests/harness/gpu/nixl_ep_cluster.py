"""A GpuCluster whose mixtures of experts go by NIXL-EP's stand-in, in one term after the other."""

import uuid
from concurrent.futures import ThreadPoolExecutor

import torch

from data_plane.startup.experimental.nixl_ep import NixlEpExchange
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.gpu.gpu_cluster import GpuCluster
from harness.gpu_stand_ins.nixl_ep_stand_in import Buffer
from nanocp.config.limits import LimitsConfig

LIMITS = LimitsConfig(start_timeout_ms=10_000)


class Turns:
    """The stand-in for ranks that take turns in one thread, with rows in fp32."""

    class Buffer(Buffer):
        dtype, wait_s = torch.float32, 0


class Member:
    """One instance's end, as if in a process of its own."""

    def __init__(self, cluster_id, seat, cluster, model, limits=LIMITS):
        self.term, self.seat = Term(), seat
        self.segments = Segments(cluster_id, term=self.term)
        self.exchange = NixlEpExchange(
            self.segments, seat, cluster, model, limits, torch.device("cpu"), Turns
        )

    def begin_term(self, number, seats):
        """Leave the last term and begin this one, as all of its seats do."""
        self.exchange.leave()
        self.term.number = number
        self.exchange.begin_term(seats)


def meet(members, number, seats):
    """Let members begin a term together."""
    with ThreadPoolExecutor(len(members)) as pool:
        for done in [pool.submit(each.begin_term, number, seats) for each in members]:
            done.result()


class NixlEpCluster(GpuCluster):
    """Instances in one process that take turns; begin_term connects those that serve."""

    def __init__(self, checkpoint, **keys):
        super().__init__(checkpoint, **keys)
        self._id, self.members = f"nixl-ep-{uuid.uuid4().hex[:8]}", {}
        for seat in self.instances:
            self.start(seat)
        self.begin_term(1, self.seats)

    def start(self, seat):
        """Let another process have the seat: what was connected to the one before is lost."""
        self.members[seat] = Member(self._id, seat, self.cluster, self.model)
        step, exchange = self.instances[seat].step, self.members[seat].exchange
        step.mixture.all_to_all, step.check_mixture = exchange, exchange.check

    def begin_term(self, number, seats):
        super().begin_term(number, seats)
        if self.members:
            meet([self.members[seat] for seat in seats], number, seats)
