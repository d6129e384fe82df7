"""Text to token ids and back by the checkpoint's tokenizer, up to the first stop string."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import tokenizers

from control_plane.frontend.client_request import Contents
from control_plane.frontend.text.grammar_check import GrammarCheck
from control_plane.frontend.text.long_texts import LeastTokens
from nanocp.files.tokenizer import character_of_byte, tokenizer_json

# A text gains nothing from the library's threads, and it warns at every fork after their first use.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
_BYTES = {character: byte for byte, character in character_of_byte().items()}
_SPACE = "\u2581"
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


class Tokenizer:
    """A tokenizer whose every token is a piece of UTF-8, so text is decoded token by token.

    Vocabularies spell bytes by characters (ByteLevel), or as <0x0A> (ByteFallback, of
    SentencePiece).
    """

    def __init__(self, library_tokenizer: tokenizers.Tokenizer) -> None:
        """Raises ValueError if the tokenizer's decoder is neither ByteLevel nor SentencePiece's."""
        description = json.loads(library_tokenizer.to_str())
        decoder = description["decoder"] or {}
        # A Strip takes the space away that begins a whole text, and changes no other token.
        steps = [one for one in decoder.get("decoders", [decoder]) if one.get("type") != "Strip"]
        self._spells_bytes = [one.get("type") for one in steps] == ["ByteLevel"]
        if not self._spells_bytes and steps != _SENTENCEPIECE:
            raise ValueError(
                f"the tokenizer's decoder is {decoder.get('type')} of "
                f"{', '.join(str(one.get('type')) for one in steps)}; it must be ByteLevel, or a "
                "Sequence of Replace (U+2581 by a space), ByteFallback and Fuse (without a "
                "tokenizer the service takes and returns token ids only)"
            )
        self._tokenizer = library_tokenizer
        added = library_tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.added_tokens = frozenset(token.content for token in added.values())
        """Texts that are always tokens of their own, such as markers."""
        self._bytes: dict[int, bytes] = {}
        vocabulary = library_tokenizer.get_vocab().values()
        self._least_tokens = LeastTokens(
            description, (self._look_up(i) or self.token_string(i).encode() for i in vocabulary)
        )
        self.grammar_check = GrammarCheck(library_tokenizer.to_str)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's ids, with the special tokens that the tokenizer adds.

        Releases the GIL; the library's `encode` does so in its first call only.
        """
        (encoded,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoded.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the text's tokens, much faster than `encode`."""
        return self._least_tokens.of(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of all ids with special tokens. Releases the GIL, as `encode` does."""
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        return str(text)

    def token_string(self, token_id: int) -> str:
        """Return the vocabulary's spelling of the token; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_name(self, token_id: int) -> bytes:
        """Return the UTF-8 of the token; for a special token, that of its name."""
        return self.token_bytes(token_id) or self.token_string(token_id).encode()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 of the token; empty for special and unknown tokens."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._look_up(token_id)
        return self._bytes[token_id]

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if not self._spells_bytes:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return token.encode()  # An added token that was never spelled in bytes.


class Detokenizer:
    """Turns one request's token ids into text, with at most three bytes held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.token_bytes if skip_special_tokens else tokenizer.token_name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that the ids complete; with `flush` it adds up to all text."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """Return the text for an incomplete character at the very end."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Strings that end a request when its text contains one.

    Raises ValueError naming what is right.
    """

    strings: tuple[str, ...] = ()
    is_included: bool = False
    """True: the text includes the stop string, or the stop token's text."""

    def __post_init__(self) -> None:
        if len(self.strings) > MAX_STOP_STRINGS:
            raise ValueError(
                f"stop has {len(self.strings)} strings; at most {MAX_STOP_STRINGS} fit"
            )
        for string in self.strings:
            if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
                limits = f"from 1 to {MAX_STOP_CHARACTERS}"
                raise ValueError(
                    f"stop has a string of {len(string)} characters; each must have {limits}"
                )


class OutputText:
    """The text of one request as its tokens come, up to the first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings,
        min_tokens: int,
        skip_special_tokens: bool = True,
        contents: Contents | None = None,
    ) -> None:
        """A stop string that is complete within `min_tokens` tokens does not count.

        contents: finds the content in which stop strings count; None: all text.
        """
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stop = stop
        self._num_early = min_tokens
        """Tokens until a stop string counts."""
        self._contents = contents
        self._untaken = ""
        self._num_chars = 0
        """Characters of all text so far."""
        self._num_held = 0
        """Characters at the end of `_untaken` held back for a possible stop string."""
        self._tail = ""
        """Last characters of the content, in which a stop string may have begun."""
        self._tail_end = 0
        """Where they end in all text."""
        self.stop_string: str | None = None
        """The stop string that ended the text; None until then."""

    def feed(self, token_id: int, is_stop_token: bool = False) -> bool:
        """Add a token's text; True if a stop string ended it.

        Nothing may follow that, or a stop token.
        """
        if is_stop_token and not self._stop.is_included:
            return False
        new = self._detokenizer.feed([token_id])
        self._untaken += new
        self._num_chars += len(new)
        self._num_early -= 1
        if self._stop.strings and new:
            place = self._num_chars - len(new), new
            for begin, content in self._contents.contents(new) if self._contents else [place]:
                if self.stop_string is None:
                    self._search(begin, content)
            decided = self._contents.num_decided if self._contents else self._num_chars
            self._hold(decided)
        return self.stop_string is not None

    def take_new(self) -> str:
        """Return new text that is surely output."""
        end = len(self._untaken) - self._num_held
        new, self._untaken = self._untaken[:end], self._untaken[end:]
        return new

    def flush(self) -> str:
        """Return the held text, at the request's end."""
        rest, self._untaken, self._num_held = self._untaken, "", 0
        return rest if self.stop_string is not None else rest + self._detokenizer.flush()

    def _search(self, begin: int, content: str) -> None:
        """Find the first stop string to end in the next content, at offset `begin` of all text."""
        if begin != self._tail_end:
            self._tail = ""
        text, num_old = self._tail + content, len(self._tail)
        self._tail_end = begin + len(content)
        found = []
        if self._num_early < 0:
            for string in self._stop.strings:
                at = text.find(string, max(0, num_old - len(string) + 1))
                if at >= 0:
                    found.append((at + len(string), at, string))
        if found:
            end, at, self.stop_string = min(found, key=itemgetter(0))
            num_cut = len(text) - (end if self._stop.is_included else at)
            num_cut += self._num_chars - self._tail_end
            self._untaken = self._untaken[: len(self._untaken) - num_cut]
        longest = max(map(len, self._stop.strings)) - 1
        self._tail = text[len(text) - longest :] if longest < len(text) else text

    def _hold(self, num_decided: int) -> None:
        self._num_held = 0
        if self.stop_string is not None:
            return
        if num_decided != self._tail_end:  # What comes is no content, or does not go on with this.
            self._tail = ""
        suffixes = (self._tail[begin:] for begin in range(len(self._tail)))
        begun = (len(one) for one in suffixes if any(s.startswith(one) for s in self._stop.strings))
        num_begun = 0 if self._stop.is_included else next(begun, 0)
        self._num_held = self._num_chars - num_decided + num_begun


def load_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """Load a checkpoint's tokenizer; None without tokenizer.json and Kimi's file.

    Raises ValueError, naming the file, if it cannot be used.
    """
    text = tokenizer_json(checkpoint)
    if text is None:
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # The library raises bare Exceptions.
        raise ValueError(f"{checkpoint / 'tokenizer.json'} cannot be used: {error}") from error
