"""The example of docs/develop/overlap.md runs exactly as it is printed, and its model is cut."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.paths import ROOT
from nanocp.overlap.engine import backend

pytestmark = pytest.mark.usefixtures("fresh")


def test_the_documents_example_runs_as_printed(monkeypatch):
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/develop/overlap.md").read_text(), re.S
    )
    engines = []
    monkeypatch.setattr(backend.overlap, "__defaults__", (engines.append, False))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes)
    model = LlamaForCausalLM(config).eval()
    ids, lengths = torch.randint(0, 64, (16, 7)), torch.arange(16) % 5 + 3
    mask = (torch.arange(7) < lengths[:, None]).long()
    names = {"model": model, "input_ids": ids, "attention_mask": mask}
    with torch.enable_grad():  # as a user's program begins
        exec(example, names)
        first = names["logits"]
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            again = names["run"](ids, attention_mask=mask, use_cache=False).logits
    for logits in (first, again):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    (engine,) = engines
    (recording,) = engine.recordings.values()
    assert recording.sizes == (8, 8)
    attention = [step for step in recording.steps if step.is_merged]
    assert len(attention) == 2, "attention of both halves runs once in each layer"
