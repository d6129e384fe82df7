"""Networks between instances of one process: NVSHMEM's calls, delivered as late as it allows.

Interpreted kernels call NVSHMEM's functions, which become writes that wait here. Each is delivered
during a wait or, if the seed says so, before any read of memory.
"""

import random
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from data_plane.moe.gpu import pairs
from data_plane.transport.gpu import cuda_ipc
from data_plane.transport.gpu.peer_memory import FAR, PeerMemory
from harness.transports.exchange_cases import ExchangeCase

SET = 9
NUM_THREADS = 128
CHUNKS = (16, 64, 256, 4096)


class Misuse(Exception):
    """A call that no network promises anything for."""


class Write:
    """Bytes, or a signal, on their way."""

    def __init__(self, run, caller, after, is_signal):
        self.run, self.caller, self.after = run, caller, list(after)
        self.is_signal, self.is_done = is_signal, False

    def is_ready(self):
        """Whether everything that comes first has been delivered."""
        return all(write.is_done for write in self.after)


class WeakMemory:
    """The memory of instances, and what is on its way between them.

    Of each put, the bytes come before its own signal. Nothing else is in order, unless the caller
    has fenced; or, with `by_threads`, unless one thread wrote both: the model of peers' memory.
    order: any, or oldest or newest: then signals come first, and bytes as late as they may.
    """

    def __init__(self, memories, seed, order="any", by_threads=False):
        self.memories = memories
        self.random, self.order, self.by_threads = random.Random(seed), order, by_threads
        self.read_rate = self.random.choice((0, 0.02, 0.3)) if order == "any" else 0
        """How often something arrives before a read."""
        self.pending = []
        self.held = set()
        """Callers whose writes do not arrive yet."""
        self.counts = {"layers": 0, "writes": 0}
        self._last_caller = None
        """Who made the last call: a fence does not say whose it is."""
        self._fenced = defaultdict(list)
        self._of_thread = {}

    # --- what kernels call

    def call(self, symbol, arguments):
        """Do what the library's function of this name does."""
        values = [int(handle.data.reshape(-1)[0]) for handle in arguments]
        name = symbol.removeprefix("nvshmemx_").removeprefix("nvshmem_").removesuffix("_block")
        if name == "fence":
            own = [write for write in self.pending if write.caller == self._last_caller]
            self._fenced[self._last_caller] = own
        elif name == "signal_op":
            # A call with scalars alone is made by every thread.
            for thread in range(NUM_THREADS):
                self._signal(*values, after=(), thread=thread)
        elif name.startswith("putmem"):
            to, source, num_bytes, *signal = values
            if "signal" not in name:
                (pe,), signal = signal, []
            else:
                pe = signal[-1]
            written = self._put(to, source, num_bytes, pe, is_read_later="nbi" in name)
            if signal:
                self._signal(*signal, after=written, thread=0)
        else:
            raise NotImplementedError(symbol)

    def _put(self, to, source, num_bytes, pe, is_read_later):
        caller, offset = self._symmetric(to)
        _, from_offset = self._symmetric(source)
        if num_bytes <= 0:
            raise Misuse("a put of no bytes")
        memory = self.memories[caller].memory.numpy()
        data = memory[from_offset : from_offset + num_bytes]
        data = data if is_read_later else data.copy()
        target = self.memories[pe].memory.numpy()[offset : offset + num_bytes]
        written, begin = [], 0
        while begin < num_bytes:
            end = min(num_bytes, begin + self.random.choice(CHUNKS))
            written.append(self._chunk(target, data, begin, end, caller, len(written)))
            begin = end
        return written

    def _chunk(self, target, data, begin, end, caller, number):
        def run():
            target[begin:end] = data[begin:end]

        return self._add(run, caller, number % NUM_THREADS, ())

    def _signal(self, signal, value, operation, pe, after, thread):
        caller, offset = self._symmetric(signal)
        word = self.memories[pe].memory.numpy()[offset : offset + 8].view(np.int64)

        def run():
            word[0] = value if operation == SET else word[0] + value

        self._add(run, caller, thread, after, is_signal=True)

    def _add(self, run, caller, thread, after, is_signal=False):
        first = [*after, *self._fenced[caller]]
        if self.by_threads and (caller, thread) in self._of_thread:
            first.append(self._of_thread[caller, thread])
        write = Write(run, caller, first, is_signal)
        self._of_thread[caller, thread] = write
        self.pending.append(write)
        return write

    def _symmetric(self, address):
        """The instance whose memory has the address, and the offset in it."""
        for instance, peer in self.memories.items():
            offset = address - peer.memory.data_ptr()
            if 0 <= offset < peer.memory.nbytes:
                self._last_caller = instance
                return instance, offset
        raise Misuse(f"{address:#x} is in nobody's symmetric memory")

    # --- when it arrives

    def deliver(self, most=1):
        """Deliver up to so many writes that may come now."""
        for _ in range(most):
            ready = [
                write
                for write in self.pending
                if write.is_ready() and write.caller not in self.held
            ]
            if not ready:
                return
            if self.order == "any":
                write = self.random.choice(ready)
            else:
                first = [write for write in ready if write.is_signal] or ready
                write = first[-1 if self.order == "newest" else 0]
            self.pending.remove(write)
            write.run()
            write.is_done = True
            self.counts["writes"] += 1

    def read(self):
        """Somebody reads memory: something may arrive first."""
        if self.pending and self.random.random() < self.read_rate:
            self.deliver(self.random.randint(1, 3))


