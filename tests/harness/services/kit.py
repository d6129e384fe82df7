"""What most tests of a running service need: its start and stop, prompts and answers."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from harness.waits import WAIT_S
from nanocp.client import Client


@contextmanager
def started(service):
    """Start the service on entry, and stop it on exit."""
    try:
        service.start(lambda step: None)
        yield service
    finally:
        service.stop()


def ids_of(chunks):
    """The tokens of an answer's chunks."""
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def random_prompt(length, seed):
    """Ids of the tiny model's vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(length)]


def greedy(target, ids, max_tokens, **options):
    """The ids of a greedy answer, which goes on after ends of sequences."""
    options = {"temperature": 0.0, "ignore_eos": True, "timeout_s": WAIT_S} | options
    with Client(target) as client:
        return ids_of(client.generate(ids, max_tokens=max_tokens, **options))


@contextmanager
def exact_answers(oracle, target, prompts, max_tokens, **options):
    """Greedy answers to these prompts run; at the end each is what the oracle says."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(greedy, target, ids, max_tokens, **options) for ids in prompts]
        yield running
        for ids, output in zip(prompts, running, strict=True):
            assert oracle.judge(ids, output.result(WAIT_S)).exact, len(ids)
