"""Every value that crosses the wire survives it, and equal values have equal bytes."""

from enum import Enum
from hashlib import sha256
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.frontend.remote import messages
from control_plane.ports.controller_interface import Submission
from nanocp.values import commands, members
from nanocp.values import plan as p
from nanocp.values import table_changes as t
from nanocp.values.experts import home_table
from nanocp.values.members import Envelope
from nanocp.values.offload import Fetch, StoredPage, Stow
from nanocp.values.passes import LayerMove, LayerMoves, LayersMoved, PassPlan, Span
from nanocp.values.remote_blocks import RemoteBlocks
from nanocp.values.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    HandOffState,
    PromptPart,
    RowInput,
    SamplingParams,
    Token,
    TokenBatch,
    TokenLogprobs,
)
from nanocp.wire import members as wire
from nanocp.wire import rows
from nanocp.wire.codec import Codec

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
    p.InstancePlan, instance=U32, window=U64, first_step=U64, num_steps=U32, base_digest=U64,
    result_digest=U64, is_full=st.booleans(), changes=CHANGES,
    starts=tuples_of(st.builds(p.RowStart, REQUEST, U32, U32, st.binary(max_size=20))),
    hand_offs_out=HAND_OFFS, hand_offs_in=HAND_OFFS, ends=tuples_of(REQUEST),
    two_lanes=U32, num_drafts=U32, experts=U32,
)  # fmt: skip
TRANSFERS = st.builds(
    p.Transfer, ticket=U64, request_id=REQUEST, num_tokens=U32,
    targets=tuples_of(st.builds(p.TargetRun, U32, U32, U32, U32)),
)  # fmt: skip
REASONS = st.sampled_from(p.FinishReason)
WINDOWS_DONE = st.builds(
    p.WindowDone, instance=U32, window=U64,
    finished=tuples_of(st.builds(p.Finished, REQUEST, U32, REASONS)), step_us=U32, exchange_us=U32,
    num_tokens=U32, num_rows=U32, num_received=U32, bucket_rows=U32, bucket_received=U32,
    route_bytes=U64, expert_bytes=U64, mask_us=U32, waits_us=tuples_of(U64),
    written=tuples_of(st.builds(p.WrittenPage, REQUEST, U32, U32, st.binary(max_size=16))),
    hidden_us=U32, advanced=tuples_of(REQUEST), drafts=tuples_of(st.tuples(U32, U32)),
)  # fmt: skip
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
        Token,
        st.just("front:1"),
        REQUEST,
        U32,
        U32,
        st.none() | REASONS,
        st.none() | LOGPROBS,
        U32,  # else it is drawn without bounds
        st.integers(-1, 64),
    )
)
MOVES = st.builds(
    LayerMoves, U64, st.none() | st.lists(U32, min_size=1, max_size=4).map(tuple),
    tuples_of(st.builds(LayerMove, U32, U32, U32, U32, tuples_of(st.tuples(U32, U32)))),
)  # fmt: skip
PASSES = st.builds(
    PassPlan, U64, U64, st.integers(-1, 2**62), PLANS,
    tuples_of(st.builds(Span, U64, U32, U32, st.booleans())),
)  # fmt: skip
STOWS = st.builds(Stow, U64, U32, tuples_of(st.tuples(U32, U32)), st.booleans())
FETCHES = st.builds(Fetch, U64, U32, tuples_of(st.builds(StoredPage, U32, U32, U32)))
PARTS = st.builds(PromptPart, REQUEST, U32, tuples_of(LOGPROBS, 3))
BATCHES = st.builds(TokenBatch, U32, TOKENS, tuples_of(PARTS))

