"""States of hash rows, folded late as kv/carry_pool.py folds them.

A state is spread over all of its pages, and its newest records are on the last: one page that is
missing, doubled or of another time makes all that follows wrong.
"""

from collections.abc import Sequence

import numpy as np

from harness.hash_clusters.hash_model import HashModel, fold
from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import PAGE_SIZE

_MASK = (1 << 64) - 1
MAX_DEPTH = 4
_WORDS = 2 + MAX_DEPTH + 1
"""Words of a layer in a page: its part of the state, tokens folded, and records."""


class HashStates:
    """The states of one instance."""

    depth = 1
    """Newest tokens of a row that are never folded."""

    def __init__(self, cluster: ClusterConfig, model: HashModel) -> None:
        num_frames, num_words = cluster.bounds.max_rows + 1, words_of_page(model)
        self._pages = np.zeros((num_frames, cluster.carry_pages, num_words), np.uint64)
        self._place_of = {layer: place for place, layer in enumerate(model.linear_layers)}

    def clear(self, frame: int) -> None:
        """The frame gets the state of no token."""
        self._pages[frame] = 0

    def num_folded(self, frame: int) -> int:
        """Tokens that a state has, in the layer with most."""
        begins = [_WORDS * place + 1 for place in self._place_of.values()]
        return int(self._pages[frame, 0, begins].max())

    def page(self, frame: int, number: int) -> np.ndarray:
        """A page of a frame."""
        return self._pages[frame, number]

    def step(self, frame: int, layer: int, position: int, record: int) -> int:
        """The state of a layer after a token, which is not folded."""
        begin = _WORDS * self._place_of[layer]
        parts = self._pages[frame, :, begin]
        folded = self._pages[frame, 0, begin + 1 : begin + 2]
        records = self._pages[frame, -1, begin + 2 : begin + 3 + self.depth]
        state = int(parts.sum())
        assert folded[0] <= position, "a state has tokens after its row's position"
        while folded[0] <= position - self.depth:
            state = fold(state, int(records[int(folded[0]) % len(records)]))
            folded += np.uint64(1)
        parts[0] = (state - int(parts[1:].sum())) & _MASK
        for at in range(int(folded[0]), position):
            state = fold(state, int(records[at % len(records)]))
        records[position % len(records)] = record
        return fold(state, record)


def pages_of(
    model: HashModel, states: Sequence[int], num_tokens: int, num: int
) -> list[np.ndarray]:
    """The pages of states after so many tokens, all of which are folded."""
    pages = np.zeros((num, words_of_page(model)), np.uint64)
    for place, state in enumerate(states):
        begin = _WORDS * place
        pages[1:, begin] = [(state * 7 + number) & _MASK for number in range(1, num)]
        pages[0, begin] = (state - int(pages[1:, begin].sum())) & _MASK
        pages[0, begin + 1] = num_tokens
    return list(pages)


def words_of_page(model: HashModel) -> int:
    """Words of a page, of KV or of a state."""
    return PAGE_SIZE * (model.num_layers - len(model.linear_layers))
