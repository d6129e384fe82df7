"""Instances in one process that exchange rows by the GPU's kernels: interpreted, or on one GPU."""

import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from control_plane.scheduler.windows.routing import build_routes
from data_plane.moe.gpu.all_to_all_gpu import GpuExpertExchange
from data_plane.moe.gpu.pairs import lay_out
from data_plane.startup.experimental.nvshmem import NvshmemMemory, load_nvshmem
from data_plane.startup.experimental.nvshmem_put import forwarding_module
from data_plane.transport.exchange import Channel, Field
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.cuda_runtime import load_runtime
from data_plane.transport.gpu.ipc_memory import IpcMemory
from data_plane.transport.gpu.peer_memory import FAR, PeerMemory, RegionPlaces
from data_plane.transport.regions import mixture_layout
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig

POISON = 0xA5


class Widths(NamedTuple):
    """The widths of what a row carries. With an odd `kv`, its bytes are no multiple of 4."""

    q: int = 6
    kv: int = 3
    heads: int = 2
    value: int = 5


NARROW = Widths()


def layout(num_slots, widths):
    """Lay a region out as the data plane does."""
    return {
        Channel.Q: (Field("position", "int64", (num_slots,)),
                    Field("live", "bool", (num_slots,)),
                    Field("q", "uint16", (num_slots, widths.q)),
                    Field("kv", "uint16", (num_slots, widths.kv))),
        Channel.RES: (Field("partial", "uint16", (num_slots, widths.heads, widths.value)),
                      Field("lse", "float32", (num_slots, widths.heads))),
    }  # fmt: skip


NUM_EXPERTS, PER_ROW, HIDDEN = 2, 2, 8
"""Experts of an instance, experts of a row, width of a hidden state."""


def expert_layout(max_rows):
    """Lay out the regions of dispatch and combine."""
    return mixture_layout(max_rows, PER_ROW, HIDDEN, "float32")


class Twice:
    """Experts that double their rows."""

    num_here = NUM_EXPERTS

    def run_pairs(self, pairs):
        x_ESX, _ = lay_out(pairs.x, pairs.count_E, pairs.row_ES.shape[1], pairs)
        return 2 * x_ESX.flatten(0, 1)


def random_requests(num_instances, num_slots, num_requests, generator, max_rows=8):
    """Draw (id, MoE binding, KV binding) of requests, within the bounds of links and rows."""
    requests, links, rows = [], {}, [0] * num_instances
    for number in range(num_requests):
        owner, degree = torch.randint(num_instances, (2,), generator=generator).tolist()
        others = torch.randperm(num_instances, generator=generator).tolist()[: degree + 1]
        kv_binding = sorted(
            other for other in {owner, *others} if links.get((owner, other), 0) < num_slots
        )
        if rows[owner] == max_rows:
            continue
        rows[owner] += 1
        for other in kv_binding:
            links[owner, other] = links.get((owner, other), 0) + (other != owner)
        requests.append((number, owner, tuple(kv_binding)))
    return requests


