"""Put, wait and take, interpreted: several instances in turn move what the routes say."""

import re
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from data_plane.transport.exchange import Channel, EpochError, ExchangeTimeout, Term, TermOver
from data_plane.transport.gpu import peer_memory, triton_exchange
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import PeerMemory, cuda_ipc_obstacle
from harness.gpu_stand_ins.recorded_calls import recorded
from harness.transports.exchange_cases import ExchangeCase
from harness.waits import until

CPU = torch.device("cpu")


def filled(num_instances, num_slots, requests, seed=0):
    generator = torch.Generator().manual_seed(seed)
    case = ExchangeCase(num_instances, num_slots)
    case.fill(requests, generator)
    return case, generator


def test_rows_and_partials_arrive_where_random_routes_say():
    case, generator = filled(3, 2, [])
    for _ in range(3):
        case.fill(case.random_requests(6, generator), generator)
        assert case.num_sent.sum() > 0
        case.run_layer()
        case.check()


def test_loads_are_of_the_slots_that_live_rows_name():
    case, generator = ExchangeCase(3, 2, has_experts=True), torch.Generator().manual_seed(2)
    expected_NE = torch.zeros_like(case.load)
    for _ in range(3):
        case.fill([], generator)
        case.run_layer()
        case.check()
        named = case.expert[case.live].flatten()
        expected_NE += torch.bincount(named, minlength=expected_NE.numel()).view_as(expected_NE)
        assert case.load.equal(expected_NE)
    assert not case.live.all() and expected_NE.any(dim=1).all()


@pytest.mark.parametrize("requests", [
    pytest.param([], id="no request"),
    pytest.param([(0, 1, (1,)), (1, 0, (0,))], id="no link"),
    pytest.param([(0, 0, (1,)), (1, 0, (1,)), (2, 0, (1,))],
                 id="one way, every slot, no KV at the MoE binding"),
    pytest.param([(i, i % 2, (0, 1)) for i in range(6)], id="every slot both ways"),
])  # fmt: skip
def test_routes_at_their_limits(requests):
    case, _ = filled(2, 3, requests)
    case.run_layer()
    case.check()


def test_a_lost_row_is_seen():
    case, _ = filled(2, 3, [(i, 0, (0, 1)) for i in range(3)])
    case.run_layer()
    case.received[1]["position"][2] += 1
    with pytest.raises(AssertionError):
        case.check()


def test_the_programs_of_each_put_are_counted_apart():
    """A flag is released by the last program of its own put, of which there may be more."""
    case = ExchangeCase(2, 2, has_experts=True)
    case.fill([(0, 1, (0, 1)), (1, 1, (0, 1))], torch.Generator().manual_seed(1))
    case.live[:] = True
    case.run_layer()
    case.check()
    for exchange in case.members.values():
        for channel in (Channel.DISPATCH, Channel.COMBINE):
            assert exchange.done(channel).any(), channel.name


def one_link():
    """Make a case where instance 0 sends a row to instance 1."""
    case, _ = filled(2, 2, [(0, 0, (0, 1))])
    return case, case.phases()


def set_flag(case, epoch, awaited):
    """Set the flag that instance 1 finds of instance 0, and the epoch that it waits for."""
    place = case.places.channels[Channel.Q]
    flags = case.members[1].memory.memory[place.flag_offset :][:32].view(torch.int64).view(2, 2)
    flags[awaited & 1, 0] = epoch
    case.members[1].epoch_C[Channel.Q] = awaited - 1


@pytest.mark.parametrize(
    "found, error, words",
    [(0, ExchangeTimeout, "it did not come within 0.01 ms"),
     (6, ExchangeTimeout, "the last epoch here is 6"),
     (10, EpochError, "finds epoch 10: the region was overwritten")],
    ids=["missing", "older", "newer"],
)  # fmt: skip
def test_a_wait_ends_in_the_error_word_unless_the_flag_equals_the_epoch(found, error, words):
    case, (_, wait_q, *_) = one_link()
    set_flag(case, 8, awaited=8)
    wait_q(1)
    case.members[1].check()
    set_flag(case, found, awaited=8)
    wait_q(1)
    assert case.members[1].error.tolist() == [Channel.Q + 1, 0, 8, found]
    with pytest.raises(error, match=f"instance 1 awaits Q of instance 0, epoch 8.*{words}") as late:
        case.members[1].check()
    assert late.value.peer == (0 if error is ExchangeTimeout else None)


def test_the_other_parity_is_not_looked_at():
    case, (_, wait_q, *_) = one_link()
    set_flag(case, 7, awaited=7)
    set_flag(case, 0, awaited=8)
    wait_q(1)
    assert case.members[1].error.tolist() == [Channel.Q + 1, 0, 8, 0]


def test_after_an_error_nothing_is_put_and_the_first_error_stays():
    case, (put_q, wait_q, _, put_res, wait_res, _) = one_link()
    wait_q(1)
    first = case.members[1].error.tolist()
    before = case.members[0].memory.memory.clone()
    put_res(1)
    assert case.members[0].memory.memory.equal(before)
    put_q(0)
    wait_q(1)
    assert case.members[1].error.tolist() == first == [Channel.Q + 1, 0, 1, 0]
    wait_res(0)
    assert case.members[0].error.tolist() == [Channel.RES + 1, 1, 1, 0]


def test_a_wait_ends_with_its_term():
    """The host says so before the wait begins; what has come by then is taken all the same."""
    case, (put_q, wait_q, *_) = one_link()
    receiver, term = case.members[1], Term(1)
    term.mirror(receiver.ended)
    term.end(1)
    receiver.max_polls = 200
    wait_q(1)
    assert receiver.error.tolist() == [16 + Channel.Q + 1, 0, 1, 0]
    with pytest.raises(TermOver, match="term 1 is over: instance 1 awaits Q of instance 0, epoch"):
        receiver.check()
    case, (put_q, wait_q, *_) = one_link()
    case.members[1].ended[0] = 1
    put_q(0)
    wait_q(1)
    case.members[1].check()


