"""Passes and layer moves survive the wire, and equal values have equal bytes."""

from hypothesis import given
from hypothesis import strategies as st

from nanocp.values.passes import LayerMove, LayerMoves, PassPlan, Span
from nanocp.values.plan import InstancePlan, RowStart
from nanocp.wire import passes

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def tuples_of(strategy):
    return st.lists(strategy, max_size=4).map(tuple)


TABLES = st.builds(
    lambda window, starts, ends: InstancePlan(0, window, window, 1, 7, 8, starts=starts, ends=ends),
    U64,
    tuples_of(st.builds(RowStart, U64, U32, U32, st.binary(max_size=9))),
    tuples_of(U64),
)
PASSES = st.builds(
    PassPlan,
    U64,
    U64,
    st.integers(-1, 2**62),
    TABLES,
    tuples_of(st.builds(Span, U64, U32, U32, st.booleans())),
)
MOVES = st.builds(
    LayerMoves,
    U64,
    st.none() | st.lists(U32, min_size=1, max_size=4).map(tuple),
    tuples_of(st.builds(LayerMove, U32, U32, U32, U32, tuples_of(st.tuples(U32, U32)))),
)


@given(PASSES)
def test_a_pass_survives(plan):
    message = passes.pass_plan_to_wire(plan)
    assert passes.pass_plan_from_wire(message) == plan
    again = passes.pass_plan_to_wire(plan)
    assert message.SerializeToString() == again.SerializeToString()


@given(MOVES)
def test_layer_moves_survive(moves):
    assert passes.layer_moves_from_wire(passes.layer_moves_to_wire(moves)) == moves
