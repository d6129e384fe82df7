"""Instances with fused mixtures in one process, their rows, and what these must get."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from data_plane.moe.fused.mixture import FusedMoe, FusedTiles, GateTiles
from data_plane.moe.fused.state import FusedWeights
from data_plane.moe.gate import gate
from data_plane.moe.rows import name_slots
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import PeerMemory, RegionPlaces
from data_plane.transport.regions import mixture_layout
from harness.kernels.kernel_cases import in_fp8
from harness.transports.random_tables import numbers_of, random_table
from nanocp.values.experts import home_table

SMALL_TILES = FusedTiles(
    rows=4, columns=16, depth=16, copied=32, parts=2, num_warps=4, num_stages=1,
    gate=GateTiles(rows=4, columns=4, depth=16, parts=2),
)  # fmt: skip


@dataclass(frozen=True)
class FusedSizes:
    """The sizes of a case: small, so that an interpreted launch takes a moment."""

    num_instances: int = 2
    num_experts: int = 4
    per_row: int = 2
    max_rows: int = 4
    hidden: int = 32
    width: int = 16
    num_shared: int = 1
    softmax_gate: bool = False
    num_groups: int = 1
    groups_per_row: int = 1
    weights_normalised: bool = True
    fp8_block: tuple | None = None
    redundant: int = 0
    """Slots more than an instance needs: then experts are in any, and some in several."""

    def model(self):
        """Name what a fused mixture reads of a model's configuration."""
        return SimpleNamespace(
            num_experts=self.num_experts, num_experts_per_token=self.per_row,
            hidden_size=self.hidden, expert_size=self.width, num_shared_experts=self.num_shared,
            softmax_gate=self.softmax_gate, num_groups=self.num_groups,
            num_groups_per_token=self.groups_per_row, weights_normalised=self.weights_normalised,
            routed_scale=1.5, fp8_block=self.fp8_block,
        )  # fmt: skip


class Layer:
    """One epoch of an instance: its rows, and what they must get."""

    def __init__(self, case, num_rows, visited, is_live, generator):
        sizes = case.sizes
        self.x, self.residual = torch.randn(2, num_rows, sizes.hidden, generator=generator)
        self.live = torch.full((num_rows,), is_live) & (
            torch.rand(num_rows, generator=generator) < 0.8
        )
        self.bias = 0.2 * torch.randn(sizes.num_experts, generator=generator)
        if visited is not None:
            # A score is below 1, so no other expert is chosen.
            self.bias -= 10
            self.bias[visited] += 10
        self.moe = SimpleNamespace(
            gate=case.gate, gate_bias=None if sizes.softmax_gate else self.bias
        )
        self.expert, self.weight = gate(self.x, self.moe, case.model)
        self.expected = case.reference(self)
        self.rows = None
        """The rows as a launch takes them; made when the first launch needs them."""


