"""Instances in one process whose steps run without the host: under the interpreter, or on one GPU, eager or captured.

A stand-in for the brain places requests: pages on any instance of a KV binding that grows, a MoE binding that changes.
Greedy tokens; the same seed gives the same placements whatever runs the steps.
"""

import random
from dataclasses import dataclass, field

import torch

from control_plane.routing import build_routes
from data_plane.attention.fp8_latent import quantise
from data_plane.attention.triton_mla import TritonMla
from data_plane.device_parts import device_parts
from data_plane.graph.buckets import BucketTable
from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.weights import expert_range, load_weights
from data_plane.moe.triton_gemm import TritonGemm
from data_plane.prefill import prefill_pages
from data_plane.transport.cuda_ipc import PeerMemory
from nanocp.config import BoundsConfig, ClusterConfig, DataPlaneConfig
from nanocp.plan import PAGE_SIZE, PageRun

BOUNDS = BoundsConfig(max_rows=4, max_links=4, max_attention_rows=8, max_partials=8)


@dataclass
class Request:
    """Where it is, and its tokens so far."""

    ids: list
    moe_binding: int
    kv_binding: list
    pages: list = field(default_factory=list)
    """(holder, frame)."""
    num_prompt: int = 0
    logits: list = field(default_factory=list)

    @property
    def output(self):
        return self.ids[self.num_prompt :]


class DeviceInstance:
    """What an instance has on the device, and on the host of its own."""

    def __init__(self, parts, memory):
        self.step, self.frames, self.pool, exchange, _ = parts
        exchange.attach(memory)
        num_frames = self.frames.scratch_slot // PAGE_SIZE
        self.free = list(range(0, num_frames, 2)) + list(range(1, num_frames, 2))
        self.window = -1


