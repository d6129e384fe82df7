"""A stage whose tokens are wrong exactly if a layer was left out, doubled, or read wrong KV.

Only the arithmetic is fake (hash_model.py).
"""

from collections.abc import Sequence

import numpy as np

from data_plane.instance.interface import PageMover
from data_plane.instance.rows import Row
from data_plane.instance.stage_edge import StageEdge, StageModel, StageRequests
from data_plane.instance.stage_layers import StageLayers
from data_plane.transport.stage_links import StageLinks
from harness.hash_clusters import hash_model
from harness.hash_clusters.hash_model import HashModel
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import Span
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import TokenLogprobs

_SPOILED = 0xDEAD_BEEF_DEAD_BEEF


class HashStageModel(StageModel):
    """Some layers of a HashModel. Hidden rows are a list of integers a span."""

    def __init__(self, pipeline: PipelineConfig, num_frames: int, model: HashModel) -> None:
        """Raises ValueError if the model has another number of layers."""
        if model.num_layers != pipeline.num_layers:
            raise ValueError(
                f"the model has {model.num_layers} layers; num_layers is {pipeline.num_layers}"
            )
        self._model = model
        self.kv = np.full((pipeline.num_places, num_frames, PAGE_SIZE), _SPOILED, np.uint64)

    def begin_term(self, layers: StageLayers, requests: StageRequests) -> None:
        """Nothing of a term is kept here."""

    def load(self, layers: Sequence[int]) -> None:
        """There are no weights."""

    def ended(self, request_ids: Sequence[int]) -> None:
        """Nothing of a request is kept here."""

    def close(self) -> None:
        """Nothing is held."""

    def has(self, layer: int) -> bool:
        """There are no weights."""
        return True

    def embed(self, spans: Sequence[tuple[Span, Sequence[int]]]) -> list[list[int]]:
        return [
            [hash_model.embed(token, span.first + i) for i, token in enumerate(ids)]
            for span, ids in spans
        ]

    def run_layer(
        self,
        layer: int,
        place: int,
        spans: Sequence[tuple[Span, Sequence[int]]],
        rows: list[list[int]],
    ) -> list[list[int]]:
        kv = self.kv[place]
        after = []
        for (span, frames), values in zip(spans, rows, strict=True):
            page, offset = divmod(span.first, PAGE_SIZE)
            kv_sum = int(kv[frames[:page]].sum()) + int(kv[frames[page], :offset].sum())
            row = []
            for position, value in enumerate(values, span.first):
                entry, hidden = self._model.run_layer(layer, position, value, kv_sum)
                kv[frames[position // PAGE_SIZE], position % PAGE_SIZE] = entry
                kv_sum += entry
                row.append(hidden)
            after.append(row)
        return after

    def sample(
        self, spans: Sequence[Span], samplers: Sequence[Row | None], rows: list[list[int]]
    ) -> list[tuple[int, TokenLogprobs | None]]:
        sampled = []
        for row, values in zip(samplers, rows, strict=True):
            if row is not None:
                vocab_size = self._model.vocab_size
                token = hash_model.sample(values[-1], row.params, row.output_ids, vocab_size)
                logprobs = hash_model.logprobs(values[-1], token, row.params, vocab_size)
                sampled.append((token, logprobs))
        return sampled

    def read_frame(self, place: int, frame: int) -> np.ndarray:
        entries: np.ndarray = self.kv[place, frame]
        return entries.copy()

    def write_frame(self, place: int, frame: int, payload: np.ndarray) -> None:
        self.kv[place, frame] = payload.view(np.uint64)

    def new_layer(self, layer: int, place: int) -> None:
        self.kv[place] = _SPOILED


def hash_stage(
    stage: int,
    pipeline: PipelineConfig,
    num_frames: int,
    model: HashModel,
    links: StageLinks,
    mover: PageMover,
) -> StageEdge[HashStageModel]:
    """A stage with its layers of the model. Raises what HashStageModel raises."""
    own = HashStageModel(pipeline, num_frames, model)
    return StageEdge(stage, pipeline, num_frames, own, links, mover)
