"""Masks of structured output: which tokens a row may generate next.

Enters: a row's grammar and its output so far. Leaves: a mask of the vocabulary. Does not know:
logits, windows, where a row came from.

A mask is a function of (grammar, output ids), so windows of several steps, hand-offs, preemption
and recovery need no line here. The library's matchers are a cache of it: nothing of one travels.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_MAX_MATCHERS = 512
"""Matchers that are kept; the one that was not used for longest goes first."""
_MAX_COMPILED = 64
"""Grammars whose matcher is kept; the one that was not used for longest goes first."""


class _Progress:
    """A matcher and how many ids it has eaten."""

    __slots__ = ("has_failed", "matcher", "num_eaten")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_eaten = 0
        self.has_failed = False


class GrammarMasks:
    """The masks of one instance's rows. Used from the decode thread."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._only_eos = torch.zeros(vocab_size, dtype=torch.bool)
        self._only_eos[list(eos_ids)] = True
        self._kept: OrderedDict[tuple[int, int], _Progress] = OrderedDict()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        """Matchers that have eaten nothing, by grammar."""

    def mask(
        self, request_id: int, attempt: int, grammar: str, output_ids: Sequence[int]
    ) -> Tensor:
        """[vocabulary] bool: the tokens that may come after `output_ids`; at least one.

        Within an attempt of a request, `output_ids` only grows. When the grammar is complete, or
        too costly to go on with, only end-of-sequence tokens remain.
        """
        known = self._kept.pop((request_id, attempt), None)
        if known is None or known.num_eaten > len(output_ids):
            known = _Progress(self._new_matcher(grammar))
        self._kept[request_id, attempt] = known
        if len(self._kept) > _MAX_MATCHERS:
            self._kept.popitem(last=False)
        if known.num_eaten < len(output_ids):
            known.matcher.consume_tokens(list(output_ids[known.num_eaten :]))
            known.num_eaten = len(output_ids)
        allowed = None if known.matcher.is_stopped() else self._computed(known.matcher)
        if known.matcher.is_error() and not known.has_failed:
            known.has_failed = True
            logger.warning(
                "the grammar of request %d ends its output after %d tokens: %s",
                request_id,
                len(output_ids),
                known.matcher.get_error(),
            )
        if allowed is None or not allowed.any():
            return self._only_eos
        return allowed

    def _new_matcher(self, grammar: str) -> LLMatcher:
        """A matcher that has eaten nothing. A grammar is compiled once while it is kept.

        Compiling takes up to tens of milliseconds of every row's step, a copy far less.
        """
        from llguidance import LLMatcher

        fresh = self._compiled.pop(grammar, None)
        if fresh is None:
            fresh = LLMatcher(self._tokenizer, grammar, log_level=0)
        self._compiled[grammar] = fresh
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return fresh.deep_copy()

    def _computed(self, matcher: LLMatcher) -> Tensor:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(allowed.view(np.bool_))


def load_grammar_masks(
    checkpoint: Path, vocab_size: int, eos_ids: Sequence[int]
) -> GrammarMasks | None:
    """The masks for a checkpoint; None without a tokenizer or an end-of-sequence token.

    Takes about a second for a large vocabulary.
    """
    path = checkpoint / "tokenizer.json"
    if not path.is_file() or not eos_ids:
        return None
    from llguidance import LLTokenizer

    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError:
        # The tokenizer knows more tokens than the model has logits.
        tokenizer = LLTokenizer(text, eos_token=list(eos_ids))
    return GrammarMasks(tokenizer, vocab_size, eos_ids)
