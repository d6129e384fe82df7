"""Fields of config.json for every preset of seeded checkpoints."""

from __future__ import annotations

from typing import Any

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_COMMON = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 16384,
    "rope_parameters": _YARN,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PRESETS: dict[str, dict[str, Any]] = {
    # About 7 million parameters, for tests and the demo.
    "tiny": _COMMON
    | {
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
    },
    # About 160 million parameters, for benchmarks. The latent widths are DeepSeek-V3's: vLLM's CPU
    # kernel takes no others.
    "small": _COMMON
    | {
        "vocab_size": 4096,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 1536,
        "moe_intermediate_size": 384,
        "n_routed_experts": 32,
        "initializer_range": 0.04,
    },
}
# DeepSeek-V2-Lite's rules at the size of tiny: a softmax gate without groups or bias, no q LoRA,
# another mscale.
PRESETS["tiny-v2"] = PRESETS["tiny"] | {
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
_PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
_KV_HEADS = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": 16384,
    "rope_parameters": _PLAIN,
    "initializer_range": 0.06,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# K/V heads, with numbers that fit together by no accident: groups of 3 and 5, one K/V head, as many
# as query heads, widths that are not the hidden size over the heads.
PRESETS |= {
    "tiny-qwen3-moe": _KV_HEADS
    | {
        "model_type": "qwen3_moe",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "tiny-llama": _KV_HEADS
    | {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "intermediate_size": 640,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "tiny-qwen2": _KV_HEADS
    | {
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "tie_word_embeddings": True,
    },
    "tiny-qwen3": _KV_HEADS
    | {
        "model_type": "qwen3",
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "tiny-glm4-moe": _KV_HEADS
    | {
        "model_type": "glm4_moe",
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5},
        "intermediate_size": 512,
        "moe_intermediate_size": 96,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "tiny-mixtral": _KV_HEADS
    | {
        "model_type": "mixtral",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 96,
        "intermediate_size": 192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
}
# About 150 million parameters, for benchmarks.
_SMALL = _KV_HEADS | {"vocab_size": 4096, "initializer_range": 0.04}
PRESETS |= {
    "small-qwen3-moe": _SMALL
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 1536,
        "moe_intermediate_size": 384,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "small-llama": _SMALL
    | {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2816,
    },
}
_GATED_DELTA_NET = _KV_HEADS | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_KIMI_DELTA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 16384,
    "initializer_range": 0.06,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# Linear attention layers beside full ones. Widths of states differ from each other and from those
# of full attention; the last layer is of either kind.
PRESETS |= {
    "tiny-qwen3-next": _GATED_DELTA_NET
    | {"model_type": "qwen3_next", "num_hidden_layers": 6, "norm_topk_prob": True},
    "tiny-qwen3.5": _GATED_DELTA_NET
    | {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 3,
    },
    "tiny-kimi-linear": _KIMI_DELTA
    | {
        "model_type": "kimi_linear",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "rms_norm_eps": 1e-5,
        "layer_types": [
            *["linear_attention"] * 3,
            "full_attention",
            "linear_attention",
            "full_attention",
        ],
    },
    "tiny-ling": _KIMI_DELTA
    | {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 48,
        "layer_group_size": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
}
