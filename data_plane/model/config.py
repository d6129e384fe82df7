"""The model's shape and rules, from a Hugging Face folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_plane.model.attention_kinds.delta import DeltaConfig
from data_plane.model.attention_kinds.kind import AttentionKind
from data_plane.model.config_fields import Fields, is_int, read_json
from data_plane.model.families import LIMITS, PLAIN_NAMES, TensorNames, family_of, text_fields
from data_plane.model.rope_config import RopeConfig, read_rope
from data_plane.model.safetensors_reader import has_fp8

_FORMS = "float32, bfloat16, float16, or fp8 (e4m3) with one scale for each block"
_BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_MOST_EXPERTS = 1_000_000
"""The limit of layers times experts, listed before anything is read; Kimi-K2 has 23,000."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: each layer is attention of one kind, then an MLP or a MoE layer."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionKind
    dense_size: int
    num_dense_layers: int
    """The first layers; all others are MoE layers."""
    num_experts: int
    """0 if every layer is dense."""
    num_experts_per_token: int
    expert_size: int
    num_shared_experts: int
    softmax_gate: bool
    """True: DeepSeek-V2's gate, softmax scores, groups by their best expert, no bias. False: V3's,
    sigmoid scores, groups by their best two experts, a bias in the choice.
    """
    num_groups: int
    """Groups of experts; the gate chooses groups first."""
    num_groups_per_token: int
    weights_normalised: bool
    """True if the chosen experts' weights are divided by their sum."""
    routed_scale: float
    shared_size: int
    """Intermediate size of the shared experts together."""
    norm_eps: float
    tied_embeddings: bool
    max_len: int
    eos_token_ids: tuple[int, ...]
    rope: RopeConfig
    fp8_block: tuple[int, int] | None
    """Rows and columns that share a scale; None: no FP8."""
    names: TensorNames = PLAIN_NAMES
    num_mtp_layers: int = 0
    """1 if an MTP layer behind the last one drafts tokens."""
    has_shared_gate: bool = False
    """True if the shared expert's output has a gate."""
    has_offset_norms: bool = False
    """True if norms multiply by 1 + their weights."""
    delta: DeltaConfig | None = None
    linear_layers: tuple[int, ...] = ()
    """Ascending; rows have recurrent states and no KV there."""
    expert_limits: tuple[float, ...] = ()
    """Limits of activations by layer (layers.gated); infinity is none."""
    shared_limits: tuple[float, ...] = ()
    """Limits of shared experts' activations by layer."""

    @property
    def longest(self) -> int:
        """Positions of the rotary embedding, with its stretch."""
        yarn = self.rope.yarn
        return max(self.max_len, round(yarn.factor * yarn.original_max_len) if yarn else 0)

    @property
    def in_words(self) -> str:
        """What tells a model's times from those of another."""
        return f"{self.num_layers} layers of {self.hidden_size}, {self.num_experts} experts"

    @property
    def longest_why(self) -> str:
        """The fields that limit a request's length, for messages."""
        own, yarn = f"max_position_embeddings is {self.max_len}", self.rope.yarn
        if yarn is None:
            return f"{own}, and no yarn stretches it"
        return f"{own}; yarn stretches {yarn.original_max_len} by a factor of {yarn.factor:g}"

    def check_no_limits(self) -> None:
        """Raise ValueError if activations have limits, which no GPU kernel holds."""
        for name, limits in zip(LIMITS, (self.expert_limits, self.shared_limits), strict=True):
            if min(limits, default=math.inf) < math.inf:
                raise ValueError(
                    f"config.json: {name} has limits of activations, which only CPUs hold so far: "
                    "data_plane.device must be cpu"
                )

    @property
    def num_stored_layers(self) -> int:
        """With the MTP layer if it is used."""
        return self.num_layers + self.num_mtp_layers

    @property
    def num_kept_layers(self) -> int:
        """Layers with KV."""
        return self.num_stored_layers - len(self.linear_layers)

    @property
    def places(self) -> tuple[int, ...]:
        """For each layer, the number before it of its kind, linear attention or full."""
        return tuple(
            self.places_before(index)[index in self.linear_layers]
            for index in range(self.num_stored_layers)
        )

    def limits_of(self, index: int) -> tuple[float, float]:
        """Return the limits of a layer's experts' and shared experts' activations."""
        both = self.expert_limits, self.shared_limits
        routed, shared = (each[index] if index < len(each) else math.inf for each in both)
        return routed, shared

    def places_before(self, index: int) -> tuple[int, int]:
        """Return the numbers of full and linear attention layers before this one."""
        num_linear = sum(layer < index for layer in self.linear_layers)
        return index - num_linear, num_linear

    @classmethod
    def from_folder(cls, path: str | Path, has_mtp: bool = False) -> ModelConfig:
        """Read a Hugging Face folder's config.json and generation_config.json.

        Raises ValueError naming the missing or unsupported field, and the remedy.
        """
        folder = Path(path)
        raw = text_fields(read_json(folder / "config.json"))
        family = family_of(raw)
        raw = raw.with_defaults(family.defaults)
        rope = replace(read_rope(raw, family.has_pairs), is_off=not family.has_rope)
        mixture = family.mixture(raw)
        linear = family.linear(raw) if family.linear is not None else None
        if linear is not None and has_mtp:
            raise ValueError(
                "scheduler.num_drafts is set, and the model has linear attention layers, whose "
                "states take one token a step so far: set it to 0"
            )
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        config = cls(
            vocab_size=raw.positive("vocab_size"),
            hidden_size=raw.positive("hidden_size"),
            num_layers=raw.positive("num_hidden_layers"),
            attention=family.attention(raw, rope),
            dense_size=raw.positive("intermediate_size") if mixture["num_dense_layers"] else 0,
            **mixture,
            norm_eps=raw.number("rms_norm_eps", 1e-6),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_len=raw.positive("max_position_embeddings", "model_max_length"),
            eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
            rope=rope,
            fp8_block=_fp8_block(raw, folder),
            names=family.names,
            num_mtp_layers=_num_mtp_layers(raw) if has_mtp else 0,
            has_offset_norms=family.has_offset_norms,
            delta=None if linear is None else linear.delta,
            linear_layers=() if linear is None else linear.indices,
        )
        _check_shape(config)
        return config


