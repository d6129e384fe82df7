"""Weights of a stage of a pipeline: some layers with all their experts, and those of its end."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.linear import Packing
from data_plane.model.rope import RopeTable
from data_plane.model.sizes import embedding_shapes, head_shapes, layer_shapes, mtp_shapes
from data_plane.model.weights import (
    HeadWeights,
    LayerWeights,
    MtpWeights,
    Progress,
    WeightLoader,
    open_tensors,
    say_nothing,
)


class StageWeights:
    """The layers here; others are read in a thread, while passes run."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        packing: Packing,
        layers: Iterable[int],
        is_first: bool,
        is_last: bool,
        progress: Progress = say_nothing,
    ) -> None:
        """packing, progress and errors: as of weights.load_weights.

        The whole checkpoint is checked, since any layer may come.
        """
        self._config, self._dtype, self._packing = config, dtype, packing
        self._experts = range(config.num_experts)
        self._reader, _ = open_tensors(path, config, self._experts)
        layers = list(layers)
        shapes = self._shapes(layers)
        has_mtp = is_last and config.num_mtp_layers > 0
        if is_first or has_mtp:
            shapes |= embedding_shapes(config)
        if is_last:
            shapes |= head_shapes(config)
        if has_mtp:
            shapes |= mtp_shapes(config)
        loader = self._loader(shapes, progress)
        self.rope = RopeTable(config.rope, config.attention.rope_dim)
        self.embedding: Tensor | None = loader.embedding() if is_first or has_mtp else None
        """[vocabulary, X]; at the first stage, and beside an MTP layer."""
        self.head: HeadWeights | None = loader.head(self.embedding) if is_last else None
        """Only at the last stage."""
        self.mtp: MtpWeights | None = loader.mtp() if has_mtp else None
        self._layers: dict[int, Future[LayerWeights]] = {}
        for layer in layers:
            self._layers[layer] = Future()
            self._layers[layer].set_result(loader.layer(layer, self._experts_of(layer)))
        self._thread = ThreadPoolExecutor(1, "layer weights")

    def keep(self, layers: Collection[int]) -> list[LayerWeights]:
        """Hold these layers: begin to read missing ones, return those given up."""
        gone = [self._layers.pop(layer) for layer in list(self._layers) if layer not in layers]
        for layer in layers:
            if layer not in self._layers:
                self._layers[layer] = self._thread.submit(self._read, layer)
        for each in gone:
            each.cancel()  # one that is still being read goes when it is here: it never ran
        gone = [each for each in gone if not each.cancelled()]
        return [each.result() for each in gone if each.done() and not each.exception()]

    def has(self, layer: int) -> bool:
        """True if the layer is here."""
        return self._layers[layer].done()

    def layer(self, layer: int) -> LayerWeights:
        """Return a layer; raises the error of its reading, OSError or ValueError."""
        return self._layers[layer].result()

    def close(self) -> None:
        """End the thread, after the layer that it reads."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, layer: int) -> LayerWeights:
        return self._loader(self._shapes([layer]), say_nothing).layer(layer)

    def _experts_of(self, layer: int) -> range:
        return self._experts if layer < self._config.num_layers else range(0)

    def _shapes(self, layers: Iterable[int]) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for layer in layers
            for name, shape in layer_shapes(self._config, layer, self._experts_of(layer)).items()
        }

    def _loader(self, shapes: dict[str, tuple[int, ...]], progress: Progress) -> WeightLoader:
        return WeightLoader(
            self._reader, self._config, self._dtype, self._experts, shapes, progress, self._packing
        )
