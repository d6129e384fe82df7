"""Every family in a real cluster: each token is the reference model's.

`make test` runs each family once, in the stories that disturb it most. The whole matrix of families
and stories takes several minutes: `make test-system`.
"""

from dataclasses import replace

import pytest
import torch

from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.decode_cluster import DecodeCluster, Prompt
from harness.exact_runs import CLUSTER, NUM_TOKENS, assert_exact, make_prompts
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config

FAMILIES = (
    "tiny-qwen3-moe",
    "tiny-llama",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-glm4-moe",
    "tiny-mixtral",
    "tiny-qwen3-next",
    "tiny-qwen3.5",
    "tiny-kimi-linear",
    "tiny-ling",
    "tiny-qwen3-moe in bfloat16",
)
"""Presets; one is stored in bf16, which the kernels keep, and computed in fp32 like the others."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Make each family's checkpoint and oracle once."""
    made = {}

    def of(preset):
        if preset not in made:
            path = tmp_path_factory.mktemp("family") / preset
            name, _, stored = preset.partition(" in ")
            dtype = getattr(torch, stored or "float32")
            make_checkpoint(path, name, dtype=dtype, published_spelling=True)
            made[preset] = path, Oracle(path)
        return made[preset]

    return of


def run(
    checkpoint,
    lengths,
    seed,
    arrival_gap=0,
    num_tokens=NUM_TOKENS,
    num_frames=192,
    wire_form="latent",
    **scheduler,
):
    """Play prompts of these lengths; returns them and the cluster, ended."""
    config = Config(
        cluster=replace(CLUSTER, num_frames=num_frames),
        scheduler=SchedulerConfig(**scheduler),
        data_plane=DataPlaneConfig(
            wire_form=wire_form,
            cpu_kernels="torch" if scheduler.get("steps_per_window") == 4 else "auto",
        ),
    )
    prompts = make_prompts(lengths, seed, arrival_gap, num_tokens)
    with DecodeCluster(config, checkpoint) as cluster:
        cluster.run(prompts)
    return prompts, cluster


def forced(checkpoint, degree):
    lengths = [length for length in (1, 63, 64, 65, 500) if length > 64 * degree or degree == 1]
    policy = f"fixed_degree:{degree}"
    prompts, _ = run(checkpoint, [*lengths, 300], degree, policy=policy)
    assert all(prompt.placements[0].cp_degree == degree for prompt in prompts)
    return prompts


def mixed(checkpoint, wire_form):
    """Degrees 1, 2 and 4 in a batch; requests arrive and end while others run."""
    lengths = (1, 17, 64, 65, 129, 511, 1023, 1500, 3001)
    prompts, _ = run(checkpoint, lengths, 11, 4, wire_form=wire_form, policy="dual_balanced")
    assert {prompt.placements[0].cp_degree for prompt in prompts} == {1, 2, 4}
    return prompts


def chaos(checkpoint, num_steps, wire_form):
    """Re-bindings, extensions and page moves every few windows."""
    prompts, cluster = run(
        checkpoint,
        (1, 40, 64, 130, 400, 900),
        num_steps,
        3,
        wire_form=wire_form,
        policy="chaos",
        steps_per_window=num_steps,
        chaos_seed=num_steps,
        chaos_period_windows=2 if num_steps == 1 else 1,
        growth_promise="tokens:0",
    )
    moved = sum(len({p.moe_binding for p in prompt.placements}) > 1 for prompt in prompts)
    # How many, the threads decide.
    assert moved and cluster.num_moves, "the story must contain what it is about"
    return prompts


def preempted(checkpoint, num_steps):
    """Rows that are promised no frame outgrow the cluster together."""
    prompts, _ = run(
        checkpoint,
        range(45, 61, 2),
        7,
        num_tokens=90,
        num_frames=3,
        growth_promise="tokens:0",
        steps_per_window=num_steps,
    )
    assert sum(prompt.num_preemptions for prompt in prompts) >= 1
    return prompts


