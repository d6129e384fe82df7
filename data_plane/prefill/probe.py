"""The probe: a fixed prompt whose first layers of KV are known, so that other KV never serves.

Enters: pages as an engine wrote them. Leaves: the sentence that says what is wrong. Does not know:
how the expected KV was computed, rings, engines.

A fingerprint compares shapes. The probe compares numbers: it sees another layout of the rotated
key, another rope, other positions, and other weights in the layers before the first experts. Wrong
experts it cannot see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data_plane.attention.fp8_latent import dequantise
from nanocp.values.plan import PAGE_SIZE

NUM_TOKENS = PAGE_SIZE + 1
"""A full page, and one that is not: both ways in which pages are cut."""
_MAX_ERROR = 1e-4
_MAX_MEAN_ERROR = 0.05
_MAX_ROW_ERROR = 2**-6
"""Two units in the last place of bfloat16, for the largest value of a row."""


class Probe(Protocol):
    """What an engine is asked, and how its pages are judged."""

    fingerprint: Mapping[str, str]
    """What must be equal at both ends for pages to fit (connectors/fingerprint.py)."""
    token_ids: tuple[int, ...]
    """The prompt; its KV is wanted at every position."""
    num_layers: int
    """Layers of a page."""
    page_bytes: int

    def problem(self, pages: Mapping[int, Any]) -> str | None:
        """What is wrong with the pages, by number uint8 [page_bytes]; None: nothing."""


def probe_token_ids(vocab_size: int) -> tuple[int, ...]:
    """Ids from all over the vocabulary, a fixed sequence."""
    return tuple((position * 7919 + 13) % vocab_size for position in range(NUM_TOKENS))


class LatentProbe:
    """The probe of a model with latent KV; see Probe."""

    def __init__(
        self,
        *,
        fingerprint: Mapping[str, str],
        token_ids: tuple[int, ...],
        expected: Tensor,
        num_layers: int,
        rank: int,
        is_fp8: bool,
        page_bytes: int,
    ) -> None:
        """expected: KV of the first layers, [layers, NUM_TOKENS, width], in its dtype.

        num_layers: of a page. rank: kv_lora_rank. is_fp8: pages are written in FP8.
        """
        self.fingerprint = fingerprint
        self.token_ids = token_ids
        self.page_bytes = page_bytes
        self._expected = expected
        self.num_layers = num_layers
        self._rank = rank
        self._is_fp8 = is_fp8

    def problem(self, pages: Mapping[int, Any]) -> str | None:
        """What is wrong with the pages, by number uint8 [page_bytes]; None: nothing."""
        found = torch.cat([self._kv(pages[page]) for page in sorted(pages)], dim=1)
        found = found[: len(self._expected), :NUM_TOKENS].float()
        for layer, (found_TD, expected_TD) in enumerate(zip(found, self._expected, strict=True)):
            for name, part in (("latent", slice(self._rank)), ("key", slice(self._rank, None))):
                off = self._off(layer, found_TD[:, part], expected_TD[:, part].float())
                if off is not None:
                    return (
                        f"its KV is not this model's: the {name} of layer {layer} is off by {off} "
                        "in the probe; layout, rope, positions or weights differ"
                    )
        return None

    def _kv(self, page: np.ndarray) -> Tensor:
        data = torch.from_numpy(np.array(page)).view(self.num_layers, PAGE_SIZE, -1)
        if self._is_fp8:
            return dequantise(data, self._rank)
        return data.view(self._expected.dtype)

    def _off(self, layer: int, found: Tensor, expected: Tensor) -> str | None:
        """By how much the two differ, if that is too much."""
        error = (found - expected).abs()
        if not bool(torch.isfinite(found).all()):
            return "numbers that are not finite"
        if self._expected.dtype == torch.float32:
            return f"{error.max():.2g}" if error.max() > _MAX_ERROR else None
        if layer == 0 and not self._is_fp8:
            limit = _MAX_ROW_ERROR * expected.abs().amax(dim=-1, keepdim=True)
            return f"{error.max():.2g}" if bool((error > limit).any()) else None
        return f"{error.mean():.2g} on average" if error.mean() > _MAX_MEAN_ERROR else None
