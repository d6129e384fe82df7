"""States of linear attention layers, from vLLM's layouts to what the embedded prefill sends."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights
from data_plane.prefill.connector.requests import TicketedRequests
from nanocp.values.plan import CARRY_PAGE

from .test_contract import Places, ticket_of
from .test_vllm_adapter import Sender, assert_sent, config_of

NUM_BLOCKS, BLOCK_SIZE = 9, 32
POISON = 7.0


class Prefilled(NamedTuple):
    """A model's linear attention layers, and hidden rows that enter each."""

    folder: object
    model: ModelConfig
    layers: list
    rows: torch.Tensor


@pytest.fixture(scope="module")
def prefilled(models):
    folder = models("tiny-qwen3-next").path
    model = ModelConfig.from_folder(folder)
    weights = load_weights(folder, model, torch.float32, range(0))
    layers = [weights.layers[index].attention for index in model.linear_layers]
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(len(layers), 200, model.hidden_size, generator=generator)
    return Prefilled(folder, model, layers, rows)


@torch.no_grad()
def embedded(prefilled, num_tokens, dtype, page_bytes):
    """What the embedded prefill has in frame 0 after these tokens."""
    pool = CarryPool(prefilled.model.delta, len(prefilled.layers), 1, dtype, page_bytes)
    for layer, weights in enumerate(prefilled.layers):
        fields = pool.layers[layer]
        of_rows = CarryPool(prefilled.model.delta, 1, 1, torch.float32)
        of_rows.extend(0, 0, 0, prefilled.rows[layer, :num_tokens], weights)
        for own, other in zip(fields, of_rows.layers[0], strict=True):
            own[0] = other[0].to(own.dtype)
    return pool


def caches_of(prefilled, pool, num_tokens, config, block_of):
    """vLLM's tensors: KV of the full layers, and in each layer's context its inputs and states."""
    model, delta = prefilled.model, prefilled.model.delta
    is_cpu, caches, dtype = config.device_config.device_type == "cpu", {}, pool.layers[0][4].dtype
    kept = delta.conv_size - 1
    for index in range(model.num_layers):
        name = f"model.layers.{index}.{'linear_attn' if index in block_of else 'self_attn.attn'}"
        if index not in block_of:
            kind = model.attention
            shape = NUM_BLOCKS, kind.num_kv_heads, BLOCK_SIZE, 2 * kind.head_dim
            caches[name] = torch.zeros(shape, dtype=dtype)
            config.compilation_config.static_forward_context[name].isa = "vec" if is_cpu else None
            continue
        fields, block = pool.layers[model.places[index]], block_of[index]
        inputs = torch.full((NUM_BLOCKS, kept, delta.num_channels), POISON, dtype=dtype)
        positions = torch.arange(num_tokens - kept, num_tokens)
        ring = fields.channels[0]
        inputs[block] = torch.where(positions[:, None] >= 0, ring[positions % len(ring)], 0)
        shape = NUM_BLOCKS, delta.num_heads, delta.key_dim, delta.value_dim
        state = torch.full(shape, POISON)
        state[block] = fields.state[0]
        if is_cpu:  # the axes are named as on a GPU, and its kernels take them the other way round
            state = state.view(NUM_BLOCKS, delta.num_heads, delta.value_dim, delta.key_dim)
        else:
            state = state.transpose(2, 3).contiguous()
        config.compilation_config.static_forward_context[name].kv_cache = (inputs, state)
        caches[name] = torch.zeros(NUM_BLOCKS, 1, 1, 8, dtype=torch.int8)
    return caches


def groups_of(names):
    """A group for each linear attention layer and one for all others, as vLLM may make them."""
    linear = [[name] for name in names if "linear" in name]
    full = [name for name in names if "linear" not in name]
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    groups = [SimpleNamespace(layer_names=each, kv_cache_spec=spec) for each in (*linear, full)]
    return SimpleNamespace(kv_cache_groups=groups)


def sent(module, monkeypatch, prefilled, num_tokens, device, dtype, is_turned=False):
    """The state's pages that a worker sends for a prompt, and the embedded prefill's pool."""
    model, places = prefilled.model, Places()
    monkeypatch.setattr(module, "PageWriters", lambda networks: places)
    page_bytes = model.num_kept_layers * 64 * model.attention.kv_width * dtype.itemsize
    pool = embedded(prefilled, num_tokens, dtype, page_bytes)
    config = config_of(prefilled.folder, dtype=dtype)
    config.device_config.device_type = device
    block_of = {index: 1 + place for place, index in enumerate(model.linear_layers)}
    caches = caches_of(prefilled, pool, num_tokens, config, block_of)
    if is_turned:
        for context in config.compilation_config.static_forward_context.values():
            if hasattr(context, "kv_cache"):
                inputs, state = context.kv_cache
                context.kv_cache = inputs.transpose(1, 2).contiguous(), state
    groups = groups_of(caches)
    worker = module.NanocpConnector(config, module.KVConnectorRole.WORKER, groups)
    worker.register_kv_caches(caches)
    num_pages, num_state_pages = math.ceil(num_tokens / 64), pool.frame_bytes // page_bytes
    ticket = ticket_of(
        1,
        num_tokens,
        targets=((0, num_pages, 0), (CARRY_PAGE, num_state_pages, 1)),
        num_layers=model.num_kept_layers,
    )
    blocks = (*((block,) for block in block_of.values()), tuple(range(num_pages * 2)))
    sender = Sender(module, worker)
    sender.queue([module.PagePart("r", ticket, blocks, 0, num_pages)])
    assert_sent(sender)
    worker.shutdown()
    assert len(places.pages) == num_pages + num_state_pages
    pages = [places.pages[1, CARRY_PAGE + number][0] for number in range(num_state_pages)]
    assert [(instance, tokens) for instance, tokens, _ in pages] == [(1, 0)] * num_state_pages
    return [payload.reshape(-1).view("uint8") for *_, payload in pages], pool