def shared(checkpoint, policy):
    """Whole prompts and beginnings, while their writer runs and after all requests have ended."""
    config = Config(
        cluster=CLUSTER, scheduler=SchedulerConfig(policy=policy, growth_promise="tokens:0")
    )
    (first,) = make_prompts([420], seed=5)
    others = [[*first.ids[:200], 7, 8, 9], first.ids, first.ids[:257]]
    with DecodeCluster(config, checkpoint) as cluster:
        prompts = cluster.run([first, *(Prompt(ids, first.params, 20) for ids in others[:2])])
        prompts += cluster.run([Prompt(ids, first.params) for ids in others[2:]])
        assert cluster.scheduler.prefix_sharing.num_hit_tokens >= 64 * (3 + 6)
    return prompts


STORIES = {
    "forced degree 1": (forced, 1),
    "forced degree 2": (forced, 2),
    "forced degree 4": (forced, 4),
    "mixed degrees": (mixed, "latent"),
    "mixed degrees, absorbed": (mixed, "absorbed"),
    "chaos": (chaos, 1, "latent"),
    "chaos, absorbed": (chaos, 1, "absorbed"),
    "chaos, windows of four steps": (chaos, 4, "latent"),
    "preempted": (preempted, 1),
    "preempted, windows of four steps": (preempted, 4),
    "shared pages": (shared, "fixed_degree:2"),
    "shared pages, chaos": (shared, "chaos"),
}
SAMPLE = (
    ("tiny-qwen3-moe", "chaos, windows of four steps"),
    ("tiny-llama", "chaos, windows of four steps"),
    ("tiny-qwen2", "shared pages, chaos"),
    ("tiny-qwen3", "mixed degrees, absorbed"),
    ("tiny-glm4-moe", "chaos, absorbed"),
    ("tiny-mixtral", "preempted, windows of four steps"),
    ("tiny-qwen3-next", "chaos, windows of four steps"),
    ("tiny-qwen3-next", "chaos"),
    ("tiny-qwen3.5", "shared pages, chaos"),
    ("tiny-kimi-linear", "chaos, absorbed"),
    ("tiny-ling", "chaos"),
    ("tiny-qwen3-moe in bfloat16", "chaos"),
)


@pytest.mark.parametrize(("preset", "story"), SAMPLE)
def test_a_story_of_each_family(checkpoints, preset, story):
    judge(checkpoints, preset, story)


@pytest.mark.system
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("preset", FAMILIES)
def test_every_story_of_each_family(checkpoints, preset, story):
    judge(checkpoints, preset, story)


def judge(checkpoints, preset, story):
    checkpoint, oracle = checkpoints(preset)
    play, *arguments = STORIES[story]
    assert_exact(oracle, play(checkpoint, *arguments))


def test_the_sample_has_every_family():
    assert {preset for preset, _ in SAMPLE} == set(FAMILIES)


def test_the_numbers_are_unusual(checkpoints):
    """Numbers that fit together by accident would hide a width that stands in for another."""
    models = [ModelConfig.from_folder(checkpoints(preset)[0]) for preset in FAMILIES]
    kinds = [model.attention for model in models if isinstance(model.attention, GqaConfig)]
    assert {kind.num_kv_heads for kind in kinds} >= {1, 2, 4}
    assert any(kind.num_kv_heads == kind.num_heads for kind in kinds)
    assert any(kind.num_heads // kind.num_kv_heads % 2 and kind.num_kv_heads > 1 for kind in kinds)
    assert any(kind.head_dim * kind.num_heads != kind.hidden_size for kind in kinds)
    assert any(kind.has_bias for kind in kinds) and any(kind.has_norms for kind in kinds)
    assert any(kind.rope_dim < kind.head_dim for kind in kinds)
    deltas = [model.delta for model in models if model.delta is not None]
    assert any(delta.num_key_heads < delta.num_heads for delta in deltas)
    assert any(delta.key_dim != delta.value_dim for delta in deltas)
    last = [model.num_layers - 1 in model.linear_layers for model in models if model.delta]
    assert any(last) and not all(last)
