"""Compute and exchange of an instance. Standard library only: the scheduler imports it."""

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

SAMPLINGS = ("inverse", "gumbel_max")


def default_dtype(device: str) -> str:
    """The dtype of `nanocp serve` and `nanocp plan` on a device without one given."""
    return "bfloat16" if device == "cuda" else "float32"


@dataclass(frozen=True, slots=True)
class DataPlaneConfig:
    """Compute and exchange of an instance."""

    __pydantic_config__ = {"extra": "forbid"}

    device: Annotated[str, Among(DEVICES)] = "cpu"
    """cpu or cuda: where an instance computes. cuda: on GPU i of its node, i its number there."""
    dtype: Annotated[str, Among(DTYPES)] = "float32"
    """Weights (native kernels keep stored bfloat16), activations and KV: float32 or bfloat16, the
    default with device cuda."""
    kv_dtype: Annotated[str, Among(KV_DTYPES)] = "auto"
    """auto: KV is kept in `dtype`. fp8: in e4m3 with four scales a token, on a GPU (656 bytes at
    DeepSeek-V3's widths)."""
    wire_form: Annotated[str, Among(WIRE_FORMS)] = "latent"
    """Content of Q-route: `latent` (the normed q latent; the receiver projects) or `absorbed` (the
    paper's form)."""
    cpu_kernels: Annotated[str, Among(CPU_KERNELS)] = "auto"
    """Kernels of layers on a CPU. torch: PyTorch. native: built on first use (10 s) for the fastest
    instructions of the CPU: AMX (bfloat16), AVX-512, or AVX2. avx2: native, with no more than AVX2.
    auto: native where available, else torch."""
    attention_backend: Annotated[str, Among(ATTENTION_BACKENDS)] = "auto"
    """Kernels of attention: one of ATTENTION_BACKENDS. auto on a CPU: as cpu_kernels, else torch.
    """
    expert_backend: Annotated[str, Among(EXPERT_BACKENDS)] = "auto"
    """Kernels of experts: one of EXPERT_BACKENDS. deep_gemm: dense layers too, where the checkpoint
    has them in FP8 (docs/use/gpu.md)."""
    dispatch_backend: Annotated[str, Among(DISPATCH_BACKENDS)] = "auto"
    """Carries rows to their experts and back: one of DISPATCH_BACKENDS. fused: a layer's experts
    are one call, with native kernels on a CPU (docs/develop/mixture.md). auto: fused, else deep_ep,
    else exchange, where it can run. nixl_ep: as deep_ep, and it goes on after a loss; experimental
    (docs/use/gpu.md)."""
    moe_schedule: Annotated[str, Among(MOE_SCHEDULES)] = "auto"
    """Order of a fused MoE layer on a CPU (docs/develop/mixture.md). barrier: the shared expert,
    then, once all rows are here, the experts. arrival: first work that other instances wait for;
    then, while rows are awaited, work that ends in time. auto: arrival where fused. Tokens are the
    same."""
    exchange_backend: Annotated[str, Among(EXCHANGE_BACKENDS)] = "auto"
    """Carries the exchange. auto on a CPU: shared memory within a node, TCP between nodes. shm: one
    node. tcp: TCP even within a node, for tests. auto on a GPU: cuda_ipc, the peers' memory, on one
    node. nvshmem: GPUs of several nodes; experimental (docs/use/gpu.md)."""
    page_backend: Annotated[str, Among(PAGE_BACKENDS)] = "auto"
    """Carries pages of prefill and page moves. auto: shared memory within a node, TCP between
    nodes; only TCP where exchange_backend is tcp. nixl: NIXL (RDMA where available, TCP, or memory
    to memory within a node)."""
    sampling: Annotated[str, Among(SAMPLINGS)] = "inverse"
    """Draw of a token at a temperature from a seed. inverse: by the distribution function, in the
    order of token ids. gumbel_max: the token whose exponential clock rings first, so that at
    temperature 1 nearly twice as many drafts are right (docs/use/speculation.md). One distribution,
    but other tokens for a seed."""
    threads_per_instance: Positive = 1
    """Threads of an instance: of native kernels, which refuse more than there are cores, or
    intra-op ones of torch. More than one per core is slower."""
    eager: bool = False
    """On a GPU: launch every kernel of every step instead of replaying captured graphs. For
    debugging."""
    row_buckets: tuple[int, ...] = ()
    """Rows of the captured steps, ascending; the last must be max_rows. Empty: powers of two up to
    max_rows."""

    @property
    def has_nvshmem(self) -> bool:
        """True if GPUs exchange by NVSHMEM."""
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
            not self.has_nvshmem or self.dispatch_backend != "fused",
            "exchange_backend is nvshmem and dispatch_backend fused; it must be exchange, which "
            "puts by NVSHMEM, or deep_ep or nixl_ep, which leave the node by themselves",
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
