"""The supported architectures: how each config.json is read, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from data_plane.model.attention_kinds.delta_families import (
    LinearLayers,
    kimi_linear,
    ling,
    qwen3_5,
    qwen3_next,
)
from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.attention_kinds.kind import AttentionKind
from data_plane.model.attention_kinds.mla import MlaConfig
from data_plane.model.config_fields import Fields
from data_plane.model.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A checkpoint's names of tensors."""

    mixture: str = "mlp."
    """Prefix of a MoE layer's names."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts."
    gate_bias: str = "gate.e_score_correction_bias"
    dense: str = "mlp."
    attention: str = "self_attn."
    output: str = "o_proj"
    embedding: str = "model.embed_tokens"


PLAIN_NAMES = TensorNames()


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of an architecture."""

    attention: Callable[[Fields, RopeConfig], AttentionKind]
    mixture: Callable[[Fields], Mapping[str, Any]]
    supported: Mapping[str, tuple[Any, ...]]
    """Field -> its allowed values; an absent field means the first of them. No values: only this
    family reads the field.
    """
    has_pairs: bool = False
    """True if rotated pairs stand side by side unless config.json says otherwise."""
    names: TensorNames = PLAIN_NAMES
    linear: Callable[[Fields], LinearLayers] | None = None
    has_rope: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Field -> the default of `transformers`, unless it is every family's."""
    has_offset_norms: bool = False


def _kv_heads(
    has_bias: bool | None = False, has_norms: bool | None = False, has_gate: bool = False
) -> Callable[[Fields, RopeConfig], AttentionKind]:
    """Make the reader of K/V heads; None stands for a field of config.json."""

    def read(raw: Fields, _: RopeConfig) -> AttentionKind:
        return GqaConfig.read(
            raw,
            has_bias=bool(raw.get("attention_bias", False)) if has_bias is None else has_bias,
            has_norms=bool(raw.get("use_qk_norm", False)) if has_norms is None else has_norms,
            has_gate=has_gate,
        )

    return read


def _no_mixture(raw: Fields) -> dict[str, Any]:
    return {
        "num_dense_layers": raw.positive("num_hidden_layers"),
        "num_experts": 0,
        "num_experts_per_token": 0,
        "expert_size": 0,
        "num_shared_experts": 0,
        "shared_size": 0,
        "softmax_gate": True,
        "num_groups": 1,
        "num_groups_per_token": 1,
        "weights_normalised": True,
        "routed_scale": 1.0,
    }


def _mixture(
    raw: Fields,
    num_dense_layers: int = 0,
    experts: str = "num_experts",
    per_token: str = "num_experts_per_tok",
    size: str = "moe_intermediate_size",
) -> dict[str, Any]:
    return _no_mixture(raw) | {
        "num_dense_layers": num_dense_layers,
        "num_experts": raw.positive(experts),
        "num_experts_per_token": raw.positive(per_token),
        "expert_size": raw.positive(size),
    }


def _qwen3_moe(raw: Fields) -> dict[str, Any]:
    return _mixture(raw) | {"weights_normalised": bool(raw.get("norm_topk_prob", False))}


def _mixtral(raw: Fields) -> dict[str, Any]:
    return _mixture(raw, experts="num_local_experts", size="intermediate_size")


def _grouped(raw: Fields, softmax_gate: bool, has_groups: bool) -> dict[str, Any]:
    num_dense = raw.count("first_k_dense_replace", 0)
    fields = _mixture(raw, num_dense, experts="n_routed_experts")
    num_shared = raw.count("n_shared_experts", 0)
    return fields | {
        "num_shared_experts": num_shared,
        "shared_size": num_shared * fields["expert_size"],
        "softmax_gate": softmax_gate,
        "num_groups": (raw.count("n_group", 1) or 1) if has_groups else 1,
        "num_groups_per_token": (raw.count("topk_group", 1) or 1) if has_groups else 1,
        "weights_normalised": bool(raw.get("norm_topk_prob", not softmax_gate)),
        "routed_scale": raw.number("routed_scaling_factor", 1.0),
    }


def _deepseek_v3(raw: Fields) -> dict[str, Any]:
    return _grouped(raw, softmax_gate=False, has_groups=True)


def _deepseek_v2(raw: Fields) -> dict[str, Any]:
    has_groups = raw.get("topk_method", "greedy") != "greedy"
    return _grouped(raw, softmax_gate=True, has_groups=has_groups)


def _qwen3_next(raw: Fields) -> dict[str, Any]:
    return _qwen3_moe(raw) | {
        "num_shared_experts": 1,
        "shared_size": raw.positive("shared_expert_intermediate_size"),
        "has_shared_gate": True,
        "weights_normalised": bool(raw.get("norm_topk_prob", True)),
    }


