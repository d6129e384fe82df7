"""A real service whose MTP layer drafts: tokens are `transformers`', and metrics count drafts."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tokenizers import Tokenizer

from data_plane.reference.oracle import Oracle
from harness.hash_service import CONFIG, forked_service
from harness.member_fakes import until
from harness.paths import ROOT
from nanocp.cli.demo_prompts import SHORT_PROMPTS, long_prompt
from nanocp.client import Client
from nanocp.config.cluster import ClusterConfig
from nanocp.config.speculative import EXAMPLE, num_drafts_of
from nanocp.serve.service import open_checkpoint

TALE = ROOT / "models/tale"
NUM_TOKENS = 48


def test_tokens_are_exact_at_degree_two_and_about_half_of_the_drafts_are_right():
    config = replace(
        CONFIG,
        cluster=ClusterConfig(num_instances=2, max_model_len=2048),
        scheduler=replace(
            CONFIG.scheduler, policy="fixed_degree:2", num_drafts=num_drafts_of(EXAMPLE)
        ),
    )
    tokenizer = Tokenizer.from_file(str(TALE / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in SHORT_PROMPTS]
    prompts.append(long_prompt(tokenizer, 700, seed=1))
    service = forked_service(config, open_checkpoint(config, TALE))
    try:
        service.start(lambda step: None)
        with ThreadPoolExecutor(len(prompts)) as pool:
            outputs = list(pool.map(lambda ids: greedy(service.address, ids), prompts))
        until(lambda: metric(service, "iteration_tokens_total_sum") == NUM_TOKENS * len(prompts))
        num_drafts = metric(service, "spec_decode_num_drafts_total")
        num_accepted = metric(service, "spec_decode_num_accepted_tokens_total")
        assert num_drafts == metric(service, "spec_decode_num_draft_tokens_total")
        per_pos = "spec_decode_num_accepted_tokens_per_pos_total"
        assert num_accepted == metric(service, per_pos, position="0")
    finally:
        service.stop()
    oracle = Oracle(TALE)
    for ids, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS and oracle.judge(ids, output).exact
    assert 0.35 < num_accepted / num_drafts < 0.65
    # The first step of a row has no draft, and later ones have one; drafts are tokens.
    rounds = NUM_TOKENS * len(prompts) - num_accepted - len(prompts)
    assert 0.9 * rounds <= num_drafts <= rounds


def greedy(address, ids):
    with Client(address) as client:
        params = {"temperature": 0, "repetition_penalty": 1.0}  # the checkpoint has another default
        chunks = client.generate(ids, max_tokens=NUM_TOKENS, timeout_s=600, **params)
        return [token_id for chunk in chunks for token_id in chunk.token_ids]


def metric(service, name, **labels):
    """The sum over both instances."""
    value = service.metrics.registry.get_sample_value
    engines = [{"engine": engine, **labels} for engine in "01"]
    return sum(value(f"nanocp:{name}", of_engine) for of_engine in engines)