TRANSFER = p.Transfer(3, 9, 130, (p.TargetRun(0, 2, 1, 5), p.TargetRun(2, 1, 0, 7)), 2)
PLACEMENT = p.Placement(7, 2, 130, ((0, 2), (1, 0)))
ARRIVAL = p.Arrival(
    5, 2, 9, b"row", priority=-3, resumes=True, attempt=4, page_hashes=(b"a" * 16,),
    client_id="mine", tenant="ada", sampler_work=7,
)  # fmt: skip
TABLE = home_table(4, 2, 1)
ENGINE = members.EngineNow("http://a", True, "", 1, 2, 3, 4, 5, 0.5, 1.5)
BLOCKS = RemoteBlocks("engine", "cmpl-1", (4, 5), "host", 5600, 2, 99, 16, 3)
EXAMPLES = [
    members.Hello(1, members.Peer("node", "host:1"), ((4, p.TargetRun(0, 2, 1, 5)),)),
    members.Loading(7),
    members.Beat(),
    members.Beat(2),
    members.Ready(("graphs: 3 prepared",)),
    members.Left(),
    members.Suspect(None, True, "it is gone"),
    members.Failure("why"),
    members.Resync(3, "digest 1, not 2"),
    members.TokensLost((1, 2), "too slow"),
    members.ExpertsHere(1, 2, "OSError: the file is gone"),
    members.ExpertLoad(1, 2, 77, (bytes(24), bytes(24))),
    commands.ChangeExperts(3, home_table(7, 3)),
    members.EnginesNow((ENGINE,)),
    p.TransferDone(1, 2),
    p.TransferFenced(1, 2),
    p.TransferMissed(1, 2),
    p.TransferFailed(1, "why"),
    LayersMoved(1, 2),
    commands.Join((members.Peer("node", ""), members.Peer()), 9, (0, 1), TABLE, True),
    commands.Leave(),
    commands.Shutdown("enough"),
    commands.ExpectPages(TRANSFER),
    commands.SendPages(TRANSFER),
    commands.RefusePages(5),
    commands.StagePrompt(4, [1, 2], 3, "host:1"),
    commands.PrefillRequest(TRANSFER, [1, 2, 3], None, ""),
    commands.CancelPrefill(5),
    commands.PagesArrived(5),
    commands.HoldBlocks(3, BLOCKS),
    commands.ReleaseBlocks(3),
    commands.RefuseBlocks(BLOCKS),
    members.BlocksRefused(3, "why"),
    wire.FromNode(
        (wire.FromStream(1, wire.Opened("instance 1", "x")), wire.FromStream(2, message=b"m"))
    ),
    wire.ToNode((wire.ToStream(1, b"m"), wire.ToStream(2))),
    messages.FrontEndHello("a:1", "a:2", "", 77, 3),
    Submission(ARRIVAL, [1, 2], 700, "host:1", 2),
    Submission(ARRIVAL, [1, 2]),
    Submission(ARRIVAL, [1, 2], remote=BLOCKS),
    p.AbortRequested(3),
    messages.AllSubmitted(),
    messages.Observed(b"[]"),
    messages.Drained(True),
    messages.OpenFrontEnd(4, ("a:1", "b:1")),
    messages.IssuedSecret("instance 1", "x"),
    messages.Placed(PLACEMENT, None),
    messages.Placed(PLACEMENT, 64),
    messages.Placed(PLACEMENT._replace(begins=(129, 133)), 64),
    p.Preempted(3, 90),
    messages.Interrupted(),
    messages.RequestLostTokens(3, "too slow"),
    p.Ended(3, p.FinishReason.EXPIRED, "too late"),
    p.ClusterLoad(3, 2, (p.InstanceLoad(100, 1, 5, 0, 3),), 1),
    messages.Drain(),
    messages.Stop("enough"),
    messages.PageRequest("metrics"),
    messages.Page(b"page"),
]
DRAWN = {
    p.InstancePlan: PLANS, p.WindowDone: WINDOWS_DONE, PassPlan: PASSES, LayerMoves: MOVES,
    Stow: STOWS, Fetch: FETCHES, TokenBatch: BATCHES, RowInput: ROW_INPUTS,
    HandOffState: HAND_OFF_STATES,
}  # fmt: skip
CODECS = [
    each
    for module in (wire, messages, rows)
    for each in vars(module).values()
    if isinstance(each, Codec)
]