def _check_shape(config: ModelConfig) -> None:
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise ValueError(
                f"config.json or generation_config.json: eos_token_id has {token_id}; ids must be "
                f"from 0 to {config.vocab_size - 1}, the last of the vocabulary (vocab_size)"
            )
    num_experts = config.num_layers * max(1, config.num_experts)
    if num_experts > _MOST_EXPERTS:
        raise ValueError(
            f"config.json: {config.num_layers} layers (num_hidden_layers) with "
            f"{config.num_experts} experts each have {num_experts:,} together; "
            f"{_MOST_EXPERTS:,} is the limit"
        )
    if config.num_dense_layers == config.num_layers and not config.num_experts:
        return
    if config.num_dense_layers >= config.num_layers:
        raise ValueError(
            f"config.json: first_k_dense_replace is {config.num_dense_layers} of "
            f"{config.num_layers} layers, so no layer has the experts that the file describes"
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


def _num_mtp_layers(raw: Fields) -> int:
    number = raw.get("num_nextn_predict_layers", 0)
    if not is_int(number) or number < 1:
        raise ValueError(
            f"config.json: num_nextn_predict_layers is {number!r}; scheduler.num_drafts needs a "
            "model with an MTP layer, which drafts: set it to 0 for this one"
        )
    return 1


def _fp8_block(raw: Fields, folder: Path) -> tuple[int, int] | None:
    said = map(raw.inner, ("quantization_config", "compression_config", "quantization"))
    quantization = next(filter(None, said), None)
    _refuse_beside(folder)
    if quantization is None:
        return None
    forms = map(quantization.get, ("quant_method", "quant_algo", "fmt", "format"))
    form = [str(each) for each in forms if each is not None]
    if form[:1] == ["fp8"] and has_fp8(folder) is False:
        return None
    if form not in (["fp8"], ["fp8", "e4m3"]):
        raise ValueError(
            f"{quantization.where.partition(':')[0]}: the weights are quantized "
            f"({', '.join(form) or 'without a quant_method'}); they must be {_FORMS}"
        )
    block = quantization.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(is_int(size) and size > 0 for size in block)
    ):
        raise ValueError(
            f"{quantization.where}: weight_block_size is {block!r}; it must be the rows and "
            "columns of a block that has a scale of its own, as [128, 128]"
        )
    return block[0], block[1]


def _refuse_beside(folder: Path) -> None:
    for path in (folder / name for name in _BESIDE if (folder / name).exists()):
        fields = Fields(read_json(path), path.name)
        fields = fields.inner("quantization") or fields
        for name in ("quant_algo", "quant_method", "bits", "w_bit"):
            is_left_over = "FP8" in str(form := fields.get(name)) and has_fp8(folder) is False
            if form is not None and not is_left_over:
                raise ValueError(
                    f"{path}: {name} is {form!r}; weights of this form are not read, they must be "
                    f"{_FORMS}, as quantization_config in config.json says it"
                )


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_int(token_id) for token_id in ids):
        raise ValueError(
            f"config.json: eos_token_id is {value!r}; it must be an id or a list of ids"
        )
    return tuple(ids)
