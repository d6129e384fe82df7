"""Stand-ins for packages that run only on GPUs: published signatures and conventions, in torch.

They were read in the packages' public sources, at the commits and versions that pyproject.toml
names; FlashMLA's own at 9241ae3. Only what our adapters use is here, with every parameter, so that
a call that binds here binds there (`gpu_check.py` compares signatures where a package is
installed).
"""

import math
from types import SimpleNamespace

import torch

from data_plane.attention.torch_paged import LatentKv
from harness.kernels.slow_references import reference_attention


class FlashMLASchedMeta:
    """A schedule, empty until its first use, then tied to lengths (flash_mla_interface.py)."""

    def __init__(self):
        self.lengths = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # fmt: skip
    """Decode over dense KV: (out [B, s_q, h_q, 512], lse [B, h_q, s_q]).

    lse is fp32, a natural log, and +inf where there is no KV.
    """
    assert (
        isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
        and num_splits is None
        and indices is None
    )
    assert (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k_cache.dtype
        and q.stride(-1) == 1
    )
    (batch, s_q, _, width), (_, page, h_k, _) = q.shape, k_cache.shape
    assert (s_q, width, head_dim_v, page, h_k) == (1, 576, 512, 64, 1)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
    assert block_table.shape[0] == cache_seqlens.shape[0] == batch
    lengths = cache_seqlens.tolist()
    if tile_scheduler_metadata.lengths is None:
        tile_scheduler_metadata.lengths = lengths
    assert tile_scheduler_metadata.lengths == lengths, "a schedule of other lengths"
    frames = [
        row[: -(-length // 64)].tolist() for row, length in zip(block_table, lengths, strict=True)
    ]
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    layout = LatentKv(head_dim_v)
    out, lse = reference_attention(q[:, 0], k_cache[:, :, 0], frames, lengths, scale, layout)
    lse[cache_seqlens == 0] = math.inf
    return out[:, None], lse[..., None]


def sgl_flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
    enable_batch_invariant=False, use_legacy=False, kv_format=None, descale_q=None, descale_k=None,
):  # fmt: skip
    """Decode as FlashMLA does, by the wheel sgl-flash-mla 1.0.0 (flash_mla_interface.py).

    Dense decode is among what it keeps for `use_legacy`; without, it asks for `indices`.
    """
    assert use_legacy, "Sparse attention is required: `indices` must be provided"
    assert kv_format is descale_q is descale_k is None and not is_fp8_kvcache
    return flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
        softmax_scale, causal, False, indices,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Decode over paged K/V heads: (out [B, 1, h_q, d], lse [B, h_q, 1], and more).

    FlashAttention's hopper/flash_attn_interface.py. The page size is any. What the lse of a row
    without KV is, it does not say: here it is +inf.
    """
    assert k is v is qv is cache_batch_idx is cache_leftpad is None and return_softmax_lse
    assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1 and k_cache.shape == v_cache.shape
    (batch, length_q, heads, width), (frames, page, h_k, _) = q.shape, k_cache.shape
    assert length_q == 1 and heads % h_k == 0 and k_cache.shape[3] == width
    assert page_table.dtype == cache_seqlens.dtype == torch.int32 and page_table.stride(-1) == 1
    assert page_table.shape[0] == cache_seqlens.shape[0] == batch
    # A page without tokens may be looked up: it must be one.
    assert ((page_table >= 0) & (page_table < frames)).all(), "an entry that is no page"
    out, lse = torch.zeros_like(q), torch.full((batch, heads, 1), math.inf)
    for row, length in enumerate(cache_seqlens.tolist()):
        if not length:
            continue
        pages = page_table[row, : -(-length // page)].long()
        key, value = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(heads // h_k, dim=1)
            for cache in (k_cache, v_cache)
        )
        score = torch.einsum("hd,thd->ht", q[row, 0].float(), key)
        score *= width**-0.5 if softmax_scale is None else softmax_scale
        lse[row, :, 0] = score.logsumexp(dim=1)
        out[row, 0] = torch.einsum("ht,thd->hd", score.softmax(dim=1), value).to(q.dtype)
    return out, lse, None, None


flash_attn_interface = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
flash_mla = SimpleNamespace(
    get_mla_metadata=get_mla_metadata,
    flash_mla_with_kvcache=flash_mla_with_kvcache,
    FlashMLASchedMeta=FlashMLASchedMeta,
)
sgl_flash_mla = SimpleNamespace(
    get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=sgl_flash_mla_with_kvcache
)
"""The module flash_mla of the wheel sgl-flash-mla."""


def m_grouped_fp8_gemm_nt_masked(
    a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
    disable_ue8m0_cast=False,
):  # fmt: skip
    """Multiply groups in FP8, as DeepGEMM's csrc/apis/gemm.hpp does on Hopper.

    Scales are fp32, one for 1 x 128 of a and one for 128 x 128 of b.
    """
    (values, scale), (weight, weight_scale) = a, b
    groups, rows, width = values.shape
    columns = weight.shape[1]
    assert weight.shape == (groups, columns, width) and d.shape == (groups, rows, columns)
    assert (
        values.dtype == weight.dtype == torch.float8_e4m3fn
        and scale.dtype == weight_scale.dtype == torch.float32
    )
    assert scale.shape == (groups, rows, width // 128) and weight_scale.shape == (
        groups,
        columns // 128,
        width // 128,
    )
    assert d.dtype == torch.bfloat16 and d.is_contiguous() and expected_m > 0
    assert masked_m.dtype == torch.int32 and masked_m.is_contiguous() and len(masked_m) == groups
    x = values.float() * scale.repeat_interleave(128, dim=2)
    w = weight.float() * weight_scale.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    for group, count in enumerate(masked_m.tolist()):
        d[group, :count] = (x[group, :count] @ w[group].T).bfloat16()


def fp8_gemm_nt(
    a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
    disable_ue8m0_cast=False,
):  # fmt: skip
    """Multiply in FP8, d = a b^T, as DeepGEMM's csrc/apis/gemm.hpp does on Hopper.

    Scales are those of m_grouped_fp8_gemm_nt_masked. In another layout than TMA's, which is checked
    here, it takes scales of a too, and launches a kernel of its own that lays them out.
    """
    (values, scale), (weight, weight_scale) = a, b
    (rows, width), columns = values.shape, len(weight)
    assert weight.shape == (columns, width) and d.shape == (rows, columns)
    assert values.is_contiguous() and weight.is_contiguous() and d.stride(1) == 1
    assert values.dtype == weight.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16
    assert scale.dtype == weight_scale.dtype == torch.float32
    assert columns % 8 == 0 and scale.shape == (rows, -(-width // 128))
    assert weight_scale.shape == (-(-columns // 128), -(-width // 128))
    assert weight_scale.is_contiguous()
    assert scale.stride() == (1, -(-rows // 4) * 4) and scale.data_ptr() % 16 == 0
    x = values.float() * scale.repeat_interleave(128, dim=1)
    w = weight.float() * weight_scale.repeat_interleave(128, dim=0)[:columns].repeat_interleave(
        128, dim=1
    )
    d.copy_(x @ w.T)


deep_gemm = SimpleNamespace(
    m_grouped_fp8_gemm_nt_masked=m_grouped_fp8_gemm_nt_masked, fp8_gemm_nt=fp8_gemm_nt
)
