"""What most tests of a running service need: its start and stop, prompts and answers."""

import random
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


def random_prompt(length, seed):
    """Ids of the tiny model's vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(length)]


def greedy(target, ids, max_tokens, **options):
    """The ids of a greedy answer, which goes on after ends of sequences."""
    options = {"temperature": 0.0, "ignore_eos": True, "timeout_s": WAIT_S} | options
    with Client(target) as client:
        chunks = client.generate(ids, max_tokens=max_tokens, **options)
        return [token for chunk in chunks for token in chunk.token_ids]
