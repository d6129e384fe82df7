"""What tests of exactness share: a cluster of four, random prompts, and the judgement."""

import random
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from data_plane.reference.oracle import Verdict
from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.exact.settings import configured
from harness.exact.states import depth_of_states
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.whole import Config
from nanocp.values.sampling import SamplingParams

NUM_TOKENS = 28
"""A row gets another page if its prompt ends fewer before a page's edge."""
CLUSTER = ClusterConfig(
    num_instances=4,
    num_frames=192,
    max_model_len=6400,
    bounds=BoundsConfig(max_rows=16, max_attention_rows=48),
)

FOUR = Config(cluster=CLUSTER)
right_outputs = WeakKeyDictionary()
"""By oracle and prompt: the longest output that it found right without a near-tie."""


@contextmanager
def cluster_of(checkpoint, base=FOUR, lost_share=0.0, experts=None, depth=1, **settings):
    """Run a cluster. settings: by name. depth: newest tokens that no step folds into a state."""
    config = configured(base, **settings)
    with depth_of_states(depth), DecodeCluster(config, checkpoint, lost_share, experts) as cluster:
        yield cluster
        pools = [instance._frames.states for instance in cluster.instances.values()]
        assert {pool.depth for pool in pools if pool is not None} <= {depth}


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