def _kimi(raw: Fields) -> dict[str, Any]:
    kinds = raw.names("mlp_layer_types")
    num_dense = kinds.count("dense") if kinds else raw.count("first_k_dense_replace", 0)
    if "dense" in kinds[num_dense:]:
        raise ValueError(
            f"config.json: mlp_layer_types is {kinds}; its dense layers must be the first ones"
        )
    fields = _mixture(raw, num_dense, per_token="num_experts_per_token")
    num_shared = raw.count("num_shared_experts", 0)
    return fields | {
        "num_shared_experts": num_shared,
        "shared_size": num_shared * fields["expert_size"],
        "softmax_gate": False,
        "num_groups": raw.positive("num_expert_group"),
        "num_groups_per_token": raw.positive("topk_group"),
        "weights_normalised": bool(raw.get("moe_renormalize", True)),
        "routed_scale": raw.number("routed_scaling_factor", 1.0),
    }


def _ling(raw: Fields) -> dict[str, Any]:
    fields = _kimi(raw)
    size = raw.count("moe_shared_expert_intermediate_size", fields["expert_size"])
    return fields | {
        "shared_size": fields["num_shared_experts"] * size,
        "expert_limits": _limits(raw, LIMITS[0]),
        "shared_limits": _limits(raw, LIMITS[1]),
    }


def _limits(raw: Fields, name: str) -> tuple[float, ...]:
    """Read a limit for each layer; null and 0 are none."""
    values, num_layers = raw.get(name, []), raw.positive("num_hidden_layers")
    num_all = num_layers + raw.count("num_nextn_predict_layers", 0)
    is_list = isinstance(values, list) and (not values or len(values) in (num_layers, num_all))
    if not is_list or not all(_is_limit(value) for value in values):
        raise ValueError(
            f"config.json: {name} is {values!r}; it must be null, or a list of {num_layers} "
            "limits, one for each layer (num_hidden_layers): a number above 0, or 0 or null for "
            "a layer without"
        )
    return tuple(float(value or math.inf) for value in values)


def _is_limit(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and 0 <= value < math.inf)


LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_NO_BIAS = {"attention_bias": (False,)}
_NO_WINDOW = {"use_sliding_window": (False,)}
_UNUSED_BY_LING = (
    *("use_bias", "use_qkv_bias", "use_mla_nope", "use_kda_lora", "use_nGPT"),
    *("scale_router_input", "up_proj_norm", "value_norm"),
)
_QWEN3_NEXT = {
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "num_key_value_heads": 2,
    "head_dim": 256,
}
FAMILIES: dict[str, Family] = {
    "DeepseekV3ForCausalLM": Family(
        MlaConfig.read,
        _deepseek_v3,
        {
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
            **_NO_BIAS,
        },
        has_pairs=True,
        defaults={
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        MlaConfig.read,
        _deepseek_v2,
        {
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "rope_interleave": (True,),
            "mlp_bias": (False,),
            "moe_layer_freq": (1,),
            **_NO_BIAS,
        },
        has_pairs=True,
        defaults={"n_shared_experts": 2, "q_lora_rank": 1536},
    ),
    "Qwen3MoeForCausalLM": Family(
        _kv_heads(has_norms=True),
        _qwen3_moe,
        {"mlp_only_layers": ([],), "decoder_sparse_step": (1,), **_NO_BIAS, **_NO_WINDOW},
        defaults={"num_key_value_heads": 4},
    ),
    "Glm4MoeForCausalLM": Family(
        _kv_heads(has_bias=None, has_norms=None),
        _deepseek_v3,
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        defaults={
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "MixtralForCausalLM": Family(
        _kv_heads(),
        _mixtral,
        {"sliding_window": (None,), **_NO_BIAS},
        names=TensorNames("block_sparse_moe.", gate="w1", up="w3", down="w2"),
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "Qwen3NextForCausalLM": Family(
        _kv_heads(has_norms=True, has_gate=True),
        _qwen3_next,
        {"mlp_only_layers": ([],), "decoder_sparse_step": (1,), **_NO_BIAS},
        names=TensorNames(shared="shared_expert."),
        linear=qwen3_next,
        has_offset_norms=True,
        defaults=_QWEN3_NEXT,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        _kv_heads(has_norms=True, has_gate=True),
        _qwen3_next,
        {"mlp_only_layers": ([],), **_NO_BIAS},
        names=TensorNames(shared="shared_expert."),
        linear=qwen3_5,
        has_offset_norms=True,
        defaults=_QWEN3_NEXT,
    ),
    "KimiLinearForCausalLM": Family(
        MlaConfig.read,
        _kimi,
        {
            "moe_router_activation_func": ("sigmoid",),
            "mla_use_nope": (True,),
            "moe_layer_freq": (1,),
            **_NO_BIAS,
        },
        names=TensorNames("block_sparse_moe.", gate="w1", up="w3", down="w2"),
        linear=kimi_linear,
        has_rope=False,
        defaults={
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "rms_norm_eps": 1e-5,
        },
    ),
    "BailingHybridForCausalLM": Family(
        MlaConfig.read_gated,
        _ling,
        {
            "score_function": ("sigmoid",),
            "no_kda_lora": (True,),
            "gated_attention_proj_granularity_type": ("head_wise",),
            "moe_router_enable_expert_bias": (True,),
            **dict.fromkeys(_UNUSED_BY_LING, (False,)),
            **dict.fromkeys(LIMITS, ()),
            **_NO_BIAS,
        },
        has_pairs=True,
        names=TensorNames(
            gate_bias="gate.expert_bias",
            attention="attention.",
            output="dense",
            embedding="model.word_embeddings",
        ),
        linear=ling,
        defaults={
            "first_k_dense_replace": 2,
            "num_shared_experts": 1,
            "num_expert_group": 8,
            "topk_group": 4,
            "layer_group_size": 6,
            "short_conv_kernel_size": 4,
            "routed_scaling_factor": 2.5,
            "rope_theta": 6e6,
        },
    ),
    "LlamaForCausalLM": Family(_kv_heads(), _no_mixture, {"mlp_bias": (False,), **_NO_BIAS}),
    "Qwen2ForCausalLM": Family(
        _kv_heads(has_bias=True), _no_mixture, _NO_WINDOW, defaults={"num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": Family(
        _kv_heads(has_norms=True),
        _no_mixture,
        {**_NO_BIAS, **_NO_WINDOW},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
}
_ALSO_NAMED = {"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM"}
"""Published architecture -> the served row."""
_WRAPPERS = {
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
}
"""Published architecture that reads pictures too -> the row of its text_config."""
_SUPPORTED_OF_ALL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    **dict.fromkeys((*LIMITS, "swiglu_limit", "swiglu_limits"), (None,)),
}
"""Field -> its allowed values in every family that does not say otherwise."""


def text_fields(raw: Mapping[str, Any]) -> Fields:
    """Read the fields of config.json; those of a wrapper's text model come first.

    Raises ValueError if a wrapper has no text_config, or one of another architecture.
    """
    served, names = _ALSO_NAMED | _WRAPPERS, raw.get("architectures")
    architecture = next((n for n in served if isinstance(names, list) and n in names), None)
    if architecture is None:
        return Fields(raw)
    row = served[architecture]
    own: dict[str, Any] = {}
    if architecture in _WRAPPERS:
        text = Fields(raw).inner("text_config")
        if text is None:
            raise ValueError(
                f"config.json: text_config is missing; {architecture} is read by its text model, "
                f"{row}"
            )
        if row not in (inner := text.names("architectures") or [row]):
            raise ValueError(
                f"{text.where}: the architecture is {', '.join(inner)}; in {architecture} it must "
                f"be {row}"
            )
        own = {name: value for name, value in raw["text_config"].items() if value is not None}
    return Fields({**raw, **own, "architectures": [row]})


def family_of(raw: Fields) -> Family:
    """Return the supported architecture of config.json.

    Raises ValueError if there is none, or a field asks for an unsupported rule.
    """
    architectures = raw.names("architectures")
    name = next((name for name in FAMILIES if name in architectures), None)
    if name is None:
        found = ", ".join(architectures) or f"none (model_type {raw.get('model_type')!r})"
        raise ValueError(
            f"config.json: the architecture is {found}; it must be "
            f"{' or '.join((*FAMILIES, *_ALSO_NAMED, *_WRAPPERS))}"
        )
    for field_name, allowed in (_SUPPORTED_OF_ALL | dict(FAMILIES[name].supported)).items():
        if allowed and (value := raw.get(field_name, allowed[0])) not in allowed:
            supported = " or ".join(map(repr, allowed))
            raise ValueError(
                f"config.json: {field_name} is {value!r}; {name} is supported with {supported} only"
            )
    layer_types = raw.names("layer_types")
    if FAMILIES[name].linear is None and any(kind != "full_attention" for kind in layer_types):
        raise ValueError(
            f"config.json: layer_types has {', '.join(sorted(set(layer_types)))}; every layer must "
            "be full_attention"
        )
    return FAMILIES[name]
