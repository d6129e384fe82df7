"""The model's shape and rules, from a Hugging Face folder.

Enters: config.json (both spellings of rope) and generation_config.json. Leaves: a ModelConfig, or a
ValueError that says what was found and what would be right. Does not know: tensors, instances.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_V3, _V2 = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The model's rotary embedding: plain, or stretched by yarn."""

    theta: float
    interleaved: bool
    """Whether the checkpoint stores rotated pairs side by side (x0, x1), not as two halves."""
    yarn: YarnConfig | None
    """None: plain rope."""


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Yarn's stretch of the context (arXiv 2309.00071)."""

    factor: float
    original_max_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """Factor of cos and sin."""
    softmax_mscale: float
    """Factor whose square multiplies the softmax scale."""
    truncated: bool
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek decoder: each layer is latent attention, then an MLP or a mixture of experts."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    """None: queries are projected from the hidden state directly."""
    kv_lora_rank: int
    nope_dim: int
    """Width of the part of a head's query and key that is not rotated."""
    rope_dim: int
    """Width of the rotated part."""
    v_dim: int
    """Width of a head's values."""
    dense_size: int
    """Intermediate size of the dense layers."""
    num_dense_layers: int
    """How many layers, the first ones, are dense; all others are mixtures of experts."""
    num_experts: int
    num_experts_per_token: int
    expert_size: int
    """Intermediate size of one expert."""
    num_shared_experts: int
    softmax_gate: bool
    """Whether the gate is DeepSeek-V2's, else DeepSeek-V3's.

    V2: scores are a softmax, a group counts by its best expert, and no expert has a bias. V3:
    scores are sigmoids, a group counts by its best two experts, and a bias takes part in the
    choice.
    """
    num_groups: int
    """Groups of experts; the gate chooses groups first."""
    num_groups_per_token: int
    weights_normalised: bool
    """Whether the chosen experts' weights are divided by their sum."""
    routed_scale: float
    """Factor of the chosen experts' weights."""
    norm_eps: float
    tied_embeddings: bool
    max_len: int
    """Number of positions that the model was made for."""
    eos_token_ids: tuple[int, ...]
    rope: RopeConfig
    fp8_block: tuple[int, int] | None
    """Rows and columns of an FP8 weight that share a scale; None: every weight is a plain float."""

    @property
    def latent_dim(self) -> int:
        """Width of a token's latent KV: normed c_kv, then the rotated key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def q_latent_dim(self) -> int:
        """Width of the q latent: q_lora_rank, or the hidden size without it."""
        return self.hidden_size if self.q_lora_rank is None else self.q_lora_rank

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores before the softmax."""
        mscale = 1.0 if self.rope.yarn is None else self.rope.yarn.softmax_mscale
        return float((self.nope_dim + self.rope_dim) ** -0.5 * mscale * mscale)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read a Hugging Face folder's config.json and generation_config.json.

        Raises ValueError naming the field that is missing or unsupported, and what would be right.
        """
        folder = Path(path)
        raw = _Fields(_read_json(folder / "config.json"))
        is_v2 = _architecture(raw) == _V2
        has_groups = raw.get("topk_method", "greedy" if is_v2 else "noaux_tc") != "greedy"
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        config = cls(
            vocab_size=raw.positive("vocab_size"),
            hidden_size=raw.positive("hidden_size"),
            num_layers=raw.positive("num_hidden_layers"),
            num_heads=raw.positive("num_attention_heads"),
            q_lora_rank=raw.positive("q_lora_rank") if raw.get("q_lora_rank") is not None else None,
            kv_lora_rank=raw.positive("kv_lora_rank"),
            nope_dim=raw.positive("qk_nope_head_dim"),
            rope_dim=raw.positive("qk_rope_head_dim"),
            v_dim=raw.positive("v_head_dim"),
            dense_size=raw.positive("intermediate_size"),
            num_dense_layers=raw.count("first_k_dense_replace", 0),
            num_experts=raw.positive("n_routed_experts", "num_local_experts"),
            num_experts_per_token=raw.positive("num_experts_per_tok"),
            expert_size=raw.positive("moe_intermediate_size"),
            num_shared_experts=raw.count("n_shared_experts", 0),
            softmax_gate=is_v2,
            num_groups=(raw.count("n_group", 1) or 1) if has_groups else 1,
            num_groups_per_token=(raw.count("topk_group", 1) or 1) if has_groups else 1,
            weights_normalised=bool(raw.get("norm_topk_prob", not is_v2)),
            routed_scale=raw.number("routed_scaling_factor", 1.0),
            norm_eps=raw.number("rms_norm_eps", 1e-6),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_len=raw.positive("max_position_embeddings"),
            eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
            rope=_rope(raw),
            fp8_block=_fp8_block(raw),
        )
        _check_shape(config)
        return config


class _Fields:
    """Fields of config.json, or of an object in it, each read with its type checked."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self._raw = raw
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        value = self._raw.get(name)
        return default if value is None else value

    def count(self, name: str, default: int) -> int:
        value = self.get(name, default)
        if not _is_int(value) or value < 0:
            raise ValueError(
                f"{self.where}: {name} is {value!r}; it must be an integer of at least 0"
            )
        return int(value)

    def positive(self, *names: str) -> int:
        """Read the first of `names` that is present; it must be an integer of at least 1."""
        value = next((self._raw[name] for name in names if self._raw.get(name) is not None), None)
        if value is None:
            raise ValueError(
                f"{self.where}: {names[0]} is missing; it must be an integer of at least 1"
            )
        if not _is_int(value) or value < 1:
            raise ValueError(
                f"{self.where}: {names[0]} is {value!r}; it must be an integer of at least 1"
            )
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not (_is_int(value) or isinstance(value, float)) or not math.isfinite(value):
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be a finite number")
        return float(value)

    def positive_number(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be above 0")
        return value

    def inner(self, name: str) -> _Fields | None:
        """Read the object of that name; None if it is absent or empty."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be an object")
        return _Fields(value, f"{self.where}: {name}") if value else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is missing; a checkpoint is a Hugging Face folder with a {path.name}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}); it must be a Hugging Face {path.name}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; it must hold a JSON object")
    return value


_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    _V3: {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    _V2: {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "rope_interleave": (True,),
        "mlp_bias": (False,),
    },
}
"""Architecture -> field -> the values it may have; an absent field means the first of them."""
_SUPPORTED_OF_ALL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
}


def _architecture(raw: _Fields) -> str:
    """Find the supported architecture that the file names.

    Raises ValueError if there is none, or if a field asks for a rule that is not supported.
    """
    architectures = raw.get("architectures", [])
    if not isinstance(architectures, list):
        raise ValueError(
            f"config.json: architectures is {architectures!r}; it must be a list of names"
        )
    architecture = next((name for name in _SUPPORTED if name in architectures), None)
    if architecture is None:
        found = ", ".join(map(str, architectures)) or f"none (model_type {raw.get('model_type')!r})"
        raise ValueError(
            f"config.json: the architecture is {found}; it must be {' or '.join(_SUPPORTED)}"
        )
    for name, allowed in (_SUPPORTED_OF_ALL | _SUPPORTED[architecture]).items():
        value = raw.get(name, allowed[0])
        if value not in allowed:
            supported = " or ".join(map(repr, allowed))
            raise ValueError(
                f"config.json: {name} is {value!r}; "
                f"{architecture} is supported with {supported} only"
            )
    return architecture


def _check_shape(config: ModelConfig) -> None:
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise ValueError(
                f"config.json or generation_config.json: eos_token_id has {token_id}; ids must be "
                f"from 0 to {config.vocab_size - 1}, the last of the vocabulary (vocab_size)"
            )
    if config.num_dense_layers >= config.num_layers:
        # The exchange's two-deep buffers are safe only because every instance answers every
        # dispatch; without one, a fast instance could overtake a slow one by two uses.
        raise ValueError(
            f"config.json: first_k_dense_replace is {config.num_dense_layers} of "
            f"{config.num_layers} layers, so there is no MoE layer; at least one is needed"
        )
    if config.num_experts % config.num_groups:
        raise ValueError(
            f"config.json: n_routed_experts is {config.num_experts}; it must be a multiple of "
            f"n_group ({config.num_groups})"
        )
    group_size = config.num_experts // config.num_groups
    if group_size < 2 and not config.softmax_gate:
        raise ValueError(
            f"config.json: a group has {group_size} expert; the gate scores groups by two experts"
        )
    if not 1 <= config.num_groups_per_token <= config.num_groups:
        raise ValueError(
            f"config.json: topk_group is {config.num_groups_per_token}; it must be from 1 to "
            f"n_group ({config.num_groups})"
        )
    available = config.num_groups_per_token * group_size
    if config.num_experts_per_token > available:
        raise ValueError(
            f"config.json: num_experts_per_tok is {config.num_experts_per_token}; "
            f"the chosen groups have {available}"
        )
    if config.rope_dim % 2:
        raise ValueError(f"config.json: qk_rope_head_dim is {config.rope_dim}; it must be even")


def _fp8_block(raw: _Fields) -> tuple[int, int] | None:
    quantization = raw.inner("quantization_config")
    if quantization is None:
        return None
    method, fmt = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    if (method, fmt) != ("fp8", "e4m3"):
        raise ValueError(
            f"config.json: the weights are quantized ({method}, {fmt}); they must be float32, "
            "bfloat16, float16, or fp8 (e4m3) with one scale for each block"
        )
    block = quantization.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(_is_int(size) and size > 0 for size in block)
    ):
        raise ValueError(
            f"{quantization.where}: weight_block_size is {block!r}; it must be the rows and "
            "columns of a block that has a scale of its own, as [128, 128]"
        )
    return block[0], block[1]


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_int(token_id) for token_id in ids):
        raise ValueError(
            f"config.json: eos_token_id is {value!r}; it must be an id or a list of ids"
        )
    return tuple(ids)


def _rope(raw: _Fields) -> RopeConfig:
    """Read rope in either spelling: rope_theta and rope_scaling, or all in rope_parameters."""
    parameters = raw.inner("rope_scaling") or raw.inner("rope_parameters") or _Fields({})
    theta = parameters.positive_number("rope_theta", raw.positive_number("rope_theta", 10_000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise ValueError(
            f"{parameters.where}: the rope type is {kind!r}; it must be default or yarn"
        )
    for fields in (raw, parameters):
        share = fields.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise ValueError(
                f"{fields.where}: partial_rotary_factor is {share!r}; only 1.0 is supported"
            )
    yarn = _yarn(raw, parameters) if kind == "yarn" else None
    return RopeConfig(theta=theta, interleaved=bool(raw.get("rope_interleave", True)), yarn=yarn)


def _yarn(raw: _Fields, parameters: _Fields) -> YarnConfig:
    max_len = raw.positive("max_position_embeddings")
    original_max_len = parameters.positive_number("original_max_position_embeddings", max_len)
    factor = parameters.positive_number("factor", max_len / original_max_len)
    mscale = parameters.number("mscale", 0.0)
    mscale_all_dim = parameters.number("mscale_all_dim", 0.0)
    attention_factor = _mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return YarnConfig(
        factor=factor,
        original_max_len=int(original_max_len),
        beta_fast=parameters.number("beta_fast", 0.0) or 32.0,
        beta_slow=parameters.number("beta_slow", 0.0) or 1.0,
        attention_factor=parameters.number("attention_factor", attention_factor),
        softmax_mscale=_mscale(factor, mscale_all_dim) if mscale_all_dim else 1.0,
        truncated=bool(parameters.get("truncate", True)),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
