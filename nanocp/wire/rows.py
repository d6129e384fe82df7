"""Encoded row state for front ends and instances, deterministic and bounded in size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanocp.values.offload import HASH_BYTES
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    HandOffState,
    RowInput,
    SamplingParams,
)
from nanocp.values.sampling_fields import CONTROLS, MAX_LOGPROBS, NUM_SEEDS
from nanocp.wire.codec import Codec

MAX_FRONT_END_BYTES = 262
"""The longest host:port: a host name has at most 253 bytes, an IPv6 address in brackets fewer."""
_NUMBERS = {name: type(getattr(SamplingParams(), name)) for name in CONTROLS}
_LARGEST_ID = 2**32 - 1
_ID_BYTES = 5

_ROW_INPUT = Codec(RowInput)
_HAND_OFF_STATE = Codec(HandOffState)


def encode_row_input(row: RowInput) -> bytes:
    """The bytes of `Arrival.row_start`, from the front end to the instance."""
    return _ROW_INPUT.encode(_canonical(row))


def decode_row_input(data: bytes) -> RowInput:
    """Raises ValueError if the bytes are not an encoded RowInput."""
    row: RowInput = _ROW_INPUT.decode(data)
    return row


def encode_hand_off_state(state: HandOffState) -> bytes:
    """At most `max_hand_off_bytes(max_model_len)` bytes."""
    return _HAND_OFF_STATE.encode(replace(state, row=_canonical(state.row)))


def decode_hand_off_state(data: bytes) -> HandOffState:
    """Raises ValueError if the bytes are not an encoded HandOffState."""
    state: HandOffState = _HAND_OFF_STATE.decode(data)
    return state


def max_hand_off_bytes(max_model_len: int) -> int:
    """Most bytes of an encoded HandOffState without a grammar: the size of its mailbox slot."""
    # Prompt and output together have at most max_model_len tokens.
    return _largest_without_tokens() + _ID_BYTES * (max_model_len + PAGE_SIZE)


def _largest_without_tokens() -> int:
    numbers: dict[str, Any] = {
        name: _LARGEST_ID if kind is int else 1.0 for name, kind in _NUMBERS.items()
    }
    params = SamplingParams(
        **numbers,
        max_tokens=_LARGEST_ID,
        min_tokens=_LARGEST_ID,
        seed=NUM_SEEDS - 1,
        stop_token_ids=(_LARGEST_ID,) * MAX_STOP_TOKEN_IDS,
        logit_bias=((_LARGEST_ID, 1.0),) * MAX_LOGIT_BIASES,
        bad_words=((_LARGEST_ID,),) * MAX_BAD_WORD_TOKENS,
        logprobs=MAX_LOGPROBS,
    )
    row = RowInput(
        _LARGEST_ID, params, "h" * MAX_FRONT_END_BYTES, attempt=_LARGEST_ID,
        page_hash=bytes(HASH_BYTES),
    )  # fmt: skip
    num_bytes = len(encode_hand_off_state(HandOffState(2**64 - 1, True, _LARGEST_ID, row)))
    length_bytes, num_texts = 4, 4  # The lengths of three lists of tokens, and of the grammar.
    return num_bytes + length_bytes * num_texts


def _canonical(row: RowInput) -> RowInput:
    """The row with equal numbers in one type, for deterministic bytes."""
    assert len(row.front_end.encode()) <= MAX_FRONT_END_BYTES, (
        f"front_end {row.front_end!r} is not a host:port"
    )
    params = row.params
    # Adding 0 turns -0.0 into 0.0, which it is equal to.
    numbers = {name: kind(getattr(params, name)) + 0 for name, kind in _NUMBERS.items()}
    biases = tuple((token_id, float(bias) + 0) for token_id, bias in params.logit_bias)
    return replace(row, params=replace(params, logit_bias=biases, **numbers))
