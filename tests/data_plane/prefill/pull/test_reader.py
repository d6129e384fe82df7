"""Prompts' KV read from a stand-in of vLLM, by real NIXL, against the KV that it computed."""

import random
import socket
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from data_plane.attention.fp8_latent import quantise
from data_plane.prefill.build import build_reader
from data_plane.prefill.pull import reader as reading
from data_plane.prefill.pull import side_channel
from data_plane.prefill.pull.reader import KvChanged
from harness.vllm.nixl_engine import NixlEngine, blocks_of
from harness.waits import until
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.prefill import PrefillConfig, PullConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 66, 127, 128, 129, 200, 300)
LATENT, HEADS = "tiny, mini", "tiny-qwen3-moe, mini"
KINDS = {
    "latent": (LATENT, {}),
    "latent, bf16": (LATENT, {"dtype": "bfloat16", "block_size": 64}),
    "latent, large blocks": (LATENT, {"block_size": 128, "gap": 64}),
    "latent, blocks of two": (LATENT, {"blocks_per_logical": 2}),
    "latent, two ranks": (LATENT, {"tp_size": 2}),
    "heads": (HEADS, {"block_size": 128}),
    "heads, AMX": (HEADS, {"kernel": "amx", "dtype": "bfloat16", "block_size": 32}),
    "heads, head-major": (HEADS, {"kernel": "HNC", "gap": 32}),
    "heads, token-major": (HEADS, {"kernel": "NHC"}),
}


def config_of(dtype="float32", num_drafts=0):
    return Config(
        prefill=PrefillConfig(pull=PullConfig(allowed=("127.0.0.0/8",))),
        data_plane=DataPlaneConfig(dtype=dtype),
        scheduler=SchedulerConfig(num_drafts=num_drafts),
    )


def prompt(num_tokens, seed=0):
    chosen = random.Random(f"{num_tokens} {seed}")
    return [chosen.randrange(2, 300) for _ in range(num_tokens)]


