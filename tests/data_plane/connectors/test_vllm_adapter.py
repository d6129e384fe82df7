"""NanocpConnector itself, called as vLLM calls it, with a stand-in for vLLM's base class."""

import inspect
import json
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_plane.model.presets import PRESETS
from data_plane.prefill.connector.ticket import KEY
from harness.paths import ROOT
from harness.vllm import published_vllm
from harness.vllm.fake_vllm import FakeVllm
from harness.waits import until

from .test_contract import MODEL, Places, assert_pages, run, ticket_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with latent KV of as many layers as MODEL has; only its config.json is read."""
    folder = tmp_path_factory.mktemp("latent")
    config = PRESETS["tiny"] | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": MODEL.num_layers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder, extra=None, dtype=torch.float32, cache_dtype="auto", method=None, **parallel):
    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, mamba_cache_mode="none", use_replayssm=False
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=SimpleNamespace(method=method) if method else None,
        model_config=SimpleNamespace(dtype=dtype, model=str(folder)),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}),
        compilation_config=SimpleNamespace(static_forward_context=defaultdict(SimpleNamespace)),
    )


def groups_of(block_size):
    """vLLM's KVCacheConfig, as far as the connector reads it."""
    names = [f"model.layers.{layer}.{of}attn" for layer in range(4) for of in ("", "self_attn.")]
    spec = SimpleNamespace(block_size=block_size)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=names)
    return SimpleNamespace(kv_cache_groups=[group])


class Requests:
    """TicketedRequests' calls, by way of the connector of vLLM's scheduler."""

    def __init__(self, connector):
        self.connector = connector

    def allocated(self, request_id, params, num_tokens):
        self.connector.update_state_after_alloc(
            SimpleNamespace(
                request_id=request_id, kv_transfer_params=params, num_prompt_tokens=num_tokens
            ),
            blocks=None,
            num_external_tokens=0,
        )

    def step(self, scheduled):
        return self.connector.build_connector_meta(scheduled).work

    def finished(self, request_id, is_aborted):
        status = "FINISHED_ABORTED" if is_aborted else "FINISHED_LENGTH_CAPPED"
        request = SimpleNamespace(request_id=request_id, status=SimpleNamespace(name=status))
        return self.connector.request_finished_all_groups(request, ([],))

    def sent(self, request_ids):
        self.connector.update_connector_output(SimpleNamespace(finished_sending=request_ids))

    @property
    def is_holding(self):
        return self.connector.has_pending_push_work()


class Sender:
    """PageSender's calls, by way of the connector of a worker."""

    def __init__(self, module, connector):
        self.module, self.connector = module, connector

    def drop(self, dropped):
        work = self.module.StepWork(dropped=dropped)
        self.connector.handle_preemptions(self.module.NanocpMetadata(work))

    def queue(self, parts):
        work = self.module.StepWork(parts=parts)
        self.connector.bind_connector_metadata(self.module.NanocpMetadata(work))
        self.connector.wait_for_save()

    def finished(self, request_ids, timeout_s):
        sending, receiving = self.connector.get_finished(request_ids)
        assert receiving is None
        return sending or set()


def assert_sent(sender):
    until(lambda: sender.finished({"r"}, 0))


def engine_with(module, monkeypatch, folder, places, **options):
    """A FakeVllm whose halves are two NanocpConnectors."""
    monkeypatch.setattr(module, "PageWriters", lambda networks: places)
    engine = FakeVllm(16, places, 0, **options)
    method = "mtp" if options.get("has_mtp") else None
    engine.sender.close()
    halves = [
        module.NanocpConnector(config_of(folder, method=method), role, groups_of(16))
        for role in (module.KVConnectorRole.SCHEDULER, module.KVConnectorRole.WORKER)
    ]
    layers = engine._kv.view(np.float32)
    halves[1].register_kv_caches(
        {
            f"model.layers.{layer}.self_attn.attn": torch.from_numpy(layers[layer])[:, None]
            for layer in reversed(range(len(layers)))
        }
    )
    engine.requests = Requests(halves[0])
    engine.sender = Sender(module, halves[1])
    assert halves[1].get_finished_count() == 1
    return engine, halves


@pytest.mark.parametrize("has_mtp", [False, True])
def test_pages_arrive_and_blocks_come_back(connector_module, monkeypatch, folder, has_mtp):
    places, options = Places(), {"preempted_share": 0.2, "has_mtp": has_mtp}
    engine, halves = engine_with(connector_module, monkeypatch, folder, places, **options)
    fingerprint = connector_module.fingerprint(folder, "float32")
    tickets = {}
    for number, length in enumerate((1, 64, 65, 200)):
        ids = [(number + 7 * position) % MODEL.vocab_size for position in range(length)]
        layers = MODEL.num_layers + number % 2
        tickets[number] = ids, ticket_of(number, length, num_layers=layers, fingerprint=fingerprint)
        engine.add(f"r{number}", ids, tickets[number][1].to_params())
    run(engine)
    for ids, ticket in tickets.values():
        assert_pages(places, ids, ticket, has_mtp=has_mtp)
    assert engine.num_blocks_used == 0
    halves[1].shutdown()


def test_blocks_of_a_preempted_prompt_are_not_read(connector_module, monkeypatch, folder):
    places = Places(is_gated=True)
    engine, halves = engine_with(
        connector_module, monkeypatch, folder, places, chunk_tokens=(140, 140)
    )
    ids = [token % MODEL.vocab_size for token in range(200)]
    fingerprint = connector_module.fingerprint(folder, "float32")
    ticket = ticket_of(1, 200, fingerprint=fingerprint)
    engine.add("r", ids, ticket.to_params())
    engine.step()
    assert places.at_gate.acquire(timeout=30)
    engine._preempted_share = 1.0
    engine.step()
    engine._preempted_share = 0.0
    places.gate.release(20)
    run(engine)
    assert_pages(places, ids, ticket)
    halves[1].shutdown()


def test_a_refusal_is_in_the_answer(connector_module, monkeypatch, folder):
    engine, halves = engine_with(connector_module, monkeypatch, folder, Places())
    answers = []
    engine.add("r", [1] * 70, ticket_of(1, 70).to_params(), answers.append)
    run(engine)
    assert list(answers[0][KEY]) == ["refused"]
    assert "layout is pairs-1 in this engine and None in NanoCP" in answers[0][KEY]["refused"]
    halves[1].shutdown()


HEADS, WIDTH, LAYERS, BLOCKS = 2, 32, 2, 12


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory):
    """A model with K/V heads; only its config.json is read."""
    folder = tmp_path_factory.mktemp("heads")
    widths = {"num_key_value_heads": HEADS, "head_dim": WIDTH, "num_hidden_layers": LAYERS}
    config = PRESETS["tiny-qwen3"] | {"architectures": ["Qwen3ForCausalLM"]} | widths
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def place_of(kernel, size, slot, head, number, is_value):
    """Where vLLM's kernel keeps a number of a head, in [BLOCKS, HEADS, size * 2 * WIDTH]."""
    block, at = divmod(slot, size)
    if kernel is None:
        return block, head, at * 2 * WIDTH + WIDTH * is_value + number
    if kernel == "amx" and not is_value:
        offset = at // 16 * 16 * WIDTH + number // 2 * 32 + at % 16 * 2 + number % 2
    elif kernel == "amx":
        offset = number // 16 * 16 * size + at // 2 * 32 + number % 16 * 2 + at % 2
    else:
        offset = at * WIDTH + number if is_value else number * size + at
    return block, head, is_value * size * WIDTH + offset


@pytest.mark.parametrize("blocks_in_one", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(None, "bfloat16"), ("vec", "float32"), ("vec16", "bfloat16"), ("amx", "bfloat16")],
)
def test_pages_have_the_keys_of_all_heads_then_their_values(
    connector_module, monkeypatch, heads_folder, kernel, dtype, blocks_in_one
):
    """The model's caches are written number by number, as vLLM's kernels do."""
    monkeypatch.setattr(connector_module, "PageWriters", lambda networks: places)
    places, num_tokens, size = Places(), 100, 32
    role, config = connector_module.KVConnectorRole.WORKER, config_of(heads_folder)
    worker = connector_module.NanocpConnector(config, role, groups_of(size * blocks_in_one))
    kind = np.uint16 if dtype == "bfloat16" else np.uint32
    generator = np.random.default_rng(0)
    dense = generator.integers(1, 1 << 14, (LAYERS, 128, 2, HEADS, WIDTH)).astype(kind)
    dense[:, num_tokens:] = 0
    blocks = generator.permutation(BLOCKS // blocks_in_one)[: -(-num_tokens // size)]
    caches = {}
    for layer in range(LAYERS):
        cache = np.full((BLOCKS, HEADS, size * 2 * WIDTH), 7, kind)
        for token, is_value, head, number in np.ndindex(num_tokens, 2, HEADS, WIDTH):
            block, at = divmod(token, size * blocks_in_one)
            slot = blocks[block] * size * blocks_in_one + at
            place = place_of(kernel, size, int(slot), head, number, is_value)
            cache[place] = dense[layer, token, is_value, head, number]
        name = f"model.layers.{layer}.self_attn.attn"
        kv = torch.from_numpy(cache).view(getattr(torch, dtype))
        caches[name] = kv.view(BLOCKS, HEADS, size, 2 * WIDTH)
        if kernel is not None:
            config.compilation_config.static_forward_context[name].isa = kernel
    if kernel is None:  # the axes' names stay, and their order in memory may be another
        caches = {
            name: kv.transpose(1, 2).contiguous().transpose(1, 2) for name, kv in caches.items()
        }
    worker.register_kv_caches(caches)
    ticket = ticket_of(1, num_tokens, num_layers=LAYERS)
    sender = Sender(connector_module, worker)
    sender.queue([connector_module.PagePart("r", ticket, (tuple(map(int, blocks)),), 0, 2)])
    assert_sent(sender)
    for page in (0, 1):
        ((_, _, payload),) = places.pages[1, page]
        expected = dense[:, page * 64 : page * 64 + 64].reshape(LAYERS, 64, -1)
        np.testing.assert_array_equal(payload.reshape(-1).view(kind), expected.reshape(-1))
    worker.shutdown()


@pytest.mark.parametrize(("shape", "kernel", "sentence"), [
    ((2, 4, HEADS, 32, WIDTH), "vec", r"\[2, 4, 2, 32, 32\]; it must be \[blocks, 2, tokens"),
    ((4, HEADS, 32, WIDTH), "vec", "the keys and values of the model's K/V heads"),
    ((4, 1, 32, 2 * WIDTH), "vec", "it must be"),
    ((4, HEADS, 32, 2 * WIDTH), "neon", "attention on this CPU is neon"),
])  # fmt: skip
def test_heads_that_it_cannot_read_are_refused(
    connector_module, heads_folder, shape, kernel, sentence
):
    role, config = connector_module.KVConnectorRole.WORKER, config_of(heads_folder)
    caches = {f"model.layers.{layer}.attn": torch.zeros(shape) for layer in range(LAYERS)}
    for name in caches:
        config.compilation_config.static_forward_context[name].isa = kernel
    worker = connector_module.NanocpConnector(config, role, groups_of(32))
    with pytest.raises(ValueError, match=sentence):
        worker.register_kv_caches(caches)


def test_a_rank_that_has_some_heads_is_refused(connector_module, folder, heads_folder):
    role, groups = connector_module.KVConnectorRole.SCHEDULER, groups_of(16)
    sentence = "tensor_parallel_size is 2; it must be 1 .* with all K/V heads"
    with pytest.raises(ValueError, match=sentence):
        config = config_of(heads_folder, tensor_parallel_size=2)
        connector_module.NanocpConnector(config, role, groups)
    connector_module.NanocpConnector(config_of(folder, tensor_parallel_size=2), role, groups)


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; it must be 1"),
    ({"decode_context_parallel_size": 4}, "decode_context_parallel_size is 4"),
    ({"cache_dtype": "fp8"}, "kv_cache_dtype fp8; NanoCP takes float32 or bfloat16"),
    ({"dtype": torch.float16}, "dtype is torch.float16"),
    ({"folder": "deepseek-ai/DeepSeek-V3"}, "give vLLM the checkpoint as a folder"),
])  # fmt: skip
def test_what_it_cannot_send_is_refused_at_the_start(connector_module, folder, changed, sentence):
    config = config_of(**({"folder": folder} | changed))
    with pytest.raises(ValueError, match=sentence):
        connector_module.NanocpConnector(
            config, connector_module.KVConnectorRole.SCHEDULER, groups_of(16)
        )


