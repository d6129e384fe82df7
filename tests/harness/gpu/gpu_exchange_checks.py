"""Checks of the exchange between GPUs: instances in turn, captured, and in two processes."""

import tempfile

import torch

from data_plane.transport.exchange import Channel, ExchangeTimeout
from harness.transports.exchange_cases import ExchangeCase, Widths, run_process

FULL_WIDTHS = Widths(q=1536, kv=576, heads=128, value=128)
"""The widths of DeepSeek-V3 in the latent form."""


def exchange_checks(device, num_instances, num_slots, widths):
    """Yield (name, check) of what needs no streams."""

    def in_turn(is_packed=False):
        case = ExchangeCase(
            num_instances, num_slots, widths, device, 1000, has_experts=True, is_packed=is_packed
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            case.fill(case.random_requests(2 * num_slots, generator), generator)
            case.run_layer()
            case.check()

    def nothing_comes():
        case = ExchangeCase(2, 2, widths, device, timeout_ms=0.01)
        case.fill([(0, 0, (0, 1))], torch.Generator().manual_seed(1))
        case.members[1].wait(Channel.Q, case.num_received[1])
        try:
            case.members[1].check()
        except ExchangeTimeout:
            return
        raise AssertionError("a wait for what was never put had no error")

    yield "routed exchange, instances in turn", in_turn
    yield "routed exchange, packed rows", lambda: in_turn(is_packed=True)
    yield "routed exchange, a flag that does not come", nothing_comes


def captured_exchange():
    """Each instance's layer is a graph on a stream of its own, replayed with ever new tables."""
    case = ExchangeCase(4, 16, FULL_WIDTHS, "cuda", timeout_ms=1000, max_rows=32, has_experts=True)
    generator = torch.Generator().manual_seed(2)
    case.fill(case.random_requests(60, generator), generator)
    # A kernel that is loaded while another one spins may wait for it: all are loaded before.
    case.run_layer()
    case.check()
    graphs = []
    for instance in case.members:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for phase in case.phases():
                phase(instance)
        graphs.append((graph, stream))
    for num_layers in (1, 2, 1, 61):
        case.fill(case.random_requests(60, generator), generator)
        torch.cuda.synchronize()
        for _ in range(num_layers):
            for graph, stream in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        case.check()


def exchange_between_processes(by_nvshmem=False):
    """Two processes on this GPU exchange through memory that each maps of the other.

    by_nvshmem: by NVSHMEM's puts. That shows links, addresses and numbers; no order on a network.
    """
    with tempfile.TemporaryDirectory() as directory:
        arguments = 2, f"{directory}/store", "cuda:0", 5, by_nvshmem
        torch.multiprocessing.spawn(run_process, arguments, nprocs=2)