def survives(message):
    """Every codec that has the message's type gives it back, equal and of equal bytes."""
    name = type(message).__name__
    codecs = [codec for codec in CODECS if name in codec._decoders]
    assert codecs
    for codec in codecs:
        data = codec.encode(message)
        assert codec.decode(data) == message and codec.name(data) == name
        assert codec.encode(codec.decode(data)) == data, "a re-send is byte-identical"
        assert codec.open(codec.seal(Envelope(message, 2**63))) == Envelope(message, 2**63)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives(message):
    survives(message)


@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.__name__)
def test_drawn_messages_survive(kind):
    @given(DRAWN[kind])
    @settings(max_examples=50)
    def check(message):
        survives(message)

    check()


def test_every_message_is_tested_here():
    tested = {type(message).__name__ for message in EXAMPLES} | {kind.__name__ for kind in DRAWN}
    assert tested == {name for codec in CODECS for name in codec._decoders}


def fields_of(kind):
    """A line of fields and their types for the class, and for each that its fields hold."""
    own = get_type_hints(kind)
    yield f"{kind.__name__} {own}"
    for hint in own.values():
        for held in classes_in(hint):
            yield from fields_of(held)


def classes_in(hint):
    if get_args(hint):
        return [each for argument in get_args(hint) for each in classes_in(argument)]
    is_ours = isinstance(hint, type) and hint.__module__.startswith("nanocp")
    return [hint] if is_ours and not issubclass(hint, Enum) else []


def test_a_change_of_the_messages_has_another_version():
    """Unless it only gave a dataclass a field with a default: then write the new digest alone.

    VERSION is in nanocp/wire/members.py; members of different versions refuse each other by name.
    """
    kinds = [type(message) for message in EXAMPLES] + list(DRAWN)
    lines = sorted({line for kind in kinds for line in fields_of(kind)})
    digest = sha256("\n".join(lines).encode()).hexdigest()[:16]
    what = "raise VERSION and write both, or for a field with a default the digest alone"
    assert (wire.VERSION, digest) == (6, "89f3a731291ed5c9"), "\n".join([*lines, what])


@given(CHANGES)
@settings(max_examples=50)
def test_decoded_changes_have_the_types_of_plan_values(changes):
    plan = p.InstancePlan(0, 1, 1, 1, 7, 8, changes=changes)
    decoded = wire.TO_INSTANCE.decode(wire.TO_INSTANCE.encode(plan)).changes
    assert decoded == changes and isinstance(decoded, t.TableChanges)
    assert all(isinstance(change, t.RowChange) for change in decoded.rows)
    assert all(isinstance(change, t.RouteChange) for change in decoded.q_route + decoded.res_route)
    assert all(isinstance(change, t.PageRun) for change in decoded.pages)
    assert all(isinstance(change, t.PageClear) for change in decoded.cleared)
    assert all(isinstance(change, t.HolderChange) for change in decoded.holders)


@given(ROW_INPUTS)
def test_row_input_survives(row):
    data = rows.encode_row_input(row)
    assert rows.decode_row_input(data) == row
    assert rows.encode_row_input(rows.decode_row_input(data)) == data


@given(HAND_OFF_STATES)
def test_hand_off_state_survives_the_mailbox(state):
    data = rows.encode_hand_off_state(state)
    assert rows.decode_hand_off_state(data) == state
    num_tokens = len(state.row.prompt_ids) + len(state.row.output_ids)
    assert len(data) <= rows.max_hand_off_bytes(num_tokens)