def test_a_wait_ends_with_its_term_while_it_polls():
    case, (_, wait_q, *_) = one_link()
    receiver, term = case.members[1], Term(1)
    term.mirror(receiver.ended)
    receiver.max_polls = 2**30
    assert receiver.awaited is None
    seen = []

    def end():
        until(lambda: receiver.awaited is not None)
        seen.append(receiver.awaited)
        term.end(1)

    thread = threading.Thread(target=end)
    thread.start()
    wait_q(1)
    thread.join()
    assert seen == [0] and receiver.awaited is None
    with pytest.raises(TermOver):
        receiver.check()


def test_another_term_goes_on_where_only_the_one_before_is_over():
    case, (_, wait_q, *_) = one_link()
    for member, memory in zip(
        case.members.values(), PeerMemory.create_all(case.places, CPU), strict=True
    ):
        member.ended[0] = 1
        member.attach(memory, term=2)
        member.max_polls = 200
    wait_q(1)
    with pytest.raises(ExchangeTimeout):
        case.members[1].check()


def test_an_instance_that_is_not_in_the_term_is_neither_written_to_nor_awaited():
    """Instances 0 and 2 are the term's; the address of the other is 0, where a store faults."""
    seats = [0, 2]
    case = ExchangeCase(
        3, 2, own_memory=lambda places: PeerMemory.create_all(places, CPU, seats), has_experts=True
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        case.fill([(0, 0, (0, 2)), (1, 2, (0, 2)), (2, 2, (2,))], generator)
        visited = torch.rand(*case.expert.shape[:2], 4, generator=generator).argsort(dim=-1)
        case.expert.copy_(torch.tensor([0, 1, 4, 5])[visited[..., :2]])
        case.live[:] = True
        case.run_layer()
        case.check()


def test_a_recorded_layer_goes_on_in_another_term_with_another_peer():
    """Instance 0 runs again what it launched in term 1; instance 1 is another process then."""
    case, generator = filled(2, 2, [(0, 0, (0, 1)), (1, 1, (0, 1))])
    calls = []
    for phase in case.phases():
        calls.append([])
        for instance in case.members:
            with recorded(calls[-1] if instance == 0 else []):
                phase(instance)
    case.check()
    before = case.members[0].memory
    case.members[1] = GpuExchange(case.places, CPU, timeout_ms=0.01)
    memories = PeerMemory.create_all(case.places, CPU)
    for member, memory in zip(case.members.values(), memories, strict=True):
        member.attach(memory, term=2)
    old = before.memory.clone()
    for _ in range(2):
        case.fill([(0, 0, (0, 1)), (1, 1, (0, 1)), (2, 1, (0, 1))], generator)
        for own, phase in zip(calls, case.phases(), strict=True):
            for call in own:
                call()
            phase(1)
        case.check()
    assert before.memory.equal(old), "memory of the term before was written"


def test_regions_are_two_deep_and_a_sender_two_ahead_is_an_error():
    case, (put_q, wait_q, take_q, *_) = one_link()
    position, sender, receiver = case.own[0]["position"], *case.members.values()

    def put(epoch):
        position[0] = epoch
        sender.epoch_C[Channel.RES] = epoch - 1  # as if the answer had come
        put_q(0)

    put(1)
    put(2)
    wait_q(1)
    take_q(1)
    receiver.check()
    assert case.received[1]["position"][0] == 1
    put(3)
    receiver.epoch_C[Channel.Q] = 0
    wait_q(1)
    with pytest.raises(EpochError, match="epoch 1, but finds epoch 3"):
        receiver.check()


def one_ahead():
    """Let instance 0, with no rows to send, dispatch twice before instance 1 looks at the first."""
    case = ExchangeCase(2, 2, has_experts=True)
    case.fill([], torch.Generator().manual_seed(0))
    case.live[0] = False
    phases = case.phases()
    run_experts, combine = phases[-2:]
    for phase in phases[:-2]:
        for instance in case.members:
            phase(instance)
    for phase in (run_experts, combine, *phases[:-2]):
        phase(0)
    run_experts(1)
    case.members[1].check()


def test_a_peer_that_need_not_wait_may_be_one_dispatch_ahead():
    one_ahead()


def test_with_one_deep_regions_it_may_not(monkeypatch, tmp_path):
    """This is the control: the same kernels with one parity."""
    source = Path(triton_exchange.__file__).read_text()
    one_deep, num_changed = re.subn(r"(epoch|epoch_ptr\)) & 1\)", r"\1 & 0)", source)
    assert num_changed == 4
    path = tmp_path / "one_deep.py"
    path.write_text(one_deep)
    spec = spec_from_file_location("one_deep", path)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, triton_exchange.__name__, module)
    monkeypatch.setitem(sys.modules, "one_deep", module)
    spec.loader.exec_module(module)
    with pytest.raises(
        EpochError, match="instance 1 awaits DISPATCH of instance 0, epoch 1, but finds epoch 2"
    ):
        one_ahead()


def test_without_cuda_it_is_refused_by_name(monkeypatch):
    obstacle = cuda_ipc_obstacle(CPU)
    assert "needs an NVIDIA GPU" in obstacle
    if not torch.cuda.is_available():
        assert "torch sees none here" in cuda_ipc_obstacle(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peer_memory, "loaded_cudart", lambda: "")
    assert "no CUDA runtime (libcudart)" in cuda_ipc_obstacle(torch.device("cuda", 0))
