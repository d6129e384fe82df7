"""Start-up of the prefill, and what its stage makes of prompts."""

import types
from random import Random
from uuid import uuid4

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.weights import load_weights
from data_plane.prefill import build as prefill
from data_plane.startup.shared_parts import new_carry, with_carry
from data_plane.transport.segments import Segments
from harness.exact.reference_prefill import prefill_pages
from harness.exact.states import assert_same_state
from harness.members.staged_prefill import prefill_scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.whole import Config
from nanocp.serve.service import member_environment
from nanocp.values.plan import CARRY_PAGE, Arrival


def test_model_larger_than_the_free_memory_is_refused_by_numbers(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(
        prefill.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1 << 20)
    )
    with pytest.raises(
        ValueError,
        match=r"0\.0 GiB in float32, but 0\.0 GiB of memory are free; set prefill.synthetic_kv",
    ):
        prefill.build_prefill_stage(Config(), 0, Segments("unused"), tiny_checkpoint)


def test_few_programs_of_shapes_are_kept_unless_somebody_wants_more(monkeypatch):
    """A prefill sees prompts of all lengths, and torch keeps a program of each."""
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    assert member_environment(Config())["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
    assert member_environment(Config())["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1024"


@pytest.mark.parametrize("preset", ["tiny-qwen3-next", "tiny-ling"])
def test_pages_and_states_of_prompts_are_the_reference_prefills(preset, tmp_path):
    """Prompts in passes that they share; the last layer of one model attends linearly."""
    make_checkpoint(tmp_path, preset)
    config = with_carry(
        Config(prefill=PrefillConfig(chunk_tokens=90), cluster=ClusterConfig(max_model_len=512)),
        tmp_path,
    )
    built = prefill.build_prefill_stage(config, 0, Segments(uuid4().hex[:8]), tmp_path)
    built.stage.connect()
    scheduler, random = prefill_scheduler(config), Random(3)
    model = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, model, torch.float32, range(model.num_experts))
    prompts = {
        ticket: [random.randrange(2, 512) for _ in range(length)]
        for ticket, length in enumerate((1, 63, 64, 65, 200, 333), start=1)
    }
    events, unseen = [Arrival(ticket, len(ids), 1) for ticket, ids in prompts.items()], {*prompts}
    for ticket, ids in prompts.items():
        built.stage.requests.take_prompt(ticket, ids)
    for now in range(100):
        plan = scheduler.plan_pass(events, now).pass_plan
        if plan is None:
            break
        list(built.stage.run(plan))
        events = list(built.stage.poll().events)
        for span in plan.spans:
            ids = prompts[span.request_id]
            if span.first + span.num_tokens == len(ids):
                unseen.remove(span.request_id)
                assert_pages(built, span.request_id, ids, weights, model, config)
    built.stage.close()
    assert not unseen


def assert_pages(built, ticket, ids, weights, model, config):
    carry = new_carry(config, model, 1)
    for page, kv in prefill_pages(weights, model, ids, len(ids), 512, carry=carry):
        seen = torch.from_numpy(built.part(ticket, page)[1]).view(torch.float32).view(kv.shape)
        num = min(len(ids) - 64 * page, 64)
        torch.testing.assert_close(seen[:, :num], kv[:, :num], atol=2e-5, rtol=1e-4)
    seen = new_carry(config, model, 1)
    for number in range(config.cluster.carry_pages):
        seen.page(0, number)[:] = built.part(ticket, CARRY_PAGE + number)[1]
    assert_same_state(seen, carry, len(ids))
