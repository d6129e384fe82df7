"""Long texts: a quick lower bound of their tokens, and a queue for tokenizing them."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")

_LONG_TEXT_CHARACTERS = 1 << 16
"""A longer text takes tens of milliseconds to tokenize, and many times its size."""
_LONG_TEXTS = ThreadPoolExecutor(1, "long texts")
_GRAMMARS = ThreadPoolExecutor(1, "grammars")
_COUNTED_BYTES = 1 << 18
"""Bytes of a text that are counted at a time, to save memory."""


async def in_thread(
    num_characters: int, has_grammar: bool, work: Callable[..., Result], *args: object
) -> Result:
    """Call `work` in a thread, and return its result.

    Long texts and grammars wait for each other, to save memory; short texts do not.
    """
    lane = _GRAMMARS if has_grammar else None
    if num_characters > _LONG_TEXT_CHARACTERS:
        lane = _LONG_TEXTS
    return await asyncio.get_running_loop().run_in_executor(lane, partial(work, *args))


class LeastTokens:
    """A lower bound of the number of tokens of any text.

    A byte weighs 1 through the length of the longest token that has it, so no token weighs more
    than 1.
    """

    def __init__(self, description: Mapping[str, Any], tokens: Iterable[bytes]) -> None:
        """description: the content of tokenizer.json. tokens: the bytes of each token."""
        normalizers = _steps(description["normalizer"], "normalizers")
        self._is_composed = any(step["type"] == "NFC" for step in normalizers)
        decoders = [step["type"] for step in _steps(description["decoder"], "decoders")]
        self._has_spaces = "ByteFallback" in decoders
        """True if U+2581 is a space, as in SentencePiece."""
        self._weights: np.ndarray | None = None
        # A token may stand for more than its bytes where text is dropped or made shorter.
        if (
            all(self._keeps_length(step) for step in normalizers)
            and all(map(_keeps_text, _steps(description["pre_tokenizer"], "pretokenizers")))
            and not any(token["lstrip"] or token["rstrip"] for token in description["added_tokens"])
            and not description["truncation"]
            and description["model"]["type"] in ("BPE", "Unigram")
        ):
            weights = _byte_weights(map(self._spaced, tokens))
            # Otherwise unknown characters in a row are one token.
            if not self._has_spaces or (description["model"]["byte_fallback"] and weights.all()):
                self._weights = weights

    def _keeps_length(self, step: Mapping[str, Any]) -> bool:
        """Return whether a step of normalizing makes no text shorter in bytes."""
        to_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        return step["type"] in ("NFC", "Prepend") or (self._has_spaces and step == to_spaces)

    def _spaced(self, spelled: bytes) -> bytes:
        return spelled.replace("\u2581".encode(), b" ") if self._has_spaces else spelled

    def of(self, text: str) -> int:
        """Return the lower bound for a text; 0 for an unknown tokenizer."""
        if self._weights is None:
            return 0
        if self._is_composed:
            text = unicodedata.normalize("NFC", text)
        weight, spelled = 0.0, self._spaced(text.encode(errors="replace"))
        for first in range(0, len(spelled), _COUNTED_BYTES):
            piece = np.frombuffer(spelled[first : first + _COUNTED_BYTES], np.uint8)
            weight += float(np.bincount(piece, minlength=256) @ self._weights)
        return int(weight * (1 - 1e-9))  # The sum is rounded.


def _steps(part: Any, name: str) -> list[Any]:
    """The part is one step, a sequence of them, or nothing."""
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    is_known = step["type"] in ("ByteLevel", "Digits", "Metaspace", "Split")
    return is_known and step.get("behavior") != "Removed"


def _byte_weights(tokens: Iterable[bytes]) -> np.ndarray:
    longest, alone = np.zeros(256), np.zeros(256, np.bool_)
    for token in tokens:
        used = list(set(token))
        longest[used] = np.maximum(longest[used], len(token))
        alone[used] |= len(token) == 1
    # A byte that is no token may be dropped.
    return np.divide(1.0, longest, out=np.zeros(256), where=alone)
