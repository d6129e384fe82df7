"""vLLM's KV of a token in its blocks, as views for PagedKv, in any order of axes.

Legend: B blocks, G K/V heads, S tokens of a block, E width of a head, W width of latent KV.
"""

from __future__ import annotations

from torch import Tensor

_PLAIN = ("vec", "vec16")
_TILE = 16
"""Rows of an AMX tile; each has pairs of bf16 numbers."""


def latent(name: str, kv: Tensor) -> tuple[Tensor]:
    """Return the layer's latent KV, [B, S, W]; raises ValueError if it is none."""
    plain = kv.reshape(kv.shape[0], -1, kv.shape[-1])
    if plain.data_ptr() != kv.data_ptr() or kv.numel() != plain.numel() or kv.dim() not in (3, 4):
        raise ValueError(f"the KV of {name} is {list(kv.shape)}; it must be the latent KV of MLA")
    return (plain,)


def heads(
    name: str, kv: Tensor, num_heads: int, head_dim: int, kernel: str | None
) -> tuple[Tensor, Tensor]:
    """Return the layer's keys and values, each [B, S, G, E], where several axes may be S or E.

    kernel: vLLM's attention on a CPU; None: on a GPU. Raises ValueError for another shape or
    kernel.
    """
    if kv.dim() != 4 or kv.shape[1] != num_heads or kv.shape[3] != 2 * head_dim:
        raise ValueError(
            f"the KV of {name} is {list(kv.shape)}; it must be [blocks, {num_heads}, tokens, "
            f"{2 * head_dim}], the keys and values of the model's K/V heads"
        )
    if kernel is None:
        key, value = kv.transpose(1, 2).chunk(2, dim=-1)
        return key, value
    # In a block a head has all its keys, then all its values.
    outer, size = kv.shape[:2], kv.shape[2]
    key, value = kv.view(*outer, 2, size * head_dim).unbind(2)
    if kernel in _PLAIN:
        key, value = key.view(*outer, head_dim, size), value.view(*outer, size, head_dim)
        return key.permute(0, 3, 1, 2), value.transpose(1, 2)
    if kernel == "amx":
        # Keys: for 16 tokens, pair after pair of their numbers. Values: for 16 numbers of a head,
        # pair after pair of tokens.
        key = key.view(*outer, size // _TILE, head_dim // 2, _TILE, 2)
        value = value.view(*outer, head_dim // _TILE, size // 2, _TILE, 2)
        return key.permute(0, 2, 4, 1, 3, 5), value.permute(0, 3, 5, 1, 2, 4)
    raise ValueError(
        f"vLLM's attention on this CPU is {kernel}, which keeps keys in an order that the "
        f"connector does not know; it knows those of {', '.join(_PLAIN)} and amx, on x86-64"
    )
