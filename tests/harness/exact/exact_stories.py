"""Stories of a real cluster that disturb rows; each takes settings by name, and returns prompts."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.exact.exact_runs import cluster_of, make_prompts
from nanocp.config.kv_offload import KvOffloadConfig


def _run(
    checkpoint: Path,
    lengths: Iterable[int],
    arrival_gap: int = 0,
    num_tokens: int = 26,
    **settings: Any,
) -> tuple[list[Prompt], DecodeCluster]:
    with cluster_of(checkpoint, **settings) as cluster:
        return cluster.run(make_prompts(lengths, arrival_gap, num_tokens)), cluster


def forced(checkpoint: Path, degree: int, **settings: Any) -> list[Prompt]:
    """All prompts have one degree."""
    lengths = [length for length in (1, 63, 64, 65, 500) if length > 64 * degree or degree == 1]
    prompts, _ = _run(checkpoint, [*lengths, 300], policy=f"fixed_degree:{degree}", **settings)
    assert all(prompt.placements[0].cp_degree == degree for prompt in prompts)
    return prompts


MIXED = (1, 17, 64, 65, 129, 511, 1023, 1500, 3001)
"""Lengths around page edges, degree buckets and one token."""


def mixed(checkpoint: Path, lengths: Iterable[int] = MIXED, **settings: Any) -> list[Prompt]:
    """Degrees 1, 2 and 4 in a batch; requests arrive and end while others run."""
    prompts, _ = _run(checkpoint, lengths, 4, policy="dual_balanced", **settings)
    assert {prompt.placements[0].cp_degree for prompt in prompts} == {1, 2, 4}
    return prompts


def chaos(checkpoint: Path, num_tokens: int = 26, **settings: Any) -> list[Prompt]:
    """Re-bindings, extensions and page moves every few windows."""
    num_steps = settings.get("steps_per_window", 1)
    prompts, cluster = _run(
        checkpoint, (1, 40, 64, 130, 300, 500), 3, num_tokens, policy="chaos",
        chaos_seed=num_steps, chaos_period_windows=2 if num_steps == 1 else 1,
        growth_promise="tokens:0", **settings,
    )  # fmt: skip
    moved = sum(len({p.moe_binding for p in prompt.placements}) > 1 for prompt in prompts)
    # How many, the threads decide.
    assert moved and cluster.num_moves, "the story must contain what it is about"
    if num_tokens >= 40:
        extended = [p for p in prompts if p.placements[-1].cp_degree > p.placements[0].cp_degree]
        assert extended and moved >= 2 and cluster.num_moves >= 3
    return prompts


def experts_move(checkpoint: Path, **settings: Any) -> list[Prompt]:
    """Experts go to other slots, twenty times or more, while rows change their bindings."""
    prompts: list[Prompt] = []
    moves = {"redundant_experts": 2, "expert_load_mb_per_s": 1000}
    with cluster_of(
        checkpoint, policy="chaos", chaos_period_windows=2, **moves, **settings
    ) as cluster:
        while cluster.moved.counts["moves_done"] < 20:
            assert len(prompts) < 300, cluster.moved.counts
            prompts += cluster.run(make_prompts((1, 40, 64, 130, 300), num_tokens=40))
    return prompts


def resyncs(checkpoint: Path, **settings: Any) -> list[Prompt]:
    """Every fifth plan comes corrupted, while rows change their bindings and pages move."""
    chaotic = {"policy": "chaos", "chaos_period_windows": 1, "lost_share": 1 / 5}
    prompts, cluster = _run(checkpoint, (1, 64, 200, 390), num_tokens=28, **chaotic, **settings)
    assert cluster.num_resyncs >= 10, "the story must contain what it is about"
    return prompts


def in_lanes(
    checkpoint: Path, policy: str, lengths: Iterable[int], lanes: str, **settings: Any
) -> list[Prompt]:
    """Rows are in both lanes, unless lanes are off."""
    # `always` gives rows that come one after the other the same lane: they are to overlap.
    num_tokens = 96 if lanes == "always" else 24
    prompts, cluster = _run(
        checkpoint, lengths, num_tokens=num_tokens, policy=policy, lanes=lanes, **settings
    )
    plans = [plan for each in cluster.plans for plan in each.instances]
    num_orders = len(cluster.config.scheduler.lane_orders)
    expected = {"off": {0}, "always": {1}, "random": {*range(1 + num_orders)}}[lanes]
    assert {plan.two_lanes for plan in plans} == expected
    used = {change.lane for plan in plans for change in plan.changes.rows}
    assert used == ({0} if lanes == "off" else {0, 1})
    return prompts


def forced_in_lanes(checkpoint: Path, degree: int, **settings: Any) -> list[Prompt]:
    """All prompts have one degree, on as many instances or two."""
    lengths, policy = (260, 300, 320, 400), f"fixed_degree:{degree}"
    instances = {"num_instances": max(degree, 2)}
    prompts = in_lanes(checkpoint, policy, lengths, chaos_seed=1, **instances, **settings)
    assert {prompt.placements[0].cp_degree for prompt in prompts} == {degree}
    return prompts


def chaos_in_lanes(checkpoint: Path, **settings: Any) -> list[Prompt]:
    """Rows change their bindings every window."""
    chaotic = {"chaos_seed": settings.get("steps_per_window", 1), "chaos_period_windows": 1}
    return in_lanes(
        checkpoint, "chaos", (1, 64, 130, 300), growth_promise="tokens:0", **chaotic, **settings
    )


def preempted(checkpoint: Path, **settings: Any) -> list[Prompt]:
    """Rows that are promised no frame outgrow the cluster together.

    With pages outside the frames some come back without a prefill.
    """
    prompts, cluster = _run(
        checkpoint, range(45, 61, 2), num_tokens=90, num_frames=3, growth_promise="tokens:0",
        **settings,
    )  # fmt: skip
    assert sum(prompt.num_preemptions for prompt in prompts) >= 1
    assert cluster.num_whole_tickets or not cluster.config.has_slots
    return prompts


def shared(checkpoint: Path, policy: str, **settings: Any) -> list[Prompt]:
    """Whole prompts and beginnings, while their writer runs and after all requests have ended."""
    (first,) = make_prompts([420], num_tokens=64)
    others = [[*first.ids[:200], 7, 8, 9], first.ids, first.ids[:257], [*first.ids, *range(2, 90)]]
    # The first has KV of its prompt by then, and has not ended.
    window = 20 if settings.get("steps_per_window", 1) == 1 else 12
    params = replace(first.params, max_tokens=24)
    with cluster_of(checkpoint, policy=policy, growth_promise="tokens:0", **settings) as cluster:
        prompts = cluster.run([first, *(Prompt(ids, params, window) for ids in others[:2])])
        prompts += cluster.run([Prompt(ids, params) for ids in others[2:]])
    assert cluster.scheduler.prefix_sharing.num_hit_tokens >= 64 * (3 + 6)
    return prompts


def conversations(checkpoint: Path, **settings: Any) -> list[Prompt]:
    """Two rounds of some conversations, and others between them, which take the frames."""
    with cluster_of(checkpoint, num_frames=8, **settings) as cluster:
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
    assert offload.num_stowed[1] or not cluster.config.kv_offload.file_gib
    return prompts


def conversations_in_a_file(checkpoint: Path, **settings: Any) -> list[Prompt]:
    """Memory is small and a file behind it."""
    slots = {"offload_host_pages": 6, "offload_file_pages": 100}
    with tempfile.TemporaryDirectory() as folder:
        file = KvOffloadConfig(1.0, 1.0, folder)
        return conversations(checkpoint, kv_offload=file, **slots, **settings)


def drafts(checkpoint: Path, **settings: Any) -> list[Prompt]:
    """Some drafts are right, while rows change their bindings."""
    chaotic = {"policy": "chaos", "chaos_period_windows": 1, "growth_promise": "tokens:0"}
    prompts, cluster = _run(checkpoint, (5, 64, 130), 2, 64, **chaotic, **settings)
    assert sum(right for _, right in cluster.checked_drafts()) > 20
    return prompts


STORIES: dict[str, Callable[..., list[Prompt]]] = {
    **{f"forced degree {degree}": partial(forced, degree=degree) for degree in (1, 2, 4)},
    "mixed degrees": mixed,
    "mixed degrees, absorbed": partial(mixed, wire_form="absorbed"),
    "chaos": chaos,
    "chaos, absorbed": partial(chaos, wire_form="absorbed"),
    "preempted": preempted,
    "shared pages": partial(shared, policy="fixed_degree:2"),
    "shared pages, chaos": partial(shared, policy="chaos"),
}
"""What every family plays."""
MORE_STORIES = {
    "resyncs": resyncs,
    "experts move": experts_move,
    **{
        f"lanes, degree {degree}": partial(forced_in_lanes, degree=degree) for degree in range(1, 5)
    },
    "lanes, chaos": chaos_in_lanes,
    "preempted, offload": partial(preempted, offload_host_pages=100),
    "conversations": partial(conversations, offload_host_pages=100),
    "conversations, file": conversations_in_a_file,
    "drafts": drafts,
}
"""What some models play."""
