"""Kernels in this folder run under Triton's interpreter; compiling them needs a process of its own.

What the compiler makes of them is test_kernel_compilation.py.
"""

import pytest

from harness.gpu_stand_ins.interpreter import interpret

interpret()

MINI = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "vocab_size": 320,
}  # fmt: skip
"""A dense layer and a mixture of experts, as small as the kernels take them."""


@pytest.fixture(scope="session")
def mini_shape():
    return MINI


@pytest.fixture(scope="session")
def mini(tmp_path_factory):
    """Make a mini checkpoint: (its folder, the oracle on it)."""
    from data_plane.model.make_checkpoint import make_checkpoint
    from data_plane.reference.oracle import Oracle

    path = tmp_path_factory.mktemp("checkpoints") / "mini"
    make_checkpoint(path, "tiny", overrides=MINI)
    return path, Oracle(path)
