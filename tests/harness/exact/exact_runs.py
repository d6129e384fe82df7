"""What tests of exactness share: a cluster of four, random prompts, and the judgement."""

import random
from weakref import WeakKeyDictionary

from data_plane.reference.oracle import Verdict
from harness.exact.decode_cluster import Prompt
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.values.experts import ExpertTable
from nanocp.values.sampling import SamplingParams

NUM_TOKENS = 28
"""A row gets another page if its prompt ends fewer before a page's edge."""
CLUSTER = ClusterConfig(
    num_instances=4,
    num_frames=192,
    max_model_len=6400,
    bounds=BoundsConfig(max_rows=16, max_attention_rows=48),
)


right_outputs = WeakKeyDictionary()
"""By oracle and prompt: the longest output that it found right without a near-tie."""


def make_prompts(lengths, arrival_gap=0, num_tokens=NUM_TOKENS):
    """Make greedy requests, that many windows apart; of a length, there is one random prompt."""
    return [
        Prompt(
            ids=random.Random(length).choices(range(2, 512), k=length),
            params=SamplingParams(max_tokens=num_tokens, temperature=0.0),
            arrives_at_window=number * arrival_gap,
        )
        for number, length in enumerate(lengths)
    ]


def assert_exact(oracle, prompts):
    """Every token is the reference's; near-ties are one, or one in a thousand."""
    near_ties = 0
    for prompt in prompts:
        verdict = judge(oracle, tuple(prompt.ids), tuple(prompt.output))
        assert len(prompt.output) == prompt.params.max_tokens
        assert verdict.exact, (len(prompt.ids), verdict, prompt.placements)
        near_ties += verdict.near_ties
    assert near_ties * 1000 <= max(sum(len(prompt.output) for prompt in prompts), 1000)


def judge(oracle, ids, output):
    """Let the oracle judge what it has not found right before."""
    known = right_outputs.setdefault(oracle, {})
    right = known.get(ids, ())
    if output == right[: len(output)]:
        return Verdict(len(output), None, 0)
    verdict = oracle.judge(ids, output)
    if verdict.exact and not verdict.near_ties:
        known[ids] = output
    return verdict


def random_table(num_experts: int, num_instances: int, seed: int) -> ExpertTable:
    """Every expert on any instance; slots of an instance are in any order."""
    rng = random.Random(seed)
    seats = [rng.randrange(num_instances) for _ in range(num_experts)]
    slots = [0] * num_experts
    for instance in range(num_instances):
        held = [expert for expert, seat in enumerate(seats) if seat == instance]
        for slot, expert in enumerate(rng.sample(held, len(held))):
            slots[expert] = slot
    return ExpertTable(tuple(seats), tuple(slots))
