"""How an instance computes and exchanges.

Enters: values from nanocp.config.file or from tests. Leaves: frozen, validated values. Does not
know: files, the environment, the command line. Standard library only: the scheduler imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nanocp.config.choices import Among, Positive, check_fields, require

DEVICES = ("cpu", "cuda")

DTYPES = ("float32", "bfloat16")

KV_DTYPES = ("auto", "fp8")

WIRE_FORMS = ("latent", "absorbed")

CPU_KERNELS = ("auto", "torch", "native", "avx2")

ATTENTION_BACKENDS = ("auto", "torch", "triton", "flashmla", "flash_attention")

EXPERT_BACKENDS = ("auto", "loop", "grouped_mm", "triton", "deep_gemm")

DISPATCH_BACKENDS = ("auto", "exchange", "deep_ep", "nixl_ep", "fused")

MOE_SCHEDULES = ("auto", "barrier", "arrival")

EXCHANGE_BACKENDS = ("auto", "shm", "tcp", "cuda_ipc", "nvshmem")

PAGE_BACKENDS = ("auto", "nixl")

SAMPLINGS = ("inverse", "race")


def default_dtype(device: str) -> str:
    """What `nanocp serve` and `nanocp plan` take on a device where no dtype is given."""
    return "bfloat16" if device == "cuda" else "float32"


@dataclass(frozen=True, slots=True)
class DataPlaneConfig:
    """How an instance computes and exchanges."""

    __pydantic_config__ = {"extra": "forbid"}

    device: Annotated[str, Among(DEVICES)] = "cpu"
    """cpu or cuda: where an instance computes. cuda: on GPU i of its node, i its number among the
    node's instances."""
    dtype: Annotated[str, Among(DTYPES)] = "float32"
    """Weights (native kernels keep stored bfloat16), activations and KV: float32 or bfloat16, which
    is the default with device cuda."""
    kv_dtype: Annotated[str, Among(KV_DTYPES)] = "auto"
    """auto: KV is kept in `dtype`. fp8: in e4m3 with four scales a token, on a GPU (656 bytes at
    DeepSeek-V3's widths)."""
    wire_form: Annotated[str, Among(WIRE_FORMS)] = "latent"
    """What Q-route carries: `latent` (the normed q latent; the receiver projects) or `absorbed`
    (the paper's form)."""
    cpu_kernels: Annotated[str, Among(CPU_KERNELS)] = "auto"
    """What computes a layer on a CPU. torch: PyTorch. native: kernels that this machine's C++
    compiler builds on first use (10 s), for the fastest instructions that the CPU has: AMX
    (bfloat16), AVX-512, or AVX2. avx2: native, with no more than AVX2. auto: native where it is
    available, else torch."""
    attention_backend: Annotated[str, Among(ATTENTION_BACKENDS)] = "auto"
    """What computes attention: one of ATTENTION_BACKENDS. auto on a CPU: as cpu_kernels, else
    torch."""
    expert_backend: Annotated[str, Among(EXPERT_BACKENDS)] = "auto"
    """What multiplies the experts' weights: one of EXPERT_BACKENDS. deep_gemm: dense layers too,
    where the checkpoint has them in FP8 (docs/use/gpu.md)."""
    dispatch_backend: Annotated[str, Among(DISPATCH_BACKENDS)] = "auto"
    """What carries rows to their experts and back: one of DISPATCH_BACKENDS. fused: a layer's
    mixture of experts is one call, with native kernels on a CPU (docs/develop/mixture.md). auto:
    fused where it can run, else deep_ep where it can, else exchange. nixl_ep: as deep_ep, and it
    goes on after a loss; experimental (docs/use/gpu.md)."""
    moe_schedule: Annotated[str, Among(MOE_SCHEDULES)] = "auto"
    """What a fused mixture runs when, on a CPU (docs/develop/mixture.md). barrier: the shared
    expert, then, once all rows are here, the experts. arrival: first what other instances wait for;
    while rows are awaited, the shared expert, and experts that will have ended by then, unless
    another lane computes. auto: arrival where the mixture is fused. Tokens are the same."""
    exchange_backend: Annotated[str, Among(EXCHANGE_BACKENDS)] = "auto"
    """What carries the exchange. auto on a CPU: shared memory within a node, TCP between nodes.
    shm: one node. tcp: TCP even within a node, for tests. auto on a GPU is cuda_ipc: the peers'
    memory, on one node. nvshmem: GPUs of several nodes; experimental (docs/use/gpu.md)."""
    page_backend: Annotated[str, Among(PAGE_BACKENDS)] = "auto"
    """What carries pages of prefill and page moves. auto: shared memory within a node, TCP between
    nodes; only TCP where exchange_backend is tcp. nixl: NIXL (RDMA where available, TCP, or memory
    to memory within a node)."""
    sampling: Annotated[str, Among(SAMPLINGS)] = "inverse"
    """How a row of a temperature draws its token from a seed. inverse: by the distribution
    function, in the order of token ids. race: the token whose exponential clock rings first. At
    temperature 1 nearly twice as many drafts are right with it (docs/use/speculation.md). Both draw
    from the same distribution, and a seed gives other tokens with each."""
    threads_per_instance: Positive = 1
    """Threads of an instance. Native kernels share their tasks out among them and refuse more than
    there are cores; with torch they are intra-op threads. More than one per core is slower
    (docs/log.md)."""
    eager: bool = False
    """On a GPU: launch every kernel of every step instead of replaying captured graphs. For
    debugging."""
    row_buckets: tuple[int, ...] = ()
    """Rows of the captured steps, ascending; the last must be max_rows. Empty: powers of two up to
    max_rows."""

    @property
    def has_nvshmem(self) -> bool:
        """Whether GPUs exchange by NVSHMEM."""
        return self.exchange_backend == "nvshmem"

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.kv_dtype != "fp8" or self.device == "cuda",
            "kv_dtype is fp8, which needs a GPU: device must be cuda",
        )
        require(
            self.exchange_backend == "auto"
            or (self.exchange_backend in ("cuda_ipc", "nvshmem")) == (self.device == "cuda"),
            f"exchange_backend is {self.exchange_backend} and device {self.device}; shm and "
            "tcp are for cpu, cuda_ipc and nvshmem for cuda",
        )
        require(
            not self.has_nvshmem or self.dispatch_backend in ("auto", "exchange", "nixl_ep"),
            f"exchange_backend is nvshmem and dispatch_backend {self.dispatch_backend}; it must be "
            "exchange, which puts by NVSHMEM, or nixl_ep, which leaves the node by itself",
        )
        require(
            self.page_backend != "nixl" or self.exchange_backend != "shm",
            "page_backend is nixl and exchange_backend shm; NIXL's agents meet over TCP, which shm "
            "does without: take auto",
        )
        require(
            list(self.row_buckets) == sorted(set(self.row_buckets))
            and all(rows >= 1 for rows in self.row_buckets),
            f"row_buckets is {self.row_buckets}; it must be ascending positive integers",
        )
