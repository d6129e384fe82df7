"""Numbers of the NanoFlow paper: Tables 1 to 3, the setup of Table 2, the ablation."""

from __future__ import annotations

from typing import NamedTuple

from nanocp.overlap.interference import Interference
from nanocp.overlap.layers import dense_layer
from nanocp.overlap.operations import Operation
from nanocp.overlap.roofline import MODELS, Gpu, Machine, Requests

TABLE_1: tuple[tuple[Gpu, tuple[str, str, str]], ...] = (
    (Gpu("NVIDIA", "V100", 2017, 16, 900, 300, 125_000), ("0.018", "139", "0.33")),
    (Gpu("NVIDIA", "A100-40", 2020, 40, 1555, 600, 312_000), ("0.026", "200", "0.39")),
    (Gpu("NVIDIA", "A100-80", 2021, 80, 2000, 600, 312_000), ("0.040", "156", "0.30")),
    (Gpu("NVIDIA", "H100", 2023, 80, 3352, 900, 989_000), ("0.024", "295", "0.268")),
    (Gpu("NVIDIA", "H200", 2024, 96, 4800, 900, 989_000), ("0.020", "206", "0.19")),
    (Gpu("NVIDIA", "B100", 2024, 120, 8000, 1800, 1_800_000), ("0.015", "225", "0.23")),
    (Gpu("NVIDIA", "B200", 2024, 120, 8000, 1800, 2_250_000), ("0.015", "281", "0.23")),
    (Gpu("AMD", "MI250", 2021, 128, 3352, 800, 362_000), ("0.038", "107", "0.24")),
    (Gpu("AMD", "MI300", 2023, 192, 5300, 1024, 1_307_000), ("0.036", "246", "0.19")),
    (Gpu("AMD", "MI325X", 2024, 256, 6000, 1024, 1_307_000), ("0.043", "218", "0.17")),
    (Gpu("Intel", "Gaudi 2", 2022, 96, 2400, 600, 1_000_000), ("0.040", "417", "0.25")),
    (Gpu("Intel", "Gaudi 3", 2024, 128, 3700, 1200, 1_800_000), ("0.035", "486", "0.32")),
    (Gpu("NVIDIA", "Ada 6000", 2022, 48, 960, 64, 182_000), ("0.050", "190", "0.067")),
)
"""Table 1, with its ratios as printed. The card of an H200 has 141 GB."""

MACHINE = Machine(TABLE_1[2][0], 8)
LLAMA_2_70B = MODELS[0]
REQUESTS = Requests(prompt=512, output=1024)
BATCH = 2048


class Line(NamedTuple):
    """One operation of Table 2."""

    name: str
    gflop: float
    mem_gb: float
    net_gb: float
    compute_ms: float
    memory_ms: float
    network_ms: float
    measured_ms: float


TABLE_2 = (
    Line("KQV", 27_487.8, 19.5, 0, 11.01, 1.22, 0, 16.08),
    Line("O", 21_990.2, 16.1, 0, 8.81, 1.01, 0, 16.01),
    Line("UG", 153_931.6, 96.6, 0, 61.67, 6.04, 0, 69.92),
    Line("D", 76_965.8, 49.7, 0, 30.84, 3.11, 0, 34.96),
    Line("DecAttn", 3665.9, 462.2, 0, 1.47, 28.89, 0, 35.60),
    Line("PfAttn", 916.3, 2.1, 0, 0.37, 0.13, 0, 4.56),
    Line("Net", 18.8, 75.2, 75.2, 0.01, 4.70, 31.33, 47.92),
)
MEASURED_US = {line.name: 1e3 * line.measured_ms / LLAMA_2_70B.num_layers for line in TABLE_2}

WORKLOADS = {
    "512 to 1,024": REQUESTS,
    "Splitwise": Requests(1155, 211),
    "LMSYS-Chat": Requests(102, 222),
    "ShareGPT": Requests(246, 322),
}
"""Means of Table 4."""

PEAK_GFLOP_PER_S = 280_000
"""CUTLASS on an A100 (3.5)."""
OPTIMAL_TOKENS_PER_S = 1857
"""The paper's result of equation 5: it needs 260 TFLOP/s where the text says 280."""

TABLE_3 = Interference(
    memory=((0, 0), (0.1, 0.2), (0.2, 0.3), (0.4, 0.8), (0.8, 0.85), (0.9, 0.95), (1, 1)),
    network=((0, 0), (0.1, 0.3), (0.2, 0.5), (0.8, 0.9), (0.9, 1), (1, 1)),
    source="as the paper measured on an A100 (Table 3)",
)
"""Table 3, with decode attention's 0.8 at 0.4 (4.1.4)."""

ABLATION = {"network": 1.07, "network and memory": 1.17}
"""Gain over sequential operations by what overlaps."""


def layer() -> tuple[Operation, ...]:
    """One layer of Table 2's iteration, by its measured times, as a graph of operations."""
    return dense_layer(MEASURED_US, {})