class ExchangeCase:
    """Tables and rows of several instances, in buffers that stay where they are.

    So a captured layer can be replayed with other rows. own_memory: makes the memories of the
    instances that run here, RegionPlaces -> [PeerMemory]; by default all run here. has_experts: a
    layer has a dispatch and a combine too.
    """

    def __init__(
        self, num_instances, num_slots, widths=NARROW, device="cpu", timeout_ms=0.01, max_rows=8,
        own_memory=None, has_experts=False, is_packed=False,
    ):  # fmt: skip
        self.num_instances, self.num_slots, self.max_rows = num_instances, num_slots, max_rows
        self.layout = layout(num_slots, widths) | (expert_layout(max_rows) if has_experts else {})
        self.places = RegionPlaces(self.layout, num_instances, is_packed)
        memories = (
            own_memory or (lambda places: PeerMemory.create_all(places, torch.device(device)))
        )(self.places)
        self.members = {}
        for memory in memories:
            self.members[memory.instance] = GpuExchange(
                self.places, torch.device(device), timeout_ms
            )
            self.members[memory.instance].attach(memory)
        self.all_to_all, self.experts = {}, {}
        if has_experts:
            for index, member in self.members.items():
                self.experts[index] = Twice()
                self.all_to_all[index] = GpuExpertExchange(
                    member,
                    num_instances=num_instances,
                    num_here=NUM_EXPERTS,
                    max_rows=max_rows,
                    device=torch.device(device),
                )
        self.x, self.y, self.weight = (
            torch.zeros(num_instances, max_rows, width, device=device)
            for width in (HIDDEN, HIDDEN, PER_ROW)
        )
        self.expert = torch.zeros(
            num_instances, max_rows, PER_ROW, dtype=torch.int64, device=device
        )
        self.live = torch.zeros(num_instances, max_rows, dtype=torch.bool, device=device)
        shape = num_instances, NUM_EXPERTS
        self.load = torch.zeros(shape, dtype=torch.int64, device=device)
        self.dispatched = {}
        count = num_instances * num_slots

        def tensors(channel, rows):
            fields = self.layout[channel]
            return [
                {
                    f.name: torch.zeros(
                        rows, *f.shape[1:], dtype=getattr(torch, f.dtype), device=device
                    )
                    for f in fields
                }
                for _ in range(num_instances)
            ]

        self.own, self.received = tensors(Channel.Q, max_rows), tensors(Channel.Q, count)
        self.partial, self.returned = tensors(Channel.RES, count), tensors(Channel.RES, count)
        self.num_sent = torch.zeros(num_instances, num_instances, dtype=torch.int32, device=device)
        self.num_received = torch.zeros_like(self.num_sent)
        self.send_row = torch.zeros(
            num_instances, num_instances, num_slots, dtype=torch.int32, device=device
        )

    def random_requests(self, num_requests, generator):
        """Draw requests within this case's bounds."""
        return random_requests(
            self.num_instances, self.num_slots, num_requests, generator, self.max_rows
        )

    def fill(self, requests, generator):
        """Fill in the routes of requests, and random rows; memory to be written holds poison."""
        self.q_route, res_route = build_routes(requests, self.num_instances)
        self.row_of = {}
        for owner in range(self.num_instances):
            self.row_of |= {
                i: row for row, i in enumerate(i for i, binding, _ in requests if binding == owner)
            }
        self.num_sent.copy_(torch.tensor([[len(ids) for ids in peers] for peers in self.q_route]))
        self.num_received.copy_(torch.tensor([[len(ids) for ids in peers] for peers in res_route]))
        table = torch.full(self.send_row.shape, 2_147_480_000, dtype=torch.int32)
        for owner, peers in enumerate(self.q_route):
            for peer, ids in enumerate(peers):
                table[owner, peer, : len(ids)] = torch.tensor(
                    [self.row_of[i] for i in ids], dtype=torch.int32
                )
        self.send_row.copy_(table)
        for tensor in (t for fields in (*self.own, *self.partial) for t in fields.values()):
            high = 2 if tensor.dtype == torch.bool else 256
            raw = torch.randint(high, (tensor.nbytes,), generator=generator, dtype=torch.uint8)
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
        for instance in range(self.num_instances):
            self.forget(instance)
        # In each layer other rows visit other experts; of some instances, no row does.
        for tensor in (self.x, self.weight):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        everybody = torch.rand(
            *self.expert.shape[:2], self.num_instances * NUM_EXPERTS, generator=generator
        )
        self.expert.copy_(everybody.argsort(dim=-1)[..., :PER_ROW])
        is_idle = torch.rand(self.num_instances, 1, generator=generator) < 0.4
        self.live.copy_((torch.rand(self.live.shape, generator=generator) < 0.7) & ~is_idle)

    def forget(self, instance):
        """Let memory that is to be written hold poison."""
        for fields in (self.received[instance], self.returned[instance]):
            for tensor in fields.values():
                tensor.view(torch.uint8).fill_(POISON)

    def phases(self):
        """List what an instance does in a layer, in this order."""
        q, res = Channel.Q, Channel.RES
        return [
            lambda i: self.members[i].put(q, self.own[i], self.num_sent[i], self.send_row[i]),
            lambda i: self.members[i].wait(q, self.num_received[i]),
            lambda i: self.members[i].take(q, self.num_received[i], self.received[i]),
            lambda i: self.members[i].put(res, self.partial[i], self.num_received[i]),
            lambda i: self.members[i].wait(res, self.num_sent[i]),
            lambda i: self.members[i].take(res, self.num_sent[i], self.returned[i]),
            *((self._dispatch, self._run_experts, self._combine) if self.all_to_all else ()),
        ]

    def _dispatch(self, i):
        # Each expert is in the slot of its number.
        number = self.expert[i].masked_fill(~self.live[i][:, None], -1)
        self.dispatched[i] = self.all_to_all[i].dispatch(self.x[i], number, self.weight[i])

    def _run_experts(self, i):
        self.all_to_all[i].receive(self.dispatched[i])
        self.all_to_all[i].run_experts(self.dispatched[i], self.experts[i], self.load[i])

    def _combine(self, i):
        x_BX = torch.zeros_like(self.x[i])
        self.all_to_all[i].receive_sums(self.dispatched[i])
        y_BX, _ = self.all_to_all[i].combine(self.dispatched[i], x_BX, None, x_BX[0], 1.0)
        self.y[i].copy_(y_BX)

    def run_layer(self):
        """Run a layer of all instances that are here, phase by phase, in turn."""
        for phase in self.phases():
            for instance in self.members:
                phase(instance)

    def check(self):
        """Raise AssertionError unless rows are where routes say, and nothing else was written."""
        for j, member in self.members.items():
            member.check()
            self.check_member(j, self)

    def check_member(self, j, sent):
        """Check what member j has of a layer, whose rows and routes `sent` has."""
        everyone = range(self.num_instances)
        firsts = [sum(len(sent.q_route[s][i]) for s in range(j)) for i in everyone]
        came = [(i, sent.row_of[request]) for i in everyone for request in sent.q_route[i][j]]
        _assert_rows(
            self.received[j], [{n: t[row] for n, t in sent.own[i].items()} for i, row in came]
        )
        back = [(i, firsts[i] + slot) for i in everyone for slot in range(len(sent.q_route[j][i]))]
        _assert_rows(
            self.returned[j], [{n: t[row] for n, t in sent.partial[i].items()} for i, row in back]
        )
        if self.all_to_all:
            expected = (
                2 * sent.x[j] * sent.weight[j].sum(dim=1, keepdim=True) * sent.live[j][:, None]
            )
            torch.testing.assert_close(self.y[j], expected, msg=lambda text: f"combined: {text}")