class Case:
    """A stand-in and a reader of it."""

    def __init__(self, path, dtype="float32", num_drafts=0, **options):
        self.engine = NixlEngine(path, dtype=dtype, **options)
        self.reader = build_reader(config_of(dtype, num_drafts), path)

    def held(self, ids):
        """The blocks of a prompt, and the engine that has them."""
        blocks = blocks_of(self.engine.prefill(ids))
        remote = self.reader.meet(blocks)
        remote.check(blocks)
        return blocks, remote

    def forget(self):
        """No connection is used any more."""
        for remote in self.reader._engines.values():
            remote.is_usable = False

    def read(self, remote, blocks, ids, wanted=None, obstacle=str):
        """Page -> (tokens, payload)."""
        num_tokens = max(1, len(ids) - 1)
        wanted = range(-(-num_tokens // 64)) if wanted is None else wanted
        pages = remote.pages(blocks, ids, num_tokens, wanted, obstacle)
        return {page: (end, payload.copy()) for page, end, payload in pages}

    def assert_right(self, pages, ids, num_layers=None):
        kv = self.engine.kv(ids)
        num_layers = len(kv) if num_layers is None else num_layers
        for page, (end, payload) in pages.items():
            assert end == min(64, max(1, len(ids) - 1) - page * 64)
            expected = torch.zeros(num_layers, 64, kv.shape[2], dtype=kv.dtype)
            expected[: len(kv), :end] = kv[:, page * 64 : page * 64 + end]
            assert expected.view(torch.uint8).flatten().equal(torch.from_numpy(payload)), page

    def close(self):
        self.reader.close()
        self.engine.kill()


@pytest.fixture(scope="module")
def latent(models):
    with closing(Case(models(LATENT).path, num_blocks=512)) as case:
        yield case


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_is_the_prompts_and_the_blocks_are_freed(models, kind):
    name, options = KINDS[kind]
    with closing(Case(models(name).path, **options)) as case:
        num_free, num_ranks = case.engine.free_blocks(), options.get("tp_size", 1)
        blocks, remote = case.held(prompt(3))
        case.read(remote, blocks, prompt(3))  # Now it knows all ranks.
        remote.notify(f"{blocks.request_id}:1")
        for length in LENGTHS:
            ids = prompt(length)
            blocks = blocks_of(case.engine.prefill(ids))
            pages = case.read(remote, blocks, ids)
            assert len(pages) == -(-max(1, length - 1) // 64)
            case.assert_right(pages, ids)
            remote.notify(f"{blocks.request_id}:1")
        until(lambda: case.engine.free_blocks() == num_free)
        notified = case.engine.notifications()
        assert len(notified) == num_ranks * (len(LENGTHS) + 1) == len(set(notified))


def test_only_wanted_pages_are_read_and_in_small_parts(latent, monkeypatch):
    monkeypatch.setattr(reading, "_STAGING_BYTES", 1)
    monkeypatch.setattr(latent.reader, "_staging", None)
    ids = prompt(500)
    blocks, remote = latent.held(ids)
    for wanted in ((0,), (7,), (1, 3, 4), range(8)):
        pages = latent.read(remote, blocks, ids, wanted)
        assert [*pages] == [*wanted]
        latent.assert_right(pages, ids)


@pytest.mark.parametrize("num_more_layers", [0, 1])
def test_an_mtp_layer_is_zero_if_the_engine_has_none(models, num_more_layers):
    path = models("tiny, mini, with an MTP layer").path
    ids = prompt(100)
    with closing(Case(path, num_drafts=1, num_more_layers=num_more_layers)) as case:
        blocks, remote = case.held(ids)
        pages = case.read(remote, blocks, ids)
        if not num_more_layers:
            case.assert_right(pages, ids, num_layers=3)
            return
        for end, payload in pages.values():
            mtp = torch.from_numpy(payload).view(torch.float32).view(3, 64, -1)[2]
            assert mtp[:end].all() and not mtp[end:].any()


def test_regions_behind_the_models_layers_are_not_read(models):
    with closing(Case(models(LATENT).path, num_more_layers=1)) as case:
        ids = prompt(70)
        blocks, remote = case.held(ids)
        case.assert_right(case.read(remote, blocks, ids), ids)


def test_pages_in_fp8_are_those_of_the_instances(latent, monkeypatch):
    rank = latent.reader.shape.model.attention.fp8_rank()
    monkeypatch.setattr(latent.reader, "shape", latent.reader.shape._replace(fp8_rank=rank))
    ids = prompt(64)
    blocks, remote = latent.held(ids)
    ((end, payload),) = latent.read(remote, blocks, ids).values()
    kv = latent.engine.kv(ids)
    kv[:, end:] = 0
    assert quantise(kv, rank).flatten().equal(torch.from_numpy(payload))


@pytest.mark.parametrize("layers", [None, [0]])
@pytest.mark.parametrize("block", [0, 2, 5, 9])
def test_a_block_that_was_used_again_is_seen(latent, layers, block):
    ids = prompt(160)
    blocks, remote = latent.held(ids)
    latent.engine.overwrite([blocks.block_ids[block]], layers)
    with pytest.raises(KvChanged, match="hold other KV than the prompt's: layer 0 is off by"):
        latent.read(remote, blocks, ids)


def test_another_prompt_in_blocks_whose_lease_ended_is_seen(models):
    with closing(Case(models(LATENT).path, num_blocks=16)) as case:
        ids = prompt(160)
        blocks, remote = case.held(ids)
        case.engine.expire(blocks.request_id)
        other = blocks_of(case.engine.prefill(prompt(160, seed=1)))
        assert set(other.block_ids) & set(blocks.block_ids)
        with pytest.raises(KvChanged):
            case.read(remote, blocks, ids)
        case.assert_right(case.read(remote, other, prompt(160, seed=1)), prompt(160, seed=1))


def test_a_block_that_is_written_during_the_read_is_seen(latent, monkeypatch):
    """vLLM writes layer by layer: the first read sees layer 0 before, and the others after it."""
    ids = prompt(100)
    blocks, remote = latent.held(ids)
    agent, calls = latent.reader.agent, iter(([1], [0]))

    def post(*arguments):
        latent.engine.overwrite(blocks.block_ids[1:2], next(calls))
        return type(agent).post(agent, *arguments)

    monkeypatch.setattr(agent, "post", post)
    with pytest.raises(KvChanged, match="has written blocks while they were read"):
        latent.read(remote, blocks, ids)


def test_an_obstacle_that_came_during_the_last_read_counts(latent):
    ids = prompt(100)
    blocks, remote = latent.held(ids)
    answers = iter(("", "late"))
    with pytest.raises(KvChanged, match="late"):
        latent.read(remote, blocks, ids, obstacle=lambda: next(answers))
    latent.assert_right(latent.read(remote, blocks, ids), ids)


def test_a_read_without_an_end_leaves_its_memory_alone(latent, monkeypatch):
    ids = prompt(100)
    blocks, remote = latent.held(ids)
    before = latent.reader.staging(0)[1]
    monkeypatch.setattr(latent.reader.agent, "is_done", lambda *_: False)
    monkeypatch.setattr(reading, "_LIMIT_S", 0.01)
    with pytest.raises(ConnectionError, match="the process is alive but took more than"):
        latent.read(remote, blocks, ids)
    assert latent.reader.staging(0)[1].address != before.address
    monkeypatch.undo()
    latent.assert_right(latent.read(latent.reader.meet(blocks), blocks, ids), ids)


def test_engines_that_hang_take_bounded_memory_and_give_it_back(latent, monkeypatch):
    reader, is_over = latent.reader, []
    reader._abandoned.clear()
    monkeypatch.setattr(reader.agent, "is_done", lambda read, *_: read in is_over)
    monkeypatch.setattr(reader.agent, "discard", lambda read: None)
    for number in range(4):
        reader.abandon(reader.staging(0)[1], number)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="4 reads of engines have not ended"):
            reader.staging(0)
    is_over.append(2)
    assert reader.staging(0)[1].num_bytes
    is_over += range(4)
    reader.abandon(reader.staging(0)[1], 0)
    reader.staging(0)
    assert not reader._abandoned


def test_an_engine_that_moved_its_KV_unsaid_is_met_again(latent):
    ids = prompt(100)
    blocks, remote = latent.held(ids)
    latent.engine.register_again()
    blocks, _ = latent.held(ids)
    with pytest.raises((KvChanged, ConnectionError)):
        latent.read(remote, blocks, ids)
    remote.is_usable = False
    latent.assert_right(latent.read(latent.reader.meet(blocks), blocks, ids), ids)


def test_two_names_of_an_engine_share_a_connection(latent):
    blocks = blocks_of(latent.engine.prefill(prompt(3)))
    assert latent.reader.meet(blocks) is latent.reader.meet(replace(blocks, host="localhost"))


@pytest.mark.parametrize("position", [0, 70, 77, 127, 130])
def test_each_token_before_the_end_counts_also_of_pages_that_others_have(latent, position):
    """KV of the last page depends on it, though layer 0 of that page does not."""
    ids = prompt(150)
    blocks, remote = latent.held(ids)
    other = [*ids[:position], (ids[position] + 1) % 500, *ids[position + 1 :]]
    for wanted in ((2,), (0, 2), (0, 1, 2)):
        with pytest.raises(KvChanged, match="other KV than the prompt's"):
            list(remote.pages(blocks, other, 150, wanted, lambda: ""))
        pages = list(remote.pages(blocks, ids, 150, wanted, lambda: ""))
        assert tuple(number for number, *_ in pages) == wanted


def test_ranks_are_read_in_turn_and_all_are_told(models):
    with closing(Case(models(LATENT).path, tp_size=2)) as case:
        ids = prompt(40)
        blocks, remote = case.held(ids)
        case.engine.overwrite(blocks.block_ids)
        with pytest.raises(KvChanged):
            case.read(remote, replace(blocks, tp_size=1024), ids)
        assert case.engine.handshakes() == [0]
        blocks = blocks_of(case.engine.prefill(ids))
        case.read(remote, blocks, ids)
        assert case.engine.handshakes() == [0, 1]
        peers = set()
        agent = case.reader.agent
        prepare = agent.prepare_read
        agent.prepare_read = lambda *given: peers.add(id(given[2])) or prepare(*given)
        for _ in range(20):
            case.read(remote, blocks_of(case.engine.prefill(ids)), ids)
        assert len(peers) == 2
        remote.notify("HB:a,b")
        until(lambda: len(case.engine.heartbeats()) == 2)
        assert sorted(case.engine.heartbeats()) == [(0, ["a", "b"]), (1, ["a", "b"])]
        with pytest.raises(ValueError, match="tp_size is 1; it must be 2"):
            remote.check(replace(blocks, tp_size=1))


def test_a_heartbeat_arrives_before_anything_is_read(models):
    with closing(Case(models(LATENT).path)) as case:
        _, remote = case.held(prompt(40))
        remote.notify("HB:a")
        until(lambda: case.engine.heartbeats() == [(0, ["a"])])


def test_heads_of_several_ranks_are_refused(models):
    with closing(Case(models(HEADS).path)) as case:
        blocks, remote = case.held(prompt(3))
        with pytest.raises(ValueError, match="tp_size is 2; it must be 1: a rank has only some"):
            remote.check(replace(blocks, tp_size=2))


def test_the_first_page_tells_the_order_of_heads_for_good(models):
    with closing(Case(models(HEADS).path, kernel="HNC")) as case:
        ids = prompt(30)
        blocks, remote = case.held(ids)
        case.read(remote, blocks, ids)
        assert remote._order == "HNC"
        case.engine.overwrite(blocks.block_ids)
        with pytest.raises(KvChanged):
            case.read(remote, blocks, ids)


def test_blocks_that_cannot_be_the_engines_are_refused(latent):
    blocks, remote = latent.held(prompt(40))
    for changes, sentence in (
        ({"block_ids": (0, 1, 512)}, "remote_block_ids must be from 0 to 511"),
        ({"block_ids": (0, -1, 2)}, "remote_block_ids must be from 0 to 511"),
        ({"block_ids": (0, 1)}, "remote_block_ids has 2 blocks; 40 tokens need 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            remote.check(replace(blocks, **changes))


def test_a_new_registration_is_met_again(models):
    with closing(Case(models(LATENT).path, generation=1)) as case:
        ids = prompt(70)
        blocks, old = case.held(ids)
        assert (blocks.generation, old.generation) == (1, 1)
        case.engine.register_again()
        blocks, remote = case.held(ids)
        assert (blocks.generation, remote.generation) == (2, 2)
        case.assert_right(case.read(remote, blocks, ids), ids)
        old.close()
        with pytest.raises(ConnectionError, match="is met again"):
            case.read(old, blocks, ids)
        case.assert_right(case.read(remote, blocks, ids), ids)


@pytest.mark.parametrize("found", [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["::1"]])
def test_an_address_that_is_not_allowed_is_never_dialled(latent, monkeypatch, found):
    blocks = blocks_of(latent.engine.prefill(prompt(3)))
    num_handshakes = len(latent.engine.handshakes())
    answers = [(0, 0, 0, "", (address, 0)) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    monkeypatch.setattr(side_channel, "shake_hands", lambda *_: pytest.fail("it was dialled"))
    monkeypatch.setattr(reading, "shake_hands", lambda *_: pytest.fail("it was dialled"))
    with pytest.raises(ValueError, match=f"remote_host is 'prefill' .*{found[-1]}; it must be in"):
        latent.reader.meet(replace(blocks, host="prefill"))
    assert len(latent.engine.handshakes()) == num_handshakes


def test_the_address_that_was_checked_is_dialled(latent, monkeypatch):
    blocks = blocks_of(latent.engine.prefill(prompt(3)))
    answer = [(0, 0, 0, "", ("127.0.0.1", 0))]
    latent.forget()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    latent.reader.meet(replace(blocks, host="a-name-that-nobody-has"))


def test_what_does_not_answer_cannot_be_reached_now(latent, monkeypatch):
    monkeypatch.setattr(side_channel, "_TIMEOUT_MS", 100)
    blocks = blocks_of(latent.engine.prefill(prompt(3)))
    latent.forget()
    with pytest.raises(ConnectionError, match="does not answer a handshake"):
        latent.reader.meet(replace(blocks, port=1))
    with pytest.raises(ConnectionError, match=r"remote_host is 'a\.b\.invalid', which does not"):
        latent.reader.meet(replace(blocks, host="a.b.invalid"))
    with pytest.raises(ValueError, match="remote_engine_id is 'another'; the server at"):
        latent.reader.meet(replace(blocks, engine_id="another"))


def test_an_engine_that_dies_is_noticed(models):
    with closing(Case(models(LATENT).path)) as case:
        ids = prompt(70)
        blocks, remote = case.held(ids)
        case.engine.kill()
        with pytest.raises(ConnectionError, match="the engine at "):
            case.read(remote, blocks, ids)
        deadline = time.monotonic() + 30
        with pytest.raises(ConnectionError, match="the engine at "):
            while time.monotonic() < deadline:
                remote.notify("HB:a")
                time.sleep(0.01)


FAULTS = {
    "block_strides": (None, "block_strides"),
    "num_blocks": ("many", "num_blocks"),
    "block_size": (0, "Expected `int` >= 1 - at `..block_size`"),
    "block_lens": ([9] * 2, "block_lens of the engine's handshake: .* in torch.float32"),
    "region_names": (["model.layers.0.attn", "model.layers.2.attn"], "layers from 0 to 1"),
    "region_group_ids": ([0, 1], "region_group_ids .* one group"),
    "region_mem_types": (["DRAM", "VRAM"], "region_mem_types"),
    "ssm_sizes": ([4, 8], "ssm_sizes .* no states"),
    "dcp_size": (2, "dcp_size of the engine's handshake: 2; it must be 1"),
    "pcp_size": (2, "pcp_size"),
    "agent_metadata": (b"none", "NIXL finds no way"),
}


@pytest.mark.parametrize("field", FAULTS)
def test_a_handshake_that_does_not_fit_is_refused_by_the_field(latent, field):
    value, sentence = FAULTS[field]
    blocks = blocks_of(latent.engine.prefill(prompt(3)))
    latent.forget()
    latent.engine.set_fields(**{field: value})
    try:
        with pytest.raises(ValueError, match=sentence):
            latent.reader.meet(blocks)
    finally:
        latent.engine.set_fields()


def test_memory_that_nobody_registered_is_no_engine(latent):
    blocks = blocks_of(latent.engine.prefill(prompt(3)))
    latent.forget()
    latent.engine.set_fields(kv_caches_base_addr=[64, 4096])
    try:
        with pytest.raises(ConnectionError, match="the engine at "):
            latent.reader.meet(blocks)
    finally:
        latent.engine.set_fields()


def test_models_with_states_are_refused_at_the_start(models):
    with pytest.raises(ValueError, match=r"pull.allowed is set, .* linear attention layers"):
        build_reader(config_of(), models("tiny-qwen3-next, mini").path)


def test_missing_packages_are_named(models, monkeypatch):
    monkeypatch.setattr("data_plane.prefill.build.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"NIXL or pyzmq is not installed: pip install"):
        build_reader(config_of(), models(LATENT).path)


@pytest.mark.parametrize("size", [16, 64])
def test_another_prompt_that_begins_its_blocks_alike_is_seen(models, size):
    with closing(Case(models(LATENT).path, block_size=size)) as case:
        ids, other = prompt(300), prompt(300, 1)
        alike = [ids[i] if i % size == 0 or not 64 <= i < 256 else other[i] for i in range(300)]
        blocks, remote = case.held(alike)
        with pytest.raises(KvChanged):
            case.read(remote, blocks, ids)
