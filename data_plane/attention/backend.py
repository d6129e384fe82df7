"""The choice of this instance's attention backend, by name or `auto`, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from data_plane.attention.paged import Attention
from data_plane.attention.torch_paged import KvHeads, KvLayout, LatentKv, TorchPaged
from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.attention_kinds.kind import AttentionKind
from data_plane.model.attention_kinds.mla import MlaConfig
from data_plane.model.config import ModelConfig

_FLASHMLA_WIDTHS = (512, 64)


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """The device, dtypes and widths that attention must serve."""

    device: torch.device
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    """uint8: FP8 latent KV (fp8_latent.py)."""
    kind: AttentionKind

    @classmethod
    def of(
        cls, model: ModelConfig, device: torch.device, q_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> AttentionSite:
        """Describe a model's attention on a device."""
        return cls(device, q_dtype, kv_dtype, model.attention)


def attention_backend(
    name: str, site: AttentionSite, native: Attention | None = None
) -> tuple[Attention, str]:
    """Choose one of ATTENTION_BACKENDS; return it, and a sentence that says which it is and why.

    native: attention of the CPU's compiled kernels, which auto prefers. Raises ValueError naming
    the obstacle.
    """
    if name == "auto":
        return (native, "native, because the kernels are") if native is not None else _auto(site)
    obstacle = _OBSTACLES[name](site)
    if obstacle:
        raise ValueError(f"attention_backend is {name}: {obstacle}; auto picks one that works")
    return _make(name, site), f"{name}, as configured"


def kv_layout(kind: AttentionKind) -> KvLayout:
    """Return the layout in which torch's attention reads the KV of a kind."""
    if isinstance(kind, GqaConfig):
        return KvHeads(kind.num_kv_heads, kind.head_dim)
    assert isinstance(kind, MlaConfig), kind
    return LatentKv(kind.kv_lora_rank)


def _auto(site: AttentionSite) -> tuple[Attention, str]:
    if site.device.type == "cpu":
        return _make("torch", site), "torch, because this instance runs on the CPU"
    passed_over: list[str] = []
    for name in ("flashmla", "triton"):
        obstacle = _OBSTACLES[name](site)
        if not obstacle:
            why = "; ".join(
                [*passed_over, f"{name} runs on {torch.cuda.get_device_name(site.device)}"]
            )
            return _make(name, site), f"{name}, because {why}"
        passed_over.append(f"not {name}: {obstacle}")
    raise ValueError("attention_backend is auto: " + "; ".join(passed_over))


def _make(name: str, site: AttentionSite) -> Attention:
    kind = site.kind
    if name == "torch":
        return TorchPaged(kv_layout(kind))
    # Packages of the GPU extras are imported only where they run.
    if isinstance(kind, GqaConfig):
        if name == "flash_attention":
            from data_plane.attention.flash_attention import FlashAttentionHeads

            return FlashAttentionHeads(kind.num_kv_heads, kind.head_dim)
        from data_plane.attention.triton_gqa import TritonHeads

        return TritonHeads(kind.num_kv_heads, kind.head_dim, kind.num_heads)
    assert isinstance(kind, MlaConfig), kind
    if name == "triton":
        from data_plane.attention.triton_mla import TritonMla

        return TritonMla(kind.kv_lora_rank, kind.rope_dim, kind.num_heads)
    from data_plane.attention.flashmla import FlashMla

    return FlashMla(kind.kv_lora_rank)


def _torch_obstacle(site: AttentionSite) -> str:
    if site.device.type != "cpu":
        return f"it is the CPU's path, and this instance runs on {site.device}"
    return "" if site.kv_dtype == site.q_dtype else f"it reads no {site.kv_dtype} KV"


def _triton_obstacle(site: AttentionSite) -> str:
    if site.device.type != "cuda":
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install '.[gpu]')"
    for what, width in _tiled_widths(site.kind):
        if width < 16 or width & (width - 1):
            return f"{what} is {width}; its tiles need a power of two of at least 16"
    if site.kv_dtype not in (site.q_dtype, torch.uint8):
        return (
            "it reads KV of the queries' dtype or FP8, "
            f"not {site.kv_dtype} with queries of {site.q_dtype}"
        )
    return ""


def _tiled_widths(kind: AttentionKind) -> tuple[tuple[str, int], ...]:
    if isinstance(kind, GqaConfig):
        return (("head_dim", kind.head_dim),)
    assert isinstance(kind, MlaConfig), kind
    return ("kv_lora_rank", kind.kv_lora_rank), ("qk_rope_head_dim", kind.rope_dim)


def _flashmla_obstacle(site: AttentionSite) -> str:
    if site.device.type != "cuda":
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    if torch.cuda.get_device_capability(site.device) != (9, 0):
        return "its dense decode kernel runs on Hopper (sm_90) only"
    if find_spec("flash_mla") is None:
        # With its needs, pip would replace a torch that it runs with (docs/use/gpu.md).
        return "the package flash_mla is not installed (pip install --no-deps sgl-flash-mla==1.0.0)"
    if not isinstance(site.kind, MlaConfig):
        return "it reads latent KV, and the model has K/V heads"
    widths = site.kind.kv_lora_rank, site.kind.rope_dim
    if widths != _FLASHMLA_WIDTHS:
        return f"its widths are 512 + 64, the model's latent KV is {widths[0]} + {widths[1]}"
    if site.kv_dtype != site.q_dtype or site.q_dtype not in (torch.bfloat16, torch.float16):
        return (
            "its dense decode kernel takes bfloat16 or float16, "
            f"not {site.q_dtype} with KV of {site.kv_dtype}"
        )
    return ""


def _flash_attention_obstacle(site: AttentionSite) -> str:
    if site.device.type != "cuda":
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    if torch.cuda.get_device_capability(site.device) != (9, 0):
        return "FlashAttention 3 is for Hopper (sm_90)"
    if find_spec("flash_attn_interface") is None:
        return (
            "the package flash_attn_3 is not installed "
            "(pip install --no-build-isolation '.[flash_attention]')"
        )
    if not isinstance(site.kind, GqaConfig):
        return "it reads K/V heads, and the model has latent KV"
    if site.kind.head_dim % 8 or site.kind.head_dim > 256:
        return f"head_dim is {site.kind.head_dim}; it takes multiples of 8 up to 256"
    if site.kv_dtype != site.q_dtype or site.q_dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, not {site.q_dtype} with KV of {site.kv_dtype}"
    return ""


_OBSTACLES = {
    "torch": _torch_obstacle,
    "triton": _triton_obstacle,
    "flashmla": _flashmla_obstacle,
    "flash_attention": _flash_attention_obstacle,
}
