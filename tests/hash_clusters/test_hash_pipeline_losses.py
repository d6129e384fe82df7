"""Pipelines whose stages are lost at any turn: every open request ends with the right tokens."""

from collections import Counter

import pytest

from harness.hash_clusters.pipeline.hash_pipeline_losses import play


@pytest.mark.parametrize("is_chaos", [False, True])
def test_every_token_is_right_after_losses(is_chaos):
    counts = sum((play(seed, is_chaos).counts for seed in range(6)), Counter())
    assert counts["lost stages"] > 5 and counts["attempts"] > 15
    assert counts["retries"] > 5 and counts["tokens of ended attempts"] > 1
    assert counts["passes of ended terms"] > 50


@pytest.mark.system
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_every_token_is_right_after_losses_in_600_pipelines(first):
    for seed in range(first, first + 50):
        play(seed)
        play(seed, is_chaos=True)
