"""The whole configuration of a pipeline, once the model's layers are known."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nanocp.config.choices import Positive, require
from nanocp.config.passes import PassesConfig
from nanocp.values.passes import even_split


@dataclass(frozen=True, slots=True)
class PipelineConfig(PassesConfig):
    """The configuration of a pipeline with its stages and the model's layers."""

    num_stages: Positive = 2
    """Stages of the pipeline, in the order of the layers."""
    num_layers: int = 32
    """Layers of the model."""

    def __post_init__(self) -> None:
        # Without arguments, super would look for the class that slots have replaced.
        PassesConfig.__post_init__(self)
        require(
            self.num_layers >= self.num_stages,
            f"num_layers is {self.num_layers}; each of the {self.num_stages} stages needs a layer",
        )
        split, num_layers = self.first_split, self.num_layers
        require(
            len(split) == self.num_stages and sum(split) == num_layers and 0 not in split,
            f"layer_policy is {self.layer_policy!r}; static needs {self.num_stages} numbers of "
            f"layers, each at least 1, which sum to {num_layers}",
        )
        require(
            max(split) <= self.num_places <= num_layers,
            f"max_layers is {self.max_layers}; it must be 0, or from {max(split)}, the most layers "
            f"of a stage, to {num_layers}, all layers",
        )

    @classmethod
    def of(cls, passes: PassesConfig, num_stages: int, num_layers: int) -> PipelineConfig:
        """The pipeline for a model of so many layers. Raises ValueError if they do not fit."""
        values = {each.name: getattr(passes, each.name) for each in fields(PassesConfig)}
        return cls(num_stages=num_stages, num_layers=num_layers, **values)

    @property
    def num_places(self) -> int:
        """Layers that a stage has room for."""
        return self.max_layers or self.num_layers

    @property
    def first_split(self) -> tuple[int, ...]:
        """Layers of each stage at the start: a static policy's, else even ones."""
        name, _, argument = self.layer_policy.partition(":")
        if name != "static":
            return even_split(self.num_layers, self.num_stages)
        numbers = argument.split(",")
        is_list = all(number.isascii() and number.isdigit() for number in numbers)
        return tuple(map(int, numbers)) if is_list else ()