class DeviceCluster:
    """Requests that are decoded together."""

    def __init__(
        self, checkpoint, num_instances=2, device="cpu", data_plane=None, bounds=BOUNDS, num_frames=24, max_len=512,
        seed=0, timeout_ms=1.0, num_parts=None, is_captured=False,
    ):  # fmt: skip
        device = torch.device(device)
        self.data_plane = data_plane or DataPlaneConfig()
        self.cluster = ClusterConfig(num_instances, num_instances, num_frames, max_len, bounds)
        self.model = model = ModelConfig.from_folder(checkpoint)
        self.dtype = torch.bfloat16 if self.data_plane.dtype == "bfloat16" else torch.float32
        self.all_weights = load_weights(checkpoint, model, self.dtype, range(model.num_experts))
        attention = TritonMla(model.kv_lora_rank, model.rope_dim, model.num_heads, num_parts)
        parts = []
        for instance in range(num_instances):
            experts = expert_range(model, instance, num_instances)
            weights = load_weights(checkpoint, model, self.dtype, experts, packing=PlainPacking())
            parts.append(
                device_parts(self.cluster, self.data_plane, model, weights, attention, TritonGemm(), device, timeout_ms)
            )
        memories = PeerMemory.create_all(parts[0].places, device)
        self.instances = [DeviceInstance(*pair) for pair in zip(parts, memories, strict=True)]
        self.buckets = BucketTable(bounds.max_rows, bounds.max_attention_rows)
        self.requests, self.random, self.num_steps, self.num_moved = [], random.Random(seed), 0, 0
        self.graphs = self._capture() if is_captured else None

    def add(self, ids, degree):
        """Prefill all but the last token, over `degree` instances."""
        kv_binding = self.random.sample(range(self.cluster.num_instances), degree)
        request = Request(list(ids), kv_binding[0], kv_binding, num_prompt=len(ids))
        num_tokens = len(ids) - 1
        for page, kv_LSD in prefill_pages(self.all_weights, self.model, ids, num_tokens, 128):
            holder, frame = self._allocate(request)
            if self.data_plane.kv_dtype == "fp8":
                kv_LSD = quantise(kv_LSD, self.model.kv_lora_rank)
            payload = kv_LSD.contiguous().view(torch.uint8).flatten()
            count = min(PAGE_SIZE, num_tokens - page * PAGE_SIZE)
            self.instances[holder].frames.write_payload(frame, count, payload)
        self.requests.append(request)

    def step(self):
        """One token for every request."""
        for request in self.requests:
            if self.random.random() < 0.2:
                request.kv_binding = sorted({*request.kv_binding, self.random.randrange(self.cluster.num_instances)})
            if (len(request.ids) - 1) // PAGE_SIZE == len(request.pages):
                self._allocate(request)
            if self.random.random() < 0.3:
                moe_binding = self.random.choice(request.kv_binding)
                self.num_moved += moe_binding != request.moe_binding
                request.moe_binding = moe_binding
        rows = self._stage()
        self._run()
        for instance, requests in zip(self.instances, rows, strict=True):
            instance.step.check()
            logits = instance.step.logits_of(list(range(len(requests)))).cpu()
            for request, logits_V in zip(requests, logits, strict=True):
                request.logits.append(logits_V)
                request.ids.append(int(logits_V.argmax()))
        self.num_steps += 1

    def _allocate(self, request):
        holder = request.kv_binding[len(request.pages) % len(request.kv_binding)]
        request.pages.append((holder, self.instances[holder].free.pop(0)))
        return request.pages[-1]

    def _stage(self):
        """Fill every instance's tables, as DecodeInstance does from a plan; the requests of its rows."""
        bindings = [(number, r.moe_binding, tuple(r.kv_binding)) for number, r in enumerate(self.requests)]
        q_route, res_route = build_routes(bindings, self.cluster.num_instances)
        rows = [[r for r in self.requests if r.moe_binding == i] for i in range(self.cluster.num_instances)]
        for index, instance in enumerate(self.instances):
            instance.window += 1
            tables, state = instance.pool.staging[instance.window & 1], instance.pool.rows
            for array in (tables.num_rows, tables.own.num_pages, tables.received.num_pages, state.live):
                array[:] = 0
            tables.num_rows[0] = len(rows[index])
            for row, request in enumerate(rows[index]):
                tables.own.fill(row, self._runs(request, index))
                state.token[row], state.position[row], state.live[row] = request.ids[-1], len(request.ids) - 1, True
            received = 0
            for peer in range(self.cluster.num_instances):
                sent = [rows[index].index(self.requests[number]) for number in q_route[index][peer]]
                tables.num_sent[peer] = len(sent)
                tables.send_row[peer, : len(sent)] = sent
                tables.num_received[peer] = len(res_route[index][peer])
                for number in res_route[index][peer]:
                    tables.received.fill(received, self._runs(self.requests[number], index))
                    received += 1
            instance.pool.upload(instance.window & 1)
            instance.pool.adopt(instance.window & 1)
        return rows

    def _runs(self, request, instance):
        return [PageRun(0, page, 1, frame) for page, (holder, frame) in enumerate(request.pages) if holder == instance]

    def _contexts(self):
        for instance in self.instances:
            tables = instance.pool.staging[instance.window & 1]
            bucket = self.buckets.lookup(int(tables.num_rows[0]), int(tables.num_received.sum()))
            yield instance, bucket

    def _run(self):
        if self.graphs is not None:
            for number, (_, bucket) in enumerate(self._contexts()):
                self.graphs[number][bucket]()
            torch.cuda.synchronize()
            return
        contexts = [(instance, instance.pool.context(bucket)) for instance, bucket in self._contexts()]
        run_in_turn(contexts)


def run_in_turn(contexts):
    """One eager step of every instance, each as far as it gets without its peers, in turn."""
    for instance, _ in contexts:
        instance.pool.start()
    steps = [instance.step.phases(context) for instance, context in contexts]
    while steps:
        steps = [step for step in steps if next(step, StopIteration) is not StopIteration]
