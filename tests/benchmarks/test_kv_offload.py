"""Conversations find the predicted tokens outside the frames, on real processes."""

import pytest

from benchmarks.service import kv_offload


@pytest.mark.system
def test_conversations_find_exactly_what_was_predicted(tiny_checkpoint):
    result = kv_offload.converse(tiny_checkpoint, 4, 3)
    assert result["saved"] == result["predicted"] > 0
    assert result["outside"] > 0
