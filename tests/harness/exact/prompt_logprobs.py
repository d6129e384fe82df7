"""Log probabilities of a prompt by the reference prefill, and their comparison with others."""

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights
from harness.exact.reference_prefill import prefill_pages
from nanocp.values.sampling import PromptLogprobs


def assert_logprobs(checkpoint, ids, logprobs, num_top):
    """Each is that of the reference, of the tokens from the second one on."""
    model, expected = ModelConfig.from_folder(checkpoint), []
    weights = load_weights(checkpoint, model, torch.float32, range(model.num_experts))
    wanted = PromptLogprobs(num_top, expected.extend)
    list(prefill_pages(weights, model, ids, len(ids) - 1, 512, wanted))
    assert len(logprobs) == len(expected) == len(ids) - 1
    assert [one.logprob for one in logprobs] == pytest.approx(
        [one.logprob for one in expected], abs=1e-3
    )
    assert all(len(one.top) == num_top for one in logprobs)
