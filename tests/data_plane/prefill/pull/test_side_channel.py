"""Handshakes that vLLM's NixlConnector made, with made-up addresses and ids, and what is refused.

handshakes.json has the answers of 0.32 on a CPU, for presets small and tiny-qwen3-moe in float32,
and of 0.33, which differs in one of the parameters.
"""

import base64
import ipaddress
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.presets import PRESETS
from data_plane.prefill.pull.kv_shape import KvShape
from data_plane.prefill.pull.side_channel import allowed_address, decode
from harness.vllm.nixl_engine import blocks_of

RECORDED = json.loads(Path(__file__).with_name("handshakes.json").read_text())
MODELS = {
    "0.32, latent KV": ("small", "DeepseekV3ForCausalLM"),
    "0.33, latent KV": ("small", "DeepseekV3ForCausalLM"),
    "0.32, K/V heads": ("tiny-qwen3-moe", "Qwen3MoeForCausalLM"),
}
NEEDED = (
    "engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks", "block_lens",
    "block_strides", "block_size", "physical_blocks_per_logical_kv_block",
)  # fmt: skip
ADDED_LATER = ("region_num_blocks", "region_group_ids", "region_names", "dcp_size", "pcp_size")


def answer_of(name):
    return base64.b64decode(RECORDED[name]["answer"][0])


def changed(answer, **fields):
    """The answer with other fields; None: without."""
    outer = msgspec.msgpack.decode(answer)
    inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"]) | fields
    inner = {name: value for name, value in inner.items() if value is not None}
    return msgspec.msgpack.encode(outer | {"agent_metadata_bytes": msgspec.msgpack.encode(inner)})


def shape_of(name, folder):
    preset, architecture = MODELS[name]
    config = PRESETS[preset] | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return KvShape(ModelConfig.from_folder(folder), torch.float32, None)


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_handshake_fits_its_model(name, tmp_path):
    memory, shape = decode(answer_of(name)), shape_of(name, tmp_path)
    assert shape.check(memory) == [*range(shape.model.num_layers)]
    blocks = blocks_of(RECORDED[name]["kv_transfer_params"])
    assert (blocks.engine_id, blocks.num_tokens) == (memory.engine_id, 150)
    assert len(blocks.block_ids) == -(-150 // memory.block_size)
    assert blocks.generation == (1 if name.startswith("0.33") else None)


@pytest.mark.parametrize("field", NEEDED)
def test_a_missing_field_is_named(field):
    with pytest.raises(ValueError, match=f"`{field}`.*its version must be 9 or later"):
        decode(changed(answer_of("0.32, latent KV"), **{field: None}))


def test_fields_of_later_versions_may_be_missing_or_unknown(tmp_path):
    name = "0.32, latent KV"
    older = changed(answer_of(name), a_later_field=[1], **dict.fromkeys(ADDED_LATER))
    assert shape_of(name, tmp_path).check(decode(older)) == [*range(8)]


def test_an_answer_of_something_else_is_no_handshake():
    for answer in (b"", b"HTTP/1.1 400", msgspec.msgpack.encode({"a": 1})):
        with pytest.raises(ValueError, match="the handshake of vLLM's NixlConnector cannot be"):
            decode(answer)


def test_regions_are_in_the_order_of_their_numbers(tmp_path):
    shape = shape_of("0.32, latent KV", tmp_path)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in (*range(2, 12), 1, 0)]
    memory = decode(answer_of("0.32, latent KV"))
    length, address = memory.block_lens[0], memory.kv_caches_base_addr[0]
    memory = replace(
        memory, region_names=names, kv_caches_base_addr=[address] * 12, block_lens=[length] * 12,
        block_strides=[length] * 12,
    )  # fmt: skip
    assert shape.check(memory) == [11, 10, *range(6)]


def test_kv_of_another_dtype_is_refused(tmp_path):
    shape = shape_of("0.32, latent KV", tmp_path)._replace(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"block_lens .* in torch.bfloat16 \(--kv-cache-dtype"):
        shape.check(decode(answer_of("0.32, latent KV")))


def test_an_address_must_be_in_an_allowed_network():
    networks = [ipaddress.ip_network(each) for each in ("10.0.0.0/8", "fd00::/8")]
    assert allowed_address("10.1.2.3", networks) == "10.1.2.3"
    assert allowed_address("fd00::1", networks) == "fd00::1"
    assert allowed_address("::ffff:10.0.0.1", networks) == "::ffff:10.0.0.1"
    for host in ("11.0.0.1", "::1", "::ffff:11.0.0.1", "127.0.0.1"):
        with pytest.raises(ValueError, match=r"it must be in a network of prefill\.pull\.allowed"):
            allowed_address(host, networks)
    with pytest.raises(ValueError):
        allowed_address("10.0.0.1", [])
    with pytest.raises(ConnectionError, match="does not resolve"):
        allowed_address("x" * 300, networks)


@pytest.mark.parametrize(
    "field", ["block_size", "num_blocks", "physical_blocks_per_logical_kv_block"]
)
def test_a_size_of_zero_is_refused(field):
    with pytest.raises(ValueError, match=field):
        decode(changed(answer_of("0.32, latent KV"), **{field: 0}))


def test_a_mapped_address_is_that_of_ipv4():
    with pytest.raises(ValueError, match="must be in a network"):
        allowed_address("::ffff:127.0.0.1", [ipaddress.ip_network("::/0")])
