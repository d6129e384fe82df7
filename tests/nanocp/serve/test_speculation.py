"""A real service whose MTP layer drafts: tokens are `transformers`', also in lanes after a loss."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest
from tokenizers import Tokenizer

from data_plane.reference.oracle import Oracle
from harness.exact.settings import configured
from harness.paths import ROOT
from harness.services.hash_service import CONFIG, forked_service
from harness.services.kit import exact_answers, greedy, random_prompt, started
from harness.services.service_recovery import pid_of, sample, until_serving
from harness.waits import until
from nanocp.cli.demo.prompts import SHORT_PROMPTS, long_prompt
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import LANE_ORDERS
from nanocp.config.speculative import EXAMPLE, num_drafts_of
from nanocp.serve.service import open_checkpoint
from nanocp.values.members import Member

TALE = ROOT / "models/tale"
NUM_TOKENS = 48
PRIORITY = "combine 0/500, attention 120/610, exchange 300/800, experts 450/950"


@pytest.fixture(scope="module")
def oracle():
    return Oracle(TALE)


def test_tokens_are_exact_at_degree_two_and_about_half_of_the_drafts_are_right(oracle):
    cluster = ClusterConfig(num_instances=2, max_model_len=2048)
    drafts = {"policy": "fixed_degree:2", "num_drafts": num_drafts_of(EXAMPLE)}
    config = configured(CONFIG, cluster=cluster, **drafts)
    tokenizer = Tokenizer.from_file(str(TALE / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in SHORT_PROMPTS]
    prompts.append(long_prompt(tokenizer, 700, seed=1))
    with started(forked_service(config, open_checkpoint(config, TALE))) as service:
        # The checkpoint has another penalty by default.
        asked = partial(greedy, service.address, max_tokens=NUM_TOKENS, repetition_penalty=1.0,
                        ignore_eos=False, timeout_s=600)  # fmt: skip
        with ThreadPoolExecutor(len(prompts)) as pool:
            outputs = list(pool.map(asked, prompts))
        until(lambda: metric(service, "iteration_tokens_total_sum") == NUM_TOKENS * len(prompts))
        num_drafts = metric(service, "spec_decode_num_drafts_total")
        num_accepted = metric(service, "spec_decode_num_accepted_tokens_total")
        assert num_drafts == metric(service, "spec_decode_num_draft_tokens_total")
        per_pos = "spec_decode_num_accepted_tokens_per_pos_total"
        assert num_accepted == metric(service, per_pos, position="0")
        answers = [answer_with_metrics(service, prompts[0], is_chat) for is_chat in (False, True)]
        streamed = answer_with_metrics(service, prompts[0], False, stream=True)
    for num_tokens, drafts in (*answers, streamed):
        none, one = drafts["acceptance_histogram"]
        assert (drafts["num_spec_steps"], drafts["num_accepted_draft_tokens"]) == (none + one, one)
        assert drafts["num_draft_tokens"] == none + one and drafts["num_spec_tokens"] == 1
        assert drafts["mean_acceptance_length"] == 1 + drafts["draft_acceptance_rate"]
        # A step without drafts: each choice's first; the last where nothing is left to draft.
        assert num_tokens - 4 <= none + 2 * one + 2 <= num_tokens + 1
    for ids, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS and oracle.judge(ids, output).exact
    assert 0.35 < num_accepted / num_drafts < 0.65
    # The first step of a row has no draft, and later ones have one; drafts are tokens.
    rounds = NUM_TOKENS * len(prompts) - num_accepted - len(prompts)
    assert 0.9 * rounds <= num_drafts <= rounds


def answer_with_metrics(service, ids, is_chat, stream=False):
    """(tokens, drafts' metrics) of two choices over HTTP."""
    client = openai.OpenAI(base_url=f"http://{service.http_address}/v1", api_key="EMPTY")
    params = {"max_tokens": 20, "n": 2, "seed": 1, "model": str(TALE), "stream": stream}
    if stream:
        params["stream_options"] = {"include_usage": True}
    if is_chat:
        message = {"role": "user", "content": "Once upon a time"}
        answer = client.chat.completions.create(messages=[message], **params)
    else:
        answer = client.completions.create(prompt=ids, **params)
    last = list(answer)[-1] if stream else answer
    return last.usage.completion_tokens, last.model_extra["metrics"]["speculative_decoding"]


@pytest.mark.parametrize("order", [*LANE_ORDERS, PRIORITY])
def test_an_instance_is_lost_while_two_lanes_run_in_each_order(order, oracle):
    """Rows draft, and chaos gives them CP degrees 1 and 2."""
    cluster = ClusterConfig(num_instances=2, num_frames=64, max_model_len=1024)
    lanes = {"lanes": "always", "lane_table": ((1, 0, 90, order),), "num_drafts": 1}
    chaos = {"policy": "chaos", "chaos_period_windows": 1, "growth_promise": "tokens:0"}
    config = configured(CONFIG, cluster=cluster, **lanes, **chaos)
    prompts = [random_prompt(length, length) for length in (5, 63, 130, 300)]
    with started(forked_service(config, open_checkpoint(config, TALE))) as service:
        windows = partial(sample, service, "lane_windows_total")
        asked = (oracle, service.address, prompts, 150)
        with exact_answers(*asked, repetition_penalty=1.0):
            until(lambda: (windows(order=order) or 0) > 5)
            os.kill(pid_of(service, Member("instance", 1)), signal.SIGKILL)
            until_serving(service, 2)
            before = windows(order=order)
        assert sample(service, "replayed_tokens_total"), "rows ran when it was lost"
        assert windows(order=order) > before and not windows(order="one_lane")
        assert metric(service, "exchange_bytes_total", kind="route")
        assert metric(service, "spec_decode_num_accepted_tokens_total")


def metric(service, name, **labels):
    """The sum over both instances."""
    return sum(sample(service, name, engine=engine, **labels) for engine in "01")
