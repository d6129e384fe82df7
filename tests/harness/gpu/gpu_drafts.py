"""An instance on a GPU that drafts in a service's own loop, beside the same one on a CPU.

A greedy row runs beside one that samples, and on alone when that has ended: then the device drafts
before the host knows the step's tokens.
"""

from dataclasses import replace

from harness.exact.decode_cluster import DecodeCluster, Prompt
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.sampling import SamplingParams

# The greedy row takes at least 8 steps and the other one at most 5, whichever begins first.
NUM_DRAFTS, NUM_TOKENS, MAX_ROWS = 2, 24, 6
BOUNDS = BoundsConfig(max_rows=MAX_ROWS, max_links=3, max_attention_rows=6, max_partials=3)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=1.0, seed=3, max_tokens=5)


def played(checkpoint, **data_plane):
    """(prompts with their tokens, (checked, accepted) drafts by offset).

    The last token is at the last position that the model may have; drafts go beyond it. data_plane:
    fields of DataPlaneConfig.
    """
    config = Config(
        cluster=ClusterConfig(num_instances=1, num_frames=8, max_model_len=72, bounds=BOUNDS),
        scheduler=SchedulerConfig(steps_per_window=2, num_drafts=NUM_DRAFTS, drafting="always"),
        data_plane=DataPlaneConfig(**data_plane),
    )
    prompts = [Prompt(list(range(30, 70)), GREEDY), Prompt(list(range(200, 264)), SAMPLED)]
    with DecodeCluster(config, checkpoint) as cluster:
        return cluster.run(prompts), cluster.checked_drafts()


def assert_drafts_as(on_cpu, checkpoint, oracle, **data_plane):
    """Compare with what `played` has returned for a CPU; returns how many drafts were checked."""
    expected, drafts = on_cpu
    found, checked = played(checkpoint, device="cuda", row_buckets=(MAX_ROWS,), **data_plane)
    assert checked == drafts, "the MTP layer gets the same rows as on a CPU"
    num_checked, num_right = (sum(each) for each in zip(*checked, strict=True))
    assert 0 < num_right < num_checked
    assert [each.output for each in found] == [each.output for each in expected]
    greedy = found[0]
    assert oracle.judge(greedy.ids, greedy.output).exact and len(greedy.output) == NUM_TOKENS
    return num_checked


def draft_checks(folder):
    """(name, check) of an instance on this machine's GPU."""
    from data_plane.model.make_checkpoint import make_checkpoint
    from data_plane.reference.oracle import Oracle
    from harness.exact.mtp_layers import add_mtp_layer

    path = folder / "drafting"
    make_checkpoint(path, "tiny")
    add_mtp_layer(path)
    oracle, on_cpu = Oracle(path), played(path)
    for eager in (True, False):
        yield (
            f"tokens with drafts, {'eager' if eager else 'graphs'}, as on a CPU",
            lambda eager=eager: assert_drafts_as(on_cpu, path, oracle, eager=eager),
        )
