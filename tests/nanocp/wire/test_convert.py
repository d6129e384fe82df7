"""Every value that crosses the wire survives it, and equal values have equal bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocp.values import plan as p
from nanocp.values import table_changes as t
from nanocp.values.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    HandOffState,
    RowInput,
    SamplingParams,
    Token,
    TokenLogprobs,
)
from nanocp.wire import convert
from nanocp.wire.v1 import cluster_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
REQUEST = st.integers(1, 2**64 - 1)


def tuples_of(strategy: st.SearchStrategy, max_size: int = 4) -> st.SearchStrategy:
    return st.lists(strategy, max_size=max_size).map(tuple)


LANE = st.integers(0, 1)
ROUTES = tuples_of(st.builds(t.RouteChange, U32, U32, st.none() | REQUEST, LANE))
HAND_OFFS = tuples_of(st.builds(p.HandOff, REQUEST, U32))
CHANGES = st.builds(
    t.TableChanges,
    forgotten=tuples_of(REQUEST),
    rows=tuples_of(st.builds(t.RowChange, U32, st.none() | REQUEST, LANE)),
    q_route=ROUTES,
    res_route=ROUTES,
    cleared=tuples_of(st.builds(t.PageClear, REQUEST, U32, U32)),
    pages=tuples_of(st.builds(t.PageRun, REQUEST, U32, U32, U32)),
    holders_forgotten=tuples_of(REQUEST),
    holders=tuples_of(st.builds(t.HolderChange, REQUEST, U32, U32)),
)
PLANS = st.builds(
    p.InstancePlan,
    instance=U32,
    window=U64,
    first_step=U64,
    num_steps=U32,
    base_digest=U64,
    result_digest=U64,
    is_full=st.booleans(),
    changes=CHANGES,
    starts=tuples_of(st.builds(p.RowStart, REQUEST, U32, U32, st.binary(max_size=20))),
    hand_offs_out=HAND_OFFS,
    hand_offs_in=HAND_OFFS,
    ends=tuples_of(REQUEST),
    two_lanes=st.booleans(),
)
TRANSFERS = st.builds(
    p.Transfer,
    ticket=U64,
    request_id=REQUEST,
    num_tokens=U32,
    targets=tuples_of(st.builds(p.TargetRun, U32, U32, U32, U32)),
)
REASONS = st.sampled_from(p.FinishReason)
WINDOWS_DONE = st.builds(
    p.WindowDone,
    instance=U32,
    window=U64,
    finished=tuples_of(st.builds(p.Finished, REQUEST, U32, REASONS)),
    step_us=U32,
    exchange_us=U32,
    num_tokens=U32,
    num_rows=U32,
    num_received=U32,
    bucket_rows=U32,
    bucket_received=U32,
    route_bytes=U64,
    expert_bytes=U64,
    mask_us=U32,
    waits_us=tuples_of(U64),
    written=tuples_of(st.builds(p.WrittenPage, REQUEST, U32, U32, st.binary(max_size=16))),
    hidden_us=U32,
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 2**32 - 1),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, allow_nan=False, allow_infinity=False),
    top_k=U32,
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=tuples_of(U32),
    ignore_eos=st.booleans(),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, exclude_min=True, allow_infinity=False),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=tuples_of(st.tuples(U32, st.floats(-100, 100))),
    logprobs=st.none() | st.integers(0, 20),
    bad_words=tuples_of(st.lists(U32, min_size=1, max_size=3).map(tuple)),
)
ROW_INPUTS = st.builds(
    RowInput,
    U32,
    PARAMS,
    st.text(max_size=30),
    tuples_of(U32, 40),
    tuples_of(U32, 40),
    page_hash=st.binary(max_size=16),
    page_ids=tuples_of(U32, 64),
)
HAND_OFF_STATES = st.builds(HandOffState, REQUEST, st.booleans(), U32, ROW_INPUTS)
F32 = st.floats(width=32, allow_nan=False)
LOGPROBS = st.builds(TokenLogprobs, F32, tuples_of(st.tuples(U32, F32)))
TOKENS = tuples_of(
    st.builds(
        Token, st.just("front:1"), REQUEST, U32, U32, st.none() | REASONS, st.none() | LOGPROBS
    )
)


@given(PLANS)
def test_instance_plan_survives_the_wire(plan: p.InstancePlan) -> None:
    data = convert.instance_plan_to_wire(plan).SerializeToString()
    received = pb.InstancePlan.FromString(data)
    assert convert.instance_plan_from_wire(received) == plan
    # What was decoded is equal, so a re-send of it is byte-identical.
    assert (
        convert.instance_plan_to_wire(convert.instance_plan_from_wire(received)).SerializeToString()
        == data
    )


@given(CHANGES)
def test_decoded_changes_have_the_types_of_plan_values(changes: t.TableChanges) -> None:
    decoded = convert.table_changes_from_wire(convert.table_changes_to_wire(changes))
    assert decoded == changes
    assert all(isinstance(change, t.RowChange) for change in decoded.rows)
    assert all(isinstance(change, t.RouteChange) for change in decoded.q_route + decoded.res_route)
    assert all(isinstance(change, t.PageRun) for change in decoded.pages)
    assert all(isinstance(change, t.PageClear) for change in decoded.cleared)
    assert all(isinstance(change, t.HolderChange) for change in decoded.holders)


@given(TRANSFERS)
def test_transfer_survives_the_wire(transfer: p.Transfer) -> None:
    data = convert.transfer_to_wire(transfer).SerializeToString()
    assert convert.transfer_from_wire(pb.Transfer.FromString(data)) == transfer


@given(WINDOWS_DONE)
def test_window_done_survives_the_wire(done: p.WindowDone) -> None:
    data = convert.window_done_to_wire(done).SerializeToString()
    message = pb.WindowDone.FromString(data)
    assert convert.window_done_from_wire(done.instance, message) == done


@given(ROW_INPUTS)
def test_row_input_survives_the_wire(row: RowInput) -> None:
    data = convert.encode_row_input(row)
    assert convert.decode_row_input(data) == row
    assert convert.encode_row_input(convert.decode_row_input(data)) == data


@given(HAND_OFF_STATES)
def test_hand_off_state_survives_the_mailbox(state: HandOffState) -> None:
    data = convert.encode_hand_off_state(state)
    assert convert.decode_hand_off_state(data) == state
    assert len(data) <= convert.max_hand_off_bytes(
        len(state.row.prompt_ids) + len(state.row.output_ids)
    )


@given(TOKENS)
@settings(max_examples=50)
def test_tokens_survive_the_wire(tokens: tuple[Token, ...]) -> None:
    message = pb.TokenBatch.FromString(convert.tokens_to_wire(3, tokens).SerializeToString())
    assert message.instance == 3
    assert convert.tokens_from_wire("front:1", message) == tokens


def test_the_largest_hand_off_fits_its_bound_closely() -> None:
    largest = 2**32 - 1
    params = SamplingParams(
        max_tokens=largest,
        min_tokens=largest,
        temperature=1.5,
        top_k=largest,
        top_p=0.5,
        seed=2**63 - 1,
        stop_token_ids=(largest,) * MAX_STOP_TOKEN_IDS,
        ignore_eos=True,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias=((largest, 0.5),) * MAX_LOGIT_BIASES,
        bad_words=((largest,),) * MAX_BAD_WORD_TOKENS,
        logprobs=20,
    )
    row = RowInput(
        largest,
        params,
        "h" * convert.MAX_FRONT_END_BYTES,
        (largest,) * 8000,
        (largest,) * 192,
        page_hash=b"h" * 16,
        page_ids=(largest,) * 64,
    )
    num_bytes = len(convert.encode_hand_off_state(HandOffState(2**64 - 1, True, largest, row)))
    bound = convert.max_hand_off_bytes(8192)
    assert bound - 100 < num_bytes <= bound


def test_a_zero_has_one_encoding() -> None:
    names = ("temperature", "min_p", "presence_penalty", "frequency_penalty")
    minus_zero, zero = (
        RowInput(1, SamplingParams(**dict.fromkeys(names, value), logit_bias=((5, value),)), "h:1")
        for value in (-0.0, 0.0)
    )
    assert minus_zero == zero
    assert convert.encode_row_input(minus_zero) == convert.encode_row_input(zero)


def test_a_request_id_of_zero_cannot_be_sent() -> None:
    with pytest.raises(AssertionError, match="positive"):
        convert.table_changes_to_wire(t.TableChanges(rows=(t.RowChange(0, 0),)))


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        convert.table_changes_from_wire(pb.TableChanges(row_index=[1, 2], row_request=[5]))
    with pytest.raises(ValueError, match="shorter"):
        convert.table_changes_from_wire(
            pb.TableChanges(q_route=pb.RouteChanges(peer=[1], slot=[0]))
        )
    with pytest.raises(ValueError, match="shorter"):
        convert.transfer_from_wire(pb.Transfer(first_page=[1], instance=[1], frame=[]))


def test_bytes_that_are_no_row_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="not an encoded RowInput"):
        convert.decode_row_input(b"\xff\xff\xff")
    with pytest.raises(ValueError, match="not an encoded HandOffState"):
        convert.decode_hand_off_state(b"\xff\xff\xff")


@given(REQUEST, U32, st.lists(LOGPROBS, max_size=3))
def test_logprobs_of_a_prompt_survive(
    request_id: int, first: int, logprobs: list[TokenLogprobs]
) -> None:
    message = convert.prompt_logprobs_to_wire(request_id, first, logprobs)
    back = pb.PromptLogprobs.FromString(message.SerializeToString())
    assert convert.prompt_logprobs_from_wire(back) == (request_id, first, tuple(logprobs))


def test_an_unknown_finish_reason_is_refused() -> None:
    batch = pb.TokenBatch(tokens=[pb.TokenItem(request_id=1, finish_reason="tired")])
    with pytest.raises(ValueError, match="tired"):
        convert.tokens_from_wire("front:1", batch)