def calls(symbol, kinds):
    """Declare a function of NVSHMEM for interpreted kernels, as nvshmem_put declares one.

    kinds: of its arguments, q for int64 and i for int32. An int that a kernel gives becomes that.
    """
    from triton.language import core
    from triton.runtime.interpreter import interpreter_semantic

    types = tuple(core.int64 if kind == "q" else core.int32 for kind in kinds)

    def call(*arguments):
        semantic = interpreter_semantic
        tensors = [semantic.to_tensor(getattr(a, "value", a)) for a in arguments]
        values = [semantic.cast(t, kind) for t, kind in zip(tensors, types, strict=True)]
        handles = [value.handle for value in values]
        semantic.builder.create_extern_elementwise("", "", symbol, handles, None, False)

    return call


@contextmanager
def network(weak):
    """Let interpreted kernels call NVSHMEM over this memory."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle, interpreter_semantic

    from data_plane.startup.experimental import nvshmem_put

    declared = nvshmem_put._put_signal_block
    extern, load, access = (
        Builder.create_extern_elementwise,
        Builder.create_masked_load,
        Builder.create_atomic_rmw,
    )

    def call(self, _name, _path, symbol, arguments, _type, _is_pure):
        weak.call(symbol, arguments)
        return TensorHandle(np.zeros(1, np.int32), tl.int32)

    def reading(self, *args):
        weak.read()
        return load(self, *args)

    def polling(self, *args):
        weak.deliver()
        return access(self, *args)

    # Only functions of Triton's own modules get the interpreter by themselves.
    nvshmem_put._put_signal_block = partial(declared, _semantic=interpreter_semantic)
    Builder.create_extern_elementwise = call
    Builder.create_masked_load = reading
    Builder.create_atomic_rmw = polling
    try:
        yield weak
    finally:
        nvshmem_put._put_signal_block = declared
        Builder.create_extern_elementwise = extern
        Builder.create_masked_load = load
        Builder.create_atomic_rmw = access


def apart(places, node_of=None):
    """Make the memory of all instances; stores reach those of the same node alone.

    node_of: the node of each; None: each has its own.
    """
    everyone = range(places.num_instances)
    from data_plane.startup.experimental.nvshmem_put import put_far

    node_of = node_of or everyone
    made = [torch.zeros(places.num_bytes, dtype=torch.uint8) for _ in everyone]
    return [
        PeerMemory(
            i,
            [made[j].data_ptr() if node_of[i] == node_of[j] else FAR for j in everyone],
            made[i],
            put_far=put_far,
        )
        for i in everyone
    ]


class Snapshot:
    """The rows and routes of a layer of a case, which the case itself no longer has."""

    TENSORS = ("x", "weight", "expert", "live", "num_sent", "num_received", "send_row")
    FIELDS = ("own", "partial")

    def __init__(self, case):
        for name in self.TENSORS:
            setattr(self, name, getattr(case, name).clone())
        for name in self.FIELDS:
            fields = [{n: t.clone() for n, t in each.items()} for each in getattr(case, name)]
            setattr(self, name, fields)
        self.q_route, self.row_of = case.q_route, case.row_of

    def give(self, case, i):
        """Give instance i of the case its rows and routes of this layer."""
        for name in self.TENSORS:
            getattr(case, name)[i].copy_(getattr(self, name)[i])
        for name in self.FIELDS:
            for field, tensor in getattr(self, name)[i].items():
                getattr(case, name)[i][field].copy_(tensor)
        case.forget(i)


PUT_Q, WAIT_Q, _, PUT_RES, WAIT_RES, _, DISPATCH, EXPERTS, COMBINE = range(9)


MODELS = [
    {"order": order, "by_threads": by_threads}
    for order in ("any", "oldest", "newest")
    for by_threads in (False, True)
]
NUM_LAYERS = 3
"""The third layer is the first that writes a region again."""


def run_layers(seed):
    """Run layers of instances that are as far apart in time as their waits let them be."""
    draw, model = random.Random(seed), MODELS[seed % len(MODELS)]
    num_instances, num_layers = draw.choice((2, 2, 3)), NUM_LAYERS
    nodes = draw.randint(2, num_instances)
    node_of = [*range(nodes), *(draw.randrange(nodes) for _ in range(num_instances - nodes))]
    case = ExchangeCase(
        num_instances, 2, timeout_ms=20, max_rows=4,
        own_memory=lambda places: apart(places, node_of), has_experts=True, is_packed=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(num_layers):
        case.fill(case.random_requests(draw.randint(0, 5), generator), generator)
        layers.append(Snapshot(case))
    phases = case.phases()
    done = [0] * num_instances
    """Phases that each instance has run, of all layers."""
    weak = WeakMemory({i: member.memory for i, member in case.members.items()}, seed, **model)

    def may_run(i):
        number, phase = divmod(done[i], len(phases))
        layer, begin = layers[number], number * len(phases)
        if phase == WAIT_Q:
            awaited, what = layer.num_received[i], PUT_Q
        elif phase == WAIT_RES:
            awaited, what = layer.num_sent[i], PUT_RES
        elif phase == EXPERTS:
            awaited, what = torch.ones(num_instances), DISPATCH
        elif phase == COMBINE:
            awaited, what = case.dispatched[i].count_N, EXPERTS
        else:
            return True
        return all(done[j] > begin + what for j in range(num_instances) if awaited[j])

    # Few programs a launch: the interpreter runs them one after the other.
    few = patch.object(pairs, "_NUM_GATHERERS", 2), patch.object(cuda_ipc, "_MAX_PROGRAMS", 2)
    with network(weak), few[0], few[1]:
        while any(count < num_layers * len(phases) for count in done):
            ready = [
                i for i in range(num_instances) if done[i] < num_layers * len(phases) and may_run(i)
            ]
            i = draw.choice(ready)
            number, phase = divmod(done[i], len(phases))
            if phase == PUT_Q:
                layers[number].give(case, i)
            phases[phase](i)
            case.members[i].check()
            done[i] += 1
            if phase == COMBINE:
                case.check_member(i, layers[number])
                weak.counts["layers"] += 1
    return weak
