"""Requests of a service of four HashInstances that must come out exact while members are lost."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from control_plane.shell.event_log import LogReader
from harness import waits
from harness.services.hash_service import CONFIG, expected, generate, prompt, shared_memory_of
from nanocp.simulator.replay import replay

SLOW = "harness.services.hash_members:build_slow"
LENGTHS = [1, 64, 130, 300, 511, 900]
NUM_SEGMENTS = 4 + 4 + 4 * 3


WAIT_S = 240
"""Longest wait for what takes seconds: processes start, which a busy machine delays."""
until = partial(waits.until, limit_s=WAIT_S)


def terms_of(service):
    return service._controller.members.terms


def pid_of(service, member):
    return service.launcher.pid(member)


def sample(service, name, **labels):
    """A metric of the service, by its name behind nanocp: and its labels."""
    return service.metrics.registry.get_sample_value(f"nanocp:{name}", labels)


def until_decoding(service):
    until(lambda: sample(service, "generation_tokens_total"))


def until_serving(service, term):
    until(lambda: terms_of(service).number >= term and terms_of(service).is_serving)


@contextmanager
def generating(service, max_tokens):
    """Requests of six lengths run; at the end each has exactly its tokens, and nothing is left."""
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        streams = {
            length: pool.submit(
                generate, service.address, prompt(length, length), max_tokens, timeout_s=WAIT_S
            )
            for length in LENGTHS
        }
        until_decoding(service)
        yield streams
        for length, stream in streams.items():
            assert stream.result(WAIT_S) == expected(prompt(length, length), max_tokens), length
    until(lambda: num_free_frames(service) == 4 * CONFIG.cluster.num_frames)
    assert len(shared_memory_of(service)) == NUM_SEGMENTS, "segments of an earlier term are gone"


def num_free_frames(service):
    return sum(sample(service, "frames_free", engine=engine) or 0 for engine in "0123")


def played_again(log):
    """The event log of a service, played again."""
    with log.open("rb") as lines:
        return replay(LogReader(lines, log.name))
