"""A check of whole steps between two processes on one card, of which one is killed."""

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from data_plane.transport.exchange import Term, TermOver
from data_plane.transport.peer_memory import PeerMemory
from harness.exchange_cases import shared_files
from harness.gpu_cluster import GpuCluster
from harness.gpu_token_checks import make_prompts
from nanocp.config import BoundsConfig, DataPlaneConfig

BOUNDS = BoundsConfig(max_rows=4, max_links=4, max_attention_rows=8, max_partials=8)
LENGTHS = (1, 64, 70, 130)
NUM_TOKENS = 3
"""Before the loss, and after it."""
SEED = 2
"""With it some requests have all pages on the survivor, and others have not."""
LEAVE_S = 0.5
"""When the survivor hears that the term is over: what a controller needs to see an exit."""
MOST_S = 10.0
"""When the survivor's wait must have ended; without the word it would end after 60 s or more."""


def survives_a_kill(checkpoint, oracle, device="cuda:0", limit_s=240):
    """Kill one of two processes inside a step; the other one goes on, and every token is right."""
    with tempfile.TemporaryDirectory() as directory:
        context = torch.multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_decode, args=(index, directory, str(checkpoint), device))
            for index in range(2)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        codes = [process.exitcode for process in processes]
        assert codes == [0, -signal.SIGKILL], f"the processes ended with {codes}"
        found = json.loads(Path(directory, "found.json").read_text())
    for ids, num_prompt in found["requests"]:
        assert len(ids) == num_prompt + 2 * NUM_TOKENS, "a step of each process, and no more"
        assert oracle.judge(ids[:num_prompt], ids[num_prompt:]).exact, num_prompt
    assert found["ended_s"] < MOST_S and found["num_kept"] > 0, found
    return found


def _decode(index, directory, checkpoint, device):
    """The body of one process; number 1 is killed, number 0 writes its tokens."""
    is_card = torch.device(device).type == "cuda"
    if not is_card:
        # Under the interpreter the memory of the exchange is in files.
        PeerMemory.create = staticmethod(
            lambda places, _, meeting: shared_files(places, directory, meeting.instance)
        )
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=index, world_size=2)
    cluster = GpuCluster(
        checkpoint,
        device=device,
        data_plane=DataPlaneConfig(device="cuda"),
        bounds=BOUNDS,
        timeout_ms=60_000,
        num_parts=None if is_card else 2,
        is_captured=is_card,
        store=dist.PrefixStore("meeting", store),
        num_redundant=8,
        seed=SEED,
    )
    for number, ids in enumerate(make_prompts(LENGTHS, cluster.model.vocab_size)):
        cluster.add(ids, number % 2 + 1)
    dist.barrier()
    for _ in range(NUM_TOKENS):
        cluster.step()
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (own,), term = cluster.instances.values(), Term(1)
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
    requests = [(request.ids, request.num_prompt) for request in cluster.requests]
    found = {"requests": requests, "ended_s": ended_s, "num_kept": num_kept}
    Path(directory, "found.json").write_text(json.dumps(found))
    # The group has lost a member, so it is not left in order.
    os._exit(0)


def _go_on_alone(cluster):
    """Decode in a term of instance 0; return how many requests kept their pages."""
    cluster.is_one_of_many = False
    cluster.begin_term(2, [0])
    kept = [r for r in cluster.requests if all(holder == 0 for holder, _ in r.pages)]
    for request in list(cluster.requests):
        request.moe_binding, request.kv_binding = 0, [0]
        if request not in kept:
            cluster.submit_again(request)
    for _ in range(NUM_TOKENS):
        cluster.step()
    return len(kept)
