"""Deterministic MessagePack codec of tagged values; sequences come back as lists."""

from __future__ import annotations

from typing import Any

from msgspec import MsgspecError, Raw
from msgspec.msgpack import Decoder, Encoder

from nanocp.values.members import Envelope

_encode = Encoder().encode
_head = Decoder(tuple[str, int, Raw])
_UNREADABLE = (MsgspecError, UnicodeDecodeError, RecursionError)


class Codec:
    """Encodes values of these types, each with its name.

    A NamedTuple is an array and a dataclass a map, so that readers of other versions accept an
    added or missing defaulted field.
    """

    def __init__(self, *types: type) -> None:
        """types: NamedTuples and frozen dataclasses, whose names differ."""
        self._decoders: dict[str, Decoder[Any]] = {each.__name__: Decoder(each) for each in types}

    def encode(self, message: Any, term: int = 0) -> bytes:
        """The bytes of a value of one of the types. term: of an envelope."""
        name = type(message).__name__
        assert name in self._decoders, f"{name} is no message here"
        return _encode((name, term, message))

    def decode(self, data: bytes) -> Any:
        """The value. Raises ValueError for bytes that are none of these types."""
        return self.open(data).message

    def seal(self, envelope: Envelope) -> bytes:
        """The bytes of an envelope."""
        return self.encode(envelope.message, envelope.term)

    def open(self, data: bytes) -> Envelope:
        """The envelope. Raises ValueError for bytes that are none of these types."""
        try:
            name, term, body = _head.decode(data)
            return Envelope(self._decoders[name].decode(body), term)
        except (*_UNREADABLE, KeyError) as error:
            expected = ", ".join(self._decoders)
            raise ValueError(f"{len(data)} bytes are no {expected}: {error}") from error

    def name(self, data: bytes) -> str:
        """The name of the encoded value's type. Raises ValueError if there is none."""
        try:
            return _head.decode(data)[0]
        except _UNREADABLE as error:
            raise ValueError(f"{len(data)} bytes are no message: {error}") from error
