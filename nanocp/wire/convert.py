"""Plan values <-> protobuf, both ways, exactly.

Enters: values of nanocp.values.plan and nanocp.values.sampling, or messages of nanocp.wire.v1.
Leaves: the other of the two. Equal values give equal bytes (a re-send is byte-identical), and a
value survives the round trip unchanged. Does not know: streams, who sends what to whom, what the
values mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError, Message

from nanocp.values.offload import HASH_BYTES
from nanocp.values.plan import (
    PAGE_SIZE,
    Finished,
    FinishReason,
    HandOff,
    InstancePlan,
    RowStart,
    TargetRun,
    Transfer,
    WindowDone,
    WrittenPage,
)
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
from nanocp.values.sampling_fields import CONTROLS
from nanocp.wire.changes import table_changes_from_wire, table_changes_to_wire
from nanocp.wire.v1 import cluster_pb2 as pb

MAX_FRONT_END_BYTES = 262
"""The longest host:port: a host name has at most 253 bytes, an IPv6 address in brackets with a zone
has fewer."""


# --- Plans


def instance_plan_to_wire(plan: InstancePlan) -> pb.InstancePlan:
    """The message for one instance and window."""
    return pb.InstancePlan(
        instance=plan.instance,
        window=plan.window,
        first_step=plan.first_step,
        num_steps=plan.num_steps,
        base_digest=plan.base_digest,
        result_digest=plan.result_digest,
        is_full=plan.is_full,
        changes=table_changes_to_wire(plan.changes),
        starts=[
            pb.RowStart(
                request_id=request, position=position, max_tokens=max_tokens, row_start=row_start
            )
            for request, position, max_tokens, row_start in plan.starts
        ],
        hand_offs_out=_hand_offs_to_wire(plan.hand_offs_out),
        hand_offs_in=_hand_offs_to_wire(plan.hand_offs_in),
        ends=plan.ends,
        two_lanes=plan.two_lanes,
    )


def instance_plan_from_wire(message: pb.InstancePlan) -> InstancePlan:
    """The plan in the message. Raises ValueError if columns of its changes differ in length."""
    return InstancePlan(
        instance=message.instance,
        window=message.window,
        first_step=message.first_step,
        num_steps=message.num_steps,
        base_digest=message.base_digest,
        result_digest=message.result_digest,
        is_full=message.is_full,
        changes=table_changes_from_wire(message.changes),
        starts=tuple(
            RowStart(start.request_id, start.position, start.max_tokens, start.row_start)
            for start in message.starts
        ),
        hand_offs_out=tuple(
            HandOff(hand_off.request_id, hand_off.peer) for hand_off in message.hand_offs_out
        ),
        hand_offs_in=tuple(
            HandOff(hand_off.request_id, hand_off.peer) for hand_off in message.hand_offs_in
        ),
        ends=tuple(message.ends),
        two_lanes=message.two_lanes,
    )


def _hand_offs_to_wire(hand_offs: Iterable[HandOff]) -> list[pb.HandOff]:
    return [pb.HandOff(request_id=request, peer=peer) for request, peer in hand_offs]


# --- Transfers and events


def transfer_to_wire(transfer: Transfer) -> pb.Transfer:
    """The message for the prefill and for each receiver."""
    return pb.Transfer(
        ticket=transfer.ticket,
        request_id=transfer.request_id,
        num_tokens=transfer.num_tokens,
        first_page=[target.first_page for target in transfer.targets],
        num_pages=[target.num_pages for target in transfer.targets],
        instance=[target.instance for target in transfer.targets],
        frame=[target.frame for target in transfer.targets],
        source=transfer.source,
    )


def transfer_from_wire(message: pb.Transfer) -> Transfer:
    """The transfer in the message. Raises ValueError if its columns differ in length."""
    targets = zip(
        message.first_page, message.num_pages, message.instance, message.frame, strict=True
    )
    return Transfer(
        ticket=message.ticket,
        request_id=message.request_id,
        num_tokens=message.num_tokens,
        targets=tuple(TargetRun(*target) for target in targets),
        source=message.source if message.HasField("source") else None,
    )


def window_done_to_wire(done: WindowDone) -> pb.WindowDone:
    """The message of an instance; its stream says which instance."""
    return pb.WindowDone(
        window=done.window,
        finished=[
            pb.Finished(request_id=request, num_tokens=num_tokens, reason=reason.value)
            for request, num_tokens, reason in done.finished
        ],
        step_us=done.step_us,
        exchange_us=done.exchange_us,
        num_tokens=done.num_tokens,
        num_rows=done.num_rows,
        num_received=done.num_received,
        bucket_rows=done.bucket_rows,
        bucket_received=done.bucket_received,
        route_bytes=done.route_bytes,
        expert_bytes=done.expert_bytes,
        mask_us=done.mask_us,
        wait_us=done.waits_us,
        written=[pb.WrittenPage(**page._asdict()) for page in done.written],
        hidden_us=done.hidden_us,
    )


def window_done_from_wire(instance: int, message: pb.WindowDone) -> WindowDone:
    """The event in a message that came up the stream of `instance`.

    Raises ValueError for an unknown reason.
    """
    return WindowDone(
        instance=instance,
        window=message.window,
        finished=tuple(
            Finished(row.request_id, row.num_tokens, FinishReason(row.reason))
            for row in message.finished
        ),
        step_us=message.step_us,
        exchange_us=message.exchange_us,
        num_tokens=message.num_tokens,
        num_rows=message.num_rows,
        num_received=message.num_received,
        bucket_rows=message.bucket_rows,
        bucket_received=message.bucket_received,
        route_bytes=message.route_bytes,
        expert_bytes=message.expert_bytes,
        mask_us=message.mask_us,
        waits_us=tuple(message.wait_us),
        written=tuple(
            WrittenPage(page.request_id, page.attempt, page.page, page.page_hash)
            for page in message.written
        ),
        hidden_us=message.hidden_us,
    )


# --- Row state


def encode_row_input(row: RowInput) -> bytes:
    """The bytes of `Arrival.row_start`, which the front end writes and the instance reads."""
    return _encode(_row_input_to_wire(row))


def decode_row_input(data: bytes) -> RowInput:
    """Raises ValueError if the bytes are not an encoded RowInput."""
    message = pb.RowInput()
    _decode(message, data)
    return _row_input_from_wire(message)


def encode_hand_off_state(state: HandOffState) -> bytes:
    """At most `max_hand_off_bytes(max_model_len)` bytes."""
    return _encode(
        pb.HandOffState(
            request_id=state.request_id,
            finished=state.finished,
            position=state.position,
            row=_row_input_to_wire(state.row),
        )
    )


def decode_hand_off_state(data: bytes) -> HandOffState:
    """Raises ValueError if the bytes are not an encoded HandOffState."""
    message = pb.HandOffState()
    _decode(message, data)
    return HandOffState(
        request_id=message.request_id,
        finished=message.finished,
        position=message.position,
        row=_row_input_from_wire(message.row),
    )


def max_hand_off_bytes(max_model_len: int) -> int:
    """Most bytes of an encoded HandOffState: what a place in the mailbox must hold."""
    varint_32, varint_64, double = 5, 10, 8
    tags_and_lengths = 104
    scalars = 7 * varint_32 + 3 * varint_64 + 6 * double
    biases = MAX_LOGIT_BIASES * (varint_32 + double)
    bad_words = MAX_BAD_WORD_TOKENS * (varint_32 + 4)  # Tags and lengths of a word of one token.
    # Prompt and output together have at most max_model_len tokens.
    ids = varint_32 * (MAX_STOP_TOKEN_IDS + max_model_len + PAGE_SIZE)
    texts = MAX_FRONT_END_BYTES + HASH_BYTES
    return tags_and_lengths + scalars + texts + biases + bad_words + ids


def _row_input_to_wire(row: RowInput) -> pb.RowInput:
    assert len(row.front_end.encode()) <= MAX_FRONT_END_BYTES, (
        f"front_end {row.front_end!r} is not a host:port"
    )
    params = row.params
    return pb.RowInput(
        last_token=row.last_token,
        params=pb.SamplingParams(
            # Adding 0 turns -0.0 into 0.0: the two are equal, and equal values must have equal
            # bytes.
            **{name: getattr(params, name) + 0 for name in CONTROLS},
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            seed=params.seed,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            bias_token_id=[token_id for token_id, _ in params.logit_bias],
            bias=[bias + 0.0 for _, bias in params.logit_bias],
            bad_words=[pb.BadWord(token_ids=word) for word in params.bad_words],
            constraint=params.constraint,
            logprobs=params.logprobs,
        ),
        front_end=row.front_end,
        output_ids=row.output_ids,
        prompt_ids=row.prompt_ids,
        attempt=row.attempt,
        page_hash=row.page_hash,
        page_ids=row.page_ids,
    )


def _row_input_from_wire(message: pb.RowInput) -> RowInput:
    params = message.params
    return RowInput(
        last_token=message.last_token,
        params=SamplingParams(
            **{name: getattr(params, name) for name in CONTROLS},
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            seed=params.seed,
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logit_bias=tuple(zip(params.bias_token_id, params.bias, strict=True)),
            bad_words=tuple(tuple(word.token_ids) for word in params.bad_words),
            constraint=params.constraint,
            logprobs=params.logprobs if params.HasField("logprobs") else None,
        ),
        front_end=message.front_end,
        output_ids=tuple(message.output_ids),
        prompt_ids=tuple(message.prompt_ids),
        attempt=message.attempt,
        page_hash=message.page_hash,
        page_ids=tuple(message.page_ids),
    )


def _encode(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _decode(message: Message, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(
            f"{len(data)} bytes are not an encoded {message.DESCRIPTOR.name}: {error}"
        ) from error


# --- Tokens


def tokens_to_wire(instance: int, tokens: Iterable[Token]) -> pb.TokenBatch:
    """A batch for one front end; the stream says which, so that all tokens must be for one."""
    return pb.TokenBatch(
        instance=instance,
        tokens=[
            pb.TokenItem(
                request_id=token.request_id,
                index=token.index,
                token_id=token.token_id,
                finish_reason=token.finish_reason.value if token.finish_reason else "",
                logprobs=_logprobs_to_wire(token.logprobs) if token.logprobs else None,
                attempt=token.attempt,
            )
            for token in tokens
        ],
    )


def tokens_from_wire(front_end: str, message: pb.TokenBatch) -> tuple[Token, ...]:
    """The tokens of a batch that came to `front_end`.

    Raises ValueError for an unknown finish reason.
    """
    return tuple(
        Token(
            front_end=front_end,
            request_id=item.request_id,
            index=item.index,
            token_id=item.token_id,
            finish_reason=FinishReason(item.finish_reason) if item.finish_reason else None,
            logprobs=_logprobs_from_wire(item.logprobs) if item.HasField("logprobs") else None,
            attempt=item.attempt,
        )
        for item in message.tokens
    )


def prompt_logprobs_to_wire(
    request_id: int, first: int, logprobs: Iterable[TokenLogprobs]
) -> pb.PromptLogprobs:
    """The message with the log probabilities of the prompt's tokens `first`, `first` + 1, ..."""
    return pb.PromptLogprobs(
        request_id=request_id, first=first, logprobs=map(_logprobs_to_wire, logprobs)
    )


def prompt_logprobs_from_wire(
    message: pb.PromptLogprobs,
) -> tuple[int, int, tuple[TokenLogprobs, ...]]:
    """(request id, first, one for each token) of a message.

    Raises ValueError if columns that belong together differ in length.
    """
    return message.request_id, message.first, tuple(map(_logprobs_from_wire, message.logprobs))


def _logprobs_to_wire(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def _logprobs_from_wire(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )
