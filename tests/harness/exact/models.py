"""Checkpoints of random weights and their oracles, each made once a session, when asked for."""

from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.presets import PRESETS
from data_plane.reference.oracle import Oracle
from harness.exact.mtp_layers import add_mtp_layer

PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
LIMITS = {
    "expert_swiglu_limit_list": [0, 0.0, 4.0, 4.0, None],
    "share_expert_swiglu_limit_list": [0.0, None, 0, 5.0, 5.0],
}
MINI = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "vocab_size": 320,
}  # fmt: skip
"""A dense layer and a mixture of experts, as small as the GPU's kernels take them."""
MINI_HEADS = {
    "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_local_experts": 8, "vocab_size": 320,
}  # fmt: skip
MINI_LINEAR = MINI_HEADS | {
    "num_hidden_layers": 3, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "linear_key_head_dim": 24, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


def _known(preset: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Keep the fields that the preset has."""
    known = PRESETS[preset].keys() | {"layer_types"}
    return {name: value for name, value in fields.items() if name in known}


NAMED: dict[str, dict[str, Any]] = {
    # No gate is near a tie.
    "tiny, every expert": {"num_experts_per_tok": 16, "n_group": 1, "topk_group": 1},
    "tiny, no q LoRA": {"q_lora_rank": None},
    "tiny, plain rope": PLAIN_ROPE,
    "tiny, plain rope, published spelling": PLAIN_ROPE,
    "tiny, no groups, two dense layers": {
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
    },
    "tiny, as DeepSeek-V2-Lite, published spelling": PRESETS["tiny-v2"],
    "tiny, no dense layer, two shared experts": {"first_k_dense_replace": 0, "n_shared_experts": 2},
    "tiny, mini": MINI,
    "tiny, mini, with an MTP layer": MINI,
    "tiny, mini, in FP8": MINI | {
        "n_routed_experts": 4, "moe_intermediate_size": 128, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    **{f"{each}, mini": _known(each, MINI_HEADS) for each in ("tiny-qwen3-moe", "tiny-llama")},
    **{f"{each}, mini": _known(each, MINI_LINEAR)
       for each in ("tiny-qwen3-next", "tiny-kimi-linear")},
    # Weights large enough that the limits are met.
    "tiny-ling, with limits": {**LIMITS, "initializer_range": 0.3},
}  # fmt: skip
"""Fields that are unlike those of the preset before the comma."""
DTYPES = {"in FP8": torch.float8_e4m3fn, "in bf16": torch.bfloat16}


class Model:
    """A checkpoint, and `transformers` on it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def oracle(self) -> Oracle:
        """The reference, loaded when first asked for."""
        return Oracle(self.path)


def makes_models(folder: Path) -> Callable[..., Model]:
    """Return a function: a name -> its model, made in the folder by the first call."""

    @cache
    def of(name: str) -> Model:
        if name == "models/tale":
            return Model(Path(__file__).parents[3] / name)
        path, (preset, *variant) = folder / name.replace(", ", "-"), name.split(", ")
        dtype = next((DTYPES[each] for each in variant if each in DTYPES), torch.float32)
        published = "published spelling" in variant or (name not in NAMED and preset != "tiny")
        make_checkpoint(
            path, preset, dtype=dtype, overrides=NAMED.get(name), published_spelling=published
        )
        if "with an MTP layer" in variant:
            add_mtp_layer(path)
        return Model(path)

    return of
