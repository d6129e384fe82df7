"""NanoFlow's cost model (section 3): equations 1 to 5 and demands (Table 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Gpu:
    """One accelerator, as a row of NanoFlow's Table 1."""

    vendor: str
    name: str
    year: int
    mem_gb: float
    mem_gb_per_s: float
    net_gb_per_s: float
    """Both directions."""
    fp16_gflop_per_s: float


@dataclass(frozen=True)
class DenseModel:
    """A Llama-shaped model, 16 bits for each weight."""

    name: str
    hidden_size: int
    num_layers: int
    ffn_size: int
    num_kv_heads: int
    head_dim: int
    num_parameters: float
    """The nominal number, used by equations 2, 4 and 5."""

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys in a layer."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Requests:
    """A workload by its mean lengths, in tokens."""

    prompt: int
    output: int

    @property
    def decode_share(self) -> float:
        """Decoded share of a steady batch: d / (p + d)."""
        return self.output / (self.prompt + self.output)


MODELS = (
    DenseModel("LLaMA-2 70B", 8192, 80, 28_672, 8, 128, 70e9),
    DenseModel("LLaMA-3 8B", 4096, 32, 14_336, 8, 128, 8e9),
    DenseModel("LLaMA-3 70B", 8192, 80, 28_672, 8, 128, 70e9),
    DenseModel("Qwen2 72B", 8192, 80, 29_568, 8, 128, 72e9),
)
_BYTES = 2


class Demand(NamedTuple):
    """Demand of one operation, over all layers and GPUs."""

    name: str
    gflop: float
    mem_gb: float
    net_gb: float


class Times(NamedTuple):
    """Milliseconds that each resource needs by itself."""

    compute_ms: float
    memory_ms: float
    network_ms: float

    @property
    def memory_of_compute(self) -> float:
        """Equation 4: T_R."""
        return self.memory_ms / self.compute_ms


@dataclass(frozen=True)
class Machine:
    """GPUs that serve one model with tensor parallelism."""

    gpu: Gpu
    num_gpus: int

    def kv_room_gb(self, model: DenseModel) -> float:
        """Memory that weights leave for KV; below 0 they do not fit."""
        return self.num_gpus * self.gpu.mem_gb - 1e-9 * _BYTES * model.num_parameters

    def optimal_tokens_per_s(self, model: DenseModel, gflop_per_s: float | None = None) -> float:
        """Equation 5: the compute-bound throughput of one GPU, in tokens a second.

        gflop_per_s: of a GEMM; by default the data sheet's.
        """
        return (gflop_per_s or self.gpu.fp16_gflop_per_s) * 1e9 / (2 * model.num_parameters)

    def iteration(self, model: DenseModel, batch: float) -> Times:
        """Equations 2, 1 and 3: an iteration that reads all memory once."""
        num, gflop = self.num_gpus, 2e-9 * batch * model.num_parameters
        moved_gb = 4e-9 * num * batch * model.hidden_size * _BYTES * model.num_layers
        moved_gb = moved_gb if num > 1 else 0.0
        return self.times(Demand("iteration", gflop, num * self.gpu.mem_gb, moved_gb))

    def times(self, demand: Demand) -> Times:
        """Milliseconds of an operation; one direction of the network counts."""
        gpu, num = self.gpu, self.num_gpus
        return Times(
            1e3 * demand.gflop / (num * gpu.fp16_gflop_per_s),
            1e3 * demand.mem_gb / (num * gpu.mem_gb_per_s),
            1e3 * demand.net_gb / (num * gpu.net_gb_per_s / 2),
        )

    def total_ms(self, demands: Iterable[Demand]) -> Times:
        """Milliseconds of all operations."""
        return Times(*map(sum, zip(*map(self.times, demands), strict=True)))


def kv_gb(model: DenseModel, requests: Requests, batch: int) -> float:
    """KV of the decoding requests, half-way on, in a steady iteration of `batch` tokens."""
    tokens = batch * requests.decode_share * (requests.prompt + requests.output / 2)
    return 1e-9 * tokens * 2 * model.kv_width * _BYTES * model.num_layers


def demands(model: DenseModel, requests: Requests, batch: int, num_gpus: int) -> list[Demand]:
    """Demand of each operation in a steady iteration of `batch` tokens (Table 2)."""
    layers, hidden = model.num_layers, model.hidden_size
    num_decoded = batch * requests.decode_share
    num_prompt = batch - num_decoded

    def dense(name: str, width_in: int, width_out: int) -> Demand:
        flop = 2 * batch * width_in * width_out
        elements = width_in * width_out + batch * (width_in + width_out)
        return Demand(name, 1e-9 * flop * layers, 1e-9 * _BYTES * elements * layers, 0.0)

    def attention(name: str, num_tokens: float, context: float, num_kv_tokens: float) -> Demand:
        flop = 4 * num_tokens * context * hidden
        elements = 2 * num_tokens * hidden + 2 * num_kv_tokens * model.kv_width
        return Demand(name, 1e-9 * flop * layers, 1e-9 * _BYTES * elements * layers, 0.0)

    context = requests.prompt + requests.output / 2
    # Two all-gathers and one all-reduce; each GPU already has its own part of the activations.
    moved_gb = 4e-9 * (num_gpus - 1) * batch * hidden * _BYTES * layers
    return [
        dense("KQV", hidden, hidden + 2 * model.kv_width),
        dense("O", hidden, hidden),
        dense("UG", hidden, 2 * model.ffn_size),
        dense("D", model.ffn_size, hidden),
        attention("DecAttn", num_decoded, context, num_decoded * context),
        attention("PfAttn", num_prompt, requests.prompt, num_prompt),
        # An all-reduce adds half of the elements that are moved.
        Demand("Net", moved_gb / _BYTES / 2, moved_gb, moved_gb),
    ]
