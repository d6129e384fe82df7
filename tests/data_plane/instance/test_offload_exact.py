"""Conversations and preempted requests over pages outside the frames: every token is the oracle's.

Real instances copy pages in threads of their own while they decode.
"""

from dataclasses import replace

import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.exact.exact_runs import CLUSTER, assert_exact, make_prompts
from harness.paths import ROOT
from nanocp.config.kv_offload import KvOffloadConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config

TALE = ROOT / "models/tale"


def cluster_of(checkpoint, num_frames, host_pages, file_dir="", **scheduler):
    """Four instances with few frames; with a directory, memory is small and a file behind it."""
    slots = {
        "offload_host_pages": 6 if file_dir else host_pages,
        "offload_file_pages": host_pages if file_dir else 0,
    }
    config = Config(
        cluster=replace(CLUSTER, num_frames=num_frames),
        scheduler=SchedulerConfig(**(slots | scheduler)),
        kv_offload=KvOffloadConfig(1.0, 1.0, str(file_dir)) if file_dir else KvOffloadConfig(),
    )
    return DecodeCluster(config, checkpoint)


def talk(checkpoint, oracle, **config):
    """Two rounds of some conversations, and others between them, which take the frames."""
    with cluster_of(checkpoint, 8, 100, **config) as cluster:
        first = make_prompts([40, 130, 200], num_tokens=70)
        prompts = list(cluster.run(first))
        prompts += cluster.run(make_prompts([445, 446, 447, 448], num_tokens=8))
        offload = cluster.scheduler.offload
        before = sum(offload.num_fetched)
        second = [Prompt([*prompt.ids, *prompt.output, 7, 8, 9], prompt.params) for prompt in first]
        prompts += cluster.run(second)
        # Of 109, 199 and 269 tokens with KV pages 0, 0 to 2 and 0 to 3 were full.
        sharing = cluster.scheduler.prefix_sharing
        assert sum(offload.num_fetched) - before >= 3, "the frames were taken meanwhile"
        assert offload.num_hit_tokens + sharing.num_hit_tokens == 64 * (1 + 3 + 4)
    assert_exact(oracle, prompts)
    return offload


@pytest.mark.parametrize(
    ("policy", "k"),
    [pytest.param("fixed_degree:1", 1, marks=pytest.mark.system), ("fixed_degree:4", 4)],
)
def test_the_next_round_finds_prompt_and_answer(tiny_checkpoint, tiny_oracle, policy, k):
    talk(tiny_checkpoint, tiny_oracle, policy=policy, steps_per_window=k)


@pytest.mark.system
@pytest.mark.parametrize(("policy", "k"), [("chaos", 1), ("chaos", 4), ("fixed_degree:4", 1)])
def test_pages_come_from_a_file_too(tiny_checkpoint, tiny_oracle, tmp_path, policy, k):
    offload = talk(
        tiny_checkpoint, tiny_oracle, policy=policy, steps_per_window=k, file_dir=tmp_path
    )
    assert offload.num_stowed[1] > 0


@pytest.mark.system
@pytest.mark.parametrize(("policy", "k"), [("fixed_degree:4", 1), ("chaos", 4)])
def test_models_with_kv_heads(tmp_path_factory, policy, k):
    folder = tmp_path_factory.mktemp("heads") / "tiny"
    make_checkpoint(folder, "tiny-qwen3-moe", published_spelling=True)
    talk(folder, Oracle(folder), policy=policy, steps_per_window=k)


@pytest.mark.system
@pytest.mark.parametrize("policy", ["fixed_degree:4", "chaos"])
def test_pages_of_rows_with_drafts(policy):
    """KV of the MTP layer goes and comes with all other KV."""
    settings = {"policy": policy, "steps_per_window": 4, "num_drafts": 2}
    talk(TALE, Oracle(TALE), **settings)


@pytest.mark.parametrize(("preset", "k"), [
    ("tiny-qwen3-next", 4),
    pytest.param("tiny-qwen3-next", 1, marks=pytest.mark.system),
    pytest.param("tiny-kimi-linear", 4, marks=pytest.mark.system),
])  # fmt: skip
def test_pages_and_states_of_models_with_linear_attention_layers(tmp_path, preset, k):
    """The next round finds its pages; a preempted row comes back with its state."""
    make_checkpoint(tmp_path, preset, published_spelling=True)
    oracle = Oracle(tmp_path)
    talk(tmp_path, oracle, policy="chaos" if k == 4 else "fixed_degree:4", steps_per_window=k)
    crowd(tmp_path, oracle, k)


@pytest.mark.system
@pytest.mark.parametrize("k", [1, 4])
def test_preempted_requests_come_back_without_a_prefill(tiny_checkpoint, tiny_oracle, k):
    crowd(tiny_checkpoint, tiny_oracle, k)


def crowd(checkpoint, oracle, k):
    """Rows that are promised no frame outgrow the cluster together."""
    prompts = make_prompts(range(45, 61, 2), num_tokens=90)
    config = {"growth_promise": "tokens:0", "steps_per_window": k}
    with cluster_of(checkpoint, 3, 100, **config) as cluster:
        prompts = cluster.run(prompts)
        assert cluster.num_whole_tickets >= 1
    assert sum(prompt.num_preemptions for prompt in prompts) >= 1
    assert_exact(oracle, prompts)
