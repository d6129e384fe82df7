"""Seeded checkpoints for development and tests: Hugging Face folders of every architecture.

Random weights are large enough that greedy tokens vary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from data_plane.model.presets import PRESETS

_MIN_VOCABULARY = 258
# transformers does not write these fields; other engines read them.
_PUBLISHED_FIELDS = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1},
}
_OFFSET_NORMS = ("qwen3_next", "qwen3_5_moe_text")
_SLOW_DECAY: tuple[dict[str, tuple[float, float]], ...] = (
    {"A_log": (1.0, -3.0), "_bias": (1.0, -2.0)},
    {"A_log": (0.3, 0.0), "_bias": (1.0, -5.0)},  # with a bound, which a sigmoid multiplies
)
"""(spread, centre) of the tensors that decide a state's decay."""
_BLOCK = 128
_QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [_BLOCK, _BLOCK],
}


def make_checkpoint(
    path: Path,
    preset: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    overrides: dict[str, Any] | None = None,
    published_spelling: bool = False,
    max_shard_size: str = "50GB",
) -> int:
    """Write a checkpoint folder, tokenizer included; returns the number of parameters.

    preset: a key of PRESETS. dtype: float8_e4m3fn makes the matrices of attention and MLPs FP8 in
    blocks, all else bf16. overrides: fields of config.json. published_spelling: write rope_theta
    and rope_scaling. Raises ValueError for an unknown preset, or a vocabulary too small for the
    tokenizer.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; it must be {' or '.join(PRESETS)}")
    fields = deepcopy(PRESETS[preset] | (overrides or {}))  # `transformers` writes into them
    if fields["vocab_size"] < _MIN_VOCABULARY:
        raise ValueError(
            f"vocab_size is {fields['vocab_size']}; it must be at least {_MIN_VOCABULARY}, "
            "for every byte, bos and eos"
        )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config: Any = AutoConfig.for_model(**fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # With a bias of zero, a gate that wrongly weighs by score + bias would pass every test.
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.05)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            is_offset = config.model_type in _OFFSET_NORMS and "linear_attn" not in name
            centre = 0 if is_offset else 1
            parameter.data.copy_(centre + 0.1 * torch.randn(parameter.shape, generator=generator))
        elif name.endswith(("A_log", "dt_bias")):
            # States that decay fast would hide errors of old tokens.
            spread, centre = _SLOW_DECAY[config.model_type == "bailing_hybrid"][name[-5:]]
            parameter.data.copy_(
                centre + spread * torch.randn(parameter.shape, generator=generator)
            )
        elif name.endswith("bias"):
            parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    is_fp8 = dtype == torch.float8_e4m3fn
    model.to(torch.bfloat16 if is_fp8 else dtype).save_pretrained(
        path, max_shard_size=max_shard_size
    )
    write_tokenizer(path, config.vocab_size, _TRAINING_TEXT)
    _rewrite_config(
        path / "config.json",
        published_spelling,
        {"quantization_config": _QUANTIZATION} if is_fp8 else {},
    )
    if is_fp8:
        _quantise(path)
    return sum(parameter.numel() for parameter in model.parameters())


def _quantise(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if _is_quantised(name)]:
            tensors[name], tensors[name + "_scale_inv"] = _fp8_blocks(tensors[name])
        save_file(tensors, file, metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        files = content["weight_map"]
        files.update(
            {name + "_scale_inv": files[name] for name in list(files) if _is_quantised(name)}
        )
        index.write_text(json.dumps(content, indent=2) + "\n")


def _is_quantised(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def _fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a weight into (FP8 values, fp32 scale of every block)."""
    scale = (
        F.max_pool2d(weight.float().abs()[None], _BLOCK, ceil_mode=True)[0]
        / torch.finfo(torch.float8_e4m3fn).max
    )
    rows, columns = weight.shape
    scale_of_each = scale.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[
        :, :columns
    ]
    return (weight.float() / scale_of_each).to(torch.float8_e4m3fn), scale


def _rewrite_config(path: Path, published_spelling: bool, more_fields: dict[str, Any]) -> None:
    config = json.loads(path.read_text())
    config |= _PUBLISHED_FIELDS.get(config["model_type"], {}) | more_fields
    if published_spelling:
        if config["model_type"] == "qwen3_moe":
            config["num_experts"] = config.pop("num_local_experts")
        _publish_linear_layers(config)
        rope = config.pop("rope_parameters", None)
        if rope is not None:
            if "partial_rotary_factor" in rope:
                config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            config["rope_theta"] = rope.pop("rope_theta")
            kind = rope.pop("rope_type")
            config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _publish_linear_layers(config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind == "kimi_linear":
        layers = config.pop("layer_types")
        config["linear_attn_config"] = {
            "full_attn_layers": [n + 1 for n, of in enumerate(layers) if of == "full_attention"],
            "kda_layers": [n + 1 for n, of in enumerate(layers) if of == "linear_attention"],
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        }
        config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
        config["mla_use_nope"] = True
    elif kind == "bailing_hybrid":
        config["head_dim"] = config.pop("linear_head_dim")
        for field in ("layer_types", "mlp_layer_types", "linear_num_heads"):
            del config[field]
    elif kind == "qwen3_next":
        del config["layer_types"]
        config["full_attention_interval"] = 4


def write_tokenizer(path: Path, vocab_size: int, texts: Sequence[str]) -> None:
    """Write a byte-level BPE tokenizer, learnt from texts: bos is 0, eos is 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused-{number}>" for number in range(missing)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if not loop.last or add_generation_prompt %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_TRAINING_TEXT = [
    (
        "A request waits in the queue until the scheduler gives it a place. The place is "
        "one instance for its experts and"
    ),
    (
        "a set of instances for its memory. Long requests are spread over many "
        "instances, short requests stay on one."
    ),
    (
        "Every layer of the model sends what it must send and waits for what it must "
        "have, and no longer than that."
    ),
    (
        "The slowest instance decides how fast all the others can be, so the work is "
        "shared out evenly between them."
    ),
    (
        "When a page is full the next page begins; when a request ends its pages are "
        "free again for somebody else to use."
    ),
    (
        "def plan(self, events, now): return the windows, the transfers, the placements "
        "and the requests that have ended"
    ),
    (
        "for index in range(number): if value is not None and other == value: continue; "
        "else: return self.values[index]"
    ),
    (
        "What is measured is written down with the command that measured it, and what "
        "was not measured is not claimed."
    ),
    (
        "Once upon a time there was a small model that knew nothing at all, and answered "
        "every question all the same."
    ),
    (
        "0 1 2 3 4 5 6 7 8 9 10 16 32 64 100 128 256 512 1024 2048 4096 -- == != <= >= "
        "-> # ## ### `` ``` | [ ] ( ) { }"
    ),
]