@pytest.mark.parametrize(("method", "more"), [(None, 1), ("eagle", 1), ("mtp", 0), ("mtp", 2)])
def test_other_layers_than_the_models_and_its_mtp_layer_are_refused(
    connector_module, folder, method, more
):
    role = connector_module.KVConnectorRole.WORKER
    config = config_of(folder, method=method)
    worker = connector_module.NanocpConnector(config, role, groups_of(16))
    layers = range(MODEL.num_layers + more)
    caches = {f"model.layers.{layer}.attn": torch.zeros(4, 1, 16, 2) for layer in layers}
    with pytest.raises(ValueError, match="speculative decoding must be off, or of method mtp"):
        worker.register_kv_caches(caches)


def test_methods_have_the_published_arguments(connector_module):
    own = vars(connector_module.NanocpConnector)
    for name, method in own.items():
        if inspect.isfunction(method) and not (name.startswith("_") and name != "__init__"):
            parameters = inspect.signature(method).parameters.values()
            named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            assert tuple(named[1:]) == published_vllm.METHODS[name], name
    stand_in = vars(published_vllm.KVConnectorBase_V1)
    assert {name for name in stand_in if inspect.isfunction(stand_in[name])} <= set(
        published_vllm.METHODS
    )


def test_the_connector_brings_neither_torch_nor_the_service_into_vllm():
    program = (
        "import data_plane.prefill.connector.requests, data_plane.prefill.connector.sender, sys\n"
        "import data_plane.prefill.connector.rings, data_plane.prefill.connector.paged_kv\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    heavy = {"torch", "grpc", "google", "ray", "pydantic", "prometheus_client", "control_plane"}
    assert not heavy & set(eval(result.stdout))


def test_only_the_first_rank_sends(connector_module, monkeypatch, folder):
    """Every rank has the whole latent KV, and a ring takes one writer."""
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_rank", lambda: 1)
    role = connector_module.KVConnectorRole.WORKER
    worker = connector_module.NanocpConnector(config_of(folder), role, groups_of(16))
    worker.register_kv_caches(
        {f"model.layers.{layer}.attn": torch.zeros(4, 1, 16, 2) for layer in range(2)}
    )
    part = connector_module.PagePart("r", ticket_of(1, 64), ((0, 1, 2, 3),), 0, 1)
    work = connector_module.StepWork(parts=[part])
    worker.bind_connector_metadata(connector_module.NanocpMetadata(work))
    worker.wait_for_save()
    assert worker.get_finished({"r"}) == (None, None)
    assert worker._sender is None
