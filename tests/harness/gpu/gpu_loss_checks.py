"""A check of whole steps between two processes on one card: one is killed, another one comes."""

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch

from data_plane.transport.exchange import TermOver
from data_plane.transport.gpu.cuda_runtime import CudaRuntime
from harness.gpu.gpu_cluster import GpuCluster
from harness.gpu.one_of_many import OneOfMany
from harness.gpu_stand_ins.fake_cudart import FakeCudart
from nanocp.config.cluster import BoundsConfig
from nanocp.config.data_plane import DataPlaneConfig

BOUNDS = BoundsConfig(max_rows=4, max_links=4, max_attention_rows=8, max_partials=8)
LENGTHS = (1, 64, 70, 130)
NUM_TOKENS = 3
"""Before the loss, after it, and when another process has come."""
SEED = 2
"""With it some requests have all pages on the survivor, and others have not."""
LEAVE_S = 0.5
"""When the survivor hears that the term is over: what a controller needs to see an exit."""
MOST_S = 40.0
"""When the survivor's wait must have ended; without the word it would end after 60 s or more."""


def survives_a_kill(checkpoint, oracle, device="cuda:0", limit_s=240):
    """Kill one of two processes inside a step; the other one goes on alone, then with a new one."""
    with tempfile.TemporaryDirectory() as directory:
        context = torch.multiprocessing.get_context("spawn")

        def started(body, index):
            process = context.Process(target=body, args=(index, directory, str(checkpoint), device))
            process.start()
            return process

        deadline = time.monotonic() + limit_s
        survivor, killed = started(_decode, 0), started(_decode, 1)
        killed.join(max(0.0, deadline - time.monotonic()))
        processes = [survivor, killed, started(_come, 1)]
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        assert codes == [0, -signal.SIGKILL, 0], f"the processes ended with {codes}"
        found = json.loads(Path(directory, "found.json").read_text())
        of_new = json.loads(Path(directory, "of_new.json").read_text())
    assert found["requests"] == of_new, "two processes of one cluster"
    for ids, num_prompt in found["requests"]:
        assert len(ids) == num_prompt + 3 * NUM_TOKENS, "steps of three terms, and no more"
        assert oracle.judge(ids[:num_prompt], ids[num_prompt:]).exact, num_prompt
    assert found["ended_s"] < MOST_S and found["num_kept"] > 0, found
    return found


def _cluster(index, directory, checkpoint, device, term):
    """Make one instance of two, in this process; it meets the other one in this term."""
    is_card = torch.device(device).type == "cuda"
    runtime = None if is_card else CudaRuntime(FakeCudart(directory), 0)
    return GpuCluster(
        checkpoint,
        device=device,
        data_plane=DataPlaneConfig(device="cuda"),
        bounds=BOUNDS,
        timeout_ms=60_000,
        num_parts=None if is_card else 2,
        is_captured=is_card,
        one_of=OneOfMany(index, directory, term, runtime, device),
        num_redundant=8,
        seed=SEED,
    )


def _decode(index, directory, checkpoint, device):
    """The body of the first two processes; number 1 is killed, number 0 writes its tokens."""
    cluster = _cluster(index, directory, checkpoint, device, term=1)
    cluster.add_drawn(LENGTHS, [number % 2 + 1 for number in range(len(LENGTHS))])
    for _ in range(NUM_TOKENS):
        cluster.step()
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (own,), term = cluster.instances.values(), cluster.one_of.segments.term
    term.mirror(own.exchange.ended)
    cluster.stage()
    began = time.monotonic()
    leave = threading.Timer(LEAVE_S, term.end, [1])
    leave.start()
    cluster._run()
    try:
        own.step.check()
        raise AssertionError("a step ended without its peer")
    except TermOver:
        ended_s = time.monotonic() - began
    num_kept = _go_on_alone(cluster)
    known = [(request.ids, request.num_prompt) for request in cluster.requests]
    path = Path(directory, "known")
    path.write_text(json.dumps(known))
    path.rename(path.with_suffix(".json"))
    cluster.begin_term(3, [0, 1])
    requests = _go_on_together(cluster, known)
    found = {"requests": requests, "ended_s": ended_s, "num_kept": num_kept}
    Path(directory, "found.json").write_text(json.dumps(found))


def _come(index, directory, checkpoint, device):
    """The body of the process that comes in the third term."""
    cluster = _cluster(index, directory, checkpoint, device, term=3)
    known = json.loads(Path(directory, "known.json").read_text())
    requests = _go_on_together(cluster, known)
    Path(directory, "of_new.json").write_text(json.dumps(requests))


def _go_on_alone(cluster):
    """Decode in a term of instance 0; return how many requests kept their pages."""
    cluster.begin_term(2, [0])
    kept = [r for r in cluster.requests if all(holder == 0 for holder, _ in r.pages)]
    for request in list(cluster.requests):
        request.moe_binding, request.kv_binding = 0, [0]
        if request not in kept:
            cluster.submit_again(request)
    for _ in range(NUM_TOKENS):
        cluster.step()
    return len(kept)


def _go_on_together(cluster, known):
    """Submit requests again that have these tokens, and decode; return what they have then."""
    cluster.forget_requests(SEED)
    for number, (ids, num_prompt) in enumerate(known):
        cluster.add(ids, number % 2 + 1)
        cluster.requests[-1].num_prompt = num_prompt
    for _ in range(NUM_TOKENS):
        cluster.step()
    cluster.one_of.gather(None, cluster.seats)  # what the other one still writes must stay mapped
    cluster.one_of.leave()
    return [[request.ids, request.num_prompt] for request in cluster.requests]
