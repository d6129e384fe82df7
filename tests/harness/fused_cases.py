"""Instances with fused mixtures in one process, their rows, and the sums that these must get."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data_plane.model.weights import slots_of
from data_plane.moe.fused import FusedMoe, FusedTiles
from data_plane.moe.fused_tasks import FusedExperts
from data_plane.transport.cuda_ipc import GpuExchange, PeerMemory, RegionPlaces
from data_plane.transport.regions import mixture_layout
from harness.kernel_cases import in_fp8
from nanocp.experts import home_experts

SMALL_TILES = FusedTiles(
    rows=4, columns=16, depth=16, copied=32, parts=2, num_warps=4, num_stages=1
)


@dataclass(frozen=True)
class FusedSizes:
    """The sizes of a case: small, so that an interpreted launch takes a moment."""

    num_instances: int = 2
    num_experts: int = 4
    per_row: int = 2
    max_rows: int = 4
    hidden: int = 32
    width: int = 16
    fp8_block: tuple | None = None


class Layer:
    """One epoch of an instance: its rows, and what they must get."""

    def __init__(self, case, instance, num_rows, visited, is_live, generator):
        sizes = case.sizes
        self.x = torch.randn(num_rows, sizes.hidden, generator=generator)
        order = torch.rand(num_rows, len(visited), generator=generator).argsort(dim=1)
        self.expert = torch.tensor(visited)[order][:, : sizes.per_row].contiguous()
        self.weight = torch.rand(num_rows, sizes.per_row, generator=generator)
        self.live = torch.full((num_rows,), is_live) & (
            torch.rand(num_rows, generator=generator) < 0.8
        )
        self.expected = case.reference(self) * self.live[:, None]
        self.rows = None
        """What FusedMoe.route found; made when the first launch needs it."""


class FusedCase:
    """Fused mixtures of several instances, each with as many epochs of rows as were drawn."""

    def __init__(self, sizes=None, seed=0, tiles=SMALL_TILES, timeout_ms=5.0, device="cpu"):
        self.sizes = sizes = sizes or FusedSizes()
        self.generator = torch.Generator().manual_seed(seed)
        everyone = range(sizes.num_instances)
        layout = mixture_layout(sizes.max_rows, sizes.per_row, sizes.hidden, "float32")
        places, device = RegionPlaces(layout, sizes.num_instances), torch.device(device)
        self.exchanges = [GpuExchange(places, device, timeout_ms) for _ in everyone]
        for exchange, memory in zip(
            self.exchanges, PeerMemory.create_all(places, device), strict=True
        ):
            exchange.attach(memory)
        self._draw_weights()
        homes = [home_experts(sizes.num_experts, i, sizes.num_instances) for i in everyone]
        self.experts = [self._experts_of(home) for home in homes]
        self.fused = [
            FusedMoe(
                exchange, num_instances=sizes.num_instances, num_experts=sizes.num_experts,
                num_here=len(home), per_row=sizes.per_row, hidden_size=sizes.hidden,
                expert_size=sizes.width, max_rows=sizes.max_rows, dtype=torch.float32,
                device=device, fp8_block=sizes.fp8_block, tiles=tiles,
            )
            for exchange, home in zip(self.exchanges, homes, strict=True)
        ]  # fmt: skip
        self.layers = [[] for _ in everyone]
        """[instance][epoch]"""

    def _draw_weights(self):
        sizes = self.sizes

        def draw(rows, columns):
            shape = sizes.num_experts, rows, columns
            return torch.randn(shape, generator=self.generator) / columns**0.5

        self.gate_up, self.down = (
            draw(2 * sizes.width, sizes.hidden),
            draw(sizes.hidden, sizes.width),
        )
        self.stored = [self.gate_up, self.down]
        if sizes.fp8_block:
            self.stored = [in_fp8(weight, sizes.fp8_block) for weight in self.stored]
            self.gate_up, self.down = (weight.dequantised() for weight in self.stored)

    def _experts_of(self, home):
        tensors = [slots_of(home, self.sizes.num_experts)]
        for weight in self.stored:
            parts = (weight.values, weight.scale) if self.sizes.fp8_block else (weight, weight)
            tensors += [part[home.start : home.stop].contiguous() for part in parts]
        return FusedExperts(*tensors)

    def reference(self, layer):
        """Sum each row over its experts, in fp64: [B, X]."""
        total = torch.zeros_like(layer.x, dtype=torch.float64)
        for row, (x, experts) in enumerate(zip(layer.x.double(), layer.expert, strict=True)):
            for k, expert in enumerate(experts.tolist()):
                gate, up = (self.gate_up[expert].double() @ x).chunk(2)
                y = self.down[expert].double() @ (F.silu(gate) * up)
                total[row] += float(layer.weight[row, k]) * y
        return total

    def draw(self, num_rows=None, visited=None, is_live=True):
        """Draw an epoch of every instance.

        num_rows: of each instance; random if None. visited: the experts that rows may visit.
        """
        most = self.sizes.max_rows
        for instance, layers in enumerate(self.layers):
            count = int(torch.randint(most + 1, (1,), generator=self.generator))
            if num_rows is not None:
                count = num_rows[instance]
            chosen = list(visited or range(self.sizes.num_experts))
            layers.append(Layer(self, instance, count, chosen, is_live, self.generator))

    def epoch(self, instance):
        """Count the epochs that the instance has completed."""
        return int(self.fused[instance].epoch)

    def pending(self):
        """List the instances that have epochs left."""
        return [i for i, layers in enumerate(self.layers) if self.epoch(i) < len(layers)]

    def rows(self, instance, epoch=None):
        """The rows of an instance's epoch, by default of the next one, as a launch takes them."""
        layer = self.layers[instance][self.epoch(instance) if epoch is None else epoch]
        if layer.rows is None:
            layer.rows = self.fused[instance].route(layer.x, layer.expert, layer.weight, layer.live)
        return layer.rows

    def launch(self, instance, **keys):
        """Launch the kernel for the instance's next epoch."""
        self.fused[instance].launch(self.rows(instance), self.experts[instance], **keys)

    def check(self):
        """Raise unless every epoch's sums are right and no counter is left."""
        for exchange, fused, layers in zip(self.exchanges, self.fused, self.layers, strict=True):
            exchange.check()
            assert int(fused.epoch) == len(layers)
            assert not fused.counter.any(), "a counter is not zero between epochs"
            for epoch, layer in enumerate(layers):
                torch.testing.assert_close(
                    layer.rows.out.double(), layer.expected, atol=1e-5, rtol=1e-5,
                    msg=lambda text, epoch=epoch: f"epoch {epoch}: {text}",
                )  # fmt: skip

    def outputs(self):
        """The sums of all epochs and instances, one tensor."""
        return torch.cat([layer.rows.out for layers in self.layers for layer in layers])
