"""Prompts are pulled from engines while processes are lost, and no block stays held."""

import pytest

from harness.hash_clusters.losses.hash_pulls import PullingCluster, play, play_failovers


@pytest.mark.parametrize(
    "seeds", [range(100, 112), pytest.param(range(1000, 1100), marks=pytest.mark.system)]
)
def test_processes_are_lost_while_prompts_are_pulled_and_every_token_is_right(seeds):
    clusters = [play(seed) for seed in seeds]
    for what in ("pulled", "failed_pulls", "pullers_lost", "losses", "prefills_lost"):
        assert sum(getattr(cluster, f"num_{what}") for cluster in clusters), what


def test_without_a_loss_each_set_of_blocks_is_freed_once():
    clusters = [play(seed, max_losses=0) for seed in range(8)]
    assert sum(cluster.num_pulled for cluster in clusters) > 30
    assert not any(cluster.engines.num_expired for cluster in clusters)


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(200, 260), marks=pytest.mark.system)]
)
def test_the_controller_and_front_ends_are_lost_while_prompts_are_pulled(seeds):
    clusters = [play_failovers(seed) for seed in seeds]
    for what in ("pulled", "failovers", "front_ends_lost"):
        assert sum(getattr(cluster, f"num_{what}") for cluster in clusters), what


def test_the_play_sees_kv_that_an_engine_has_written_over():
    """The control: without a check of what was read, and without heartbeats, a token is wrong."""

    class Careless(PullingCluster):
        checks = beats = False

    def is_seen(seed):
        cluster = Careless(seed, max_losses=0)
        cluster.engines.lease_s = 0.02
        cluster.holds._lease_s = 30.0  # It believes in a longer one.
        try:
            cluster.play()
        except AssertionError as error:
            return "was given" in str(error)
        return False

    assert any(is_seen(seed) for seed in range(12))
