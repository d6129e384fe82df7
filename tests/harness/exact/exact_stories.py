"""Stories of a real cluster that disturb rows, and how each may be played."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.exact.exact_runs import CLUSTER, make_prompts
from harness.exact.states import depth_of_states
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config


class How(NamedTuple):
    """What a story is played with."""

    num_steps: int = 1
    """Steps of a window."""
    cpu_kernels: str = "auto"
    depth: int = 1
    """Newest tokens of a row that no step folds into its state."""
    wire_form: str = "latent"

    def config(self, num_frames: int = CLUSTER.num_frames, **scheduler: Any) -> Config:
        """The configuration of a cluster of four."""
        return Config(
            cluster=replace(CLUSTER, num_frames=num_frames),
            scheduler=SchedulerConfig(steps_per_window=self.num_steps, **scheduler),
            data_plane=DataPlaneConfig(wire_form=self.wire_form, cpu_kernels=self.cpu_kernels),
        )

    def play(
        self, checkpoint: Path, config: Config, *turns: list[Prompt]
    ) -> tuple[list[Prompt], DecodeCluster]:
        """Play prompts, one list after another; returns all, and the cluster, ended."""
        with depth_of_states(self.depth), DecodeCluster(config, checkpoint) as cluster:
            played = [prompt for prompts in turns for prompt in cluster.run(prompts)]
            pools = [instance._frames.states for instance in cluster.instances.values()]
            assert {pool.depth for pool in pools if pool is not None} <= {self.depth}
            return played, cluster


def _run(
    checkpoint: Path,
    how: How,
    lengths: Iterable[int],
    arrival_gap: int = 0,
    num_tokens: int = 26,
    **settings: Any,
) -> tuple[list[Prompt], DecodeCluster]:
    prompts = make_prompts(lengths, arrival_gap, num_tokens)
    return how.play(checkpoint, how.config(**settings), prompts)


def forced(checkpoint: Path, how: How, degree: int) -> list[Prompt]:
    """All prompts have one degree."""
    lengths = [length for length in (1, 63, 64, 65, 500) if length > 64 * degree or degree == 1]
    policy = f"fixed_degree:{degree}"
    prompts, _ = _run(checkpoint, how, [*lengths, 300], policy=policy)
    assert all(prompt.placements[0].cp_degree == degree for prompt in prompts)
    return prompts


def mixed(checkpoint: Path, how: How) -> list[Prompt]:
    """Degrees 1, 2 and 4 in a batch; requests arrive and end while others run."""
    lengths = (1, 17, 64, 65, 129, 511, 1023, 1500, 3001)
    prompts, _ = _run(checkpoint, how, lengths, 4, policy="dual_balanced")
    assert {prompt.placements[0].cp_degree for prompt in prompts} == {1, 2, 4}
    return prompts


def chaos(checkpoint: Path, how: How) -> list[Prompt]:
    """Re-bindings, extensions and page moves every few windows."""
    prompts, cluster = _run(
        checkpoint, how, (1, 40, 64, 130, 300, 500), 3, policy="chaos", chaos_seed=how.num_steps,
        chaos_period_windows=2 if how.num_steps == 1 else 1, growth_promise="tokens:0",
    )  # fmt: skip
    moved = sum(len({p.moe_binding for p in prompt.placements}) > 1 for prompt in prompts)
    # How many, the threads decide.
    assert moved and cluster.num_moves, "the story must contain what it is about"
    return prompts


def preempted(checkpoint: Path, how: How) -> list[Prompt]:
    """Rows that are promised no frame outgrow the cluster together."""
    settings = {"num_tokens": 90, "num_frames": 3, "growth_promise": "tokens:0"}
    prompts, _ = _run(checkpoint, how, range(45, 61, 2), **settings)
    assert sum(prompt.num_preemptions for prompt in prompts) >= 1
    return prompts


def shared(checkpoint: Path, how: How, policy: str) -> list[Prompt]:
    """Whole prompts and beginnings, while their writer runs and after all requests have ended."""
    config = how.config(policy=policy, growth_promise="tokens:0")
    (first,) = make_prompts([400], num_tokens=64)
    others = [[*first.ids[:200], 7, 8, 9], first.ids, first.ids[:257]]
    # The first has KV of its prompt by then, and has not ended.
    window = 20 if how.num_steps == 1 else 12
    params = replace(first.params, max_tokens=24)
    earlier = [first, *(Prompt(ids, params, window) for ids in others[:2])]
    later = [Prompt(ids, params) for ids in others[2:]]
    prompts, cluster = how.play(checkpoint, config, earlier, later)
    assert cluster.scheduler.prefix_sharing.num_hit_tokens >= 64 * (3 + 6)
    return prompts


STORIES: dict[str, Callable[[Path, How], list[Prompt]]] = {
    "forced degree 1": lambda checkpoint, how: forced(checkpoint, how, 1),
    "forced degree 2": lambda checkpoint, how: forced(checkpoint, how, 2),
    "forced degree 4": lambda checkpoint, how: forced(checkpoint, how, 4),
    "mixed degrees": mixed,
    "mixed degrees, absorbed": lambda path, how: mixed(path, how._replace(wire_form="absorbed")),
    "chaos": chaos,
    "chaos, absorbed": lambda path, how: chaos(path, how._replace(wire_form="absorbed")),
    "preempted": preempted,
    "shared pages": lambda path, how: shared(path, how, "fixed_degree:2"),
    "shared pages, chaos": lambda path, how: shared(path, how, "chaos"),
}