class FusedCase:
    """Fused mixtures of several instances, each with as many epochs of rows as were drawn."""

    def __init__(self, sizes=None, seed=0, tiles=SMALL_TILES, timeout_ms=5.0, device="cpu"):
        self.sizes = sizes = sizes or FusedSizes()
        self.model, self.device = sizes.model(), torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        everyone = range(sizes.num_instances)
        layout = mixture_layout(sizes.max_rows, sizes.per_row, sizes.hidden, "float32")
        places = RegionPlaces(layout, sizes.num_instances)
        self.exchanges = [GpuExchange(places, self.device, timeout_ms) for _ in everyone]
        for exchange, memory in zip(
            self.exchanges, PeerMemory.create_all(places, self.device), strict=True
        ):
            exchange.attach(memory)
        self._draw_weights()
        table = home_table(sizes.num_experts, sizes.num_instances, sizes.redundant)
        if sizes.redundant:
            table = random_table(sizes.num_experts, sizes.num_instances, seed, table.num_slots)
        self.num_here, self.number = table.num_slots, numbers_of(table, sizes.num_experts)
        self.held = [[table.at(i).get(slot, 0) for slot in range(self.num_here)] for i in everyone]
        self.weights = [self._weights_of(held) for held in self.held]
        self.fused = [
            FusedMoe(
                exchange, self.model, num_instances=sizes.num_instances, num_here=self.num_here,
                max_rows=sizes.max_rows, dtype=torch.float32, device=self.device,
                is_fp8=sizes.fp8_block is not None, tiles=tiles,
            )
            for exchange in self.exchanges
        ]  # fmt: skip
        self.layers = [[] for _ in everyone]
        """[instance][epoch]"""

    def _draw_weights(self):
        """Draw the gate, and the experts of all instances; shared ones have the last numbers."""
        sizes = self.sizes

        def draw(rows, columns):
            shape = sizes.num_experts + sizes.num_shared, rows, columns
            return torch.randn(shape, generator=self.generator) / columns**0.5

        self.gate = torch.randn(sizes.num_experts, sizes.hidden, generator=self.generator) * 0.3
        self.gate_up, self.down = (
            draw(2 * sizes.width, sizes.hidden),
            draw(sizes.hidden, sizes.width),
        )
        self.stored = [self.gate_up, self.down]
        if sizes.fp8_block:
            self.stored = [in_fp8(weight, sizes.fp8_block) for weight in self.stored]
            self.gate_up, self.down = (weight.dequantised() for weight in self.stored)

    def _weights_of(self, held):
        slots = [*held, *range(self.sizes.num_experts, len(self.gate_up))]
        load_E = torch.zeros(len(held), dtype=torch.int64)
        tensors = [self.gate, self.gate, self.number, load_E]
        for weight in self.stored:
            parts = (weight.values, weight.scale) if self.sizes.fp8_block else (weight, weight)
            # Indexing does not know FP8.
            tensors += [torch.stack([part[slot] for slot in slots]) for part in parts]
        return FusedWeights(*(tensor.to(self.device) for tensor in tensors))

    def reference(self, layer):
        """Add each row's experts and the shared ones to the row, in fp64: [B, X]."""
        total = layer.residual.double()
        for row, (x, experts) in enumerate(zip(layer.x.double(), layer.expert, strict=True)):
            visits = [*zip(experts.tolist(), layer.weight[row].tolist(), strict=True)]
            visits = visits if layer.live[row] else []
            shared = range(self.sizes.num_experts, len(self.gate_up))
            for expert, weight in [*visits, *((expert, 1.0) for expert in shared)]:
                gate, up = (self.gate_up[expert].double() @ x).chunk(2)
                total[row] += weight * (self.down[expert].double() @ (F.silu(gate) * up))
        return total

    def expected_loads(self):
        """The slow reference of all epochs' loads: [N, S], of what each live row names."""
        expected = torch.zeros(self.sizes.num_instances, self.num_here, dtype=torch.int64)
        for seat, layers in enumerate(self.layers):
            for layer in layers:
                number_BK = name_slots(layer.expert, layer.live, self.number, seat)
                named = number_BK[number_BK >= 0]
                expected += torch.bincount(named, minlength=expected.numel()).view_as(expected)
        return expected

    def draw(self, num_rows=None, visited=None, is_live=True):
        """Draw an epoch of every instance.

        num_rows: of each instance; random if None. visited: the experts that rows may visit.
        """
        most = self.sizes.max_rows
        for instance, layers in enumerate(self.layers):
            count = int(torch.randint(most + 1, (1,), generator=self.generator))
            if num_rows is not None:
                count = num_rows[instance]
            layers.append(Layer(self, count, visited, is_live, self.generator))

    def epoch(self, instance):
        """Count the epochs that the instance has completed."""
        return int(self.fused[instance].epoch)

    def pending(self):
        """List the instances that have epochs left."""
        return [i for i, layers in enumerate(self.layers) if self.epoch(i) < len(layers)]

    def arguments(self, instance, epoch=None):
        """(rows, weights) of an instance's epoch, by default of the next one, for a launch."""
        layer = self.layers[instance][self.epoch(instance) if epoch is None else epoch]
        if layer.rows is None:
            layer.rows = self.fused[instance].rows(
                *(tensor.to(self.device) for tensor in (layer.residual, layer.x, layer.live))
            )
        weights = self.weights[instance]
        return layer.rows, weights._replace(gate_bias=layer.bias.to(self.device))

    def launch(self, instance, **keys):
        """Launch the kernel for the instance's next epoch."""
        self.fused[instance].launch(*self.arguments(instance), **keys)

    def check(self):
        """Raise unless every epoch's results and loads are right and no counter is left."""
        loads = [weights.load.tolist() for weights in self.weights]
        assert loads == self.expected_loads().tolist()
        for exchange, fused, layers in zip(self.exchanges, self.fused, self.layers, strict=True):
            exchange.check()
            assert int(fused.epoch) == len(layers)
            assert not fused.counter.any(), "a counter is not zero between epochs"
            for epoch, layer in enumerate(layers):
                torch.testing.assert_close(
                    layer.rows.out.double().cpu(), layer.expected, atol=1e-5, rtol=1e-5,
                    msg=lambda text, epoch=epoch: f"epoch {epoch}: {text}",
                )  # fmt: skip

    def outputs(self):
        """The results of all epochs and instances, one tensor."""
        return torch.cat([layer.rows.out for layers in self.layers for layer in layers])


def run_turns(case):
    """Run the next epoch of the instances that have one by turns, and count the rounds."""
    turns = [case.fused[i].turns(*case.arguments(i)) for i in case.pending()]
    num_rounds = 0
    while turns:
        turns = [turn for turn in turns if next(turn, StopIteration) is not StopIteration]
        num_rounds += 1
    return num_rounds