WAYS = [("cuda", "float32", False), ("cuda", "float32", True), ("cpu", "bfloat16", False)]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 64, 130])
@pytest.mark.parametrize(("device", "dtype", "is_turned"), WAYS)
@torch.no_grad()
def test_a_row_goes_on_as_behind_the_embedded_prefill(
    connector_module, monkeypatch, prefilled, num_tokens, device, dtype, is_turned
):
    """Number for number: the states are equal, and so are the outputs of the next three tokens."""
    dtype = getattr(torch, dtype)
    pages, pool = sent(
        connector_module, monkeypatch, prefilled, num_tokens, device, dtype, is_turned
    )
    for number, payload in enumerate(pages):
        pool.page(1, number)[:] = payload
    for fields in pool.layers:
        assert torch.equal(fields.state[1], fields.state[0])
        assert fields.folded.unique().tolist() == [num_tokens]
    if dtype != torch.float32:
        return
    live = torch.tensor([True, True])
    for position in range(num_tokens, num_tokens + 3):
        rows = CarryRows(torch.tensor([0, 1]), torch.tensor([position] * 2), live)
        for layer, weights in enumerate(prefilled.layers):
            x_BX = prefilled.rows[layer, position].expand(2, -1)
            out_BHV = pool.step(layer, rows, x_BX, weights)
            assert torch.equal(out_BHV[0], out_BHV[1])


def scheduled(new=(), cached=(), **num_scheduled):
    """vLLM's SchedulerOutput, as far as it is read."""
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[each[0] for each in cached],
            new_block_ids=[each[1] for each in cached],
            num_computed_tokens=[each[2] for each in cached],
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        preempted_req_ids=set(),
    )


def test_the_state_goes_with_the_prompts_last_chunk_and_is_read_in_its_groups_block():
    """A prompt whose pages of KV are all there gets the state alone."""
    requests = TicketedRequests({}, 100)
    for targets in (((0, 3, 0), (CARRY_PAGE, 2, 1)), ((CARRY_PAGE, 2, 1),)):
        ticket = ticket_of(1, 150, targets=targets)
        requests.allocated("r", ticket.to_params(), 150)
        new = SimpleNamespace(req_id="r", block_ids=([4], [7, 8]), num_computed_tokens=0)
        (first,) = requests.step(scheduled([new], r=100)).parts
        assert (first.pages(), first.blocks) == ([0], ((4,), (7, 8)))
        (last,) = requests.step(scheduled(cached=[("r", ([], [2]), 100)], r=50)).parts
        assert last.pages() == [1, 2, CARRY_PAGE, CARRY_PAGE + 1]
        assert last.blocks == ((4,), (7, 8, 2))
        requests.finished("r", is_aborted=False)


@pytest.mark.parametrize(("section", "changed", "sentence"), [
    ("cache_config", {"mamba_cache_mode": "align"}, "prefix caching is on, .* it must be off"),
    ("cache_config", {"use_replayssm": True}, "use_replayssm is on"),
    ("model_config", {"dtype": torch.float32}, "dtype is torch.float32: on a CPU vLLM runs"),
    ("parallel_config", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
])  # fmt: skip
def test_an_engine_whose_states_cannot_be_right_is_refused_at_its_start(
    connector_module, prefilled, section, changed, sentence
):
    config = config_of(prefilled.folder, dtype=torch.bfloat16)
    vars(getattr(config, section)).update(changed)
    for role in connector_module.KVConnectorRole:
        with pytest.raises(ValueError, match=sentence):
            connector_module.NanocpConnector(config, role, groups_of([]))


def test_speculation_with_states_is_refused(connector_module, prefilled):
    config = config_of(prefilled.folder, dtype=torch.bfloat16, method="mtp")
    with pytest.raises(ValueError, match="speculative decoding is on, whose tokens enter states"):
        connector_module.NanocpConnector(
            config, connector_module.KVConnectorRole.SCHEDULER, groups_of([])
        )


def test_states_of_other_shapes_and_dtypes_are_refused(connector_module, prefilled):
    delta, views = prefilled.model.delta, connector_module.state_views
    inputs = torch.zeros(2, delta.conv_size - 1, delta.num_channels)
    state = torch.zeros(2, delta.num_heads, delta.value_dim, delta.key_dim)
    for kept, sentence in (
        ((inputs[:, :2], state), "they must be the"),
        ((inputs, state.transpose(2, 3)), "they must be the"),
        ((inputs, state.bfloat16()), "--mamba-ssm-cache-dtype float32"),
        ((inputs.bfloat16(), state), "--mamba-cache-dtype auto"),
    ):
        with pytest.raises(ValueError, match=sentence):
            views("layer", kept, delta, torch.float32, False)
