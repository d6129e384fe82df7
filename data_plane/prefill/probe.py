"""The probe: a fixed prompt whose first layers of KV are known, so that other KV never serves.

It sees another layout of the rotated key, another rope, other positions, other weights before the
first experts, but not wrong experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data_plane.attention.fp8_latent import dequantise
from data_plane.kv.carry_pool import CarryPool
from nanocp.values.plan import CARRY_PAGE, PAGE_SIZE

NUM_TOKENS = PAGE_SIZE + 1
"""A full page and a partial one: both ways of cutting pages."""
_MAX_ERROR = 1e-4
_MAX_MEAN_ERROR = 0.05
_LARGE = 8.0
"""Rows with larger values, such as keys with biases, may be off in proportion."""
_MAX_ROW_ERROR = 2**-6
"""Two units in the last place of bfloat16, for the largest value of a row."""
_STATE_SHARES = {torch.float32: 1e-4, torch.bfloat16: 2**-5}
"""Largest error of a recurrent state, as a share of its size."""


def kv_error(
    found: Tensor, expected: Tensor, dtype: torch.dtype, is_first_layer: bool
) -> str | None:
    """Return how far KV [tokens, width] fp32 is off, or None if it is as near as it must be.

    dtype: in which it was computed. is_first_layer: True for layer 0 that was not rounded to FP8.
    """
    error, largest = (found - expected).abs(), expected.abs().amax(dim=-1, keepdim=True)
    if dtype != torch.float32 and is_first_layer:
        is_near = bool((error <= _MAX_ROW_ERROR * largest).all())
        return None if is_near else f"{error.max():.2g}"
    scaled = error / (largest / _LARGE).clamp(min=1.0)
    if dtype == torch.float32:
        return None if scaled.max() <= _MAX_ERROR else f"{error.max():.2g}"
    return None if scaled.mean() <= _MAX_MEAN_ERROR else f"{error.mean():.2g} on average"


class Probe(Protocol):
    """A prompt for engines, and the judge of its pages."""

    fingerprint: Mapping[str, str]
    """Equal at both ends if pages fit (connector/fingerprint.py)."""
    token_ids: tuple[int, ...]
    """The prompt; every position's KV is checked."""
    num_layers: int
    page_bytes: int

    @property
    def num_state_pages(self) -> int:
        """Pages of the recurrent state, behind those of KV."""

    def problem(self, pages: Mapping[int, Any]) -> str | None:
        """Return the fault of the pages, by number uint8 [page_bytes]; None if they are right."""


def probe_token_ids(vocab_size: int) -> tuple[int, ...]:
    """Return a fixed sequence of ids from all over the vocabulary."""
    return tuple((position * 7919 + 13) % vocab_size for position in range(NUM_TOKENS))


@dataclass(frozen=True, kw_only=True, eq=False)
class KvProbe(Probe):
    """The Probe of a model's KV."""

    fingerprint: Mapping[str, str]
    token_ids: tuple[int, ...]
    expected: Tensor
    """KV of the first layers, [layers, NUM_TOKENS, width], in its dtype."""
    num_layers: int
    """Layers of a page."""
    parts: Sequence[tuple[str, slice]]
    """Names and slices of a token's KV."""
    fp8_rank: int | None
    """The model's kv_lora_rank if pages are in FP8."""
    page_bytes: int
    states: CarryPool | None = None
    """Frame 0 has the prompt's state in the first layer, frame 1 is free."""

    @property
    def num_state_pages(self) -> int:
        return 0 if self.states is None else self.states.frame_bytes // self.page_bytes

    def problem(self, pages: Mapping[int, Any]) -> str | None:
        kv_pages = [page for page in sorted(pages) if page < CARRY_PAGE]
        found = torch.cat([self._kv(pages[page]) for page in kv_pages], dim=1)
        if not bool(torch.isfinite(found[:, :NUM_TOKENS]).all()):
            return "its KV has numbers that are not finite"
        found = found[: len(self.expected), :NUM_TOKENS].float()
        for layer, (found_TD, expected_TD) in enumerate(zip(found, self.expected, strict=True)):
            for name, part in self.parts:
                off = kv_error(
                    found_TD[:, part],
                    expected_TD[:, part].float(),
                    self.expected.dtype,
                    layer == 0 and self.fp8_rank is None,
                )
                if off is not None:
                    return (
                        f"its KV is not this model's: the {name} of layer {layer} is off by {off} "
                        "in the probe; layout, rope, positions or weights differ"
                    )
        return None if self.states is None else self._problem_of_state(self.states, pages)

    def _problem_of_state(self, states: CarryPool, pages: Mapping[int, Any]) -> str | None:
        for page in range(self.num_state_pages):
            states.page(1, page)[:] = pages[CARRY_PAGE + page]
        if states.num_folded(1) != NUM_TOKENS:
            return f"its state has {states.num_folded(1)} tokens of the probe's {NUM_TOKENS}"
        fields = states.layers[0]
        share = _STATE_SHARES[self.expected.dtype]
        for name, (expected, found) in (("state", fields.state), ("input", fields.channels)):
            expected, found = expected.float(), found.float()
            error = (found - expected).norm() / expected.norm()
            if not bool(error <= share):  # or one is not a number
                return (
                    f"its state is not this model's: the {name} of layer 0 is off by {error:.2g} "
                    "of its size in the probe; layout, positions or weights differ"
                )
        return None

    def _kv(self, page: np.ndarray) -> Tensor:
        data = torch.from_numpy(np.array(page)).view(self.num_layers, PAGE_SIZE, -1)
        if self.fp8_rank is not None:
            return dequantise(data, self.fp8_rank)
        return data.view(self.expected.dtype)
