"""Text to token ids and back, by the checkpoint's own tokenizer.json.

Enters: a checkpoint folder, texts, token ids one by one. Leaves: ids, and text that never has to be taken back.
Does not know: requests, streams, the model.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import tokenizers


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A byte-level tokenizer: each token is a piece of UTF-8, so that text can be decoded token by token, exactly."""

    def __init__(self, library_tokenizer: tokenizers.Tokenizer) -> None:
        """Raises ValueError if the tokenizer's decoder is not byte-level."""
        decoder = json.loads(library_tokenizer.to_str())["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":
            raise ValueError(
                f"the tokenizer's decoder is {decoder and decoder['type']}; only ByteLevel is supported, which every "
                "DeepSeek-V3 checkpoint uses (without tokenizer.json the service takes and returns token ids only)"
            )
        self._tokenizer = library_tokenizer
        added = library_tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text, with the special tokens that the tokenizer itself adds. Releases the GIL."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that the token stands for; none for a special token and for an id that no token has."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._look_up(token_id)
        return self._bytes[token_id]

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        alphabet = _byte_of_character()
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()  # An added token that was never spelled in bytes.


class Detokenizer:
    """Turns one request's token ids into text as they come. Holds at most three bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that the ids complete; all texts and `flush` together are the decoded text of all ids."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        """What an incomplete character at the very end becomes."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder; None if it has no tokenizer.json.

    Raises ValueError, naming the file, if the tokenizer cannot be read or its decoder is not byte-level.
    """
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # The library raises bare Exceptions.
        raise ValueError(f"{path} cannot be used: {error}") from error
