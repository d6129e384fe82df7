"""The interface of a kind of attention: widths, stored tensors, and arithmetic around attention.

Legend: B rows, X hidden, C width of `wire_q`, W width of KV, H heads, D width of a query, O width
of a partial, V value width, T tokens, U tokens so far, E width of a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # what only reads a configuration does without torch
    from torch import Tensor, dtype

    from data_plane.model.linear import LinearLayer, Packing
    from data_plane.model.rope import RopeTable


class WeightSource(Protocol):
    """Reads tensors of a checkpoint by name, in the dtype of the weights."""

    @property
    def packing(self) -> Packing:
        """The layout of weights."""

    def linear(self, *names: str) -> LinearLayer:
        """Make one linear layer of these weights, one under the other."""

    def tensor(self, name: str, dtype: dtype | None = None) -> Tensor:
        """Read a tensor as it is, by default in the rows' dtype."""

    def staged(self, name: str) -> Tensor:
        """Read a tensor to be laid out anew, into memory that is given back."""


class AttentionKind(Protocol):
    """A model's attention: its configuration and arithmetic, with `weights` of `load`."""

    @property
    def num_heads(self) -> int:
        """Query heads, H."""

    @property
    def rope_dim(self) -> int:
        """Width of the rotated part of a head."""

    @property
    def kv_width(self) -> int:
        """Elements of a token's KV in one layer, W."""

    @property
    def value_dim(self) -> int:
        """Width of a head's output, V."""

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores before the softmax."""

    def fp8_rank(self) -> int:
        """Return the leading elements of a token's KV that FP8 scales, or raise ValueError."""

    def wire_widths(self, wire_form: str) -> tuple[int, int]:
        """Return the elements of a row on Q-route, and of a head on Res-route.

        latent sends `wire_q` and returns values; absorbed sends queries and returns partials.
        """

    def stored_shapes(self, prefix: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return a layer's tensors for `load`, name -> shape, without o_proj.weight."""

    def load(self, source: WeightSource, prefix: str) -> Any:
        """Read a layer's weights, a frozen dataclass of this kind."""

    def inputs(
        self, x_BX: Tensor, position_B: Tensor, weights: Any, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """Project normed hidden rows to (wire_q [B, C], new KV [B, W])."""

    def queries(
        self, wire_q_BC: Tensor, position_B: Tensor, weights: Any, rope: RopeTable
    ) -> Tensor:
        """Make a decode step's queries of wire_q, [B, H, D]."""

    def finish(self, partial_BHO: Tensor, weights: Any) -> Tensor:
        """Turn partial outputs into heads' values [B, H, V], before or after the LSE merge."""

    def prefill_queries(
        self, wire_q_TC: Tensor, position_T: Tensor, weights: Any, rope: RopeTable
    ) -> Tensor:
        """Make queries [T, H, E] for the keys of `keys_and_values`."""

    @property
    def least_plain_chunk(self) -> int:
        """Tokens of a chunk from which `keys_and_values` costs less than `queries`."""

    def keys_and_values(self, kv_UW: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
        """Compute every head's keys [H, U, E] and values [H, U, V] of KV."""
