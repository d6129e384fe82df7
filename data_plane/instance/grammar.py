"""Masks of structured output: the tokens that a row may generate next.

A mask is a function of (grammar, output ids), so hand-offs, preemption and recovery carry nothing
of it. The library's matchers are a cache.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanocp.files.tokenizer import tokenizer_json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_MAX_MATCHERS = 512
"""The least recently used goes first."""
_MAX_KEPT_MASKS = 4
"""Kept masks of a row; the oldest goes first."""
_MAX_COMPILED = 64
"""The least recently used goes first."""


class _Progress:
    __slots__ = ("drafts", "has_failed", "masks", "matcher", "num_sure")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_sure = 0
        """Consumed output ids."""
        self.drafts: list[int] = []
        """Consumed ids behind them, which were drafts."""
        self.has_failed = False
        self.masks: OrderedDict[int, np.ndarray] = OrderedDict()
        """Number of consumed ids -> the mask after them."""

    @property
    def num_eaten(self) -> int:
        return self.num_sure + len(self.drafts)

    def mask_after(self, row: MaskedRow) -> np.ndarray | None:
        mask = self.masks.get(row.num_ids)
        ids = row.ids_from(self.num_sure)
        return mask if mask is not None and self.drafts[: len(ids)] == ids else None

    def eat(self, row: MaskedRow) -> None:
        if ids := row.ids_from(self.num_eaten):
            self.matcher.consume_tokens(ids)
        self.num_sure, self.drafts = len(row.output_ids), list(row.drafts)

    def keep(self, mask: np.ndarray) -> None:
        self.masks[self.num_eaten] = mask.copy()
        if len(self.masks) > _MAX_KEPT_MASKS:
            self.masks.popitem(last=False)

    def go_back(self, row: MaskedRow) -> bool:
        if row.num_ids < self.num_sure:
            return False  # not the row that it was: its outputs only grow
        pairs = enumerate(zip(self.drafts, row.ids_from(self.num_sure), strict=False))
        num_same = next((i for i, (a, b) in pairs if a != b), None)
        if num_same is None:
            num_same = min(len(self.drafts), row.num_ids - self.num_sure)
        num_given = len(self.drafts) - num_same
        if not num_given:
            return True
        del self.drafts[num_same:]
        for length in [each for each in self.masks if each > self.num_eaten]:
            del self.masks[length]
        return not self.matcher.is_error() and self.matcher.rollback(num_given)


class MaskedRow(NamedTuple):
    """The arguments of a mask, and its row."""

    request_id: int
    attempt: int
    grammar: str
    output_ids: Sequence[int]
    """Within an attempt of a request, these only grow."""
    drafts: Sequence[int] = ()
    """Ids behind them that may change."""

    @property
    def num_ids(self) -> int:
        return len(self.output_ids) + len(self.drafts)

    def ids_from(self, begin: int) -> list[int]:
        """Return the ids from a place on, without reading earlier ones."""
        num_outputs = len(self.output_ids)
        return [*self.output_ids[begin:], *self.drafts[max(begin - num_outputs, 0) :]]


class GrammarMasks:
    """The masks of one instance's rows, computed in a thread beside the step."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # The tokenizer may know more tokens than the model has logits.
        self._num_words = -(-max(vocab_size, tokenizer.vocab_size) // 32)
        only_eos = np.zeros(self._num_words * 32, np.bool_)
        only_eos[list(eos_ids)] = True
        self._only_eos = np.packbits(only_eos, bitorder="little").view(np.uint32)
        self._kept: OrderedDict[tuple[int, int, str], _Progress] = OrderedDict()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar masks")

    def begin(self, rows: Sequence[MaskedRow]) -> Future[Tensor]:
        """Start to compute `masks`, which the library bounds in time.

        The rows' outputs must not change until it is done.
        """
        return self._thread.submit(self.masks, rows)

    def masks(self, rows: Sequence[MaskedRow]) -> Tensor:
        """Return [rows, vocabulary] bool: the tokens that may come after each output.

        After a complete grammar only end-of-sequence tokens remain. Not to be called during a
        `begin`.
        """
        packed = np.zeros((len(rows), self._num_words), np.uint32)
        for row, words in zip(rows, packed, strict=True):
            self._fill(words, row)
        bits = np.unpackbits(
            packed.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little"
        )
        return torch.from_numpy(bits.view(np.bool_))

    def _fill(self, words: np.ndarray, row: MaskedRow) -> None:
        key = row.request_id, row.attempt, row.grammar
        known = self._kept.pop(key, None)
        if known is not None and (mask := known.mask_after(row)) is not None:
            self._kept[key] = known
            words[:] = mask
            return
        if known is None or not known.go_back(row):
            known = _Progress(self._new_matcher(row.grammar))
        self._kept[key] = known
        if len(self._kept) > _MAX_MATCHERS:
            self._kept.popitem(last=False)
        known.eat(row)
        if known.matcher.is_stopped():
            words[:] = self._only_eos
        else:
            known.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if known.matcher.is_error():
            words[:] = 0
            if not known.has_failed and not row.drafts:
                known.has_failed = True
                logger.warning(
                    "the grammar of request %d breaks off its output after %d tokens: %s",
                    row.request_id,
                    row.num_ids,
                    known.matcher.get_error(),
                )
        known.keep(words)

    def _new_matcher(self, grammar: str) -> LLMatcher:
        """Return a fresh matcher: tens of milliseconds for a grammar's first, less for a copy."""
        from llguidance import LLMatcher

        fresh = self._compiled.pop(grammar, None)
        if fresh is None:
            fresh = LLMatcher(self._tokenizer, grammar, log_level=0)
        self._compiled[grammar] = fresh
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return fresh.deep_copy()


def load_grammar_masks(
    checkpoint: Path, vocab_size: int, eos_ids: Sequence[int]
) -> GrammarMasks | None:
    """Make the masks of a checkpoint's grammars; None without a tokenizer or an end of sequence."""
    text = tokenizer_json(checkpoint) if eos_ids else None
    if text is None:
        return None
    from llguidance import LLTokenizer

    try:
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError:
        # The tokenizer knows more tokens than the model has logits.
        tokenizer = LLTokenizer(text, eos_token=list(eos_ids))
    return GrammarMasks(tokenizer, vocab_size, eos_ids)
