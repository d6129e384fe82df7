"""A mixture of experts over instances that are threads of one process, by any implementation."""

import math
import threading
import time
import uuid
from dataclasses import replace
from itertools import product

import torch

from data_plane.model.weights import LayerWeights, MlpWeights, MoeWeights
from data_plane.moe.all_to_all_cpu import ExpertExchange
from data_plane.native.kernels import NativeKernels
from data_plane.native.mixture import NativeMixtures
from data_plane.native.receiver import receive_puts
from data_plane.transport.regions import TensorExchange, mixture_layout
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.local_exchange import LocalExchange
from harness.transports.random_tables import named_slots
from nanocp.config.limits import LimitsConfig
from nanocp.values.experts import home_table
from nanocp.values.members import Peer

PATIENT = LimitsConfig(tick_ms=20, exchange_timeout_ms=30_000, plan_timeout_ms=200, retry_ms=100)
MAX_ROWS = 24


def moe_layout(model, dtype):
    """Lay out the regions of dispatch and combine."""
    value = "uint16" if dtype == torch.bfloat16 else "float32"
    return mixture_layout(MAX_ROWS, model.num_experts_per_token, model.hidden_size, value)


def exchanges(kind, num_instances, layout, limits=PATIENT, cls=ShmExchange):
    """Make the connected ends of all instances. kind: local, shm or tcp; cls: not of local ones."""
    if kind == "local":
        return LocalExchange.create_all(num_instances, layout, limits)
    cluster_id = f"test-{uuid.uuid4().hex}"
    if kind == "shm":
        segments = [Segments(cluster_id) for _ in range(num_instances)]
    else:
        servers = [TcpSegmentServer("127.0.0.1", receive_puts) for _ in range(num_instances)]
        segments = [
            Segments(cluster_id, server, node=f"node {number}")
            for number, server in enumerate(servers)
        ]
        for each in segments:
            each.meet([Peer(f"node {i}", own.address) for i, own in enumerate(segments)])
    ends = [
        cls.create(own, instance, num_instances, layout, limits)
        for instance, own in enumerate(segments)
    ]
    for end in ends:
        end.connect(30_000)
    return ends


class MixtureCase:
    """Weights of two mixtures, and what each instance is given, from a seed."""

    def __init__(
        self, config, form, num_instances, seed, num_epochs=6, keeps_bf16=None, table=None, **shape
    ):
        """config: a ModelConfig, changed by `shape`. form: see native_cases. table: of experts."""
        self.model, self.dtype = replace(config, **shape), form[0]
        self.table = table or home_table(self.model.num_experts, num_instances)
        self.form, self.num_instances, self.num_epochs = form, num_instances, num_epochs
        self.generator = torch.Generator().manual_seed(seed)
        self.value_dtype = self.dtype if keeps_bf16 is None else torch.bfloat16
        self.keeps_bf16 = bool(keeps_bf16)
        self.packing = NativeKernels(*form, keeps_bf16=self.keeps_bf16)
        experts, hidden = self.model.num_experts, self.model.hidden_size
        self.layers = []
        # Only the second layer has limits, one for its experts and one for the shared one.
        for limit, shared_limit in ((math.inf, math.inf), (0.25, 0.125)):
            mlps = [self._mlp() for _ in range(experts)]
            self.layers.append(
                MoeWeights(
                    gate=self.packing.gate_weight(self._randn(experts, hidden)),
                    gate_bias=self._randn(experts),
                    held=list(range(experts)),
                    mlps=mlps,
                    shared=self._mlp(shared_limit) if self.model.num_shared_experts else None,
                    limit=limit,
                )
            )
        self.rows = [[self._rows() for _ in range(num_epochs)] for _ in range(num_instances)]

    def _randn(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def _mlp(self, limit=math.inf):
        inner, hidden = self.model.expert_size, self.model.hidden_size
        gate_up = (self._randn(2 * inner, hidden) * hidden**-0.5).to(self.value_dtype)
        down = (self._randn(hidden, inner) * inner**-0.5).to(self.value_dtype)
        return MlpWeights(self.packing.linear(gate_up), self.packing.linear(down), limit)

    def _rows(self):
        count = int(torch.randint(0, MAX_ROWS + 1, (1,), generator=self.generator))
        x_BX, normed_BX = (self._randn(count, self.model.hidden_size).to(self.dtype) for _ in "ab")
        return x_BX, normed_BX, torch.rand(count, generator=self.generator) < 0.8

    def layers_of(self, instance):
        """The layers of an instance, with its experts; a slot without one has any."""
        slots = range(self.table.num_slots)
        held = [self.table.at(instance, layer) for layer in range(len(self.layers))]
        return [
            LayerWeights(
                *(None,) * 5, replace(moe, mlps=[moe.mlps[here.get(slot, 0)] for slot in slots])
            )
            for moe, here in zip(self.layers, held, strict=True)
        ]

    def in_parts(self, end, instance):
        """The slow reference: a call for each part of a mixture."""
        return ExpertExchange(
            end, self.model, self.layers_of(instance), self.packing, lambda phase: None, self.table
        )

    def in_one_call(self, num_processors, schedule):
        """A maker of mixtures in one native call."""
        kernels = [
            NativeKernels(*self.form, num_processors, self.keeps_bf16)
            for _ in range(self.num_instances)
        ]

        def make(end, instance):
            return NativeMixtures(end, self.model, self.layers_of(instance), kernels[instance],
                                  MAX_ROWS, lambda phase: None, self.table, schedule)  # fmt: skip

        return make

    def expected_loads(self):
        """The slow reference of `loads`: [instance][epoch], of what each live row names."""
        slots, layers = self.table.num_slots, len(self.layers)
        shape = self.num_epochs, self.num_instances, layers, slots
        loads_ENLS = torch.zeros(shape, dtype=torch.int64)
        for epoch, (seat, rows) in product(range(self.num_epochs), enumerate(self.rows)):
            layer = epoch % layers
            name, (_, normed_BX, live_B) = named_slots(self.table, layer), rows[epoch]
            expert_BK, _ = self.packing.gate(normed_BX, self.layers[layer], self.model)
            for row, experts in enumerate(expert_BK.tolist()):
                for number in (name(expert, row + seat) for expert in experts if live_B[row]):
                    loads_ENLS[epoch, number // slots, layer, number % slots] += 1
        return [list(of_instance) for of_instance in loads_ENLS.transpose(0, 1)]

    def run(self, make, kind="local", delays=None):
        """Every instance's outputs: [instance][epoch]. delays: (instance, epoch) -> seconds.

        `loads` are then those of each epoch, likewise.
        """
        layout = moe_layout(self.model, self.dtype)
        ends = [TensorExchange(end, layout) for end in exchanges(kind, self.num_instances, layout)]
        outs, self.loads = ([[] for _ in ends] for _ in range(2))
        failures = []

        def work(instance):
            try:
                mixtures = make(ends[instance], instance)
                for epoch in range(self.num_epochs):
                    if delays is not None:
                        time.sleep(delays(instance, epoch))
                    rows = self.rows[instance][epoch]
                    outs[instance].append(result_of(mixtures.phases(*rows, epoch % 2)))
                    self.loads[instance].append(mixtures.loads())
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(self.num_instances)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for end in ends:
                end.close()
        if failures:
            raise failures[0]
        return outs


def result_of(phases):
    """Run a mixture to its end without a turn for others."""
    while True:
        try:
            next(phases)
        except StopIteration as ended:
            return ended.value