def test_the_largest_hand_off_fits_its_bound_closely():
    largest = 2**32 - 1
    params = SamplingParams(
        max_tokens=largest, min_tokens=largest, temperature=1.5, top_k=largest, top_p=0.5,
        seed=2**63 - 1, stop_token_ids=(largest,) * MAX_STOP_TOKEN_IDS, ignore_eos=True, min_p=0.5,
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias=((largest, 0.5),) * MAX_LOGIT_BIASES,
        bad_words=((largest,),) * MAX_BAD_WORD_TOKENS, logprobs=20,
    )  # fmt: skip
    row = RowInput(
        largest, params, "h" * rows.MAX_FRONT_END_BYTES, (largest,) * 8000, (largest,) * 192,
        attempt=largest, page_hash=b"h" * 16, page_ids=(largest,) * 64,
    )  # fmt: skip
    num_bytes = len(rows.encode_hand_off_state(HandOffState(2**64 - 1, True, largest, row)))
    bound = rows.max_hand_off_bytes(8192)
    assert bound - 100 < num_bytes <= bound


def test_equal_numbers_have_one_encoding():
    names = ("temperature", "min_p", "presence_penalty", "frequency_penalty")
    encoded = set()
    for zero in (-0.0, 0.0, 0):
        params = SamplingParams(**dict.fromkeys(names, zero), logit_bias=((5, zero),))
        encoded.add(rows.encode_row_input(RowInput(1, params, "h:1")))
    assert len(encoded) == 1


def test_bytes_that_are_no_row_are_refused_by_name():
    with pytest.raises(ValueError, match="3 bytes are no RowInput"):
        rows.decode_row_input(b"\xff\xff\xff")
    with pytest.raises(ValueError, match="3 bytes are no HandOffState"):
        rows.decode_hand_off_state(b"\xff\xff\xff")


@pytest.mark.parametrize(("data", "sentence"), [
    (b"", "Input data was truncated"),
    (wire.FROM_INSTANCE.encode(p.WindowDone(0, 1))[:-3], "truncated"),
    (wire.TO_PREFILL.encode(commands.PagesArrived(1)), "'PagesArrived'"),
    (wire.FROM_INSTANCE.encode(members.Loading("ten")), "Expected `int`, got `str`"),
    (wire.FROM_INSTANCE.encode(p.WindowDone(0, 1, (p.Finished(1, 2, "tired"),))),
     "Invalid enum value 'tired'"),
])  # fmt: skip
def test_bytes_that_are_no_message_are_refused(data, sentence):
    with pytest.raises(ValueError, match=sentence):
        wire.FROM_INSTANCE.open(data)


def test_what_is_no_message_of_a_stream_cannot_be_sent():
    with pytest.raises(AssertionError, match="PagesArrived is no message here"):
        wire.TO_INSTANCE.encode(commands.PagesArrived(1))


@pytest.mark.parametrize(
    "said", [p.WindowDone(2, 0), p.TransferDone(1, 2), p.TransferMissed(1, 2), LayersMoved(2, 1)]
)
def test_a_member_speaks_for_itself_alone(said):
    data = wire.FROM_INSTANCE.encode(said, 7)
    assert wire.opened_said(members.Member("instance", 2), data) == Envelope(said, 7)
    with pytest.raises(ValueError, match="it speaks as instance 2"):
        wire.opened_said(members.Member("instance", 1), data)


@pytest.mark.parametrize(
    "run", [p.TargetRun(0, 2, 99, 3), p.TargetRun(0, 2, -1, 3), p.TargetRun(0, 2, 1, -4)]
)
def test_a_hello_has_pages_of_its_own_instance_alone(run):
    kept = ((7, p.TargetRun(0, 2, 1, 3)), (8, run))
    data = wire.FROM_INSTANCE.encode(members.Hello(1, members.Peer(), kept))
    with pytest.raises(ValueError, match="pages that it cannot have"):
        wire.opened_said(members.Member("instance", 1), data)


@pytest.mark.parametrize("read", [wire.FROM_INSTANCE.open, wire.FROM_INSTANCE.name])
def test_bytes_nested_without_end_are_refused(read):
    body = b"\x91" * 100_000 + b"\x90"
    with pytest.raises(ValueError, match="bytes are no"):
        read(b"\x93\xa4Left\x00" + body)
