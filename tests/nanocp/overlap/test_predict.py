"""The predicted time of a schedule is the solver's, and follows its operations."""

import pytest

from harness.overlap.first_schedule import first_schedule
from nanocp.overlap import paper
from nanocp.overlap.interference import COMPUTE, MEMORY, NETWORK
from nanocp.overlap.layers import roofline_layer
from nanocp.overlap.operations import Operation, without_empty
from nanocp.overlap.predict import Order
from nanocp.overlap.roofline import MODELS, Machine, Requests
from nanocp.overlap.schedule import Schedule
from nanocp.overlap.search import search, sequence

TABLE_3 = paper.TABLE_3
CHAIN = (
    Operation("one", MEMORY, 100.0, 5.0, needs_before=("three",)),
    Operation("two", NETWORK, 80.0, 5.0, needs=("one",)),
    Operation("three", COMPUTE, 60.0, 5.0, needs=("two",)),
)


@pytest.fixture(scope="module")
def found():
    return first_schedule([CHAIN], TABLE_3)


def alone(schedule, factor=1.0):
    return [factor * slot.nano.us for slot in schedule.slots]


def period_us(schedule, times):
    order = Order(schedule, TABLE_3)
    return order.layers_us(times, 60) - order.layers_us(times, 59)


def test_with_the_times_that_it_was_searched_for_a_layer_takes_the_period(found):
    schedule = found.schedule
    assert schedule.period_us < found.sequential_us
    assert period_us(schedule, alone(schedule)) == pytest.approx(schedule.period_us, rel=0.01)
    assert period_us(schedule, alone(schedule, 3.0)) == pytest.approx(
        3 * schedule.period_us, rel=0.01
    )


def test_a_sequence_takes_the_sum_of_its_operations():
    whole = sequence(CHAIN)
    order = Order(whole, TABLE_3)
    assert [order.layers_us([1.0, 2.0, 3.0], layers) for layers in (1, 7, 20)] == [6, 42, 120]
    assert order.layers_us([1.0, 0.0, 3.0], 10) == 40


def test_what_did_not_run_at_once_never_does(found):
    """However long one operation takes: parts of the GPU that were not together stay apart."""
    schedule = found.schedule
    order = Order(schedule, TABLE_3)
    for number, _ in enumerate(schedule.slots):
        longer = alone(schedule)
        longer[number] *= 50
        share = schedule.slots[number].share
        resource = schedule.slots[number].nano.operation.resource
        grown_us = 49 * schedule.slots[number].nano.us / TABLE_3.speed(resource, share)
        assert order.layers_us(longer, 20) > 20 * grown_us


def test_operations_that_take_no_time_are_left_out_and_their_needs_stay():
    chain = (*CHAIN[:1], Operation("two", NETWORK, 0.0, 0.0, needs=("one",)), *CHAIN[2:])
    one, three = without_empty(chain)
    assert (one.needs_before, three.needs) == (("three",), ("one",))


def test_a_dense_model_by_its_data_sheet_on_one_gpu_has_no_network():
    machine = Machine(paper.TABLE_1[4][0], 1)
    operations = roofline_layer(machine, MODELS[1], Requests(512, 1024), 2048)
    named = {operation.name: operation for operation in operations}
    assert set(named) == {"KQV", "DecAttn", "PfAttn", "O", "UG", "D"}
    assert named["O"].needs == ("DecAttn", "PfAttn") and named["KQV"].needs_before == ("D",)
    assert named["UG"].resource == COMPUTE and named["DecAttn"].resource == MEMORY
    few = roofline_layer(machine, MODELS[1], Requests(512, 1024), 64)
    gemm = next(operation for operation in few if operation.name == "UG")
    assert gemm.resource == MEMORY and gemm.fixed_us == gemm.us, "halves read all weights again"
    assert isinstance(search([few], 128 / 2048, TABLE_3, limit_s=1).schedule, Schedule)
