"""Stand-ins for packages that run only on GPUs: their published signatures and conventions, in plain torch.

Read in the packages' public sources, at the commits that pyproject.toml names. Only what our adapters use; every
parameter is there, so that a call that binds here binds there (`gpu_check.py` compares signatures where a package is
installed).
"""

import math
from types import SimpleNamespace

import torch

from data_plane.attention.torch_paged import reference_attention


class FlashMLASchedMeta:
    """Empty until its first use, then tied to lengths: flash_mla/flash_mla_interface.py."""

    def __init__(self):
        self.lengths = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
):
    """Dense decode. out [B, s_q, h_q, 512]; lse [B, h_q, s_q] fp32, natural log, +inf where there is no KV."""
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None and indices is None
    assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k_cache.dtype and q.stride(-1) == 1
    (batch, s_q, _, width), (_, page, h_k, _) = q.shape, k_cache.shape
    assert (s_q, width, head_dim_v, page, h_k) == (1, 576, 512, 64, 1)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
    assert block_table.shape[0] == cache_seqlens.shape[0] == batch
    lengths = cache_seqlens.tolist()
    if tile_scheduler_metadata.lengths is None:
        tile_scheduler_metadata.lengths = lengths
    assert tile_scheduler_metadata.lengths == lengths, "a schedule of other lengths"
    frames = [row[: -(-length // 64)].tolist() for row, length in zip(block_table, lengths, strict=True)]
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    out, lse = reference_attention(q[:, 0], k_cache[:, :, 0], frames, lengths, scale, head_dim_v)
    lse[cache_seqlens == 0] = math.inf
    return out[:, None], lse[..., None]


flash_mla = SimpleNamespace(
    get_mla_metadata=get_mla_metadata,
    flash_mla_with_kvcache=flash_mla_with_kvcache,
    FlashMLASchedMeta=FlashMLASchedMeta,
)
