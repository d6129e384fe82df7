"""Instances with GPU steps in one process: under the interpreter, or on one GPU, eager or captured.

A stand-in for the scheduler places requests: their pages lie on any instance of a KV binding that
grows, and their MoE binding changes. Tokens are greedy. The same seed gives the same placements,
whatever runs the steps.
"""

import random
from dataclasses import dataclass, field
from functools import partial

import torch

from control_plane.scheduler.windows.routing import build_routes
from data_plane.attention.fp8_latent import quantise
from data_plane.attention.triton_gqa import TritonHeads
from data_plane.attention.triton_mla import TritonMla
from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.graph.cuda_graphs import CudaGraphs
from data_plane.graph.lane_parts import in_order, order_of_lanes
from data_plane.kv.carry_pool import CarryPool
from data_plane.kv.page_ring import copy_bytes
from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.weights import expert_range, load_weights
from data_plane.moe.backend import fp8_experts
from data_plane.moe.expert_weights import ExpertWeights
from data_plane.moe.fused.mixture import FusedMixtures
from data_plane.moe.gpu.gemm import TritonGemm
from data_plane.moe.gpu.gpu_weights import place_weights
from data_plane.startup.gpu_parts import gpu_parts
from data_plane.transport.gpu.peer_memory import PeerMemory
from harness.exact.reference_prefill import prefill_pages
from harness.gpu_stand_ins.cuda_stand_in import OneStream
from harness.gpu_stand_ins.weak_memory import apart
from harness.transports.random_tables import table_of
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.overlap.policies.orders import BEHIND_FIRST
from nanocp.values.experts import num_slots, place_experts
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.table_changes import PageRun

STATE_PAGE = 4096
"""Bytes of a page of a state."""
BOUNDS = BoundsConfig(max_rows=4, max_links=4, max_attention_rows=8, max_partials=8)


@dataclass
class Request:
    """A request: where it is placed, and its tokens so far."""

    ids: list
    moe_binding: int
    kv_binding: list
    pages: list = field(default_factory=list)
    """(holder, frame) of each page."""
    carry_frame: int = 0
    """Where its state of linear attention layers lies, at its MoE binding."""
    num_prompt: int = 0
    logits: list = field(default_factory=list)

    @property
    def output(self):
        return self.ids[self.num_prompt :]


class GpuInstance:
    """An instance that runs in this process: what it has on the device."""

    def __init__(self, parts, memory):
        self.step, self.frames, self.pool = parts.step, parts.frames, parts.pool
        self.exchange, self.places = parts.exchange, parts.places
        parts.exchange.attach(memory)
        self.window = -1


