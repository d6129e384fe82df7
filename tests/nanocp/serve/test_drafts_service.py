"""A service whose instances draft: its answers are `transformers`', from prompts of any stages."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from tokenizers import Tokenizer

from control_plane.scheduler.windows.advances import Advances
from data_plane.reference.oracle import Oracle
from harness.paths import ROOT
from harness.services.hash_service import CONFIG, forked_service, shared_memory_of
from harness.services.kit import greedy, started
from nanocp.cli.demo.prompts import SHORT_PROMPTS, long_prompt
from nanocp.config.cluster import ClusterConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.serve.service import open_checkpoint

TALE = ROOT / "models/tale"


@pytest.mark.system
@pytest.mark.parametrize("stages", [1, 2])
def test_answers_with_drafts_are_exact(stages, monkeypatch):
    told = Advances.told
    accepted: list[int] = []

    def counted(self, window, advanced):
        accepted.extend(advanced)
        told(self, window, advanced)

    monkeypatch.setattr(Advances, "told", counted)
    config = replace(
        CONFIG,
        cluster=ClusterConfig(num_instances=2, num_frames=64, max_model_len=1024),
        scheduler=SchedulerConfig(policy="fixed_degree:2", num_drafts=1),
        prefill=PrefillConfig(stages=stages, chunk_tokens=128),
    )
    tokenizer = Tokenizer.from_file(str(TALE / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in SHORT_PROMPTS[1:3]]
    prompts += [long_prompt(tokenizer, length, length) for length in (129,)]
    with started(forked_service(config, open_checkpoint(config, TALE))) as service:
        # The checkpoint has another penalty by default.
        asked = partial(greedy, service.address, max_tokens=40, repetition_penalty=1.0)
        with ThreadPoolExecutor(len(prompts)) as pool:
            outputs = list(pool.map(asked, prompts))
    assert shared_memory_of(service) == []
    oracle = Oracle(TALE)
    assert all(oracle.judge(*pair).exact for pair in zip(prompts, outputs, strict=True))
    assert [len(output) for output in outputs] == [40] * len(prompts)
    assert len(accepted) > 25, "a third of the tokens come from drafts"