def _assert_rows(fields, expected):
    for name, tensor in fields.items():
        raw = tensor.view(torch.uint8).cpu().reshape(len(tensor), -1)
        for row, values in enumerate(expected):
            assert raw[row].equal(values[name].contiguous().view(-1).view(torch.uint8).cpu()), (
                name,
                row,
            )
        assert (raw[len(expected) :] == POISON).all(), name


def shared_files(places, folder, instance):
    """Map a file of zeros for each instance: the PeerMemory of a process on the CPU."""
    files = [f"{folder}/memory-{index}" for index in range(places.num_instances)]
    mapped = [
        torch.from_file(f, shared=True, size=places.num_bytes, dtype=torch.uint8) for f in files
    ]
    addresses = [memory.data_ptr() for memory in mapped]
    return PeerMemory(instance, addresses, mapped[instance], mapped)


def run_slowly(instance, num_instances, folder, num_layers):
    """Do run_process's work under the interpreter, with delays at random places of layers."""
    pause = random.Random(instance)
    case = ExchangeCase(
        num_instances, 2, timeout_ms=50,
        own_memory=lambda places: [shared_files(places, folder, instance)], has_experts=True,
        max_rows=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_layers):
        case.fill(case.random_requests(4, generator), generator)
        for phase in case.phases():
            if pause.random() < 0.02:
                # Longer than a layer takes for a peer that need not wait.
                time.sleep(0.3 * pause.random())
            phase(instance)
        case.check()


def run_process(instance, num_instances, store_path, device, num_layers, by_nvshmem=False):
    """Run one instance in this process, with its peers in others, all on one GPU.

    Every process draws the same rows. by_nvshmem: NVSHMEM puts, as if each had a node of its own.
    """
    store = dist.FileStore(store_path, num_instances)
    dist.init_process_group("gloo", store=store, rank=instance, world_size=num_instances)
    segments = Segments(Path(store_path).parent.name)
    memories, limits, nvshmem = [], LimitsConfig(), None
    if by_nvshmem:
        # NCCL refuses two processes on a card, and no NIC is looked for.
        os.environ.update(NVSHMEM_DISABLE_NCCL="1", NVSHMEM_REMOTE_TRANSPORT="none")
        torch.cuda.set_device(device)
        nvshmem = load_nvshmem("127.0.0.1:0")

    def own_memory(places):
        if nvshmem is not None:
            memories.append(
                NvshmemMemory(nvshmem, segments, instance, places, limits, torch.device(device))
            )
        else:
            runtime = load_runtime(torch.device(device).index or 0)
            memories.append(IpcMemory(runtime, segments, 0, instance, places, limits))
        memory = memories[0].begin_term(range(num_instances))
        if nvshmem is not None:
            own = memory.addresses[instance]
            memory.addresses = [own if i == instance else FAR for i in range(num_instances)]
        return [memory]

    try:
        case = ExchangeCase(
            num_instances, 4, device=device, timeout_ms=10_000, own_memory=own_memory,
            has_experts=True, is_packed=by_nvshmem,
        )  # fmt: skip
        if nvshmem is not None:
            nvshmem.initialise(forwarding_module(case.members[instance]))
            dist.barrier()
        generator = torch.Generator().manual_seed(0)
        for _ in range(num_layers):
            case.fill(case.random_requests(12, generator), generator)
            case.run_layer()
            case.check()
        dist.barrier()  # no process unmaps what others still write
    finally:
        for memory in memories:
            memory.leave()
        dist.destroy_process_group()