class GpuCluster:
    """Requests that are decoded together by instances with GPU steps.

    All instances run in this process, unless it is `one_of` many: then one does. num_redundant:
    slots for experts of instances that are lost; then experts are anywhere at first. policy: the
    order of both lanes' parts; None: one lane behind the other, or as a graph has it.
    """

    def __init__(
        self, checkpoint, num_instances=2, device="cpu", data_plane=None, bounds=BOUNDS,
        num_frames=24, max_len=512, seed=0, timeout_ms=1.0, num_parts=None, is_captured=False,
        one_of=None, num_lanes=1, num_redundant=0, policy=None,
    ):  # fmt: skip
        self.device, self.policy = torch.device(device), policy
        self.data_plane = data_plane or DataPlaneConfig()
        self.cluster = ClusterConfig(
            num_instances=num_instances,
            instances_per_node=num_instances,
            num_frames=num_frames,
            max_model_len=max_len,
            bounds=bounds,
            redundant_experts=num_redundant,
        )
        self.model = model = ModelConfig.from_folder(checkpoint)
        self.dtype = torch.bfloat16 if self.data_plane.dtype == "bfloat16" else torch.float32
        self.all_weights = load_weights(checkpoint, model, self.dtype, range(model.num_experts))
        self.one_of = one_of
        kind = model.attention
        if isinstance(kind, GqaConfig):
            attention = TritonHeads(kind.num_kv_heads, kind.head_dim, kind.num_heads, num_parts)
        else:
            attention = TritonMla(kind.kv_lora_rank, kind.rope_dim, kind.num_heads, num_parts)
        lanes = [{} for _ in range(num_lanes)]
        self.seats = list(range(num_instances))
        self.table = table_of(self.model, self.cluster, seed) if num_redundant else None
        """The expert table of the term; None: experts are at home."""
        self._held = {}
        """Instance -> what lets it hold the experts of a slot -> expert table."""
        slots = num_slots(model.num_experts, num_instances, num_redundant)
        for instance in self.seats if one_of is None else [one_of.instance]:
            experts = expert_range(model, instance, num_instances)
            gemm = TritonGemm()
            keeps_fp8, _ = fp8_experts(model, gemm, self.data_plane.dtype)
            packing = PlainPacking(keeps_fp8)
            weights = load_weights(checkpoint, model, self.dtype, experts, packing=packing)
            is_fused = self.data_plane.dispatch_backend == "fused"
            placed = place_weights(
                weights, self.device, gemm, max_len, is_fused, slots, is_alone=num_instances == 1
            )
            self._held[instance] = ExpertWeights(
                checkpoint, model, self.dtype, placed.weights, instance, packing, placed.put_expert
            )
            frames = None
            for lane in lanes:
                lane[instance] = gpu_parts(
                    self.cluster, self.data_plane, model, placed, attention, timeout_ms, is_fused,
                    frames,
                )  # fmt: skip
                if frames is None:
                    lane[instance].frames.carry = self._states(bounds.max_rows)
                frames = lane[instance].frames
        self.lanes = []
        """[lane][instance]: each lane has an exchange of its own."""
        for number, parts in enumerate(lanes):
            places = next(iter(parts.values())).places
            if one_of is None:
                make = partial(PeerMemory.create_all, device=self.device)
                memories = (apart if places.is_packed else make)(places)
            else:
                memories = [one_of.begin_term(number, [one_of.instance], places)]
            self.lanes.append({m.instance: GpuInstance(parts[m.instance], m) for m in memories})
        self.instances = self.lanes[0]
        for lane in self.lanes:
            for seat, instance in lane.items():
                self._place_experts(seat, instance)
        self.forget_requests(seed)
        self.buckets = BucketTable(
            bounds.max_rows, bounds.max_attention_rows, num_instances=num_instances
        )
        # Grids of instances on one card must fit on it together.
        self.num_programs = 16 if self.device.type == "cuda" else 1
        self._take_turns(True)
        self.graphs = self._capture() if is_captured else None
        if one_of is not None:
            self.begin_term(one_of.segments.term.number, self.seats)

    def _states(self, num_frames, device=None):
        """Room for states; None for a model without linear attention layers."""
        if self.model.delta is None:
            return None
        num_layers, device = len(self.model.linear_layers), device or self.device
        return CarryPool(
            self.model.delta, num_layers, num_frames, self.dtype, STATE_PAGE, device=device
        )

    def forget_requests(self, seed):
        """Begin with no request, and this seed."""
        num_frames = self.cluster.num_frames
        self.free = [
            [*range(0, num_frames, 2), *range(1, num_frames, 2)]
            for _ in range(self.cluster.num_instances)
        ]
        self.free_states = [set(range(self.cluster.bounds.max_rows)) for _ in self.free]
        self.requests, self.random, self.num_moved = [], random.Random(seed), 0

    def add(self, ids, degree):
        """Prefill all but the last token, over `degree` instances."""
        kv_binding = self.random.sample(self.seats, degree)
        request = Request(list(ids), kv_binding[0], kv_binding, num_prompt=len(ids))
        num_tokens = len(ids) - 1
        state = self._states(1, "cpu")
        pages = prefill_pages(self.all_weights, self.model, ids, num_tokens, 128, carry=state)
        for page, kv_LSD in pages:
            holder, frame = self._allocate(request)
            if holder not in self.instances:
                continue
            if self.data_plane.kv_dtype == "fp8":
                kv_LSD = quantise(kv_LSD, self.model.attention.kv_lora_rank)
            payload = kv_LSD.contiguous().view(torch.uint8).flatten()
            count = min(PAGE_SIZE, num_tokens - page * PAGE_SIZE)
            self.instances[holder].frames.write_payload(frame, count, payload)
        if state is not None:
            self._give_state(request, state, 0)
        self.requests.append(request)

    def add_drawn(self, lengths, degrees):
        """Add a random prompt of each length; the same ones on every machine."""
        generator, most = torch.Generator().manual_seed(1), self.model.vocab_size
        for length, degree in zip(lengths, degrees, strict=True):
            self.add(torch.randint(2, most, (length,), generator=generator).tolist(), degree)

    def assert_exact(self, oracle):
        """Raise AssertionError unless every token is the reference's."""
        for request in self.requests:
            verdict = oracle.judge(request.ids[: request.num_prompt], request.output)
            assert verdict.exact, (request.num_prompt, verdict, request.pages)

    def _give_state(self, request, source, frame):
        """Copy a state to the request's MoE binding."""
        request.carry_frame = self.free_states[request.moe_binding].pop()
        states = self.instances[request.moe_binding].frames.carry
        copy_state(states, request.carry_frame, source, frame)

    def submit_again(self, request):
        """Prefill a request that has lost pages, over the instances of the term, and go on."""
        self.requests.remove(request)
        self.add(request.ids, min(2, len(self.seats)))
        self.requests[-1].num_prompt = request.num_prompt

    def begin_term(self, number, seats):
        """Let these instances go on: with other memory, and the experts of those that do not."""
        self.seats = list(seats)
        total, num = self.model.num_experts, self.cluster.num_instances
        redundant = self.cluster.redundant_experts
        self.table = place_experts(total, num, redundant, seats, self.table) if total else None
        for lane_number, lane in enumerate(self.lanes):
            places = next(iter(lane.values())).places
            if self.one_of is None:
                memories = PeerMemory.create_all(places, self.device, seats)
            else:
                self.one_of.segments.term.number = number
                memories = [self.one_of.begin_term(lane_number, seats, places)]
            for memory in memories:
                instance = lane[memory.instance]
                self._place_experts(memory.instance, instance)
                instance.step.meet([seat for seat in seats if seat != memory.instance])
                instance.exchange.attach(memory, number)

    def _place_experts(self, seat, instance):
        if self.table is not None:
            self._held[seat].load(self.table)
            instance.step.place_experts(self.table)

    def phases(self, instance, context):
        """Run a step of an instance; see GpuStep.phases."""
        return instance.step.phases(context)

    def step(self):
        """Decode one token of every request."""
        rows_of_lanes = self.stage()
        self._run()
        self._commit(rows_of_lanes)

    def stage(self):
        """Place requests for a step and fill its tables; return every lane's rows by instance."""
        for request in self.requests:
            if self.random.random() < 0.2:
                request.kv_binding = sorted({*request.kv_binding, self.random.choice(self.seats)})
            if (len(request.ids) - 1) // PAGE_SIZE == len(request.pages):
                self._allocate(request)
            if self.random.random() < 0.3:
                moe_binding = self.random.choice(request.kv_binding)
                self.num_moved += moe_binding != request.moe_binding
                source, request.moe_binding = request.moe_binding, moe_binding
                if source != moe_binding and self.model.delta is not None:
                    self.free_states[source].add(frame := request.carry_frame)
                    self._give_state(request, self.instances[source].frames.carry, frame)
        return [self._stage(number) for number in range(len(self.lanes))]

    def _commit(self, rows_of_lanes):
        for lane, rows in zip(self.lanes, rows_of_lanes, strict=True):
            found = {}
            for index in self.seats:
                if index in lane:
                    lane[index].step.check()
                    number = len(rows[index])
                    found[index] = lane[index].step.logits_of(list(range(number))).cpu()
            if self.one_of is not None:
                everybodys = self.one_of.gather(found, self.seats)
                found = {index: logits for own in everybodys for index, logits in own.items()}
            for index, requests in enumerate(rows):
                for request, logits_V in zip(requests, found.get(index, ()), strict=True):
                    request.logits.append(logits_V)
                    request.ids.append(int(logits_V.argmax()))

    def _allocate(self, request):
        holder = request.kv_binding[len(request.pages) % len(request.kv_binding)]
        request.pages.append((holder, self.free[holder].pop(0)))
        return request.pages[-1]

    def _stage(self, lane):
        """Fill a lane's tables, as DecodeInstance does; return every instance's rows of the lane.

        Requests are in the lanes by turns.
        """
        here = {n: r for n, r in enumerate(self.requests) if n % len(self.lanes) == lane}
        bindings = [(number, r.moe_binding, tuple(r.kv_binding)) for number, r in here.items()]
        q_route, res_route = build_routes(bindings, self.cluster.num_instances)
        rows = [
            [r for r in here.values() if r.moe_binding == i]
            for i in range(self.cluster.num_instances)
        ]
        for index, instance in self.lanes[lane].items():
            instance.window += 1
            tables, state = instance.pool.staging[instance.window & 1], instance.pool.rows
            for array in (
                tables.num_rows,
                tables.own.num_pages,
                tables.received.num_pages,
                state.live,
            ):
                array[:] = 0
            tables.num_rows[0] = len(rows[index])
            for row, request in enumerate(rows[index]):
                tables.own.fill(row, self._runs(request, index))
                tables.carry_frame[row] = request.carry_frame
                state.token[row], state.position[row], state.live[row] = (
                    request.ids[-1],
                    len(request.ids) - 1,
                    True,
                )
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
        return rows

    def _runs(self, request, instance):
        return [
            PageRun(request_id=0, first_page=page, num_pages=1, frame=frame)
            for page, (holder, frame) in enumerate(request.pages)
            if holder == instance
        ]

    def _take_turns(self, takes_turns):
        """Say whether a launch of a fused mixture may wait for peers; all share this device."""
        for instance in (instance for lane in self.lanes for instance in lane.values()):
            mixture = instance.step.mixture
            if isinstance(mixture, FusedMixtures):
                # Nothing can be read from a device that only compiles.
                mixture.takes_turns = takes_turns and self.device.type != "meta"
                mixture.fused.num_programs = self.num_programs

    def _capture(self):
        """Capture all graphs: {instance: {bucket: what replays its graph}}."""
        captures = {}
        for index in self.instances:
            lanes = ((lane[index].pool, lane[index].step) for lane in self.lanes)
            captures[index] = CudaGraphs(*lanes, policies=[self.policy or BEHIND_FIRST])
        # Work around a graph waits for it, so each instance has a stream of its own for that.
        self.streams = {index: torch.cuda.Stream(self.device) for index in self.instances}
        graphs = {index: {} for index in self.instances}
        for bucket in self.buckets.all():
            contexts = {
                index: [lane[index].pool.context(bucket) for lane in self.lanes]
                for index in self.instances
            }
            # In one stream and in turn no wait spins, so that kernels can be loaded on the way.
            for number, lane in enumerate(self.lanes):
                run_in_turn([(lane[index], of[number]) for index, of in contexts.items()])
            torch.cuda.synchronize(self.device)
            self._take_turns(False)
            for index, of_lanes in contexts.items():
                graphs[index][bucket] = captures[index].capture(*of_lanes)
            self._take_turns(True)
        self.captures = list(captures.values())
        return graphs

    def _run(self):
        if self.graphs is None:
            in_turn(self.begin() if self.policy is None else [*self._in_order()])
            return
        for index in self.instances:
            lanes, bucket = self._lanes_of(index)
            with torch.cuda.stream(self.streams[index]):
                for instance in lanes:
                    instance.pool.adopt(instance.window & 1)
                self.graphs[index][bucket]()
        torch.cuda.synchronize(self.device)

    def begin(self):
        """Begin an eager step of the term's instances; return their phases, lane by lane."""
        instances = [lane[seat] for lane in self.lanes for seat in self.seats if seat in lane]
        contexts = []
        for instance in instances:
            instance.pool.adopt(instance.window & 1)
            instance.pool.start()
            contexts.append(instance.pool.context(self._bucket(instance)))
        return [self.phases(*each) for each in zip(instances, contexts, strict=True)]

    def _lanes_of(self, index):
        """An instance's lanes, and the smallest bucket for all of them."""
        lanes = [lane[index] for lane in self.lanes]
        held = [self._bucket(instance) for instance in lanes]
        return lanes, Bucket(
            max(each.num_rows for each in held),
            max(each.num_received for each in held),
            has_links=any(each.has_links for each in held),
        )

    def _in_order(self):
        """Begin an eager step of every instance, as a graph has it."""
        for index in self.seats:
            lanes, bucket = self._lanes_of(index)
            order = order_of_lanes(lanes[0].step.tags, len(lanes), self.policy)
            steps = []
            for each in lanes:
                each.pool.adopt(each.window & 1)
                each.pool.start()
                steps.append(self.phases(each, each.pool.context(bucket)))
            yield in_order(steps, order, OneStream())

    def _bucket(self, instance):
        tables = instance.pool.staging[instance.window & 1]
        received = int(tables.num_received.sum())
        has_links = bool(received or tables.num_sent.any())
        return self.buckets.lookup(int(tables.num_rows[0]), received, has_links=has_links)


def copy_state(to, frame, source, source_frame):
    """Copy a state from one pool to another."""
    for number in range(source.frame_bytes // STATE_PAGE):
        copy_bytes(source.page(source_frame, number), to.page(frame, number))


def run_in_turn(contexts):
    """Run an eager step of every instance: in turn, each as far as it gets without its peers."""
    for instance, _ in contexts:
        instance.pool.start()
    in_turn([instance.step.phases(context) for instance, context in contexts])


def in_turn(steps):
    """Run a list of generators in turn to their ends."""
    while steps:
        steps = [step for step in steps if next(step, StopIteration) is not StopIteration]
